"""What an island gives to those who measure their way to it."""

import os
import time
from collections.abc import Callable

from atoll.peers.wide.offers import PIECE


class Samples:
    """Bytes for everybody: `MOST` in each `SPAN_S`, so that training is not held up."""

    MOST, SPAN_S = 8 << 20, 60.0

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since, self._given = now, -self.SPAN_S, 0
        self._bytes = b""

    def take(self, size: int) -> tuple[memoryview, int]:
        """So many bytes, a piece at most, and 1; nothing and 0 if too much was asked for lately."""
        now, size = self._now(), min(size, PIECE)
        if now - self._since >= self.SPAN_S:
            self._since, self._given = now, 0
        if self._given + size > self.MOST:
            return memoryview(b""), 0
        self._given += size
        # that nothing on the way can make smaller
        self._bytes = self._bytes or os.urandom(PIECE)
        return memoryview(self._bytes)[:size], 1

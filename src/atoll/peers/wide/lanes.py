"""Frames of one priority on their way to one member, and the thread that hands them over."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Part = bytes | memoryview

HOLD_S = 5.0
"""How long a frame waits for a member that is not there before it is dropped; whoever needs it asks again."""


@dataclass(frozen=True)
class Way:
    """Which process of a member frames go to, and how.

    Args: since: when it opened its link, ns since 1970. direct: or passed on by the coordinator.
    """

    since: int
    direct: bool


class Lane:
    """A queue that is emptied while there is a way.

    Args: name: of the thread. hand_over: takes (way, origin, parts), and may wait as long as it likes.
    """

    def __init__(self, name: str, hand_over: Callable[[Way, int, Sequence[Part]], None], way: Way | None) -> None:
        self._hand_over, self._way = hand_over, way
        self._frames: deque[tuple[float, int, Sequence[Part]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.thread.start()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, origin: int, parts: Sequence[Part]) -> None:
        """Queue a frame."""
        with self._changed:
            self._frames.append((time.monotonic() + HOLD_S, origin, parts))
            self._changed.notify()

    def aim(self, way: Way | None) -> None:
        """The way has changed; what was queued for another process is dropped."""
        with self._changed:
            if self._way and (way is None or way.since != self._way.since):
                self._frames.clear()
            self._way = way
            self._changed.notify()

    def close(self) -> None:
        """Drop what is queued, and end the thread when it comes back."""
        with self._changed:
            self._closed = True
            self._frames.clear()
            self._changed.notify()

    def _loop(self) -> None:
        while taken := self._next():
            self._hand_over(*taken)
            del taken  # its memory, while waiting for the next

    def _next(self) -> tuple[Way, int, Sequence[Part]] | None:
        """The next frame and its way; None when there will be no more."""
        with self._changed:
            while not self._closed:
                if self._frames and self._way:
                    _, origin, parts = self._frames.popleft()
                    return self._way, origin, parts
                while self._frames and self._frames[0][0] <= time.monotonic():
                    self._frames.popleft()
                self._changed.wait(self._frames[0][0] - time.monotonic() if self._frames else None)
        return None

"""Frames of one priority on their way to one member, and the thread that hands them over."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Part = bytes | memoryview
Wanted = Callable[[], bool]
"""Whether a frame is still of use when its turn has come; asked in a thread of the link's."""

HOLD_S = 5.0
"""How long a frame waits for a member that is not there before it is dropped; whoever needs it asks again."""
MEETING_S = 2.0
"""So long after a member was first seen large frames wait for a direct way there, which takes some round trips to be
made. Passed on they would fill the coordinator's way to it, and its word would come behind them."""
NUDGE: Sequence[Part] = (b"",)
NUDGES_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LATELY_S = 0.3
LARGE = 4096
"""When a lane has nothing more after a frame of so many bytes, it sends empty ones, after so many seconds each. What
TLS has taken while the socket was full stays in its buffer until something more is written, for zenoh does not flush:
the end of a transfer would wait for the next. As long as the system holds unsent bytes the socket may be full still, so
they begin anew."""


def is_large(parts: Sequence[Part]) -> bool:
    """Whether a frame of these parts is more than a few words."""
    return sum(map(len, parts)) >= LARGE


def always() -> bool:
    """Of a frame that is of use whenever it comes."""
    return True


@dataclass(frozen=True)
class Way:
    """Which process of a member frames go to, and how.

    Args: since: when it opened its link, ns since 1970. direct: or passed on by the coordinator. met: when it was first
    seen, of this process's monotonic clock.
    """

    since: int
    direct: bool
    met: float = field(default_factory=time.monotonic, compare=False)

    def waits_s(self, parts: Sequence[Part], now: float) -> float:
        """For how long a frame waits for a better one."""
        return 0.0 if self.direct or not is_large(parts) else max(self.met + MEETING_S - now, 0.0)


class Lane:
    """A queue that is emptied while there is a way.

    Args: name: of the thread. hand_over: takes (way, origin, parts), and may wait as long as it likes. unsent: whether
    the system holds bytes that it has not sent.
    """

    def __init__(
        self,
        name: str,
        hand_over: Callable[[Way, int, Sequence[Part]], None],
        way: Way | None,
        unsent: Callable[[], bool],
    ) -> None:
        self._hand_over, self._way, self._unsent = hand_over, way, unsent
        self._origin, self._lately, self._large = 0, 0.0, False
        self._frames: deque[tuple[float, int, Sequence[Part], Wanted]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.thread.start()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def busy(self) -> bool:
        """Whether it has had large frames to send lately."""
        return self._large or time.monotonic() - self._lately < LATELY_S

    @property
    def full(self) -> bool:
        """Whether it has a large frame to send now."""
        return self._large or any(is_large(parts) for _, _, parts, _ in list(self._frames))

    def put(self, origin: int, parts: Sequence[Part], wanted: Wanted = always) -> None:
        """Queue a frame, which is dropped if it is wanted no more when its turn comes."""
        if is_large(parts):
            self._lately = time.monotonic()
        with self._changed:
            self._frames.append((time.monotonic() + HOLD_S, origin, parts, wanted))
            self._changed.notify()

    def aim(self, way: Way | None) -> None:
        """The way to the same process has changed, or it has appeared."""
        with self._changed:
            self._way = way
            self._changed.notify()

    def close(self) -> None:
        """Drop what is queued, and end the thread when it comes back."""
        with self._changed:
            self._closed = True
            self._frames.clear()
            self._changed.notify()

    def _loop(self) -> None:
        nudges = list[float]()
        while taken := self._next(nudges[0] if nudges else None):
            if taken[2] is NUDGE:
                nudges = [*NUDGES_S] if self._unsent() else nudges[1:]
            elif is_large(taken[2]):
                nudges, self._large = [*NUDGES_S], True
            self._hand_over(*taken)
            if self._large:
                self._large, self._lately = False, time.monotonic()
            del taken  # its memory, while waiting for the next

    def _next(self, nudge: float | None) -> tuple[Way, int, Sequence[Part]] | None:
        """The next frame and its way, or an empty one after `nudge` seconds; None when there will be no more."""
        until = None if nudge is None else time.monotonic() + nudge
        with self._changed:
            while not self._closed:
                now, waits_s = time.monotonic(), 0.0
                while self._frames and self._way and not (waits_s := self._way.waits_s(self._frames[0][2], now)):
                    _, self._origin, parts, wanted = self._frames.popleft()
                    if wanted():
                        return self._way, self._origin, parts
                if until is not None and now >= until and self._way:
                    return self._way, self._origin, NUDGE
                while self._frames and not self._way and self._frames[0][0] <= now:
                    self._frames.popleft()
                moments = [now + waits_s if self._way else self._frames[0][0]] if self._frames else []
                moments += [until] if until is not None and self._way else []
                self._changed.wait(min(moments) - now if moments else None)
        return None

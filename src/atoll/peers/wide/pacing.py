"""How fast the connections of one member may send together, so that they fill its link and no queue before it.

TCP finds the speed of a link by sending faster than it takes, until packets wait and then are lost; connections that
begin together do so each as fast as it last was, perhaps alone. But what is sent here is sent again and again over the
same link: how fast it was is remembered, and then only corrected, by how long packets wait.
"""

from collections import deque
from dataclasses import dataclass, field

LOOKS = 4
"""So many looks tell a speed: at one alone it is much too fast while a queue drains."""
GROWN = 1.1
"""The first search is left to TCP, until at the second half of them it was no more times as fast as at the first."""
WAIT_S, LITTLE_S = 0.02, 0.01
"""What packets may wait in queues at most, and when that is so little that more may be sent."""
DOWN, UP, MOST_UP = 0.04, 0.02, 0.16
"""The part by which it is corrected at a look; upwards, if `LOOKS` were not enough, twice as much each time."""
LEAST, MOST = 0.85, 1.25
"""Of the fastest that was seen: queues may be those of others, who must not take the link from this member altogether;
and no correction is a reason to send much more than was ever possible."""
USED, SENT = 0.95, 0.75
"""Whoever has sent less than the first part of what it may is held up by something else; less than the second, and it
is not for what it sends that packets wait."""


@dataclass
class Pace:
    """Attributes: most: bytes per second, or None as long as nothing is known."""

    most: float | None = None
    _fastest: float = 0.0
    _ups: int = 0
    _last: deque[float] = field(default_factory=lambda: deque[float](maxlen=LOOKS))

    def seen(self, speed: float, wait_s: float | None) -> None:
        """Since the last look, when there was more to send, as there is now, all connections sent with this speed, in
        bytes per second.

        Args: wait_s: what the packets of those whose buffers are not empty wait at least; None if all are.
        """
        ups, self._ups = self._ups, 0
        self._last.append(speed)
        if len(self._last) < LOOKS:
            return
        before, after = sum(list(self._last)[: LOOKS // 2]), sum(list(self._last)[LOOKS // 2 :])
        self._fastest, most = max(self._fastest, (before + after) / LOOKS), self.most
        if most is None:
            self.most = MOST * self._fastest if after <= GROWN * before else None
            return
        if wait_s is not None and wait_s > WAIT_S and speed > SENT * most:
            most *= 1 - DOWN
        elif wait_s is not None and wait_s < LITTLE_S and speed > USED * most:
            most *= 1 + min(UP * 2 ** max(ups - LOOKS, 0), MOST_UP)
            self._ups = ups + 1
        self.most = min(max(most, LEAST * self._fastest), MOST * self._fastest)

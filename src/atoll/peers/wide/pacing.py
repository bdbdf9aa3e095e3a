"""How fast the connections of one member may send together, so that they fill its link and no queue before it.

TCP finds the speed of a link by sending faster than it takes, until packets wait and then are lost; connections that
begin together do so each as fast as it last was, perhaps alone. But what is sent here is sent again and again over the
same link: how fast it was is remembered, and then only corrected, by how long packets wait.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LOOK_S = 0.1
"""Seconds between two looks at what connections have sent."""
OVER = 3
"""A speed is measured over so many looks, as answers come in bursts; or over those since sending began, if that is
less."""
MUCH, KNOWN = 64 << 10, 4 << 20
"""Bytes over `OVER` looks that are more than a few words (links of less than 2 Mbit/s are left to TCP), and bytes after
which a speed tells of a link: TCP begins slowly."""
LOOKS = 4
"""The mean of so many speeds tells how fast a link is: one alone is much too fast while a queue drains."""
GROWN = 1.05
"""The first search is left to TCP, until a look makes the fastest no more times as fast as it was."""
WAIT_S, LITTLE_S = 0.025, 0.015
"""What packets may wait in queues at most, and when that is so little that more may be sent."""
DOWN, UP, MOST_UP = 0.016, 0.016, 0.064
"""The part by which it is corrected at a look; upwards at most, as it becomes more if a second was not enough."""
LEAST, MOST = 0.85, 1.25
"""Of the fastest that was seen: queues may be those of others, who must not take the link from this member altogether;
and no correction is a reason to send much more than was ever possible."""
USED, SENT = 0.85, 0.75
"""Whoever has sent less than the first part of what it may is held up by something else; less than the second, and it
is not for what it sends that packets wait."""


class Sent(NamedTuple):
    """Of one connection. Args: sent: bytes that have arrived. waits_s: what its packets wait in queues. full: whether
    the system holds some that it has not sent."""

    sent: int
    waits_s: float
    full: bool


class _Look(NamedTuple):
    """Args: at: in seconds. sent: of each connection. waits_s: what packets of those that send wait at least. pushed:
    whether each of them had more to send."""

    at: float
    sent: dict[Hashable, int]
    waits_s: float
    pushed: bool


@dataclass
class Pace:
    """What is known of one member's link.

    A look counts if what was sent tells how fast the link is: packets waited at both ends, or, once there is a pace to
    correct, there was more to send. Where they still wait at `LEAST` they do so for others, or always: only what comes
    on top counts then.

    Attributes: most: bytes per second, or None as long as nothing is known.
    """

    most: float | None = None
    _fastest: float = 0.0
    _ups: int = 0
    _theirs_s: float = 0.0
    _last: deque[float] = field(default_factory=lambda: deque[float](maxlen=LOOKS))
    _past: deque[_Look] = field(default_factory=lambda: deque[_Look](maxlen=OVER + 1))
    _sends: int = 0

    def look(self, at: float, found: Mapping[Hashable, Sent], lately: int, waiting: int) -> set[Hashable]:
        """See how far each connection has come.

        Args: at: now, in seconds. lately, waiting: to how many members more than a few bytes have been on their way
        lately, and for how many more are waiting now. Returns: the connections that send much, and still do.
        """
        before = self._past[-min(OVER, len(self._past))].sent if self._past else {}
        sent = {name: each.sent for name, each in found.items()}
        sending = {name: found[name] for name in sent if sent[name] - before.get(name, sent[name]) > MUCH}
        waits_s = min((each.waits_s for each in sending.values()), default=0.0)
        full = sum(each.full for each in sending.values())
        now = _Look(at, sent, waits_s, 0 < lately <= max(full, waiting))
        looks = [*self._past, now]
        if sending and self._sends and sum(sent.values()) >= KNOWN:
            if self.most and now.pushed:
                self._judge(looks, self._sends)
            # without more to send it may be over by now; it was not at the look before, if more has arrived since
            elif not (self.most and looks[-2].pushed) and _arrived(looks[-2], now) > MUCH / OVER:
                self._judge(looks[:-1], self._sends - 1)
        self._sends = self._sends + 1 if sending else 0
        self._past.append(now)
        return {name for name in sending if sent[name] - looks[-2].sent.get(name, sent[name]) > MUCH / OVER}

    def _judge(self, looks: Sequence[_Look], sends: int) -> None:
        """The last look, where much was sent at so many before it: a window that began earlier would hold silence."""
        if sends:
            then, now = looks[-1 - min(sends, OVER)], looks[-1]
            self._seen(_arrived(then, now) / (now.at - then.at), then, now)

    def _seen(self, speed: float, then: _Look, now: _Look) -> None:
        """From one look to another all connections sent with this speed, in bytes per second."""
        least_s, wait_s = min(then.waits_s, now.waits_s), now.waits_s
        queued = least_s - self._theirs_s > WAIT_S
        usual = max(self._fastest, sum(self._last) / LOOKS)
        pushed = then.pushed and now.pushed and self.most is not None
        if not pushed and not (queued and speed > SENT * usual):
            return
        ups, self._ups = self._ups, 0
        self._last.append(speed)
        if len(self._last) < LOOKS:
            return
        mean, most, fastest = sum(self._last) / LOOKS, self.most, self._fastest
        self._fastest = max(fastest, mean)
        if most is None:
            self.most = MOST * self._fastest if mean <= GROWN * fastest else None
            return
        self._theirs_s = min(self._theirs_s, wait_s)
        ours_s = wait_s - self._theirs_s
        if speed > SENT * most and ours_s > WAIT_S:
            if most <= LEAST * self._fastest:
                self._theirs_s = least_s
            most *= 1 - DOWN
        elif speed > USED * most and ours_s < LITTLE_S:
            most *= 1 + min(UP * 1.3 ** max(ups - 10, 0), MOST_UP)
            self._ups = ups + 1
        self.most = min(max(most, LEAST * self._fastest), MOST * self._fastest)


def _arrived(then: _Look, now: _Look) -> int:
    """Bytes in between, on connections that were there at both looks."""
    return sum(now.sent[name] - then.sent[name] for name in now.sent.keys() & then.sent.keys())

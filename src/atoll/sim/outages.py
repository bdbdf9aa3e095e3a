"""Faults acted out: links that carry nothing, islands that stop, and what the others make of it.

Whoever is not heard for a lease counts as gone, and those who can reach one another go on without it: a mean counts if
more than the rule's quorum of its members is in it, a pair of one does not. An island that the others have gone on
without (it died, or froze, or was cut off for longer) takes up where another one stands: it fetches anchors, outer
states and counts over its link, while everyone else trains on, and enters at the end of that one's next boundary.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

from atoll.errors import GroupError
from atoll.faults import Faults
from atoll.sim.network import Network, Resource
from atoll.sim.runner import Runner
from atoll.sim.world import Meeting, Members, World
from atoll.sync.keeping import Keeping
from atoll.wire import Landed, Lost


def touched(faults: Faults, network: Network) -> frozenset[Resource]:
    """The links that faults may limit."""
    found = {(way, island, "") for island in range(len(network.islands)) for way in ("up", "down")}
    sites = sorted({island.site for island in network.islands})
    found |= {("between", a, b) for a in sites for b in sites}
    return frozenset(found) if faults.events else frozenset()


class Outages:
    """What is out of reach, and since when.

    Attributes: gone: islands that count as gone, or have not taken up yet. behind: those the others went on without.
    """

    def __init__(self, world: World, faults: Faults, runners: Sequence[Runner], keeping: Keeping | None) -> None:
        self._world, self._faults, self._runners, self._keeping = world, faults, runners, keeping
        self._network = world.traffic.network
        self._sites = sorted({island.site for island in self._network.islands})
        self._dead: set[int] = set()
        self._frozen: set[int] = set()
        self._away: dict[int, float] = {}
        self._cut: dict[tuple[str, str], float] = {}
        self.gone: set[int] = set()
        self.behind: set[int] = set()
        self._apart: set[tuple[str, str]] = set()
        self._coming: dict[int, int] = {}
        self._place = {(track.rule_index, track.fragment.index): at for at, track in enumerate(runners[0].state.tracks)}

    def begin(self) -> None:
        """Let the world ask, and plan every change."""
        self._world.review, self._world.left_out = self._review, self._left_out
        for time in self._faults.changes():
            self._world.clock.at(time, self._change)
            self._world.clock.at(time + self._faults.lease, self._lease)

    def _change(self, now: float) -> None:
        if all(runner.done or not runner.alive for runner in self._runners):
            return  # the run is over
        faults = self._faults
        for island in range(len(self._runners)):
            dead, frozen = faults.dead(island, now), faults.frozen(island, now)
            if dead != (island in self._dead):
                (self._dies if dead else self._returns)(now, island)
            if frozen != (island in self._frozen):
                (self._freezes if frozen else self._wakes)(now, island)
            self._link(now, island)
        for a, b in combinations_with_replacement(self._sites, 2):
            left = faults.left(a, b, now)
            for way in ((a, b), (b, a)):
                self._world.traffic.limit(now, ("between", *way), left)
            if left > 0:
                self._cut.pop((a, b), None)
                self._apart.discard((a, b))
            else:
                self._cut.setdefault((a, b), now)
        if not any(runner.alive and me not in self.behind for me, runner in enumerate(self._runners)):
            raise GroupError(
                f"after {now:g} simulated seconds nobody is left whose state is up to date, so a real run would begin "
                "again from its last checkpoint; let an island die only after another one has come back and fetched"
            )
        self._recover(now)

    def _link(self, now: float, island: int) -> None:
        part = 0.0 if island in self._dead or island in self._frozen else 1.0
        for way in ("up", "down"):
            self._world.traffic.limit(now, (way, island, ""), part)

    def _dies(self, now: float, island: int) -> None:
        self._dead.add(island)
        if self._runners[island].done:
            return
        self._away.setdefault(island, now)
        self._stop(now, island)
        self._world.trace.add(now, island, "died")

    def _stop(self, now: float, island: int) -> None:
        """What is under way on an island is no more, and whoever fetches from it must fetch from another one."""
        self._runners[island].stop()
        self._coming.pop(island, None)
        for waits in [waits for waits, other in self._coming.items() if other == island]:
            del self._coming[waits]

    def _returns(self, now: float, island: int) -> None:
        self._dead.discard(island)
        self._away.pop(island, None)
        if not self._runners[island].done:
            self.behind.add(island)

    def _freezes(self, now: float, island: int) -> None:
        self._frozen.add(island)
        self._away.setdefault(island, now)
        self._world.trace.add(now, island, "froze")

    def _wakes(self, now: float, island: int) -> None:
        self._frozen.discard(island)
        if island not in self._dead:
            self._away.pop(island, None)
            if self._runners[island].alive:
                self.gone.discard(island)
            self._count()
        self._world.trace.add(now, island, "woke")

    def _lease(self, now: float) -> None:
        """Who has not been heard for a lease is gone."""
        long = now - self._faults.lease * (1 - 1e-9)
        self.gone |= {island for island, since in self._away.items() if since <= long}
        self._count()
        # inside a site nobody is told apart from the others there: bytes wait until the cut ends
        self._apart |= {(a, b) for (a, b), since in self._cut.items() if since <= long and a != b}
        for island in self._dead & self.gone:
            self._world.forget(island)
        for meeting in self._world.meetings:
            for island in sorted(self._dead & self.gone & meeting.left):
                self._withdraw(meeting, island)
            self._review(meeting)

    def _count(self) -> None:
        """A keeper waits for those who are there."""
        if self._keeping:
            self._keeping.workers = len(self._runners) - len(self.gone)

    def _withdraw(self, meeting: Meeting, island: int) -> None:
        """An island will not come for this any more."""
        for members in [members for members in meeting.moving if island in members]:
            self._world.stop(meeting, members)
        if island in meeting.come:
            del meeting.come[island]
            meeting.missing += 1
        meeting.posts.pop(island, None)
        meeting.waiting.pop(island, None)
        meeting.follows.pop(island, None)
        for follower, (other, _) in list(meeting.follows.items()):
            if other == island:
                del meeting.follows[follower]
                lost = Lost(meeting.key, f"island {island}, whose place this one took, is gone")
                meeting.answers[follower] = lost
        self._world.leave(meeting, island)
        self._world.tell(meeting)

    def _review(self, meeting: Meeting) -> None:
        """Let those who can reach one another and are all here go on."""
        open_ = [me for me in meeting.to if me not in meeting.answers and me not in self.gone]
        for members in self._parts([me for me in open_ if not self._never(meeting, me)]):
            if members not in meeting.moving and all(me in meeting.come for me in members):
                for others in [others for others in meeting.moving if set(others) & set(members)]:
                    self._world.stop(meeting, others)
                self._world.start(meeting, members)

    def _never(self, meeting: Meeting, me: int) -> bool:
        """Whether an island will not come to a meeting: it has a later round behind it, or another one's place."""
        if me in meeting.posts:
            return False
        at = self._place.get(meeting.key[:2])
        passed = at is not None and self._runners[me].state.tracks[at].round > meeting.key.round
        return passed or me in meeting.follows

    def _parts(self, members: Sequence[int]) -> list[Members]:
        """Members by who can reach whom, over others if need be."""
        if not self._apart:
            return [tuple(members)] if members else []
        parts: list[set[str]] = []
        for site in self._sites:
            near = [part for part in parts if any(self._reach(site, other) for other in part)]
            parts = [part for part in parts if part not in near] + [{site}.union(*near)]
        found = [tuple(me for me in members if self._network.islands[me].site in part) for part in parts]
        return sorted(part for part in found if part)

    def _reach(self, a: str, b: str) -> bool:
        return (min(a, b), max(a, b)) not in self._apart

    def _left_out(self, meeting: Meeting, members: Members, answers: Mapping[int, Landed | Lost]) -> None:
        out = {me for me in meeting.to if me not in members and me not in meeting.follows}
        if any(isinstance(answer, Landed) for answer in answers.values()):
            # also who has this round behind it, but in the place of one that lost it
            self.behind |= out
        else:
            self.behind |= {me for me in out & self.gone if not self._never(meeting, me)}
        # not in the middle of what is being answered: who is there again fetches at once
        self._world.clock.at(self._world.clock.now, self._recover)

    def _recover(self, now: float) -> None:
        """Whoever is behind and can reach someone who is not begins to fetch; the others go on without it."""
        for island in sorted(self.behind - self._coming.keys() - self._dead - self._frozen):
            other = self._host(island)
            if other is None:
                continue
            self.gone.add(island)
            self._stop(now, island)
            self._world.trace.add(now, island, "fetches")
            self._world.forget(island)
            for meeting in self._world.meetings:
                if island in meeting.left:
                    self._withdraw(meeting, island)
            self._coming[island] = other
            bits = self._world.numerics.carried(self._runners[other].state)
            self._world.fetch(island, other, bits, lambda then, me=island, other=other: self._fetched(then, me, other))
        for meeting in self._world.meetings:
            self._review(meeting)

    def _host(self, island: int) -> int | None:
        """The lowest island that can be fetched from."""
        others = (other for other in range(len(self._runners)) if other not in self._frozen)
        return next((other for other in others if self._serves(island, other)), None)

    def _serves(self, island: int, other: int) -> bool:
        """Whether another island is up to date, still trains, and is not cut off from this one."""
        runner, sites = self._runners[other], [self._network.islands[me].site for me in (island, other)]
        up = runner.alive and not runner.done and other not in self.gone | self.behind
        return up and (min(sites), max(sites)) not in self._cut

    def _fetched(self, now: float, island: int, other: int) -> None:
        if self._coming.get(island) != other:
            return
        runner = self._runners[other]
        if not self._serves(island, other):
            del self._coming[island]
            self._recover(now)
            return
        if not runner.between:
            runner.after.append(lambda then: self._fetched(then, island, other))
            return
        del self._coming[island]
        self.behind.discard(island)
        self.gone.discard(island)
        self._count()
        self._world.trace.add(now, island, "joined")
        self._runners[island].enter(now, runner)
        # there may be others that found nobody to fetch from
        self._world.clock.at(now, self._recover)

"""Islands that a keeper answers: when their messages are due is known beforehand, when they are answered is not.

Without faults an island with a keeper has to know only which fragments wait for an answer, and since when. So what is
due at which step is worked out once for all islands (`Calendar`), an island keeps that little (`Arrivals`), and no flow
has to be driven: what it would ask for (`atoll.sync.flow.boundary`) is asked in the same order (`Caller`):

    leaves       what is due, unless its last message was still unanswered when this step began
    comes back   all that left OnArrival at earlier steps, oldest first, where it is there
                 what has left now and is Blocking, in that order: it is waited for

What lands at a step at which its fragment is due therefore leaves with the next period, as in the flow, which asks who
waits before anything lands. At the end of a run all that is in flight is looked at once more.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

from atoll.faults import Faults
from atoll.parts.landings import OnArrival
from atoll.parts.mixers import Situation, Work
from atoll.parts.schedules import NEVER
from atoll.sim.clock import Act
from atoll.sim.runner import Course, Runner
from atoll.sim.world import Letter, World
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState
from atoll.trees import Tree
from atoll.wire import Key, Landed, Post, Snapshot


def foreseen(strategy: Strategy, faults: Faults) -> bool:
    """Whether all that an island cannot know beforehand is when a keeper answers."""
    return strategy.kept and not (faults.loss or faults.events)


class Calendar:
    """What all islands know beforehand.

    Args: state: of any island; it is used up. steps: inner steps of the run.
    Attributes: looks: by track, whether its answers are looked for; else they are waited for. steps: at which something
    is due, and then NEVER. due: at each of them, the places of the tracks that are. post: what leaves.
    """

    def __init__(self, state: SyncState, steps: int) -> None:
        self._tracks, self._membership = state.tracks, state.membership
        self._sources = [Snapshot(Tree(track.message)) for track in state.tracks]
        self.looks = [isinstance(track.rule.landing, OnArrival) for track in state.tracks]
        self.steps = list[int]()
        self.due = list[list[int]]()
        while state.awaited <= steps:
            self.steps.append(state.awaited)
            self.due.append([at for at, track in enumerate(state.tracks) if track.due == state.awaited])
            state.work = Work(state.awaited, state.awaited)
            state.plan()
        self.steps.append(NEVER)
        # most islands have done as many steps for a round as others had
        self.post = lru_cache(1 << 16)(self._post)

    def _post(self, at: int, round_: int, steps: int) -> Post:
        """The message of a track and a round, after so many steps since its last answer."""
        track = self._tracks[at]
        rule, key = track.rule, Key(track.rule_index, track.fragment.index, round_)
        situation = Situation(self._membership, round_, Work(steps, steps), {}, rule.codec, track.message)
        exchange = rule.mixer.exchange(situation)
        codec = rule.codec.at(round_)
        source, fold, weight = self._sources[at], exchange.fold, exchange.weight
        return Post(key, exchange.to, source, codec, {}, fold, weight, rule.quorum, signals={})


class Arrivals:
    """How far one island has come in a calendar.

    Attributes: step: inner steps done. awaited: the next at which something is due. place: of that in the calendar.
    rounds, answered: by track, how many have left, and the step at which the last answer came. flying: by track, what
    has left and has not come back, and the step at which it left; in this order.
    """

    __slots__ = ("answered", "awaited", "calendar", "flying", "place", "rounds", "step")
    kept, gradients = True, False

    def __init__(self, calendar: Calendar) -> None:
        tracks = len(calendar.looks)
        self.calendar, self.place = calendar, 0
        self.step, self.awaited = 0, calendar.steps[0]
        self.rounds, self.answered = [0] * tracks, [0] * tracks
        self.flying: dict[int, tuple[Letter, int]] = {}

    def train(self, steps: int, since: float, now: float) -> None:
        """Count them."""
        self.step += steps


class Caller(Runner):
    """An island that goes by a calendar."""

    def __init__(self, number: int, world: World, arrivals: Arrivals, course: Course, watch: Act) -> None:
        super().__init__(number, world, arrivals, course, watch)
        self._arrivals = arrivals
        self._landed: list[tuple[Key, Landed, int]] = []

    def _bound(self, now: float) -> None:
        me, world, number = self._arrivals, self.world, self.number
        calendar, flying, step = me.calendar, me.flying, me.step
        coming = list(flying)
        if step == me.awaited:
            for at in calendar.due[me.place]:
                if at in flying:
                    continue
                post = calendar.post(at, me.rounds[at], step - me.answered[at])
                world.trace.launched(now, number, post.key)
                flying[at] = world.push(number, post, self._looks), step
                me.rounds[at] += 1
                if not calendar.looks[at]:
                    coming.append(at)
            me.place += 1
            me.awaited = calendar.steps[me.place]
        self._come(coming, self._over, now)

    def _drain(self, now: float) -> None:
        self._come(list(self._arrivals.flying), self._drained, now)

    def _come(self, coming: Sequence[int], then: Act, now: float) -> None:
        """Look for answers, or wait for them, one after another; when that is over, tell of them and go on."""
        me, world = self._arrivals, self.world
        for index, at in enumerate(coming):
            letter, left = me.flying[at]
            answer = letter.answer
            if isinstance(answer, Landed):
                world.close(letter)
                del me.flying[at]
                me.answered[at] = me.step
                self._landed.append((letter.key, answer, me.step - left))
            elif not me.calendar.looks[at]:
                letter.act = partial(self._waited, now, coming[index:], then)
                return
        for key, landed, age in self._landed:
            world.trace.came(now, self.number, key, landed, age)
        self._landed.clear()
        then(now)

    def _waited(self, since: float, coming: Sequence[int], then: Act, now: float) -> None:
        letter, _ = self._arrivals.flying[coming[0]]
        self.world.trace.waited(self.number, since, now, letter.key)
        self._come(coming, then, now)

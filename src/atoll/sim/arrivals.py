"""Islands that a keeper answers: when their messages are due is known beforehand, when they are answered is not.

Without faults a flow with a keeper has to know only which fragments wait for an answer, and since when. So what is due
at which step is worked out once for all islands (`Calendar`), and an island (`Arrivals`) keeps that little and asks for
what its flow would (`atoll.sync.flow.boundary`), in the same order:

    leaves       what is due, unless its last message was still unanswered when this step began
    comes back   all that left OnArrival at earlier steps, oldest first, where it is there
                 what has left now and is Blocking, in that order: it is waited for

What lands at a step at which its fragment is due therefore leaves with the next period, as in the flow, which asks who
waits before anything lands. At the end of a run all that is in flight is looked at once more (`drain`).
"""

from collections.abc import Sequence
from functools import lru_cache

from atoll.faults import Faults
from atoll.parts.landings import OnArrival
from atoll.parts.mixers import Situation, Work
from atoll.parts.schedules import NEVER
from atoll.sim.copies import changed
from atoll.sync.flow import Flow
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState
from atoll.trees import Tree
from atoll.wire import Event, Key, Landed, Post, Snapshot, Take


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

    def _post(self, at: int, round_: int, steps: int) -> tuple[Post, Take]:
        """The message of a track and a round, after so many steps since its last answer, and how that is asked for."""
        track = self._tracks[at]
        rule, key = track.rule, Key(track.rule_index, track.fragment.index, round_)
        situation = Situation(self._membership, round_, Work(steps, steps), {}, rule.codec, track.message)
        exchange = rule.mixer.exchange(situation)
        codec = rule.codec.at(round_)
        source, fold, weight = self._sources[at], exchange.fold, exchange.weight
        post = Post(key, exchange.to, source, codec, {}, fold, weight, rule.quorum, signals={})
        return post, Take(key, poll=self.looks[at])


class Arrivals:
    """One island's way through a calendar. Attributes: step: inner steps done. awaited: the next at which something is
    due."""

    kept, gradients = True, False

    def __init__(self, calendar: Calendar) -> None:
        tracks = len(calendar.looks)
        self.step, self.awaited = 0, calendar.steps[0]
        self._calendar, self._next = calendar, 0
        self._rounds, self._updates, self._answered = [0] * tracks, [0] * tracks, [0] * tracks
        self._flying: dict[int, tuple[Take, int]] = {}

    def train(self, steps: int, since: float, now: float) -> None:
        """Count them."""
        self.step += steps

    def boundary(self) -> Flow:
        """What leaves, and what has come."""
        calendar, coming = self._calendar, list(self._flying)
        leaving: list[int] = []
        if self.step == self.awaited:
            for at in calendar.due[self._next]:
                if at not in self._flying:
                    leaving.append(at)
                    if not calendar.looks[at]:
                        coming.append(at)
            self._next += 1
            self.awaited = calendar.steps[self._next]
        return self._pass(leaving, coming)

    def drain(self) -> Flow:
        """What has come and was not seen."""
        return self._pass((), list(self._flying))

    def told(self, now: float, events: Sequence[Event]) -> None:
        """The trace has it."""

    def _pass(self, leaving: Sequence[int], coming: Sequence[int]) -> Flow:
        flying, step = self._flying, self.step
        events: list[Event] = []
        for at in leaving:
            post, take = self._calendar.post(at, self._rounds[at], step - self._answered[at])
            yield post
            self._rounds[at] += 1
            flying[at] = take, step
        for at in coming:
            take, left = flying[at]
            landed = yield take
            if isinstance(landed, Landed):
                del flying[at]
                self._updates[at] += 1
                self._answered[at] = step
                events.append(changed(landed, age=step - left, update=self._updates[at]))
        return events

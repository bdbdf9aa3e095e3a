"""Drivers: perform the effects of flows on real groups."""

from collections.abc import Mapping, Sequence
from typing import cast

from atoll.errors import GroupError
from atoll.sync.flow import Answer, Effect, Flow
from atoll.wire import Collect, Event, KeeperGroup, PeerGroup, Post, Reply, Take

Group = PeerGroup | KeeperGroup


def drive(flow: Flow, group: Group) -> list[Event]:
    """Perform one flow to its end, waiting where it waits."""
    answer: Answer = None
    while True:
        try:
            effect = flow.send(answer)
        except StopIteration as done:
            return done.value
        answer = perform(effect, group, wait=True)


def perform(effect: Effect, group: Group, *, wait: bool) -> Answer:
    """Carry out one effect; None for a `Take` that is not there yet, if it only looks or is not waited for."""
    match effect:
        case Post():
            return cast(PeerGroup, group).post(effect)
        case Take():
            return cast(PeerGroup, group).take(effect, wait=wait and not effect.poll)
        case Collect():
            return list(cast(KeeperGroup, group).collect(effect))
        case Reply():
            return cast(KeeperGroup, group).reply(effect)


def take_turns(flows: Sequence[Flow], groups: Sequence[Group]) -> list[list[Event]]:
    """Advance the flows of several workers in one thread, in worker order, each as far as it can go without waiting.

    With one flow this is `drive`. Returns the events of each flow.
    Raises: GroupError if every flow waits for an exchange that none of them will complete.
    """
    if len(flows) == 1:
        return [drive(flows[0], groups[0])]
    turns = Turns(groups)
    turns.begin(dict(enumerate(flows)))
    turns.advance()
    if turns.pending:
        raise turns.stuck()
    return [turns.ended.get(index, []) for index in range(len(flows))]


class Turns:
    """Flows of several workers in one thread, each as far as it can go; one that waits may go on at a later tick.

    Args: groups: by the number of the worker (or keeper) whose flows are begun under it.
    Attributes: pending: flows that wait, by number. ended: events of those that have ended since `begin`.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.pending: dict[int, tuple[Flow, Take | None]] = {}
        self.ended: dict[int, list[Event]] = {}

    def begin(self, flows: Mapping[int, Flow]) -> None:
        """Start flows of workers that have none pending."""
        assert not self.pending.keys() & flows.keys()
        self.ended.clear()
        self.pending = dict(sorted((self.pending | {number: (flow, None) for number, flow in flows.items()}).items()))

    def advance(self) -> None:
        """Go on until all have ended or wait for one another."""
        moved = True
        while moved:
            moved = False
            for number in list(self.pending):
                moved |= self._one(number)

    def _one(self, number: int) -> bool:
        """Advance one flow as far as it goes; whether it moved at all."""
        flow, waiting = self.pending[number]
        group, answer, moved = self._groups[number], None, False
        while True:
            if waiting is not None:
                answer = perform(waiting, group, wait=False)
                if answer is None and not waiting.poll:
                    self.pending[number] = (flow, waiting)
                    return moved
            moved = True
            try:
                effect = flow.send(answer)
            except StopIteration as done:
                del self.pending[number]
                self.ended[number] = done.value
                return True
            waiting = effect if isinstance(effect, Take) else None
            answer = None if isinstance(effect, Take) else perform(effect, group, wait=False)

    def stuck(self) -> GroupError:
        """What to say when nobody will complete what others wait for."""
        waited = [str(take.ticket) for _, take in self.pending.values() if take]
        return GroupError(
            f"workers wait for {', '.join(waited)}, which no other worker will join; all must run the same strategy "
            "and step"
        )

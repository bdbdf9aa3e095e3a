"""Drivers: perform the effects of flows on real groups."""

from collections.abc import Sequence

from atoll.errors import GroupError
from atoll.sync.flow import Flow
from atoll.wire import Event, Key, Landed, Lost, PeerGroup, Post, Take


def drive(flow: Flow, group: PeerGroup) -> list[Event]:
    """Perform one flow to its end, waiting where it waits."""
    answer: Key | Landed | Lost | None = None
    while True:
        try:
            effect = flow.send(answer)  # pyright: ignore[reportArgumentType]  # the first send of a generator takes None
        except StopIteration as done:
            return done.value
        answer = group.post(effect) if isinstance(effect, Post) else group.take(effect)


def take_turns(flows: Sequence[Flow], groups: Sequence[PeerGroup]) -> list[list[Event]]:
    """Advance the flows of several workers in one thread, in worker order, each as far as it can go without waiting.

    With one flow this is `drive`. Returns the events of each flow.
    Raises: GroupError if every flow waits for an exchange that none of them will complete.
    """
    if len(flows) == 1:
        return [drive(flows[0], groups[0])]
    answers: list[Key | Landed | Lost | None] = [None] * len(flows)
    waiting: list[Take | None] = [None] * len(flows)
    events: list[list[Event] | None] = [None] * len(flows)
    while any(done is None for done in events):
        moved = False
        for index, (flow, group) in enumerate(zip(flows, groups, strict=True)):
            while events[index] is None:
                pending = waiting[index]
                if pending is not None:
                    answers[index] = group.take(pending, wait=False)
                    if answers[index] is None:
                        break
                    waiting[index] = None
                moved = True
                try:
                    effect = flow.send(answers[index])  # pyright: ignore[reportArgumentType]  # the first send takes None
                except StopIteration as done:
                    events[index] = done.value
                    break
                if isinstance(effect, Post):
                    answers[index] = group.post(effect)
                else:
                    waiting[index] = effect
        if not moved:
            stuck = [str(take.ticket) for take in waiting if take]
            raise GroupError(
                f"workers wait for {', '.join(stuck)}, which no other worker will join; all must run the same "
                "strategy and step"
            )
    return [done or [] for done in events]

"""Groups whose members come and go: looking who takes part, offering a state to whoever joins, and joining.

A joiner takes over a state as it was before one boundary, and goes along with what lands from there on, without
training: it carries out the same flows, and its group answers them with what a donor was answered. Live is the anchor
when it begins to train, and its inner optimizer begins anew.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from atoll.errors import CompositionError, LeftBehind
from atoll.parts.mixers import Work
from atoll.sync.drive import drive
from atoll.sync.flow import boundary
from atoll.sync.state import SyncState
from atoll.wire import Event, Key, Landed, Membership, PeerGroup, Source

State = tuple[Mapping[str, Any], Sequence[tuple[str, Tensor]]]


@runtime_checkable
class ElasticGroup(PeerGroup, Protocol):
    """A way to others who come and go."""

    @property
    def joins(self) -> bool:
        """Whether this worker has yet to take over a state before it takes part."""
        ...

    def meet(self, step: int) -> Membership:
        """Who takes part in what is launched at inner step `step`, alike on all; a joiner, who does not, gets the
        membership of the one in whose place it stands."""
        ...

    def offer(self, capture: Callable[[], State], due: int, step: int) -> None:
        """If somebody joins: capture the state, as it is before the boundary at step `due`. `step`: done."""
        ...

    def enter(self, *, alike: bool) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Fetch a state, from any of the others if they hold it `alike`. Until this worker takes part, exchanges are
        answered as they were there."""
        ...

    def expect(self, key: Key, source: Source) -> Key:
        """An exchange that was in flight in a state that was fetched; its mean is written here."""
        ...

    def again(self) -> None:
        """Drop everything under way, to come again after the others went on; `agree` is next."""
        ...

    def witness(self, held: Sequence[Tensor]) -> None:
        """Compare with the others, along with the next exchanges, what stands still until `meet` is called again."""
        ...

    def stands(self) -> tuple[int, int]:
        """The step of the boundary that is next for the one in whose place a joiner stands, and the last that it has
        done."""
        ...

    def ready(self) -> None:
        """Tell that this joiner has come as far as the others; waits a little."""
        ...

    def begins(self) -> int | None:
        """The step from which a joiner takes part, once that is known."""
        ...


def meet(state: SyncState, group: ElasticGroup) -> None:
    """Before a boundary: take up who takes part in what it launches, and offer the state if somebody joins."""
    state.membership = group.meet(state.step)
    offer(state, group)


def offer(state: SyncState, group: ElasticGroup) -> None:
    """Before a boundary, and between two: offer the state if somebody joins. It is the same until the next one."""

    def capture() -> State:
        # the answers of what is in flight will follow
        awaited = {f"queue.{'.'.join(map(str, entry.key))}" for entry in state.queue if not entry.outcome}
        tensors = [(name, tensor) for name, tensor in state.tensors() if name not in awaited]
        meta = state.meta()
        # what is due now has yet to be carried out, by whoever takes it over too
        meta["work"][0] = min(state.step, state.due - 1)
        return meta, tensors

    group.offer(capture, state.due, state.step)


def witness(state: SyncState, events: Sequence[Event], group: ElasticGroup) -> None:
    """After a boundary: have compared what all should hold alike, if anything has landed in it."""
    if state.strategy.agrees and any(isinstance(event, Landed) for event in events):
        group.witness([anchor.flat for anchor in state.anchors() if anchor])


def enter(state: SyncState, group: ElasticGroup) -> None:
    """Come in: returns when this worker takes part in the next boundary, and tries again if it is left behind on the
    way.

    Raises: CompositionError for a strategy without anchors, which nobody could come in by.
    """
    if state.gradient_tracks():
        raise CompositionError(
            "the strategy averages gradients within every step, so there are no anchors by which a worker could come "
            "in; take a method with anchors, such as diloco"
        )
    while group.joins:
        try:
            _go_along(state, group)
            return
        except LeftBehind:
            group.again()
            group.agree(state.fingerprint)


def _go_along(state: SyncState, group: ElasticGroup) -> None:
    """Take over a state, and do what the others do, until it is the same as theirs."""
    state.take_over(*group.enter(alike=state.strategy.agrees))
    for entry in state.queue:
        if not entry.outcome and entry.snapshot:
            group.expect(entry.key, entry.snapshot)
    due = state.due
    while (begins := group.begins()) is None or begins > state.due:
        if due <= state.due:
            due, _ = group.stands()  # takes a round trip, and is good for all boundaries until there
        if due <= state.due:
            group.ready()  # until the others agree on it there is nothing to go along with
            continue
        _pass_over(state, state.due)
        state.membership = group.meet(state.step)
        drive(boundary(state), group)
    # training begins where the others are by now, who would have to wait for it else
    _, step = group.stands()
    _pass_over(state, min(step, state.due - 1))
    # what others did before is in none of this worker's messages
    for track in state.tracks:
        track.launched = state.work
    for entry in state.queue:
        entry.since = state.work
    for fragment in state.fragments:
        if fragment.anchor:
            fragment.live.adopt(fragment.anchor)


def _pass_over(state: SyncState, step: int) -> None:
    """Count what the others did until they came to this step."""
    steps, tokens, share = state.work
    state.work = Work(max(step, steps), tokens * max(step, steps) // max(1, steps), share)

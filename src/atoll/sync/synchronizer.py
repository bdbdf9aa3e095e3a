"""Synchronizer: what a training loop calls."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from atoll.parts.mixers import Work
from atoll.sync.drive import drive
from atoll.sync.elastic import ElasticGroup, enter, meet, offer, witness
from atoll.sync.flow import Flow, before, boundary, drain
from atoll.sync.rule import Strategy
from atoll.sync.shared import Sharing
from atoll.sync.state import SyncState
from atoll.trees import Tree
from atoll.wire import Event, PeerGroup


class Synchronizer:
    """Carries out a strategy for one worker, in the open: nothing is hooked into the model or the inner optimizer.

    Args: model: any module; all workers must start from the same values. strategy: what is synced. group: the way to
    the other workers. One whose members come and go may have trained before this one came: `state.step` says how far,
    and live is where they are.
        share: this worker's part of all the data, 1 on average (for `weighted(by_share(), ...)`).
    Raises: CompositionError if strategy and model do not fit; GroupError if the peers train something else.

    Example:
        >>> import torch
        >>> from torch import nn, optim
        >>> from atoll.parts.outers import nesterov
        >>> from atoll.parts.schedules import every
        >>> from atoll.peers.memory import Hub
        >>> from atoll.sync.rule import Rule, Strategy
        >>> model = nn.Linear(2, 1)
        >>> inner = optim.AdamW(model.parameters())
        >>> group, strategy = Hub(1).group(0), Strategy((Rule(every(2), outer=nesterov(0.7, 0.9)),))
        >>> with Synchronizer(model, strategy, group) as sync:
        ...     for step in range(4):
        ...         loss = model(torch.ones(1, 2)).sum()
        ...         loss.backward()
        ...         events = sync.before_step()
        ...         inner.step()
        ...         inner.zero_grad()
        ...         events = sync.after_step(tokens=1)
        >>> [type(event).__name__ for event in events]
        ['Launched', 'Landed']
    """

    def __init__(self, model: nn.Module, strategy: Strategy, group: PeerGroup, *, share: float = 1.0) -> None:
        self.state = SyncState(model, strategy, group.membership, Work(0, 0, share))
        self.group = group
        self._shared = 0
        self._gradients = bool(self.state.gradient_tracks())
        # once, for to look at a protocol costs far more than a step at which nothing is due
        self._elastic = group if isinstance(group, ElasticGroup) else None
        self._come_in()

    def before_step(self) -> list[Event]:
        """Between backward and clipping: average gradients, where the strategy carries them."""
        return drive(before(self.state), self.group) if self._gradients else []

    def after_step(self, tokens: int = 0, signals: Mapping[str, float] | None = None) -> list[Event]:
        """After the inner step: count it, and start or collect whatever is due.

        Args: tokens: trained in this step, all micro-batches together; signals: floats whose mean over the workers
        schedules may read.
        """
        flow = self.after(tokens, signals)
        if self._elastic is None:
            return drive(flow, self.group) if flow else []
        if not flow:
            offer(self.state, self._elastic)
            return []
        meet(self.state, self._elastic)
        events = drive(flow, self.group)
        witness(self.state, events, self._elastic)
        return events

    def before(self) -> Flow | None:
        """`before_step` as a flow for a driver of several workers; None when there is nothing to do."""
        return before(self.state) if self._gradients else None

    def after(self, tokens: int = 0, signals: Mapping[str, float] | None = None) -> Flow | None:
        """`after_step` as a flow for a driver of several workers; None when nothing is due. Counts the step."""
        state = self.state
        steps, seen, share = state.work
        state.work = Work(steps + 1, seen + tokens, share)
        if signals:
            state.own_signals.update(signals)
        return boundary(state) if steps + 1 >= state.due else None

    @contextmanager
    def shared_weights(self) -> Generator[nn.Module]:
        """Lend the model with the shared weights in place of live ones; live comes back when the block ends, whatever
        happens in it. All workers must ask together where each has anchors of its own (gossip, eager)."""
        self._shared += 1
        sharing = Sharing(self.state, self._shared)
        drive(sharing.flow(), self.group)
        with self.lent(sharing.anchors) as model:
            yield model

    @contextmanager
    def lent(self, anchors: Sequence[Tree | None]) -> Generator[nn.Module]:
        """The same with anchors that are there already, by fragment."""
        self.state.look_again()
        lent = [
            (fragment.live, anchor, fragment.live.copied())
            for fragment, anchor in zip(self.state.fragments, anchors, strict=True)
            if anchor
        ]
        try:
            for live, anchor, _ in lent:
                live.adopt(anchor)
            yield self.state.model
        finally:
            for live, _, kept in lent:
                live.adopt(kept)

    def come_again(self) -> None:
        """After a `LeftBehind`: take over the others' state in place of this one."""
        assert self._elastic is not None
        self._elastic.again()
        self._come_in()

    def _come_in(self) -> None:
        self.group.agree(self.state.fingerprint)
        if self._elastic and self._elastic.joins:
            enter(self.state, self._elastic)

    def drain(self) -> list[Event]:
        """Use everything that is in flight: the run ends here."""
        return drive(drain(self.state), self.group)

    def __enter__(self) -> "Synchronizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.group.abort()
            return
        try:
            self.drain()
        except BaseException:
            self.group.abort()
            raise

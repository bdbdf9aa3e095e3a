"""What an island goes through: its inner steps, and what it does at some of their ends."""

from collections.abc import Sequence
from typing import Any, Protocol

from atoll.parts.mixers import Work
from atoll.sync.flow import Flow, before, boundary, drain
from atoll.sync.state import SyncState
from atoll.wire import Event


class Steps(Protocol):
    """Of one island, however it is worked out."""

    @property
    def kept(self) -> bool:
        """Whether a keeper lets everyone go on."""
        ...

    @property
    def gradients(self) -> bool:
        """Whether there is something to average within a step."""
        ...

    @property
    def step(self) -> int:
        """Inner steps done."""
        ...

    @property
    def awaited(self) -> int:
        """The next step at whose end there is something to do, if nothing comes before."""
        ...

    def train(self, steps: int, since: float, now: float) -> None:
        """Take whole inner steps, evenly between two times, and count them."""
        ...


class Flows(Steps, Protocol):
    """Of an island with flows to be driven."""

    def boundary(self) -> Flow:
        """What is done at the end of this step."""
        ...

    def drain(self) -> Flow:
        """What is done at the end of the run."""
        ...

    def told(self, now: float, events: Sequence[Event]) -> None:
        """What a flow came to."""
        ...


class Trainee:
    """An island with a flow and state of its own; nothing is trained, steps are counted."""

    def __init__(self, state: SyncState) -> None:
        self.state = state
        self.kept, self.gradients = state.strategy.kept, bool(state.gradient_tracks())

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self.state.step

    @property
    def awaited(self) -> int:
        """The next step at whose end there is something to do, if nothing comes before."""
        return self.state.awaited

    def train(self, steps: int, since: float, now: float) -> None:
        """A token for each step."""
        done, tokens, share = self.state.work
        self.state.work = Work(done + steps, tokens + steps, share)

    def backward(self) -> None:
        """The half of a step before gradients are averaged."""

    def update(self) -> None:
        """The half after it; counts the step."""
        self.train(1, 0.0, 0.0)

    def average(self) -> Flow:
        """What is done between them."""
        return before(self.state)

    def boundary(self) -> Flow:
        """What is done at the end of this step."""
        return boundary(self.state)

    def drain(self) -> Flow:
        """What is done at the end of the run."""
        return drain(self.state)

    def join(self, other: Any) -> None:
        """Take up where another island stands."""
        self.state.take_over(other.state.meta(), dict(other.state.tensors()))

    def told(self, now: float, events: Sequence[Event]) -> None:
        """What a flow came to."""

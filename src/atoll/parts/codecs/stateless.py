"""What codecs without a memory have in common."""

from typing import Self

from torch import Tensor

from atoll.trees import Layout, State


class Stateless:
    """A codec whose wires do not depend on those before."""

    def init(self, layout: Layout) -> State:
        """No state."""
        return {}

    def restore(self, wire: Tensor, STATE: State) -> None:
        """Nothing was kept that a lost wire would have to give back."""

    def at(self, round: int) -> Self:
        """The same in every round."""
        return self

"""What could not be sent in one round is sent in a later one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.nested import remembers
from atoll.trees import Layout, State
from atoll.wire import Codec


@dataclass(frozen=True)
class error_feedback:
    """Keeps the error e that `codec` makes, and adds it to the next values: a = decay e + x is encoded, e = a - decoded
    is left.

    A wire that did not count is added back, e = e + decoded: a is sent again, decayed like everything that waits.
    SparseLoCo has decay 0.95 around topk and no outer momentum; MuLoCo puts it around quantise(2). Some codes scale x
    by the outer learning rate first and again afterwards; here it is applied once, by the outer optimizer.

    A value that is not finite stays in e. Groups refuse such a contribution before they let it be encoded.

    Args: codec: one without a memory. decay: in [0, 1].

    Example:
        >>> from atoll.parts.codecs import quantise
        >>> codec, values = error_feedback(quantise(2), decay=1.0), torch.tensor([1.0, 0.25])
        >>> state = {"residual": torch.zeros(2)}
        >>> codec.decode(codec.encode(values, state), like=values), state["residual"]
        (tensor([1., 0.]), tensor([0.0000, 0.2500]))
    """

    codec: Codec
    decay: float

    def __post_init__(self) -> None:
        if remembers(self.codec):
            raise CompositionError(
                f"{self!r} keeps the error of a codec that keeps its own, so it would be sent twice; write one "
                "error_feedback around the others"
            )
        if not 0 <= self.decay <= 1:
            raise CompositionError(
                f"{self!r} has the decay {self.decay}, but errors must not grow while they wait; give 0 <= decay <= 1"
            )

    @property
    def block(self) -> int:
        """The codec's."""
        return self.codec.block

    def init(self, layout: Layout) -> State:
        """e = 0."""
        return {"residual": torch.zeros(layout.numel, dtype=layout.dtype)}

    def encode(self, values: Tensor, STATE: State) -> Tensor:
        """The wire of a; e moves on."""
        residual = STATE["residual"]
        # In memory of its own: a wire may share the memory of what it was made from.
        wanted = torch.mul(residual, self.decay).add_(values)
        wire = self.codec.encode(wanted, {})
        torch.sub(wanted, self.codec.decode(wire, wanted), out=residual)
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """As the codec does."""
        return self.codec.decode(wire, like)

    def restore(self, wire: Tensor, STATE: State) -> None:
        """e = e + decoded."""
        residual = STATE["residual"]
        residual.add_(self.codec.decode(wire, residual))

    def at(self, round: int) -> "error_feedback":
        """Around the codec of that round."""
        return replace(self, codec=self.codec.at(round))

    def nbytes(self, numel: int, itemsize: int) -> int:
        """The codec's."""
        return self.codec.nbytes(numel, itemsize)

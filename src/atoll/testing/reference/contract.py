"""The types in the contract of the reference loops, their one way to average, and tensors as one vector."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

InnerStep = Callable[[int, int, list[Tensor]], None]
Gradient = Callable[[int, int, list[Tensor]], list[Tensor]]
Update = Callable[[int, list[Tensor], list[Tensor]], None]
Result = tuple[list[Tensor], list[list[Tensor]]]

Outer = Callable[[Tensor, dict[str, Any]], Tensor]
"""An outer rule: from one tensor's outer gradient and state (empty at first), the step to subtract from its anchor."""

See = Callable[[int, int, Tensor], Tensor]
"""What the others see of worker m's flat delta in a round: see(worker, round, flat), rounds counted from 0."""


def unchanged(worker: int, round: int, flat: Tensor) -> Tensor:
    """Nothing is lost on the way: the others see the delta itself."""
    return flat


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All their elements in order: codecs cut blocks without regard to where a tensor ends."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flattened` undone: the elements in tensors of the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Their average: added in the given order, beginning with the first, and divided once."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)

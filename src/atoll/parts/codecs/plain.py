"""Codecs without loss, or with that of a narrower float."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs.stateless import Stateless
from atoll.trees import State


@dataclass(frozen=True)
class exact(Stateless):
    """The values' own bytes. No error, no copy.

    Example:
        >>> values = torch.tensor([1.0, -2.0])
        >>> exact().decode(exact().encode(values, {}), like=values)
        tensor([ 1., -2.])
    """

    @property
    def block(self) -> int:
        """Elements are written one by one."""
        return 1

    def encode(self, values: Tensor, STATE: State) -> Tensor:
        """The same memory, seen as bytes."""
        return values.view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The same memory, seen as numbers."""
        return wire.view(like.dtype)

    def nbytes(self, numel: int, itemsize: int) -> int:
        """As many as the values hold."""
        return numel * itemsize


@dataclass(frozen=True)
class cast(Stateless):
    """Values rounded to `dtype` (fp16 or bf16), to nearest even.

    Relative error at most 2^-11 (fp16) or 2^-8 (bf16) in the normal range; fp16 adds an absolute 2^-25 below 2^-14 and
    turns magnitudes above 65504 into infinities, which the group then refuses. OpenDiLoCo (section 2.1) sends fp16.

    Example:
        >>> cast(torch.float16).nbytes(10, itemsize=4)
        20
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise CompositionError(
                f"cast({self.dtype}) is not a wire format; write cast(torch.float16), cast(torch.bfloat16) or exact()"
            )

    @property
    def block(self) -> int:
        """Elements are written one by one."""
        return 1

    def encode(self, values: Tensor, STATE: State) -> Tensor:
        """Rounded copy, seen as bytes."""
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """The rounded values in the narrow dtype: adding them to a wider tensor widens each exactly."""
        return wire.view(self.dtype)

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Two bytes per element."""
        return numel * self.dtype.itemsize

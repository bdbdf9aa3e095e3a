"""Named tensors over flat buffers.

A fragment of a model is seen in two ways. `Tree` is storage of our own: one flat, contiguous buffer, allocated once,
of which every named tensor is a view (anchors, snapshots). `Live` is storage that belongs to the model: a list of its
own tensors, never re-pointed, read and written through flat views. Both have the same `Layout`, so element i of one is
element i of the other, and everything heavier than a chunk is done in a loop over `Layout.chunks()`: scratch is a
chunk, never a copy of the model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.errors import ModelError

CHUNK = 1 << 18
"""Elements per chunk. A power of two, so that codec blocks (powers of two up to 4096) never straddle chunks; 1 MiB of
fp32 stays in cache between delta, sum, outer step and merge, and is the largest message a wide-area link should have
to repeat."""

State = dict[str, Tensor]
"""State of an outer optimizer or codec for one fragment: flat tensors with one entry per element, so that it can be
cut like the fragment."""


def cut(state: State, start: int, stop: int) -> State:
    """The state of elements [start, stop), as views."""
    return {name: tensor[start:stop] for name, tensor in state.items()}


@dataclass(frozen=True)
class Spec:
    """Name, shape and dtype of one live tensor, with its global shape and placement where it is a shard of an island's
    lane."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    whole: tuple[int, ...] | None = None
    placement: str = ""

    @cached_property
    def numel(self) -> int:
        """Elements held here (of the local shard, if the tensor is sharded)."""
        return reduce(lambda a, b: a * b, self.shape, 1)


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a flat buffer of dtype `dtype` (fp32, or the live tensors' own wider dtype).

    `parts`: values held for each element. A message of two (delta and anchor) has them chunk beside chunk, so that what
    belongs together arrives together.
    """

    specs: tuple[Spec, ...]
    dtype: torch.dtype
    parts: int = 1

    @staticmethod
    def of(specs: Iterable[Spec]) -> "Layout":
        """The layout of `specs` in the given order; the dtype is the widest of fp32 and theirs."""
        specs = tuple(specs)
        return Layout(specs, reduce(torch.promote_types, (spec.dtype for spec in specs), torch.float32))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each spec, and the total number of elements at the end."""
        ends = [0]
        for spec in self.specs:
            ends.append(ends[-1] + spec.numel)
        return tuple(ends)

    @property
    def numel(self) -> int:
        """Values in all."""
        return self.offsets[-1] * self.parts

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """The fixed grid of [start, stop) ranges; the same on every worker and driver, because vectorised tails can
        change bits."""
        count, ranges = self.offsets[-1], list[tuple[int, int]]()
        for start in range(0, count, CHUNK):
            length = min(CHUNK, count - start)
            first = start * self.parts
            ranges += [(first + part * length, first + (part + 1) * length) for part in range(self.parts)]
        return tuple(ranges)

    @cached_property
    def lengths(self) -> Counter[int]:
        """How many chunks there are of each length: two lengths at most."""
        whole, rest = divmod(self.offsets[-1], CHUNK)
        return +Counter({CHUNK: whole * self.parts, rest: self.parts if rest else 0})

    def element(self, start: int) -> tuple[int, int]:
        """The first element of the chunk at `start`, and which of its values the chunk holds."""
        base = start // (CHUNK * self.parts) * CHUNK
        return base, (start - base * self.parts) // min(CHUNK, self.offsets[-1] - base)


class Tree:
    """Named tensors that are views of one flat buffer.

    Args: layout; flat: 1-D tensor with `layout.numel` elements of `layout.dtype` (allocated here when not given,
    pinned when the live tensors are on an accelerator so that copies can run beside training).
    """

    def __init__(self, layout: Layout, flat: Tensor | None = None, *, pinned: bool = False) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype, pin_memory=pinned) if flat is None else flat

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view with the live tensor's shape) in layout order."""
        for spec, start in zip(self.layout.specs, self.layout.offsets, strict=False):
            yield spec.name, self.flat[start : start + spec.numel].as_strided(spec.shape, spec.stride)


class Live:
    """A fragment's live tensors, read and written through flat views in storage order.

    Args: tensors: the model's own (a `DTensor` by its local shard), dense in memory; a tensor with gaps is refused.
    """

    def __init__(self, layout: Layout, tensors: Iterable[Tensor]) -> None:
        self.layout = layout
        tensors = list(tensors)
        self._places = [_place(tensor) for tensor in tensors]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._flats = [
            local(tensor).as_strided((spec.numel,), (1,)) for tensor, spec in zip(tensors, layout.specs, strict=True)
        ]
        self._segments = [list(self._cut(start, stop)) for start, stop in layout.chunks]

    def _cut(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        for flat, lo, hi in zip(self._flats, self.layout.offsets, self.layout.offsets[1:], strict=False):
            first, last = max(lo, start), min(hi, stop)
            if first < last:
                yield flat[first - lo : last - lo], first - start, last - start

    def shows(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these tensors lie in memory where those did that this was made of."""
        return self._places == [_place(tensor) for tensor in tensors]

    def segments(self, start: int) -> list[tuple[Tensor, int, int]]:
        """The views that make up the chunk at `start`: (live view, first, last), positions counted from the chunk's
        start."""
        return self._segments[start // CHUNK]

    def read(self, start: int, out: Tensor) -> None:
        """Copy the chunk at `start` into `out`, converting to its dtype."""
        for view, first, last in self.segments(start):
            out[first:last].copy_(view, non_blocking=True)

    def write(self, start: int, values: Tensor) -> None:
        """Copy `values` over the chunk at `start`, rounding to the live dtype."""
        for view, first, last in self.segments(start):
            view.copy_(values[first:last], non_blocking=True)

    def copied(self) -> Tree:
        """A tree with the live values (every live dtype fits the layout's exactly)."""
        tree = Tree(self.layout, pinned=self.device.type == "cuda")
        for start, stop in self.layout.chunks:
            self.read(start, tree.flat[start:stop])
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return tree

    def adopt(self, tree: Tree) -> None:
        """Write all of `tree` over the live values."""
        for start, stop in self.layout.chunks:
            self.write(start, tree.flat[start:stop])


def _place(tensor: Tensor) -> int:
    """The address of a tensor, or of this lane's shard of it."""
    return tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def local(tensor: Tensor) -> Tensor:
    """The tensor itself without autograd, or this lane's shard of a `DTensor`."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def beside(shard: Tensor, live: Tensor) -> Tensor:
    """`shard` as a tensor placed like `live`: over an island's lanes where `live` is sharded, else as it is."""
    if not isinstance(live, DTensor):
        return shard
    return DTensor.from_local(shard, live.device_mesh, live.placements, shape=live.shape, stride=live.stride())


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from all lanes where it is sharded (a collective of the island)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spec_of(name: str, tensor: Tensor) -> Spec:
    """The `Spec` of one live tensor."""
    shard = local(tensor)
    if not shard.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(shard):
        raise ModelError(
            f"parameter {name!r} has gaps in memory (shape {tuple(shard.shape)}, stride {shard.stride()}), so it "
            "cannot be synced in place; "
            "make it contiguous before handing the model over"
        )
    sharded = isinstance(tensor, DTensor)
    return Spec(
        name,
        tuple(shard.shape),
        shard.stride(),
        shard.dtype,
        tuple(tensor.shape) if sharded else None,
        str(tensor.placements) if sharded else "",
    )


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, each once: a tied weight stands under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, and the buffers that are not averaged: they belong to the model, not to a
    fragment."""
    kept = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return kept | {
        name: buffer for name, buffer in _persistent_buffers(model).items() if not buffer.is_floating_point()
    }


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers that are part of the saved model (running means and the like)."""
    return {name: buffer for name, buffer in _persistent_buffers(model).items() if buffer.is_floating_point()}


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def digest(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], view: Callable[[Tensor], Tensor] = local
) -> str:
    """sha256 over names, dtypes, shapes and bytes in name order: equal if and only if every bit is.

    Args: tensors: by name. view: what of each is digested: this lane's shard, or `whole`.

    Example:
        >>> zero, minus = torch.zeros(2), -torch.zeros(2)
        >>> digest({"w": zero}) == digest({"w": zero.clone()}), digest({"w": zero}) == digest({"w": minus})
        (True, False)
    """
    sha = sha256()
    for name, tensor in sorted(dict(tensors).items()):
        value = view(tensor).detach().cpu().contiguous()
        sha.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()

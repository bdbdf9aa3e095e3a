"""Where a message's values come from: live tensors that stand still, or a snapshot of them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from atoll.trees import Layout, Live, Tree
from atoll.wire import Snapshot, Source


class LiveSource:
    """The live values themselves, converted to the layout's dtype (carry LIVE and GRADIENT)."""

    def __init__(self, live: Live) -> None:
        self.layout: Layout = live.layout
        self._live = live

    def read(self, start: int, out: Tensor) -> Tensor:
        """Copied, so that a result written to live cannot reach a message already read."""
        self._live.read(start, out)
        return out


class DeltaSource:
    """start - live, where start is the anchor as live received it: rounded to live's dtype (carry DELTA).

    With bf16 parameters a round without training therefore has a delta of exactly zero, while the fp32 anchor keeps
    what is too small for bf16.
    """

    def __init__(self, anchor: Tree, live: Live) -> None:
        self.layout: Layout = live.layout
        self.anchor = anchor
        self._live = live

    def read(self, start: int, out: Tensor) -> Tensor:
        """The difference, chunk by chunk, in the anchor's dtype and on its device."""
        anchor = self.anchor.flat[start : start + len(out)]
        for view, first, last in self._live.segments(start):
            target, origin = out[first:last], anchor[first:last]
            if view.dtype == origin.dtype and view.device == origin.device:
                torch.sub(origin, view, out=target)
            else:
                target.copy_(view)
                torch.sub(origin.to(view.dtype).to(origin.dtype), target, out=target)
        return out


class AnchorSource:
    """The anchor itself (carry ANCHOR)."""

    def __init__(self, anchor: Tree) -> None:
        self.layout: Layout = anchor.layout
        self._anchor = anchor

    def read(self, start: int, out: Tensor) -> Tensor:
        """Copied, so that a mean written to the anchor cannot reach a message already read."""
        return out.copy_(self._anchor.flat[start : start + len(out)])


class BothSource:
    """Delta and anchor, chunk beside chunk (carry BOTH)."""

    def __init__(self, anchor: Tree, live: Live) -> None:
        self.layout: Layout = replace(live.layout, parts=2)
        self.anchor = anchor
        self._delta = DeltaSource(anchor, live)

    def read(self, start: int, out: Tensor) -> Tensor:
        """The chunk of the delta, or that of the anchor beside it."""
        element, part = self.layout.element(start)
        if part == 0:
            return self._delta.read(element, out)
        return out.copy_(self.anchor.flat[element : element + len(out)])


def snapshot(source: Source, live: Live, *, contested: bool = False) -> Snapshot:
    """Copy a source's values so that training can go on.

    On a CPU the values are formed at once. On a CUDA device live is copied asynchronously into pinned memory, and the
    subtraction waits in the group's thread for that copy: the training thread never waits for the device. Until then
    the anchor stays as it was at the launch if one rule alone serves the fragment, for only its landing moves it, and
    that comes after the last read. Where several do, another's landing may come first, so the launch copies the anchor.

    Args: contested: whether several rules serve the fragment.
    """
    layout = source.layout
    # two values for each element are read where they stand: their rules wait anyway
    if live.device.type != "cuda" or isinstance(source, AnchorSource | BothSource):
        tree = Tree(layout)
        for start, stop in layout.chunks:
            out = tree.flat[start:stop]
            values = source.read(start, out)
            if values is not out:
                out.copy_(values)
        return Snapshot(tree)
    tree = Tree(layout, pinned=True)
    for start, stop in layout.chunks:
        live.read(start, tree.flat[start:stop])
    copied = torch.cuda.Event()
    copied.record()
    anchor = source.anchor.flat if isinstance(source, DeltaSource) else None
    if anchor is not None and contested:
        anchor = anchor.clone()
    return Snapshot(tree, ready=_once(lambda: _arrived(copied, tree, anchor)))


def _arrived(copied: torch.cuda.Event, tree: Tree, anchor: Tensor | None) -> None:
    copied.synchronize()
    if anchor is not None:
        for spec, lo, hi in zip(tree.layout.specs, tree.layout.offsets, tree.layout.offsets[1:], strict=False):
            torch.sub(anchor[lo:hi].to(spec.dtype).to(tree.layout.dtype), tree.flat[lo:hi], out=tree.flat[lo:hi])


def _once(action: Callable[[], None]) -> Callable[[], None]:
    pending = [action]

    def run() -> None:
        if pending:
            pending.pop()()

    return run

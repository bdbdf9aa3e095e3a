"""Strategies without arithmetic: the same flow over tensors of no elements, and the true sizes beside them.

A hollow model has one tensor of no elements for each part of the true one, so that snapshot, step and merge return at
once; what would be sent is counted from the true layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from atoll.parts.fragments import Fragments
from atoll.parts.mixers import all_mean, cheaper
from atoll.sync.checks import nested
from atoll.sync.rule import Strategy, layout_of
from atoll.sync.state import SyncState, message
from atoll.trees import Layout, Spec
from atoll.wire import Codec, Fold, Keep, Post

Sizes = tuple[Fold, int, int]
"""A fold, bits of one wire of a message, and bits of its result."""


@dataclass(frozen=True)
class listed:
    """Fragments as they are listed."""

    fragments: Fragments

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        return self.fragments


@dataclass(frozen=True)
class Hollow:
    """A strategy over no elements, and what each exchange of it stands for.

    Args: strategy; names: of the hollow tensors, with dots written as they are. layouts: of the true parts, by number.
    """

    strategy: Strategy
    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    _sizes: dict[tuple[int, int, int], Sizes] = field(default_factory=dict[tuple[int, int, int], Sizes], compare=False)

    @staticmethod
    def of(strategy: Strategy, specs: tuple[Spec, ...]) -> "Hollow":
        """The hollow form of a strategy for the model with these parameters.

        Raises: CompositionError if they do not fit.
        """
        parts = strategy.parts(specs)
        names = tuple(held[0] for _, held in parts)
        turns = sorted({turn for turn, _ in parts})
        fragments = tuple(tuple(held[0] for at, held in parts if at == turn) for turn in turns)
        layouts = tuple(layout_of(specs, held) for _, held in parts)
        return Hollow(replace(strategy, fragments=listed(fragments)), names, layouts)

    def model(self) -> nn.Module:
        """A module with the hollow tensors."""
        model = _Hollow()
        for name in self.names:
            model.hold(name)
        return model

    def sizes(self, post: Post) -> Sizes:
        """The fold that the true sizes would choose; bits of one wire of a message; and bits of its result."""
        place = post.key.rule, post.key.fragment, len(post.to)
        sizes = self._sizes.get(place)
        if sizes is None:
            sizes = self._sizes[place] = self._measured(post)
        return sizes

    def _measured(self, post: Post) -> Sizes:
        rule, fold = self.strategy.rules[post.key.rule], post.fold
        layout = message(rule, self.layouts[post.key.fragment])
        if any(isinstance(mixer, all_mean) and mixer.fold is None for mixer in nested(rule.mixer)):
            fold = cheaper(rule.codec, layout, len(post.to))
        result = 0 if isinstance(fold, Keep) else _bits(getattr(fold, "result", rule.codec), layout)
        return fold, _bits(rule.codec, layout), result

    def carried(self, state: SyncState) -> float:
        """Bits of what an island fetches to join: anchors (live, where there are none), outer states, and what is in
        flight."""
        whole = [layout.numel * layout.dtype.itemsize * 8.0 for layout in self.layouts]
        bits = sum(whole[fragment.index] for fragment in state.fragments)
        bits += sum(whole[track.fragment.index] * len(track.outer) for track in state.tracks)
        for entry in state.queue:
            layout = message(entry.track.rule, self.layouts[entry.track.fragment.index])
            held = (entry.snapshot is not None) + (entry.sent is not None)
            bits += held * layout.numel * layout.dtype.itemsize * 8.0
        return bits


class _Hollow(nn.Module):
    """Holds tensors by dotted names, as a model would."""

    def hold(self, name: str) -> None:
        module: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, nn.Parameter(torch.empty(0)))


def _bits(codec: Codec, layout: Layout) -> int:
    return 8 * sum(codec.nbytes(length, layout.dtype.itemsize) * count for length, count in layout.lengths.items())

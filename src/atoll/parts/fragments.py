"""Partitions: which parameters are synced together. One per strategy; it must place every trainable parameter exactly
once.

A partition is a pure function of the specs, in model order. Transformer blocks are found by the first number in a
parameter's dotted name (`model.layers.3.mlp.up_proj.weight` belongs to block 3).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Protocol

from atoll.errors import CompositionError
from atoll.trees import Spec

Fragments = tuple[tuple[str, ...], ...]


class Partition(Protocol):
    """Names of each fragment's parameters."""

    def __call__(self, specs: Sequence[Spec]) -> Fragments: ...


@dataclass(frozen=True)
class whole:
    """The whole model is one fragment."""

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        return (tuple(spec.name for spec in specs),)


def _blocks(specs: Sequence[Spec], count: int) -> tuple[list[list[str]], list[str]]:
    """Parameter names by block in order of block number, and those outside any block."""
    blocks: dict[int, list[str]] = defaultdict(list)
    rest: list[str] = []
    for spec in specs:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", spec.name)
        (blocks[int(number[1])] if number else rest).append(spec.name)
    if not 1 <= count <= len(blocks):
        instead = f"ask for 1 to {len(blocks)}, or " if blocks else ""
        raise CompositionError(
            f"{count} fragments of whole blocks were asked for, but the model has {len(blocks)} numbered blocks; "
            f"{instead}name the fragments with by_name(...)"
        )
    return [blocks[number] for number in sorted(blocks)], rest


def _joined(groups: list[list[list[str]]], rest: list[str]) -> Fragments:
    fragments = [tuple(name for block in group for name in block) for group in groups]
    return tuple(fragments) + ((tuple(rest),) if rest else ())


@dataclass(frozen=True)
class strided:
    """Block l belongs to fragment l mod `count`; what lies outside the blocks (embeddings, head, last norm) is one
    fragment more.

    The default of Streaming DiLoCo (section 3.2): neighbouring blocks are fresh at different times.
    """

    count: int

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        blocks, rest = _blocks(specs, self.count)
        return _joined([blocks[index :: self.count] for index in range(self.count)], rest)


@dataclass(frozen=True)
class sequential:
    """`count` runs of consecutive blocks, as even as can be; what lies outside the blocks is one fragment more."""

    count: int

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        blocks, rest = _blocks(specs, self.count)
        ends = [index * len(blocks) // self.count for index in range(self.count + 1)]
        return _joined([blocks[first:last] for first, last in pairwise(ends)], rest)


@dataclass(frozen=True)
class balanced:
    """`count` fragments of about the same size, and one of the embeddings: each tensor, the largest first, goes where
    the fewest elements are (Decoupled DiLoCo, section 2.2: peaks of bandwidth are lowest, quality is alike)."""

    count: int

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        tables = [spec.name for spec in specs if "embed" in spec.name]
        others = [spec for spec in specs if "embed" not in spec.name]
        if not 1 <= self.count <= len(others):
            raise CompositionError(
                f"{self.count} balanced fragments were asked for, but the model has {len(others)} tensors beside its "
                f"embeddings; ask for 1 to {len(others)}"
            )
        bins: list[list[Spec]] = [[] for _ in range(self.count)]
        for spec in sorted(others, key=lambda spec: -spec.numel):
            min(bins, key=lambda held: sum(each.numel for each in held)).append(spec)
        placed = [{spec.name for spec in held} for held in bins]
        fragments = tuple(tuple(spec.name for spec in specs if spec.name in names) for names in placed)
        return (*fragments, tuple(tables)) if tables else fragments


@dataclass(frozen=True)
class by_name:
    """One fragment for each pattern (shell style); each parameter belongs to the first pattern that matches it.

    Example:
        >>> import torch
        >>> specs = [Spec(name, (2,), (1,), torch.float32) for name in ("embed.weight", "head.weight")]
        >>> by_name("embed*", "*")(specs)
        (('embed.weight',), ('head.weight',))
    """

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        object.__setattr__(self, "patterns", patterns)

    def __repr__(self) -> str:
        return f"by_name({', '.join(map(repr, self.patterns))})"

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        groups: list[list[str]] = [[] for _ in self.patterns]
        for spec in specs:
            index = next((i for i, pattern in enumerate(self.patterns) if fnmatchcase(spec.name, pattern)), None)
            if index is not None:
                groups[index].append(spec.name)
        return tuple(tuple(group) for group in groups)


def checked(partition: Partition, specs: Sequence[Spec]) -> Fragments:
    """The partition's fragments, refused unless none is empty and every parameter stands in exactly one.

    Raises: CompositionError naming the parameters that are missing, repeated or not there at all, or the fragment that
    is empty.
    """
    fragments = partition(specs)
    placed = [name for fragment in fragments for name in fragment]
    missing = sorted({spec.name for spec in specs} - set(placed))
    repeated = sorted(name for name, count in Counter(placed).items() if count > 1)
    unknown = sorted(set(placed) - {spec.name for spec in specs})
    empty = [index for index, fragment in enumerate(fragments) if not fragment]
    if missing or repeated or unknown:
        raise CompositionError(
            f"{partition!r} must place every trainable parameter once, but "
            + " and ".join(
                f"{what} {', '.join(names[:4])}"
                for what, names in (("misses", missing), ("repeats", repeated), ("invents", unknown))
                if names
            )
            + "; add a last pattern '*' for what is left, or use whole()"
        )
    if empty:
        raise CompositionError(
            f"{partition!r} leaves fragment {empty[0]} without parameters; drop its pattern or correct it"
        )
    return fragments

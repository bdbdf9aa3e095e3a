"""Who adds up which elements of an exchange: each member a part, and what a member that is gone had, those that are
left.

    ()                 all elements of a chunk, split among the members
    (2,)               the part of the third of them; if it is gone, split among those left
    (2, 0)             what the first of those got of it

A part is cut out of every chunk, so that all parts grow together and both directions of a link are always busy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.trees import Layout
from atoll.wire import Codec, pieces

Part = tuple[int, ...]


@dataclass
class Segments:
    """The parts of one exchange under `Reduce`.

    Args: to: the members, ascending. layout: of the message. block: elements that stay together in wire and result.
    """

    to: tuple[int, ...]
    layout: Layout
    block: int
    _splits: dict[Part, tuple[int, ...]] = field(init=False)
    _spans: dict[tuple[Part, int], tuple[int, int]] = field(default_factory=dict[tuple[Part, int], tuple[int, int]])
    owners: dict[Part, int] = field(init=False)
    """who adds up each part, in the order of their elements"""

    def __post_init__(self) -> None:
        self._splits = {(): self.to}
        self.owners = self._found()

    @staticmethod
    def of(to: tuple[int, ...], layout: Layout, codec: Codec, result: Codec) -> "Segments":
        """For wires and results of these codecs."""
        return Segments(to, layout, math.lcm(codec.block, result.block))

    def _found(self) -> dict[Part, int]:
        found: dict[Part, int] = {}

        def descend(path: Part) -> None:
            for index, owner in enumerate(self._splits[path]):
                if (*path, index) in self._splits:
                    descend((*path, index))
                else:
                    found[*path, index] = owner

        descend(())
        return found

    def hand_over(self, gone: Sequence[int], left: tuple[int, ...]) -> None:
        """Split among `left` what those who are gone had."""
        for part, owner in self.owners.items():
            if owner in gone:
                self._splits[part] = left
        self.owners = self._found()

    def span(self, part: Part, chunk: int) -> tuple[int, int]:
        """The elements [first, last) of a chunk that a part holds."""
        if (part, chunk) not in self._spans:
            first, last = self.layout.chunks[chunk]
            for depth, index in enumerate(part):
                first, last = list(pieces(first, last, len(self._splits[part[:depth]]), self.block))[index]
            self._spans[part, chunk] = first, last
        return self._spans[part, chunk]

    def whole(self, chunk: int) -> list[tuple[Part, int, int]]:
        """All parts of a chunk with the elements they hold, in order; those that hold none left out."""
        spans = [(part, *self.span(part, chunk)) for part in self.owners]
        return [(part, first, last) for part, first, last in spans if first < last]

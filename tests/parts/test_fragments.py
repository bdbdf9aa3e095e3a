"""Partitions: every parameter in one fragment, and in the right one."""

from collections.abc import Sequence

import pytest
import torch

from atoll.errors import CompositionError
from atoll.parts.fragments import Fragments, Partition, by_name, checked, sequential, strided, whole
from atoll.trees import Spec

BLOCKS = 5


def spec(name: str) -> Spec:
    return Spec(name, (2,), (1,), torch.float32)


def block(number: int) -> tuple[str, ...]:
    return (f"model.layers.{number}.attn.weight", f"model.layers.{number}.mlp.experts.7.weight")


REST = ("model.embed.weight", "model.norm.weight", "head.weight")
SPECS = tuple(map(spec, [REST[0], *[name for number in range(BLOCKS) for name in block(number)], *REST[1:]]))


def blocks(*numbers: int) -> tuple[str, ...]:
    return tuple(name for number in numbers for name in block(number))


CASES: list[tuple[Partition, Fragments]] = [
    (whole(), (tuple(each.name for each in SPECS),)),
    (strided(1), (blocks(0, 1, 2, 3, 4), REST)),
    (strided(2), (blocks(0, 2, 4), blocks(1, 3), REST)),
    (strided(3), (blocks(0, 3), blocks(1, 4), blocks(2), REST)),
    (sequential(2), (blocks(0, 1), blocks(2, 3, 4), REST)),
    (sequential(5), (*map(block, range(BLOCKS)), REST)),
    (
        by_name("*.attn.*", "head*", "*"),
        (
            tuple(block(n)[0] for n in range(BLOCKS)),
            ("head.weight",),
            (REST[0], *[block(n)[1] for n in range(BLOCKS)], REST[1]),
        ),
    ),
]


@pytest.mark.parametrize(("partition", "fragments"), CASES, ids=[repr(partition) for partition, _ in CASES])
def test_parameters_stand_where_the_partition_says(partition: Partition, fragments: Fragments) -> None:
    assert checked(partition, SPECS) == fragments


@pytest.mark.parametrize("partition", [partition for partition, _ in CASES], ids=repr)
def test_every_parameter_stands_in_exactly_one_fragment(partition: Partition) -> None:
    assert sorted(name for fragment in partition(SPECS) for name in fragment) == sorted(each.name for each in SPECS)


@pytest.mark.parametrize("partition", [partition for partition, _ in CASES], ids=repr)
def test_the_repr_of_a_partition_rebuilds_it(partition: Partition) -> None:
    names = {"whole": whole, "strided": strided, "sequential": sequential, "by_name": by_name}
    assert eval(repr(partition), names) == partition


def test_blocks_are_counted_by_number_and_not_by_name() -> None:
    names = [f"layers.{number}.weight" for number in (10, 2, 0, 1)]
    assert sequential(2)(list(map(spec, names))) == (
        ("layers.0.weight", "layers.1.weight"),
        ("layers.2.weight", "layers.10.weight"),
    )


def test_a_model_without_anything_outside_its_blocks_has_no_fragment_for_it() -> None:
    assert len(strided(2)([spec("0.weight"), spec("1.weight")])) == 2


@pytest.mark.parametrize("partition", [strided(0), strided(6), sequential(0), sequential(6)], ids=repr)
def test_more_fragments_than_blocks_or_none_are_refused_with_the_number_of_blocks(partition: Partition) -> None:
    with pytest.raises(CompositionError, match="ask for 1 to 5"):
        partition(SPECS)


class listed:
    """The fragments it is given."""

    def __init__(self, *fragments: tuple[str, ...]) -> None:
        self.fragments = fragments

    def __call__(self, specs: Sequence[Spec]) -> Fragments:
        return self.fragments


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (listed(("a",)), "misses b"),
        (listed(("a", "b"), ("b",)), "repeats b"),
        (listed(("a", "b", "c")), "invents c"),
        (listed(("a",), (), ("b",)), "fragment 1 without"),
        (by_name("a"), "misses b"),
        (by_name("*", "b"), "fragment 1 without"),
    ],
)
def test_a_partition_that_misses_repeats_or_invents_a_parameter_is_refused(partition: Partition, sentence: str) -> None:
    with pytest.raises(CompositionError, match=sentence):
        checked(partition, [spec("a"), spec("b")])

"""Codecs against the conformance suite, NumPy's halves, and bfloat16 rounded by integer arithmetic; what cannot be
composed is refused."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts import codecs
from atoll.parts.codecs import (
    cast,
    error_feedback,
    exact,
    float4,
    prune_by_sign,
    quantise,
    random_mask,
    statistical,
    topk,
)
from atoll.testing.conformance import check_codec
from atoll.trees import CHUNK, Layout, State
from atoll.wire import Codec

HALF, BRAIN = cast(torch.float16), cast(torch.bfloat16)
TWO_BITS = quantise(2, block=64, by=statistical())

FAR = 4.5
"""No normal value that the suite draws is larger."""

# codec, relative error, absolute error
CASES: list[tuple[Codec, float, float]] = [
    (exact(), 0.0, 0.0),
    (HALF, 2**-11, 2**-25),
    (BRAIN, 2**-8, 0.0),
    (float4(), 1 / 3, FAR * 2**-7),
    (float4(block=8), 1 / 3, FAR * 2**-7),
    (quantise(8), 0.0, FAR / 254),
    (quantise(4, block=64), 0.0, FAR / 14),
    (quantise(2), 0.0, FAR / 2),
    # w for a sigma of 1.2, and what may lie beyond three of it
    (quantise(8, by=statistical()), 0.0, 7.2 / 256 + FAR - 3),
    (quantise(4, block=256, by=statistical()), 0.0, 7.2 / 16 + FAR - 3),
    (quantise(2, by=statistical()), 0.0, 7.2 / 4 + FAR - 3),
    # what is left out is wrong by itself
    (topk(64), 1.0, 0.0),
    (topk(0.01, chunk=1024), 1.0, 0.0),
    (topk(3, chunk=8), 1.0, 0.0),
    (topk(64, then=HALF), 1.0, 0.0),
    (topk(64, then=TWO_BITS), 1.0, 7.2 / 4 + FAR - 3),
    (prune_by_sign(0.5), 1.0, 0.0),
    (prune_by_sign(0.25, then=quantise(4, block=16)), 1.0, FAR / 14),
    (random_mask(0.01, seed=0), 1.0, 0.0),
    (random_mask(0.5, seed=1, then=quantise(8)), 1.0, FAR / 254),
    (error_feedback(topk(64), 0.95), 1.0, 0.0),
    (error_feedback(topk(64, then=TWO_BITS), 0.95), 1.0, 7.2 / 4 + FAR - 3),
    (error_feedback(quantise(2), 1.0), 0.0, FAR / 2),
    (error_feedback(quantise(2, by=statistical()), 0.9), 0.0, 7.2 / 4 + FAR - 3),
    (error_feedback(exact(), 1.0), 0.0, 0.0),
]


@pytest.mark.parametrize(("codec", "relative", "absolute"), CASES, ids=[repr(codec) for codec, *_ in CASES])
def test_a_codec_keeps_its_promises(codec: Codec, relative: float, absolute: float) -> None:
    check_codec(codec, relative, absolute * (1 + 2**-20))


@pytest.mark.parametrize("codec", [codec for codec, *_ in CASES], ids=repr)
def test_the_repr_of_a_codec_rebuilds_it(codec: Codec) -> None:
    assert eval(repr(codec), vars(codecs) | {"torch": torch}) == codec


@pytest.mark.parametrize("codec", [codec for codec, *_ in CASES], ids=repr)
def test_wires_do_not_depend_on_the_number_of_threads(codec: Codec) -> None:
    values = torch.randn(CHUNK, generator=torch.Generator().manual_seed(0))
    wires: list[Tensor] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            wires.append(codec.encode(values, {"residual": torch.zeros(CHUNK)}))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(*wires)


def roundtrip(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values, {}), values)


def wide_range() -> Tensor:
    """float32 of all magnitudes from 1e-9 to 3e4, both signs."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10 ** (torch.rand(20_000, generator=generator) * 13.4 - 9)
    return magnitudes * torch.randn(20_000, generator=generator).sign()


def test_half_precision_rounds_as_numpy_does_subnormal_numbers_included() -> None:
    values = wide_range()
    with np.errstate(under="ignore"):
        halves = torch.from_numpy(values.numpy().astype(np.float16))
    assert torch.equal(roundtrip(HALF, values), halves)


def test_brain_floats_are_the_upper_half_of_float32_rounded_to_even() -> None:
    values = wide_range()
    bits = values.numpy().view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    want = torch.from_numpy((upper << 16).astype(np.uint32).view(np.float32).copy())
    assert torch.equal(roundtrip(BRAIN, values).float(), want)


def test_ties_go_to_the_even_neighbour_and_too_large_values_become_infinite() -> None:
    values = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -1e9, 2**-25, 2**-24])
    want = [1.0, 1 + 2**-9, 65504.0, float("inf"), float("-inf"), 0.0, 2**-24]
    assert roundtrip(HALF, values).tolist() == want


def test_an_exact_wire_is_the_values_own_memory() -> None:
    values = torch.arange(5.0)
    assert exact().encode(values, {}).data_ptr() == values.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_a_cast_to_anything_but_the_two_halves_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CompositionError, match="is not a wire format"):
        cast(dtype)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: float4(block=100), "powers of two"),
        (lambda: float4(block=8192), "powers of two"),
        (lambda: quantise(3), "give one of these"),
        (lambda: quantise(16), "give one of these"),
        (lambda: quantise(8, block=0), "powers of two"),
        (lambda: quantise(8, block=256, by=statistical()), "1024 bytes ahead of each block"),
        (lambda: quantise(8, block=1), "larger block"),
        (lambda: topk(0), "k from 1 to 4096"),
        (lambda: topk(65, chunk=64), "k from 1 to 64"),
        (lambda: topk(0.0), r"lies in \(0, 1\]"),
        (lambda: topk(1.5), r"lies in \(0, 1\]"),
        (lambda: topk(10, chunk=1000), "powers of two"),
        (lambda: topk(64, chunk=8192), "powers of two"),
        (lambda: topk(1, chunk=1), "no position to send"),
        (lambda: topk(64, then=quantise(2)), "divides 64"),
        (lambda: topk(64, then=error_feedback(exact(), 1.0)), "around the whole"),
        (lambda: topk(64, then=random_mask(0.1, seed=0)), "divides 64"),
        (lambda: prune_by_sign(1.0), r"in \[0, 1\)"),
        (lambda: prune_by_sign(-0.1), r"in \[0, 1\)"),
        (lambda: prune_by_sign(0.5, neuron=48), "powers of two"),
        (lambda: prune_by_sign(0.3, then=quantise(8, block=64)), "divides 45"),
        (lambda: random_mask(0.0, seed=0), r"lies in \(0, 1\]"),
        (lambda: random_mask(1.1, seed=0), r"lies in \(0, 1\]"),
        (lambda: random_mask(0.1, seed=0, then=error_feedback(exact(), 1.0)), "around the whole"),
        (lambda: error_feedback(error_feedback(topk(64), 0.9), 0.9), "one error_feedback"),
        (lambda: error_feedback(topk(64), 1.01), "decay <= 1"),
        (lambda: error_feedback(topk(64), -0.1), "decay <= 1"),
        (lambda: error_feedback(topk(64), float("nan")), "decay <= 1"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(make: Callable[[], Codec], sentence: str) -> None:
    with pytest.raises(CompositionError, match=sentence):
        make()


# The conformance suite itself: each broken promise is seen


@dataclass(frozen=True)
class Sloppy(cast):
    """A cast that breaks one promise, by name."""

    breaks: str = ""

    def init(self, layout: Layout) -> State:
        numel = 1 if self.breaks == "state" else layout.numel
        return {"seen": torch.zeros(numel, dtype=layout.dtype), "held": torch.zeros(numel, dtype=layout.dtype)}

    def encode(self, values: Tensor, STATE: State) -> Tensor:
        STATE["seen"] += 1 if self.breaks != "cuts" else len(values)
        wire = super().encode(values + STATE["held"], {}).clone()
        if self.breaks == "lost":
            STATE["held"].copy_(values)
        if self.breaks == "values":
            values.zero_()
        return torch.cat([wire, wire[:1]]) if self.breaks == "bytes" else wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        decoded = super().decode(wire, like).clone()
        if self.breaks == "wire":
            wire.zero_()
        if self.breaks == "finite":
            decoded.nan_to_num_()
        return decoded * 1.01 if self.breaks == "error" else decoded + (self.breaks == "zeros") * 1e-4

    def restore(self, wire: Tensor, STATE: State) -> None:
        if self.breaks == "lost wire":
            wire.zero_()
        if self.breaks == "pieces":
            STATE["held"] += len(wire)

    def at(self, round: int) -> "Sloppy":
        narrower = self.breaks == "round" and round == 7
        return Sloppy(torch.bfloat16, breaks="bytes") if narrower else self


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        ("state", "one entry per element"),
        ("cuts", "the state is another"),
        ("values", "wrote to the values"),
        ("bytes", "bytes were announced"),
        ("wire", "wrote to the wire"),
        ("error", "wrong by"),
        ("zeros", "zeros came back changed"),
        ("finite", "came back as something finite"),
        ("round", "round 7: the wire is"),
        ("lost wire", "restore wrote to the wire"),
        ("pieces", "restored in pieces"),
        ("lost", "not sent again"),
    ],
)
def test_a_codec_that_breaks_a_promise_is_caught(breaks: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_codec(Sloppy(torch.float16, breaks=breaks), 2**-11, 1e-3 if breaks == "zeros" else 2**-25)


def test_the_same_codec_without_its_fault_passes() -> None:
    check_codec(Sloppy(torch.float16), 2**-11, 2**-25)

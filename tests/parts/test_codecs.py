"""Codecs against the conformance suite, NumPy's halves, and bfloat16 rounded by integer arithmetic."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.codecs import cast, exact
from atoll.testing.conformance import check_codec
from atoll.trees import Layout, State
from atoll.wire import Codec

HALF, BRAIN = cast(torch.float16), cast(torch.bfloat16)

# codec, relative error, absolute error
CASES: list[tuple[Codec, float, float]] = [
    (exact(), 0.0, 0.0),
    (HALF, 2**-11, 2**-25),
    (BRAIN, 2**-8, 0.0),
]


@pytest.mark.parametrize(("codec", "relative", "absolute"), CASES, ids=[repr(codec) for codec, *_ in CASES])
def test_a_codec_keeps_its_promises(codec: Codec, relative: float, absolute: float) -> None:
    check_codec(codec, relative, absolute)


@pytest.mark.parametrize("codec", [codec for codec, *_ in CASES], ids=repr)
def test_the_repr_of_a_codec_rebuilds_it(codec: Codec) -> None:
    assert eval(repr(codec), {"cast": cast, "exact": exact, "torch": torch}) == codec


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


# The conformance suite itself: each broken promise is seen


@dataclass(frozen=True)
class Sloppy(cast):
    """A cast that breaks one promise, by name."""

    breaks: str = ""

    def init(self, layout: Layout) -> State:
        return {"seen": torch.zeros(1 if self.breaks == "state" else layout.numel)}

    def encode(self, values: Tensor, STATE: State) -> Tensor:
        STATE["seen"] += 1 if self.breaks != "cuts" else len(values)
        wire = super().encode(values, STATE).clone()
        if self.breaks == "values":
            values.zero_()
        return torch.cat([wire, wire[:1]]) if self.breaks == "bytes" else wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        decoded = super().decode(wire, like).clone()
        if self.breaks == "wire":
            wire.zero_()
        return decoded * 1.01 if self.breaks == "error" else decoded + (self.breaks == "zeros") * 1e-4


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
    ],
)
def test_a_codec_that_breaks_a_promise_is_caught(breaks: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_codec(Sloppy(torch.float16, breaks=breaks), 2**-11, 1e-3 if breaks == "zeros" else 2**-25)


def test_the_same_codec_without_its_fault_passes() -> None:
    check_codec(Sloppy(torch.float16), 2**-11, 2**-25)

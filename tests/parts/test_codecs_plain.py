"""Codecs against plain loops in Python's floats and integers, element by element, and against the error that each
states."""

import math
import struct
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
from atoll.trees import CHUNK
from atoll.wire import Codec

SEEDS = range(5)


def normal(numel: int, seed: int) -> list[float]:
    """fp64, most of them small."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) ** 3).tolist()


def tensor(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def roundtrip(codec: Codec, values: Sequence[float], dtype: torch.dtype = torch.float64) -> list[float]:
    given = tensor(values, dtype)
    return codec.decode(codec.encode(given, {}), given).tolist()


def wire_of(codec: Codec, values: Sequence[float]) -> bytes:
    return bytes(codec.encode(tensor(values), {}).tolist())


def blocks(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def single(value: float) -> float:
    """Rounded to fp32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def packed(codes: Sequence[int], bits: int) -> bytes:
    """One long number, the first code in its lowest bits."""
    number = sum(code << (bits * index) for index, code in enumerate(codes))
    return number.to_bytes(math.ceil(len(codes) * bits / 8), "little")


def plain_float4(block: Sequence[float]) -> tuple[bytes, list[float]]:
    scale = single(max(abs(value) for value in block))
    levels = [0.0, *(2.0 ** (code - 7) for code in range(1, 8))]
    codes: list[int] = []
    for value in block:
        apart = [abs(abs(value) - level * scale) for level in levels]
        nearest = max(code for code in range(8) if apart[code] == min(apart))
        codes.append(nearest + 8 * (math.copysign(1, value) < 0))
    seen = [math.copysign(levels[code % 8] * scale, 7.5 - code) for code in codes]
    return struct.pack("<f", scale) + packed(codes, 4), seen


def plain_linear(bits: int) -> Callable[[Sequence[float]], tuple[bytes, list[float]]]:
    def encode(block: Sequence[float]) -> tuple[bytes, list[float]]:
        top = 2 ** (bits - 1) - 1
        scale = single(max(abs(value) for value in block))
        codes = [round(value * (top / scale)) for value in block]
        return struct.pack("<f", scale) + packed([q + top for q in codes], bits), [q * (scale / top) for q in codes]

    return encode


def plain_statistical(bits: int) -> Callable[[Sequence[float]], tuple[bytes, list[float]]]:
    def encode(block: Sequence[float]) -> tuple[bytes, list[float]]:
        n, mean = 2**bits, fmean(block)
        width = 6 * pstdev(block) / n
        buckets: list[list[float]] = [[] for _ in range(n)]
        codes: list[int] = []
        for value in block:
            code = min(max(math.floor((value - mean) / width + n / 2), 0), n - 1) if width else n // 2
            codes.append(code)
            buckets[code].append(value)
        centres = [mean + (index - n / 2 + 0.5) * width for index in range(n)]
        book = [single(fmean(held) if held else centre) for held, centre in zip(buckets, centres, strict=True)]
        return struct.pack(f"<{n}f", *book) + packed(codes, bits), [book[code] for code in codes]

    return encode


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("codec", "plain"),
    [
        (float4(), plain_float4),
        (float4(block=16), plain_float4),
        *((quantise(bits, block=block), plain_linear(bits)) for bits in (8, 4, 2) for block in (32, 512)),
    ],
    ids=repr,
)
def test_scaled_codes_are_a_plain_loop_s_to_the_byte(
    codec: float4 | quantise, plain: Callable[[Sequence[float]], tuple[bytes, list[float]]], seed: int
) -> None:
    values = normal(5 * codec.block // 2 + 1, seed)
    want = [plain(block) for block in blocks(values, codec.block)]
    assert wire_of(codec, values) == b"".join(wire for wire, _ in want)
    assert roundtrip(codec, values) == pytest.approx([value for _, seen in want for value in seen], rel=1e-15)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("bits", "block"), [(8, 512), (4, 64), (2, 16), (2, 64), (2, 1024)])
def test_statistical_codes_are_a_plain_loop_s_and_so_are_the_means(bits: int, block: int, seed: int) -> None:
    codec, head = quantise(bits, block=block, by=statistical()), 4 * 2**bits
    values = normal(3 * block + 1, seed)
    wire, at = wire_of(codec, values), 0
    seen = roundtrip(codec, values)
    for index, each in enumerate(blocks(values, block)):
        want, decoded = plain_statistical(bits)(each)
        mine = wire[at : at + len(want)]
        at += len(want)
        assert mine[head:] == want[head:]
        means = [struct.unpack(f"<{2**bits}f", book[:head]) for book in (mine, want)]
        assert means[0] == pytest.approx(means[1], rel=2**-23, abs=1e-14)
        assert seen[index * block :][: len(each)] == pytest.approx(decoded, rel=2**-23, abs=1e-14)
    assert at == len(wire)


def test_the_mean_of_many_small_values_beside_a_huge_one_is_as_precise_as_a_sum_in_fp32() -> None:
    """All of them lie below the mean, in one bucket; m additions are wrong by m 2^-25 of their sum each, at most."""
    values = [1e3, *(1e-3 * value for value in normal(4095, seed=0))]
    seen = roundtrip(quantise(8, by=statistical()), values, torch.float32)
    assert len(set(seen[1:])) == 1
    assert seen[1] == pytest.approx(fmean(values[1:]), abs=4095 * 2**-25 * fmean(values))


def plain_topk(block: Sequence[float], count: int) -> list[int]:
    return sorted(sorted(range(len(block)), key=lambda index: -abs(block[index]))[:count])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("k", "chunk"), [(64, 4096), (3, 8), (1, 2), (5, 1024), (0.01, 4096), (0.3, 64), (1.0, 16)])
def test_the_largest_and_their_positions_are_on_the_wire(k: int | float, chunk: int, seed: int) -> None:
    """Twelve bits per position in chunks of 4096."""
    codec = topk(k, chunk=chunk)
    values = normal(2 * chunk + chunk // 3 + 1, seed)
    wire, seen = b"", [0.0] * len(values)
    for index, block in enumerate(blocks(values, chunk)):
        kept = plain_topk(block, min(k, len(block)) if isinstance(k, int) else max(1, round(k * len(block))))
        wire += packed(kept, (chunk - 1).bit_length()) + struct.pack(f"<{len(kept)}d", *(block[at] for at in kept))
        for at in kept:
            seen[index * chunk + at] = block[at]
    assert wire_of(codec, values) == wire
    assert roundtrip(codec, values) == seen


@pytest.mark.parametrize("then", [cast(torch.float16), quantise(2, block=64, by=statistical()), quantise(8, block=32)])
def test_kept_values_are_what_the_codec_behind_makes_of_them(then: Codec) -> None:
    values = normal(3 * 4096, seed=0)
    seen = roundtrip(topk(64, then=then), values)
    for start in range(0, len(values), 4096):
        kept = [start + at for at in plain_topk(values[start : start + 4096], 64)]
        assert [seen[at] for at in kept] == roundtrip(then, [values[at] for at in kept])
    assert sum(value != 0 for value in seen) <= 3 * 64


def test_what_sparse_loco_sends_is_128_times_smaller() -> None:
    codec = topk(64, then=quantise(2, block=64, by=statistical()))
    assert CHUNK * 4 / codec.nbytes(CHUNK, itemsize=4) == 128
    assert codec.nbytes(4096, itemsize=4) == 64 * 12 / 8 + 64 * 2 / 8 + 4 * 4


def plain_pruned(block: Sequence[float], fraction: float) -> list[int]:
    up = math.fsum(value for value in block if value > 0)
    down = -math.fsum(value for value in block if value < 0)
    elected = 1.0 if up >= down else -1.0

    def order(index: int) -> tuple[bool, float]:
        return math.copysign(1, block[index]) == elected, abs(block[index])

    dropped = sorted(range(len(block)), key=order)[: min(round(fraction * len(block)), len(block) - 1)]
    return sorted(set(range(len(block))) - set(dropped))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fraction", "neuron"), [(0.5, 64), (0.25, 16), (0.75, 64), (0.9, 4), (0.0, 8), (0.5, 1)])
def test_pruning_keeps_what_a_plain_loop_keeps(fraction: float, neuron: int, seed: int) -> None:
    values = normal(9 * neuron + neuron // 2 + 1, seed)
    wire, seen = b"", [0.0] * len(values)
    for index, block in enumerate(blocks(values, neuron)):
        kept = plain_pruned(block, fraction)
        bitmap = [int(at in kept) for at in range(len(block))]
        wire += packed(bitmap, 1) + struct.pack(f"<{len(kept)}d", *(block[at] for at in kept))
        for at in kept:
            seen[index * neuron + at] = block[at]
    codec = prune_by_sign(fraction, neuron=neuron)
    assert wire_of(codec, values) == wire
    assert roundtrip(codec, values) == seen


def test_of_equal_sides_the_positive_is_kept() -> None:
    values = [1.0, -2.0, 1.0, 0.0]
    assert roundtrip(prune_by_sign(0.25, neuron=4), values) == [1.0, 0.0, 1.0, 0.0]
    assert sorted(roundtrip(prune_by_sign(0.75, neuron=4), values)) == [0.0, 0.0, 0.0, 1.0]


def plain_mix(number: int) -> int:
    """splitmix64's, as published."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@pytest.mark.parametrize(("seed", "round_"), [(0, 0), (0, 1), (7, 0), (-1, 12345), (2**62, 3)])
def test_the_random_mask_is_splitmix64_in_plain_integers(seed: int, round_: int) -> None:
    numel, fraction = 1001, 0.1
    stream = plain_mix((plain_mix(seed % 2**64) + round_) % 2**64)
    hashes = [signed(plain_mix((at + stream) % 2**64)) for at in range(numel)]
    kept = set(sorted(range(numel), key=hashes.__getitem__)[: round(fraction * numel)])
    codec = random_mask(fraction, seed).at(round_)
    assert codec.mask(numel).tolist() == [at in kept for at in range(numel)]
    values = normal(numel, seed=1)
    assert roundtrip(codec, values) == [value if at in kept else 0.0 for at, value in enumerate(values)]
    assert wire_of(codec, values) == struct.pack(f"<{len(kept)}d", *(values[at] for at in sorted(kept)))


def test_masks_of_other_rounds_and_seeds_overlap_as_chance_has_it_and_cover_everything() -> None:
    """Of 1000 in 10000, two masks share 100, give or take three standard deviations of 9."""
    masks = [random_mask(0.1, seed).at(round_).mask(10_000) for seed in (0, 1) for round_ in range(40)]
    assert all(int(mask.sum()) == 1000 for mask in masks)
    shared = [int((masks[0] & mask).sum()) for mask in masks[1:]]
    assert all(60 <= count <= 140 for count in shared)
    assert sum(shared) / len(shared) == pytest.approx(100, abs=3 * 9 / math.sqrt(len(shared)))
    covered = torch.stack(masks[:40]).any(0).float().mean().item()
    assert covered == pytest.approx(1 - 0.9**40, abs=0.005)


def test_a_random_mask_reports_what_is_not_finite_even_if_it_leaves_it_out() -> None:
    codec = random_mask(0.01, seed=0)
    left_out = int(codec.mask(1000).logical_not().nonzero()[0])
    values = normal(1000, seed=0)
    values[left_out] = math.inf
    assert not all(map(math.isfinite, roundtrip(codec, values)))
    huge = [1e38] * 1000
    assert all(map(math.isfinite, roundtrip(codec, huge, torch.float32)))


def plain_round(residual: list[float], values: list[float], decay: float, codec: Codec) -> list[float]:
    """e moves on; what was seen."""
    wanted = [decay * e + x for e, x in zip(residual, values, strict=True)]
    seen = roundtrip(codec, wanted)
    residual[:] = [a - b for a, b in zip(wanted, seen, strict=True)]
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("codec", [topk(3, chunk=16), quantise(2, block=16), cast(torch.float16), exact()], ids=repr)
def test_error_feedback_is_the_paper_s_recursion_and_gives_lost_wires_back(codec: Codec, decay: float) -> None:
    """Rounds 1 and 4 are lost; values and factors are not round, so every operation must be its own."""
    numel, kept, residual = 40, error_feedback(codec, decay), [0.0] * 40
    state = {"residual": torch.zeros(numel, dtype=torch.float64)}
    for round_ in range(6):
        values = normal(numel, seed=round_)
        wire = kept.encode(tensor(values), state)
        seen = plain_round(residual, values, decay, codec)
        assert kept.decode(wire, tensor(values)).tolist() == seen
        if round_ in (1, 4):
            kept.restore(wire, state)
            residual = [e + d for e, d in zip(residual, seen, strict=True)]
        assert state["residual"].tolist() == residual


@pytest.mark.parametrize(
    "codec", [topk(2, chunk=8), random_mask(0.3, seed=0), prune_by_sign(0.5, neuron=8), quantise(2, block=8)], ids=repr
)
def test_without_decay_nothing_is_ever_lost(codec: Codec) -> None:
    """Whole numbers, so sums are exact: what arrived, and what is left, is all that was put in."""
    numel, kept = 32, error_feedback(codec, decay=1.0)
    state = {"residual": torch.zeros(numel)}
    put_in, arrived = torch.zeros(numel), torch.zeros(numel)
    for round_ in range(12):
        values = torch.randint(-64, 65, (numel,), generator=torch.Generator().manual_seed(round_)).float()
        put_in += values
        of_round = kept.at(round_)
        wire = of_round.encode(values, state)
        if round_ % 3 == 1:
            of_round.restore(wire, state)
        else:
            arrived += of_round.decode(wire, values)
        assert torch.equal(arrived + state["residual"], put_in)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_midpoints_between_levels_go_up_and_so_does_half_of_the_lowest(dtype: torch.dtype, sign: float) -> None:
    levels = [2.0**power for power in range(-6, 1)]
    bounds = [2.0**-7, *(0.75 * level for level in levels[1:])]
    for nudge, want in ((1.0, levels), (1 - 2**-23, [0.0, *levels[:-1]])):
        values = [sign, *(sign * bound * nudge for bound in bounds)]
        assert roundtrip(float4(), values, dtype) == [sign, *(sign * level for level in want)]


def test_halves_between_steps_go_to_the_even_one() -> None:
    values = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    assert roundtrip(quantise(8), values, torch.float32) == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


# The error that each docstring states, for anything finite

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
LISTS = st.one_of(
    st.lists(FINITE, min_size=1, max_size=40),
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40),
    st.tuples(st.floats(-1e6, 1e6, width=32), st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40)).map(
        lambda pair: [single(pair[0] + each) for each in pair[1]]
    ),
)
DTYPES = st.sampled_from([torch.float32, torch.float64])
TINY = 2.0**-118
ROUNDING = 2.0**-20


@given(values=LISTS, dtype=DTYPES)
def test_float4_is_wrong_by_a_third_at_most_or_half_of_its_lowest_level(
    values: list[float], dtype: torch.dtype
) -> None:
    seen = roundtrip(float4(block=16), values, dtype)
    for block, decoded in zip(blocks(values, 16), blocks(seen, 16), strict=True):
        scale = max(map(abs, block))
        for value, other in zip(block, decoded, strict=True):
            assert abs(other - value) <= max(abs(value) / 3, scale * 2**-7) * (1 + ROUNDING) + TINY


@given(values=LISTS, dtype=DTYPES, bits=st.sampled_from([8, 4, 2]))
def test_linear_codes_are_wrong_by_half_a_step_at_most(values: list[float], dtype: torch.dtype, bits: int) -> None:
    seen, top = roundtrip(quantise(bits, block=16), values, dtype), 2 ** (bits - 1) - 1
    for block, decoded in zip(blocks(values, 16), blocks(seen, 16), strict=True):
        scale = max(map(abs, block))
        for value, other in zip(block, decoded, strict=True):
            assert abs(other - value) <= scale / (2 * top) + scale * ROUNDING + TINY


@given(values=LISTS, dtype=DTYPES, bits_and_block=st.sampled_from([(8, 512), (4, 32), (2, 16)]))
def test_statistical_codes_are_wrong_by_a_bucket_and_at_the_ends_by_what_lies_outside(
    values: list[float], dtype: torch.dtype, bits_and_block: tuple[int, int]
) -> None:
    bits, size = bits_and_block
    seen, n = roundtrip(quantise(bits, block=size, by=statistical()), values, dtype), 2**bits
    for block, decoded in zip(blocks(values, size), blocks(seen, size), strict=True):
        mean, sigma = fmean(block), pstdev(block)
        width, far = 6 * sigma / n, max(abs(value - mean) for value in block)
        rounding = ROUNDING * max(map(abs, block)) + 64 * 43 * TINY
        for value, other in zip(block, decoded, strict=True):
            inside = abs(value - mean) < 3 * sigma - width * (1 + ROUNDING) - rounding
            outside = 0.0 if inside else max(0.0, far - 3 * sigma)
            assert abs(other - value) <= (width + outside) * (1 + ROUNDING) + rounding


@given(values=LISTS, dtype=DTYPES, k=st.one_of(st.integers(1, 16), st.floats(0.01, 1.0)))
def test_nothing_left_out_is_larger_than_what_is_kept(values: list[float], dtype: torch.dtype, k: int | float) -> None:
    seen = roundtrip(topk(k, chunk=16), values, dtype)
    for block, decoded in zip(blocks(values, 16), blocks(seen, 16), strict=True):
        count = min(k, len(block)) if isinstance(k, int) else max(1, round(k * len(block)))
        kept = [abs(value) for value, other in zip(block, decoded, strict=True) if other != 0]
        left_out = [abs(value) for value, other in zip(block, decoded, strict=True) if other == 0]
        assert all(other in (0, value) for value, other in zip(block, decoded, strict=True))
        assert len(kept) <= count
        assert len(kept) == count or not any(left_out)
        assert max(left_out, default=0.0) <= min(kept, default=0.0) or not any(left_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e34])
@pytest.mark.parametrize("codec", [float4(), quantise(8), quantise(8, by=statistical()), quantise(4)], ids=repr)
def test_errors_scale_with_the_values_down_to_where_a_block_becomes_flat(
    codec: Codec, size: float, dtype: torch.dtype
) -> None:
    """No square or reciprocal leaves the range of fp32 on the way."""
    shape = [math.sin(index) for index in range(5000)]
    values = [single(size * each) for each in shape]
    wrong = max(abs(a - b) for a, b in zip(roundtrip(codec, values, dtype), values, strict=True))
    bound = max(abs(a - b) for a, b in zip(roundtrip(codec, shape), shape, strict=True))
    assert wrong <= size * bound * 1.01 + 64 * 43 * TINY

"""The plain codecs against NumPy, torch and their stated bounds; the loops with compression against those without."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.testing import reference, toys
from atoll.testing.reference import Codec, InnerStep, See

SEED = 3
TIGHT = 1e-12
NESTEROV = reference.nesterov(0.7, 0.9)
WIDE = torch.float64


def training() -> InnerStep:
    return toys.inner_step(toys.Mlp(), toys.adamw, SEED)


def values(count: int, dtype: torch.dtype = WIDE) -> Tensor:
    """Over six decades, of both signs."""
    normal = toys.draws(SEED, 0, 0, [torch.empty(count, dtype=WIDE)])[0]
    return (normal * torch.logspace(-3, 3, count, dtype=WIDE).roll(count // 3)).to(dtype)


# Codecs


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize(
    "codec",
    [
        reference.exact,
        reference.cast(torch.bfloat16),
        reference.float4(64),
        reference.quantise_linear(4, 64),
        reference.quantise_statistical(2, 64),
        reference.topk(8, 64, reference.quantise_statistical(2, 8)),
        reference.prune_by_sign(0.5),
        reference.random_mask(lambda n: torch.arange(n) % 3 == 0, reference.quantise_linear(8, 32)),
    ],
)
def test_what_is_seen_has_the_dtype_and_shape_of_the_values_and_zeros_stay_zeros(
    codec: Codec, dtype: torch.dtype
) -> None:
    x = values(150, dtype)
    before = x.clone()
    seen = codec(x)
    assert (seen.dtype, seen.shape) == (x.dtype, x.shape)
    assert toys.same_bits([x], [before])
    assert not codec(torch.zeros(150, dtype=dtype)).any()


def test_float4_sees_a_sign_and_zero_or_one_of_seven_powers_of_two() -> None:
    """Halfway between two levels, 0.75 of the upper, the upper is taken; and so at half of the lowest."""
    x = torch.tensor([8.0, -6.0, 5.99, 3.0, -2.99, 0.09374, 0.0625, -0.06249, 0.0], dtype=WIDE)
    want = torch.tensor([8.0, -8.0, 4.0, 4.0, -2.0, 0.125, 0.125, -0.0, 0.0], dtype=WIDE)
    assert toys.same_bits([reference.float4()(x)], [want])


def test_float4_is_off_by_a_third_of_the_value_or_half_of_the_lowest_level() -> None:
    x = values(5000)
    off = (reference.float4(256)(x) - x).abs()
    tops = torch.stack([block.abs().max() for block in x.split(256)]).float().double()
    half_of_lowest = tops.repeat_interleave(256)[:5000] * 2.0**-7
    # The scale's own rounding to fp32, 2^-24, moves levels and midpoints alike.
    assert bool((off <= torch.maximum(x.abs() / 3, half_of_lowest) * (1 + 2**-22)).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_linear_quantisation_is_numpys_rint_of_shares_of_the_largest(bits: int) -> None:
    x = values(300).numpy()
    top = 2 ** (bits - 1) - 1
    scale = np.concatenate(
        [np.full(len(b), np.abs(b).max().astype(np.float32), float) for b in np.split(x, [128, 256])]
    )
    want = np.rint(x * (top / scale)) * (scale / top)
    seen = reference.quantise_linear(bits, 128)(torch.from_numpy(x)).numpy()
    assert np.array_equal(seen, want)
    assert np.all(np.abs(seen - x) <= scale / (2 * top) * (1 + 2**-22))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_statistical_quantisation_is_the_bucket_means_of_numpys_histogram_over_three_sigmas(bits: int) -> None:
    n = 2**bits
    x = toys.draws(SEED, 0, 0, [torch.empty(512, dtype=WIDE)])[0].numpy() * 3 + 1
    edges = np.linspace(x.mean() - 3 * x.std(), x.mean() + 3 * x.std(), n + 1)
    inside = np.clip(x, edges[0], edges[-1])
    counts, sums = (np.histogram(inside, edges, weights=w)[0] for w in (None, x))
    bucket = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, n - 1)
    want = (sums / np.maximum(counts, 1))[bucket].astype(np.float32)
    seen = reference.quantise_statistical(bits, 512)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(seen, want, rtol=2**-23)
    assert len(np.unique(seen)) == np.count_nonzero(counts)


def test_topk_keeps_what_torch_keeps_and_two_equal_values_in_their_order() -> None:
    x = values(300)
    want = torch.zeros_like(x)
    for start in (0, 128, 256):
        kept = x[start : start + 128].abs().topk(5).indices + start
        want[kept] = x[kept]
    assert toys.same_bits([reference.topk(5, 128)(x)], [want])
    tied = torch.tensor([1.0, -2.0, 2.0, 2.0])
    assert reference.topk(2, 4)(tied).tolist() == [0.0, -2.0, 2.0, 0.0]
    assert torch.equal(reference.topk(5)(tied), tied)


def test_sparselocos_codec_sends_64_of_4096_as_four_values() -> None:
    x = values(3 * 4096)
    seen = reference.topk(64, 4096, reference.quantise_statistical(2, 64))(x)
    for chunk in seen.split(4096):
        assert chunk.count_nonzero().item() == 64
        assert len(chunk.unique()) <= 1 + 4


def test_pruning_drops_the_unelected_sign_first_and_the_smallest_of_each() -> None:
    """+ is elected in the first neuron, 9 against 8, and - in the second."""
    x = torch.tensor([4.0, -1.0, 2.0, -4.0, 3.0, -3.0, 1.0, -2.0, 3.0, -9.0, 4.0, -5.0])
    by_fraction = {
        0.0: x.tolist(),
        1 / 3: [4.0, 0, 2.0, -4.0, 3.0, 0, 0, -2.0, 0, -9.0, 4.0, -5.0],
        1 / 2: [4.0, 0, 2.0, 0, 3.0, 0, 0, -2.0, 0, -9.0, 0, -5.0],
        2 / 3: [4.0, 0, 0, 0, 3.0, 0, 0, 0, 0, -9.0, 0, -5.0],
    }
    for fraction, want in by_fraction.items():
        assert reference.prune_by_sign(fraction, 6)(x).tolist() == want


@pytest.mark.parametrize("codec", [reference.topk(3, 32), reference.quantise_linear(2, 16)])
def test_without_decay_what_is_seen_and_the_residual_add_up_to_all_that_was_sent(codec: Codec) -> None:
    feedback = reference.ErrorFeedback(codec, 1.0)
    sent, seen = torch.zeros(64, dtype=WIDE), torch.zeros(64, dtype=WIDE)
    for n in range(20):
        x = toys.draws(SEED, 0, n, [sent])[0]
        sent, seen = sent + x, seen + feedback(x)
    assert feedback.residual is not None
    assert toys.distance([seen + feedback.residual], [sent]) < TIGHT
    assert toys.distance([seen], [sent]) > 1e-2


def test_what_is_never_sent_adds_up_with_decay_in_the_residual() -> None:
    feedback = reference.ErrorFeedback(reference.random_mask(lambda n: torch.arange(n) == 0), 0.5)
    for _ in range(3):
        assert feedback(torch.tensor([1.0, 1.0])).tolist() == [1.0, 0.0]
    assert feedback.residual is not None
    assert feedback.residual.tolist() == [0.0, 1.75]


# Loops


def compressed(theta: list[Tensor], see: See, inner: InnerStep, outer: reference.Outer = NESTEROV) -> reference.Result:
    return reference.compressed_diloco(theta, workers=3, steps=18, inner_step=inner, period=4, outer=outer, see=see)


def test_nothing_compressed_is_diloco_bit_for_bit() -> None:
    theta = toys.initial(toys.Mlp())
    shared, live = compressed(theta, lambda worker, round, flat: flat, training())
    want, want_live = reference.diloco(theta, workers=3, steps=18, inner_step=training(), period=4, outer=NESTEROV)
    assert toys.same_bits(shared, want)
    assert all(toys.same_bits(a, b) for a, b in zip(live, want_live, strict=True))


def test_a_whole_delta_is_seen_as_one_vector_by_worker_and_round() -> None:
    theta = [torch.zeros(2, 3, dtype=WIDE), torch.zeros(4, dtype=WIDE)]
    asked: list[tuple[int, int, list[float]]] = []

    def count(worker: int, step: int, params: list[Tensor]) -> None:
        params[0].sub_(torch.arange(6, dtype=WIDE).view(2, 3) * (worker + 1))
        params[1].sub_(torch.arange(6, 10, dtype=WIDE) * (worker + 1))

    def see(worker: int, round: int, flat: Tensor) -> Tensor:
        asked.append((worker, round, flat.tolist()))
        return flat

    compressed(theta, see, count, reference.sgd(1.0))
    want = [4.0 * i for i in range(10)]
    assert asked == [(m, r, [(m + 1) * x for x in want]) for r in range(4) for m in range(3)]


def test_streaming_sees_each_fragment_as_one_vector_in_rounds_of_its_own() -> None:
    theta = [torch.zeros(2, dtype=WIDE), torch.zeros(3, dtype=WIDE), torch.zeros(4, dtype=WIDE)]
    asked: list[tuple[int, int, int]] = []

    def fall(worker: int, step: int, params: list[Tensor]) -> None:
        for tensor in params:
            tensor.sub_(1.0)

    def see(worker: int, round: int, flat: Tensor) -> Tensor:
        asked.append((worker, round, len(flat)))
        return flat * 2

    shared, _ = reference.streaming(
        theta,
        workers=2,
        steps=15,
        inner_step=fall,
        period=6,
        fragments=[[0, 2], [1]],
        delay=0,
        alpha=0.0,
        outer=reference.sgd(1.0),
        see=see,
    )
    assert asked == [(m, r, n) for r, n in [(0, 6), (0, 3), (1, 6), (1, 3)] for m in range(2)]
    # Twice what was walked up to the last send, in step 12 and in step 15.
    assert [tensor.tolist() for tensor in shared] == [[-24.0] * 2, [-30.0] * 3, [-24.0] * 4]


@pytest.mark.parametrize("make", [lambda: reference.topk(4, 32), lambda: reference.quantise_linear(4, 32)])
def test_everyone_averages_what_is_seen(make: Callable[[], Codec]) -> None:
    """Blind pushes: the anchor falls by the mean of the three workers' error-fed wires, in NumPy's words."""
    theta = [torch.zeros(5, 8, dtype=WIDE)]

    def error_fed() -> list[Codec]:
        return [reference.ErrorFeedback(make(), 0.95) for _ in range(3)]

    senders, again = error_fed(), error_fed()
    shared, live = compressed(
        theta, lambda worker, round, flat: senders[worker](flat), toys.pushes(SEED), reference.sgd(1.0)
    )
    anchor = np.zeros(40)
    for r in range(4):
        walked = [
            sum(toys.draws(SEED, m, t, theta)[0].flatten() for t in range(4 * r + 1, 4 * r + 5)) for m in range(3)
        ]
        anchor -= np.mean([again[m](torch.as_tensor(walked[m]) / 100).numpy() for m in range(3)], axis=0)
    assert toys.distance(shared, [torch.from_numpy(anchor.reshape(5, 8))]) < 1e-9
    assert toys.distance(live[0], live[1]) > 1e-3


def test_sparta_with_every_coordinate_is_local_sgd_with_a_period_of_one_and_with_none_training_apart() -> None:
    theta = toys.initial(toys.Mlp())
    size = sum(tensor.numel() for tensor in theta)

    def sparta(fill: bool) -> reference.Result:
        return reference.sparta(
            theta, workers=3, steps=12, inner_step=training(), mask=lambda step: torch.full((size,), fill)
        )

    want, _ = reference.local_sgd(theta, workers=3, steps=12, inner_step=training(), period=1)
    assert toys.distance(sparta(True)[0], want) < TIGHT
    apart = [[tensor.clone() for tensor in theta] for _ in range(3)]
    inner = training()
    for step in range(1, 13):
        for m in range(3):
            inner(m, step, apart[m])
    shared, live = sparta(False)
    assert all(toys.same_bits(a, b) for a, b in zip(live, apart, strict=True))
    assert toys.distance(shared, [torch.stack(each).mean(0) for each in zip(*apart, strict=True)]) < TIGHT


def test_sparta_averages_the_masked_coordinates_of_the_step_and_leaves_the_others() -> None:
    """Blind pushes, every coordinate chosen in every third step: then the mean of what was walked, else one's own."""
    theta = [torch.zeros(2, 3, dtype=WIDE), torch.zeros(3, dtype=WIDE)]
    _, live = reference.sparta(
        theta, workers=2, steps=7, inner_step=toys.pushes(SEED), mask=lambda step: torch.arange(9) % 3 == step % 3
    )
    place = np.zeros((2, 9))
    for step in range(1, 8):
        place -= [np.concatenate([t.flatten() for t in toys.draws(SEED, m, step, theta)]) / 100 for m in range(2)]
        place[:, step % 3 :: 3] = place[:, step % 3 :: 3].mean(0)
    for m in range(2):
        assert np.concatenate([tensor.flatten() for tensor in live[m]]) == pytest.approx(place[m], rel=TIGHT)

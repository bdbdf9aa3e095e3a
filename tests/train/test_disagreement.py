"""Are distances between workers what their definitions say, and is what a sketch gives a bound of the truth?"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from atoll.train import disagreement
from atoll.train.disagreement import (
    Sketch,
    all_pairs,
    from_sketches,
    generalised,
    js_distance,
    l2_distance,
    probe,
    sketch,
)
from atoll.train.model import build_model

ROUNDING = 5e-4
"""What fp16 may move a distance by: probabilities are off by a part of u = 2^-11 at most, so their JSD from the true
ones is at most u²/(8 ln 2), a distance of 2.1e-4; the metric's triangle inequality counts it once for each worker."""


def logs(workers: int, seed: int, *, vocab: int, peak: float, noise: float, tokens: int = 5) -> list[Tensor]:
    """Workers that agree up to `noise`; the larger `peak`, the surer they are."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(tokens, vocab, generator=generator) * peak
    return [(common + noise * torch.randn(tokens, vocab, generator=generator)).log_softmax(-1) for _ in range(workers)]


def drawn(workers: int) -> st.SearchStrategy[list[Tensor]]:
    """From workers that nearly agree on nearly nothing to sure ones that contradict each other."""
    return st.builds(
        lambda seed, vocab, peak, noise: logs(workers, seed, vocab=vocab, peak=peak, noise=noise),
        st.integers(0, 2**32),
        st.sampled_from([2, 63, 64, 65, 256, 3000]),
        st.floats(0, 20),
        st.floats(0, 20),
    )


def by_divergences(each: Sequence[Tensor]) -> Tensor:
    """JSD in bits at each token as mean_m KL(p_m, mean), by torch's distributions in fp64."""
    parts = [Categorical(logits=log.double()) for log in each]
    mean = Categorical(probs=torch.stack([part.probs for part in parts]).mean(0))
    return torch.stack([kl_divergence(part, mean) for part in parts]).mean(0) / math.log(2)


def by_entropies(p: Sequence[float], q: Sequence[float]) -> float:
    """sqrt(H(mix) - mean H) of one token in plain numbers."""

    def entropy(each: Sequence[float]) -> float:
        return -sum(x * math.log2(x) for x in each if x > 0)

    mix = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return math.sqrt(max(0.0, entropy(mix) - (entropy(p) + entropy(q)) / 2))


@given(drawn(2))
@settings(max_examples=60, deadline=None)
def test_the_distance_is_the_root_of_the_divergence_by_two_other_formulas(pair: list[Tensor]) -> None:
    p, q = pair
    ours = js_distance(p, q)
    plain = [by_entropies(*rows) for rows in zip(p.double().exp().tolist(), q.double().exp().tolist(), strict=True)]
    assert ours == pytest.approx(sum(plain) / len(plain), abs=1e-6)
    assert ours == pytest.approx(float(by_divergences(pair).clamp_min(0).sqrt().mean()), abs=1e-6)


@given(drawn(2))
@settings(max_examples=60, deadline=None)
def test_the_distance_is_symmetric_at_most_1_and_0_from_oneself(pair: list[Tensor]) -> None:
    p, q = pair
    assert 0 <= js_distance(p, q) == js_distance(q, p) <= 1
    assert js_distance(p, p) == 0
    assert from_sketches([sketch(p), sketch(p)]) == 0


def test_without_a_token_in_common_the_distance_is_1() -> None:
    apart = [torch.eye(4)[[worker] * 3].log() for worker in range(4)]
    assert js_distance(*apart[:2]) == all_pairs(apart) == generalised(apart) == 1
    assert from_sketches([sketch(each) for each in apart]) == 1


@pytest.mark.parametrize("shift", [1e-1, 1e-2, 1e-3, 1e-4])
def test_workers_that_nearly_agree_are_told_apart(shift: float) -> None:
    """(1/2 + e, 1/2 - e) and its mirror: JSD = 1 - h(1/2 + e) = sum_n (2e)^2n / (2 ln 2 n (2n - 1))."""
    p, q = (torch.tensor([[0.5 + e, 0.5 - e]]).double().log().float() for e in (shift, -shift))
    series = sum((2 * shift) ** (2 * n) / (n * (2 * n - 1)) for n in range(1, 20)) / (2 * math.log(2))
    assert js_distance(p, q) == pytest.approx(math.sqrt(series), rel=1e-3)


@given(drawn(4))
@settings(max_examples=30, deadline=None)
def test_many_workers_are_compared_in_pairs_or_at_once(team: list[Tensor]) -> None:
    pairs = [float(by_divergences(pair).clamp_min(0).sqrt().mean()) for pair in combinations(team, 2)]
    assert all_pairs(team) == pytest.approx(sum(pairs) / 6, abs=1e-6)
    at_once = (by_divergences(team).clamp_min(0) / math.log2(4)).sqrt().mean()
    assert generalised(team) == pytest.approx(float(at_once), abs=1e-6)
    assert generalised(team[:2]) == pytest.approx(all_pairs(team[:2]), abs=1e-12)


def test_one_worker_has_no_distance() -> None:
    (alone,) = logs(1, 0, vocab=9, peak=1, noise=1)
    assert all_pairs([alone]) == generalised([alone]) == from_sketches([sketch(alone)]) == 0


def test_a_worker_that_predicts_nan_is_no_near_one() -> None:
    p, q = logs(2, 0, vocab=9, peak=1, noise=1)
    p[2, 3] = math.nan
    assert math.isnan(js_distance(p, q))
    assert math.isnan(generalised([p, q]))


def test_what_is_worked_on_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    team = logs(3, 1, vocab=100, peak=3, noise=1, tokens=50)
    whole = all_pairs(team), generalised(team), sketch(team[0]).packed
    monkeypatch.setattr(disagreement, "CHUNK", 700)
    assert all_pairs(team) == pytest.approx(whole[0], abs=1e-12)
    assert generalised(team) == pytest.approx(whole[1], abs=1e-12)
    assert torch.equal(sketch(team[0]).packed, whole[2])


def on_common_tokens(p: Tensor, q: Tensor, top: int = 64) -> tuple[float, float]:
    """Mean over tokens of the distance on the tokens in both lists and one outcome for the rest, and of the root of
    the rest's mass; in plain numbers that are never rounded to fp16."""
    distances, gaps = list[float](), list[float]()
    for mine, theirs in zip(p.double().exp(), q.double().exp(), strict=True):
        kept = min(top, len(mine))
        common = sorted(set(mine.topk(kept).indices.tolist()) & set(theirs.topk(kept).indices.tolist()))
        a, b = mine[common].tolist(), theirs[common].tolist()
        rest = max(0.0, 1 - sum(a)), max(0.0, 1 - sum(b))
        distances.append(by_entropies([*a, rest[0]], [*b, rest[1]]))
        gaps.append(math.sqrt(sum(rest) / 2))
    return sum(distances) / len(distances), sum(gaps) / len(gaps)


@given(drawn(2))
@settings(max_examples=100, deadline=None)
def test_sketches_give_the_distance_on_common_tokens_which_bounds_the_true_one_from_below(pair: list[Tensor]) -> None:
    exact, told = js_distance(*pair), from_sketches([sketch(each) for each in pair])
    p, q = pair
    merged, gap = on_common_tokens(p, q)
    assert told == pytest.approx(merged, abs=ROUNDING)
    assert told <= exact + ROUNDING
    assert exact - told <= gap + ROUNDING


@pytest.mark.parametrize("vocab", [256, 32_000])
@pytest.mark.parametrize("noise", [0.01, 0.1, 1.0])
def test_of_sure_workers_a_sketch_tells_all_but_a_hundredth(vocab: int, noise: float) -> None:
    pair = logs(2, 3, vocab=vocab, peak=10, noise=noise, tokens=64)
    assert from_sketches([sketch(each) for each in pair]) == pytest.approx(js_distance(*pair), rel=0.01, abs=ROUNDING)


def test_a_sketch_of_the_whole_vocabulary_tells_all() -> None:
    team = logs(3, 4, vocab=50, peak=1, noise=1)
    told = [sketch(each) for each in team]
    assert told[0].top == 50
    assert told[0].ids.tolist() == [list(range(50))] * 5
    torch.testing.assert_close(told[0].probabilities[:, :-1], team[0].double().exp(), rtol=2**-10, atol=1e-9)
    assert from_sketches(told) == pytest.approx(all_pairs(team), abs=ROUNDING)


def test_a_sketch_of_512_tokens_is_a_fifth_of_a_megabyte_and_survives_any_buffer() -> None:
    p, q = logs(2, 5, vocab=3000, peak=3, noise=1, tokens=512)
    mine, theirs = sketch(p), sketch(q)
    assert (mine.packed.dtype, mine.packed.numel(), mine.tokens) == (torch.uint8, 512 * 386, 512)
    message = torch.cat([torch.zeros(1, dtype=torch.uint8), theirs.packed])
    assert from_sketches([mine, Sketch(message[1:], 64)]) == from_sketches([mine, theirs])


def test_a_tail_smaller_than_fp32_sees_beside_1_is_kept() -> None:
    sure = torch.tensor([[20.0] + [0.0] * 9]).log_softmax(-1)
    assert float(sketch(sure, top=1).probabilities[0, -1]) == pytest.approx(9 * math.exp(-20), rel=0.01)


def test_sketches_of_different_probes_are_refused() -> None:
    (long,), (short,) = logs(1, 0, vocab=9, peak=1, noise=1), logs(1, 0, vocab=9, peak=1, noise=1, tokens=4)
    with pytest.raises(ValueError, match="5 and 4 tokens cannot be compared"):
        from_sketches([sketch(long), sketch(short)])


class Careless(nn.Module):
    """Maps tokens to logits through dropout, with a part that its owner keeps in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(7, 4), nn.Dropout(0.5), nn.Linear(4, 7)
        self.head.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.embed(tokens)))


def test_a_probe_predicts_without_dropout_and_leaves_every_mode_as_it_was() -> None:
    model, batch = Careless(), torch.arange(12).view(2, 6) % 7
    log_probs = probe(model, batch)
    plain = (model.embed.weight[batch[:, :5].flatten()] @ model.head.weight.T + model.head.bias).softmax(-1).log()
    torch.testing.assert_close(log_probs, plain.detach())
    assert not log_probs.requires_grad
    assert (model.training, model.drop.training, model.head.training) == (True, True, False)


def test_a_probe_gives_modes_back_when_the_model_fails() -> None:
    model = Careless()
    with pytest.raises(IndexError):
        probe(model, torch.full((1, 3), 9))
    assert model.drop.training


def test_a_probe_reads_a_model_of_ours_in_fp32_whatever_it_computes_in() -> None:
    model = nn.Module.to(build_model("tiny", vocab=256, length=8, seed=0), torch.bfloat16)
    log_probs = probe(model, torch.zeros(2, 9, dtype=torch.long))
    assert (log_probs.shape, log_probs.dtype) == ((16, 256), torch.float32)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(16))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_weights_are_apart_by_the_root_mean_square_from_their_mean(workers: int) -> None:
    generator = torch.Generator().manual_seed(workers)
    team = [torch.randn(30, generator=generator) for _ in range(workers)]
    mean = torch.stack(team).mean(0)
    squares = [float(torch.linalg.vector_norm(each - mean)) ** 2 for each in team]
    apart = l2_distance([each.split([7, 20, 3]) for each in team])
    assert apart.distance == pytest.approx(math.sqrt(sum(squares) / workers), abs=1e-6)
    assert apart.relative == pytest.approx(apart.distance / float(torch.linalg.vector_norm(mean)), abs=1e-6)


def test_weights_that_are_equal_are_not_apart_and_chunks_are_read_side_by_side() -> None:
    read: list[tuple[int, int]] = []

    def chunks(worker: int) -> Iterator[Tensor]:
        for number in range(3):
            read.append((number, worker))
            yield torch.full((4,), 0.1 + number)

    assert l2_distance(map(chunks, range(3))).distance == 0
    assert read == [(number, worker) for number in range(3) for worker in range(3)]


def test_workers_with_more_chunks_than_others_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        l2_distance([[torch.zeros(2)], [torch.zeros(2), torch.zeros(1)]])

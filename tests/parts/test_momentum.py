"""Outer optimizers for gossip and for late gradients, bit by bit against plain loops in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from atoll.parts.momentum import age_decay, consensus_momentum, delayed_nesterov, restarted
from atoll.parts.outers import Outer, adam, nesterov, sgd
from atoll.trees import Layout, Spec, cut
from atoll.wire import Key, Landed

SIZE = 37
LAYOUT = Layout.of([Spec("w", (SIZE,), (1,), torch.float64)])


def landed(update: int, *, age: int = 0, anchor: Tensor | None = None) -> Landed:
    return Landed(Key(0, 0, update - 1), (0,), 1.0, update=update, age=age, anchor=anchor)


def normal(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(count)]


def steps(outer: Outer, gradients: list[Tensor], landings: list[Landed], anchor: Tensor) -> Iterator[list[float]]:
    """The steps of `outer` along its own path, each subtracted from the anchor."""
    state, anchor = outer.init(LAYOUT), anchor.clone()
    for gradient, each in zip(gradients, landings, strict=True):
        step = outer.update(gradient.clone(), state, anchor, each)
        yield step.tolist()
        anchor -= step


# NoLoCo


def plain_noloco(
    gradients: list[Tensor], means: list[Tensor | None], anchor: Tensor, rates: tuple[float, float, float]
) -> list[list[float]]:
    """The authors' rule with their signs, one float at a time: deltas are new minus old, and the anchor adds m.

    `rates`: lr, momentum and pull. Returns -m.
    """
    lr, momentum, pull = rates
    taken: list[list[float]] = []
    m, phi = [0.0] * SIZE, anchor.tolist()
    for gradient, mean in zip(gradients, means, strict=True):
        for i, g in enumerate((-gradient).tolist()):
            m[i] = momentum * m[i] + lr * g
            if mean is not None:
                m[i] = m[i] + pull * (mean[i].item() - phi[i])
            phi[i] = phi[i] + m[i]
        taken.append([-move for move in m])
    return taken


def test_consensus_momentum_is_nolocos_heavy_ball() -> None:
    gradients, anchor = normal(0, 7), normal(1, 1)[0]
    means: list[Tensor | None] = [*normal(2, 6), None]
    means[2] = None  # met nobody
    landings = [landed(update, anchor=mean) for update, mean in enumerate(means, start=1)]
    taken = list(steps(consensus_momentum(0.7, 0.5, 0.9), gradients, landings, anchor))
    assert taken == plain_noloco(gradients, means, anchor, (0.7, 0.5, 0.9))


def test_the_pull_draws_the_anchor_to_that_of_the_others() -> None:
    """Without gradient and momentum, a pull of one puts the anchor where the mean is."""
    (anchor, mean), zero = normal(0, 2), torch.zeros(SIZE, dtype=torch.float64)
    part = consensus_momentum(1.0, 0.0, 1.0)
    step = part.update(zero, part.init(LAYOUT), anchor, landed(1, anchor=mean))
    assert torch.allclose(anchor - step, mean, rtol=0, atol=1e-15)


def test_consensus_momentum_is_cut_with_the_chunk_of_the_mean_anchor() -> None:
    """Pieces give the bits of the whole, and neither anchor nor mean anchor is written to."""
    part, anchor, mean = consensus_momentum(0.7, 0.5, 0.7), normal(1, 1)[0], normal(2, 1)[0]
    lent, lent_mean, whole, pieces = anchor.clone(), mean.clone(), part.init(LAYOUT), part.init(LAYOUT)
    for update, gradient in enumerate(normal(0, 4), start=1):
        given = gradient.clone()
        step = part.update(given, whole, anchor, landed(update, anchor=mean))
        parts = [
            part.update(gradient[a:b].clone(), cut(pieces, a, b), anchor[a:b], landed(update, anchor=mean[a:b]))
            for a, b in pairwise((0, 3, 20, SIZE))
        ]
        assert step.data_ptr() == given.data_ptr()
        assert torch.equal(torch.cat(parts), step)
        assert torch.equal(pieces["momentum"], whole["momentum"])
        assert torch.equal(anchor, lent)
        assert torch.equal(mean, lent_mean)


def test_a_step_that_is_overwritten_leaves_the_momentum_alone() -> None:
    part, gradients, zero = consensus_momentum(0.7, 0.5, 0.0), normal(0, 2), torch.zeros(SIZE, dtype=torch.float64)
    state = part.init(LAYOUT)
    part.update(gradients[0].clone(), state, zero, landed(1)).zero_()
    step = part.update(gradients[1].clone(), state, zero, landed(2))
    assert torch.equal(step, gradients[0] * 0.7 * 0.5 + gradients[1] * 0.7)


# Delayed Nesterov


def plain_delayed(gradients: list[Tensor], lr: float, momentum: float, delay: int, c: float) -> list[list[float]]:
    """The paper's algorithm, one float at a time; its t counts from 0, and lr comes last."""
    taken: list[list[float]] = []
    m, buffer = [0.0] * SIZE, [0.0] * SIZE
    for t, gradient in enumerate(gradients):
        step: list[float] = []
        for i, g in enumerate(gradient.tolist()):
            buffer[i] += g
            if (t + 1) % delay == 0:
                m[i] = momentum * m[i] + buffer[i] / delay
                step.append(lr * ((1 - c * delay + c) * (momentum * m[i]) + g / delay))
                buffer[i] = 0.0
            else:
                step.append(lr * (c * (momentum * m[i]) + g / delay))
        taken.append(step)
    return taken


@pytest.mark.parametrize(("delay", "c"), [(1, 0.0), (3, 0.0), (4, 0.25), (4, 0.1), (2, 0.5)])
def test_delayed_nesterov_is_the_papers_loop(delay: int, c: float) -> None:
    gradients = normal(0, 11)
    landings = [landed(update) for update in range(1, 12)]
    taken = list(steps(delayed_nesterov(0.7, 0.9, delay, c), gradients, landings, normal(1, 1)[0]))
    assert taken == plain_delayed(gradients, 0.7, 0.9, delay, c)


def test_gradients_that_came_together_move_the_anchor_as_nesterov_with_their_mean() -> None:
    """Of 4 workers, over 5 rounds; the same sums in another order, so to a few units in the last place."""
    alone, together = normal(1, 1)[0], normal(1, 1)[0]
    delayed, plain = delayed_nesterov(0.7, 0.9, 4), nesterov(0.7, 0.9)
    memory, other = delayed.init(LAYOUT), plain.init(LAYOUT)
    for round in range(5):
        gradients = normal(10 + round, 4)
        for index, gradient in enumerate(gradients):
            alone = alone - delayed.update(gradient.clone(), memory, alone, landed(4 * round + index + 1))
        together = together - plain.update(torch.stack(gradients).mean(0), other, together, landed(round + 1))
        assert torch.allclose(alone, together, rtol=1e-13, atol=1e-14)


def test_a_delay_of_one_is_nesterov() -> None:
    gradients, landings, anchor = normal(0, 6), [landed(update) for update in range(1, 7)], normal(1, 1)[0]
    delayed = steps(delayed_nesterov(0.7, 0.9, 1), gradients, landings, anchor)
    assert list(delayed) == list(steps(nesterov(0.7, 0.9), gradients, landings, anchor))


# Restarts


@pytest.mark.parametrize("outer", [nesterov(0.7, 0.9), adam(0.3), delayed_nesterov(0.7, 0.9, 2)], ids=repr)
@pytest.mark.parametrize("every", [1, 3, 4])
def test_a_restarted_outer_begins_each_run_of_updates_afresh(outer: Outer, every: int) -> None:
    """As a fresh optimizer would with that run alone: also Adam's bias correction counts from one."""
    gradients, anchor = normal(0, 10), normal(1, 1)[0]
    want: list[list[float]] = []
    for first in range(0, 10, every):
        run = gradients[first : first + every]
        want += steps(outer, run, [landed(update) for update in range(1, len(run) + 1)], anchor)
    landings = [landed(update) for update in range(1, 11)]
    assert list(steps(restarted(outer, every), gradients, landings, anchor)) == want


def test_nothing_but_the_count_is_hidden_from_the_restarted_outer() -> None:
    seen: list[Landed] = []

    class Recording(sgd):
        def update(self, GRADIENT: Tensor, STATE: dict[str, Tensor], anchor: Tensor, landed: Landed) -> Tensor:
            seen.append(landed)
            return GRADIENT

    given = landed(8, age=5, anchor=normal(0, 1)[0])
    gradient, anchor = normal(1, 2)
    restarted(Recording(1.0), 3).update(gradient, {}, anchor, given)
    assert [replace(each, anchor=None) for each in seen] == [replace(given, update=2, anchor=None)]
    assert seen[0].anchor is given.anchor


# Age


@pytest.mark.parametrize(
    ("power", "factor"), [(0.5, lambda age: 1 / (1 + age) ** 0.5), (1.0, lambda age: 1 / (1 + age))]
)
def test_a_gradient_counts_less_the_older_it_is(power: float, factor: Callable[[int], float]) -> None:
    """Against nesterov on gradients that were scaled beforehand; x^-p and 1 / x^p may differ in the last bit."""
    gradients, anchor, ages = normal(0, 6), normal(1, 1)[0], (0, 3, 8, 0, 99, 1)
    landings = [landed(update, age=age) for update, age in enumerate(ages, start=1)]
    scaled = [gradient * factor(age) for gradient, age in zip(gradients, ages, strict=True)]
    taken = torch.tensor(list(steps(age_decay(nesterov(0.7, 0.9), power), gradients, landings, anchor)))
    want = torch.tensor(list(steps(nesterov(0.7, 0.9), scaled, landings, anchor)))
    assert torch.allclose(taken, want, rtol=1e-13, atol=1e-15)


def test_what_lands_at_once_is_not_discounted() -> None:
    gradients, landings, anchor = normal(0, 5), [landed(update) for update in range(1, 6)], normal(1, 1)[0]
    decayed = steps(age_decay(nesterov(0.7, 0.9)), gradients, landings, anchor)
    assert list(decayed) == list(steps(nesterov(0.7, 0.9), gradients, landings, anchor))

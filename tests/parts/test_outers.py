"""Outer optimizers against the conformance suite and torch's own optimizers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import CompositionError
from atoll.parts.momentum import age_decay, consensus_momentum, delayed_nesterov, restarted
from atoll.parts.outers import Outer, adam, nesterov, sgd
from atoll.testing.conformance import check_outer
from atoll.trees import Layout, Spec, State
from atoll.wire import Key, Landed

CASES: list[Outer] = [
    sgd(1.0),
    sgd(0.3),
    nesterov(0.7, 0.9),
    nesterov(0.4, 0.0),
    adam(0.3),
    adam(1.0, 0.9, 0.999, 1e-7),
    consensus_momentum(0.7, 0.5, 0.7),
    delayed_nesterov(0.7, 0.9, 1),
    delayed_nesterov(0.7, 0.9, 3),
    delayed_nesterov(0.4, 0.9, 2, 0.5),
    restarted(nesterov(0.7, 0.9), 2),
    restarted(adam(0.3), 3),
    age_decay(nesterov(0.7, 0.9)),
    age_decay(restarted(delayed_nesterov(0.7, 0.9, 2), 4), 1.0),
]


@pytest.mark.parametrize("outer", CASES, ids=repr)
def test_an_outer_optimizer_keeps_its_promises(outer: Outer) -> None:
    check_outer(outer)


@pytest.mark.parametrize("outer", CASES, ids=repr)
def test_the_repr_of_an_outer_optimizer_rebuilds_it(outer: Outer) -> None:
    assert eval(repr(outer), globals()) == outer


def landed(update: int) -> Landed:
    return Landed(Key(0, 0, update - 1), (0,), 1.0, update=update)


Make = Callable[[nn.Parameter], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("outer", "make"),
    [
        (sgd(0.3), lambda p: torch.optim.SGD([p], lr=0.3)),
        (nesterov(0.7, 0.9), lambda p: torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True)),
        (adam(0.3, 0.9, 0.95, 0.1), lambda p: torch.optim.Adam([p], lr=0.3, betas=(0.9, 0.95), eps=0.1)),
        (adam(0.3, 0.8, 0.999, 1e-7), lambda p: torch.optim.Adam([p], lr=0.3, betas=(0.8, 0.999), eps=1e-7)),
    ],
    ids=["sgd", "nesterov", "adam", "adam with a small eps"],
)
def test_an_anchor_takes_the_path_of_torchs_optimizer(outer: Outer, make: Make) -> None:
    """In float64, where the same formula in another order differs by 1e-16 per operation."""
    anchor = torch.linspace(-1, 1, 9, dtype=torch.float64)
    state = outer.init(Layout.of([Spec("w", (9,), (1,), torch.float64)]))
    parameter = nn.Parameter(anchor.clone())
    optimizer = make(parameter)
    generator = torch.Generator().manual_seed(5)
    for update in range(1, 13):
        gradient = torch.randn(9, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        anchor = anchor - outer.update(gradient, state, anchor, landed(update))
        assert torch.allclose(anchor, parameter.detach(), rtol=1e-12, atol=1e-14)


def test_the_first_nesterov_step_of_diloco_is_1_33_times_the_mean_delta() -> None:
    gradient = torch.ones(3, dtype=torch.float64)
    state = nesterov(0.7, 0.9).init(Layout.of([Spec("w", (3,), (1,), torch.float64)]))
    step = nesterov(0.7, 0.9).update(gradient, state, torch.zeros(3, dtype=torch.float64), landed(1))
    assert step.tolist() == pytest.approx([1.33] * 3, rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sgd(0.0),
        lambda: sgd(-1.0),
        lambda: sgd(float("nan")),
        lambda: nesterov(float("inf"), 0.9),
        lambda: nesterov(0.7, 1.0),
        lambda: nesterov(0.7, -0.1),
        lambda: adam(0.3, beta1=1.0),
        lambda: adam(0.3, beta2=float("nan")),
        lambda: adam(0.3, eps=0.0),
        lambda: consensus_momentum(0.0, 0.5, 0.7),
        lambda: consensus_momentum(0.7, 1.0, 0.7),
        lambda: consensus_momentum(0.7, 0.5, -0.1),
        lambda: consensus_momentum(0.7, 0.5, float("nan")),
        lambda: delayed_nesterov(0.7, 0.9, 0),
        lambda: delayed_nesterov(0.7, 0.9, 4, 0.3),
        lambda: delayed_nesterov(0.7, 0.9, 4, -0.1),
        lambda: restarted(nesterov(0.7, 0.9), 0),
        lambda: age_decay(sgd(1.0), 0.0),
        lambda: age_decay(sgd(1.0), float("inf")),
    ],
)
def test_a_rate_or_momentum_that_cannot_work_is_refused(make: Callable[[], Outer]) -> None:
    with pytest.raises(CompositionError, match="give "):
        make()


# The conformance suite itself: each broken promise is seen


class Clipped:
    """sgd(1.0), but every piece is scaled to a norm of one: it depends on where a chunk ends."""

    def init(self, layout: Layout) -> State:
        return {}

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        return GRADIENT.div_(GRADIENT.norm())


class Greedy(sgd):
    """sgd that moves the anchor itself."""

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        anchor.sub_(GRADIENT)
        return GRADIENT


class Wasteful(sgd):
    """sgd that returns new memory."""

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        return GRADIENT * self.lr


class Forgetful(nesterov):
    """Nesterov that counts its updates beside its state."""

    count = [0]  # noqa: RUF012

    def update(self, GRADIENT: Tensor, STATE: State, anchor: Tensor, landed: Landed) -> Tensor:
        self.count[0] += 1
        return super().update(GRADIENT.mul_(self.count[0]), STATE, anchor, landed)


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        (Clipped(), "in pieces"),
        (Greedy(1.0), "wrote to the anchor"),
        (Wasteful(1.0), "memory of GRADIENT"),
        (Forgetful(0.7, 0.9), "in pieces"),
    ],
)
def test_an_outer_optimizer_that_breaks_a_promise_is_caught(outer: Outer, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_outer(outer)

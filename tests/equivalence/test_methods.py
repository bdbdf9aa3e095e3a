"""Each method against the plain loop from its paper, bit for bit in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.outers import adam, nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.recipes import methods
from atoll.sync.rule import Rule, Strategy
from atoll.testing import reference, toys
from atoll.testing.turns import live, run_turns, shared

STEPS = 31


@dataclass
class Row:
    """A strategy, and the reference loop with its own hyperparameters."""

    strategy: Strategy
    loop: Callable[..., reference.Result]
    options: dict[str, Any]


OUTER = reference.nesterov(0.7, 0.9)
# Mlp: first 0-1, middle 2-3, last 4-5, head 6-7 (weight, bias)
TURNS = {"fragments": [[0, 1], [2, 3, 4, 5], [6, 7]]}
BY_LAYER = by_name("first.*", "[ml]*", "head.*")


def _streaming(period: int, delay: int, alpha: float) -> Row:
    rule = Rule(staggered(period, 3), outer=nesterov(0.4, 0.9), landing=After(delay), merge=blend(alpha))
    options = TURNS | {"period": period, "delay": delay, "alpha": alpha, "outer": reference.nesterov(0.4, 0.9)}
    return Row(Strategy((rule,), BY_LAYER), reference.streaming, options)


ROWS = {
    "local-sgd": Row(methods.local_sgd(5).strategy, reference.local_sgd, {"period": 5}),
    "diloco": Row(methods.diloco(5).strategy, reference.diloco, {"period": 5, "outer": OUTER}),
    "diloco every step": Row(methods.diloco(1).strategy, reference.diloco, {"period": 1, "outer": OUTER}),
    "diloco-restarted": Row(
        methods.diloco_restarted(5, restart=2).strategy,
        reference.diloco,
        {"period": 5, "outer": reference.restarted(OUTER, 2)},
    ),
    "diloco with outer adam": Row(
        Strategy((Rule(every(4), outer=adam(0.3, 0.9, 0.95, 0.1)),)),
        reference.diloco,
        {"period": 4, "outer": reference.adam(0.3, 0.9, 0.95, 0.1)},
    ),
    "diloco with outer sgd": Row(
        Strategy((Rule(every(4), outer=sgd(0.5)),)), reference.diloco, {"period": 4, "outer": reference.sgd(0.5)}
    ),
    "opendiloco": Row(methods.opendiloco(5).strategy, reference.opendiloco, {"period": 5, "outer": OUTER}),
    "streaming, one step late": _streaming(6, 1, 0.5),
    "streaming, later than the next fragment leaves": _streaming(6, 4, 0.5),
    "streaming, local steps thrown away": _streaming(7, 2, 0.0),
    "streaming, live left alone": _streaming(7, 3, 1.0),
}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ROWS)
def test_a_method_is_its_papers_loop_bit_for_bit(name: str, workers: int) -> None:
    row, module = ROWS[name], toys.Mlp()
    anchor, replicas = row.loop(
        toys.initial(module),
        workers=workers,
        steps=STEPS,
        inner_step=toys.inner_step(module, toys.adamw, seed=3),
        **row.options,
    )
    syncs, _ = run_turns(module, row.strategy, workers=workers, steps=STEPS, seed=3)
    for sync, replica in zip(syncs, replicas, strict=True):
        assert toys.same_bits(shared(sync), anchor)
        assert toys.same_bits(live(sync), replica)
    assert not toys.same_bits(anchor, toys.initial(module)), "the run went nowhere"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_data_parallel_is_the_plain_loop_bit_for_bit_with_clipping_after_the_mean(workers: int) -> None:
    module = toys.Mlp()
    want, _ = reference.data_parallel(
        toys.initial(module),
        workers=workers,
        steps=STEPS,
        gradient=toys.gradient(module, seed=3),
        update=toys.update(toys.adamw, max_norm=0.1),
    )
    syncs, _ = run_turns(module, methods.data_parallel().strategy, workers=workers, steps=STEPS, seed=3, max_norm=0.1)
    for sync in syncs:
        assert toys.same_bits(live(sync), want)


def test_single_is_plain_training() -> None:
    module = toys.Mlp()
    want, _ = reference.single(
        toys.initial(module), steps=STEPS, inner_step=toys.inner_step(module, toys.adamw, seed=3)
    )
    (sync,), _ = run_turns(module, methods.single().strategy, workers=1, steps=STEPS, seed=3)
    assert toys.same_bits(shared(sync), want)


def test_a_tied_weight_is_one_tensor_and_is_synced_once() -> None:
    module = toys.TiedMlp()
    want, _ = reference.diloco(
        toys.initial(module),
        workers=3,
        steps=STEPS,
        inner_step=toys.inner_step(module, toys.adamw, seed=1),
        period=5,
        outer=reference.nesterov(0.7, 0.9),
    )
    syncs, _ = run_turns(module, methods.diloco(5).strategy, workers=3, steps=STEPS, seed=1)
    names = [spec.name for spec in syncs[0].state.fragments[0].layout.specs]
    assert "middle.weight" in names
    assert "last.weight" not in names
    assert toys.same_bits(shared(syncs[0]), want)


def test_the_outer_step_is_torchs_nesterov_sgd() -> None:
    """The mean delta in `.grad` of torch.optim.SGD(nesterov=True), to rounding in float64."""

    module = toys.Mlp()
    anchor = [torch.nn.Parameter(tensor) for tensor in toys.initial(module)]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    step, replicas = toys.inner_step(module, toys.adamw, seed=3), [toys.initial(module) for _ in range(3)]
    for t in range(1, 21):
        for m, replica in enumerate(replicas):
            step(m, t, replica)
        if t % 5 == 0:
            for i, parameter in enumerate(anchor):
                parameter.grad = torch.stack([parameter.detach() - replica[i] for replica in replicas]).mean(0)
            outer.step()
            _adopt(replicas, anchor)
    syncs, _ = run_turns(module, methods.diloco(5).strategy, workers=3, steps=20, seed=3)
    assert toys.distance(shared(syncs[0]), [parameter.detach() for parameter in anchor]) < 1e-13


def _adopt(replicas: list[list[Tensor]], anchor: list[Any]) -> None:
    for replica in replicas:
        for tensor, parameter in zip(replica, anchor, strict=True):
            tensor.copy_(parameter.detach())

"""Narrow parameters and narrow wires: what is rounded, what is not, and what no longer fits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.parts.codecs import cast, exact
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import toys
from atoll.testing.toys import draws
from atoll.wire import Codec, Fold, Keep, Reduce
from tests.properties.teams import Numbers, Team, bits, examples, live_anchor_outer, same, shared, still, values

HALF = cast(torch.float16)
BRAIN = cast(torch.bfloat16)
NARROW = st.sampled_from([torch.bfloat16, torch.float16])
MERGES = {
    "adopt": Rule(every(2), outer=nesterov(0.7, 0.9)),
    "blend": Rule(every(2), outer=nesterov(0.7, 0.9), landing=After(1), merge=blend(0.5)),
    "blend, live weighs nothing": Rule(every(2), outer=nesterov(0.7, 0.9), landing=After(1), merge=blend(0.0)),
    "live": Rule(every(2), carry=Carry.LIVE),
}


@pytest.mark.parametrize("merge", MERGES)
@examples(6)
@given(dtype=NARROW, workers=st.integers(1, 7), seed=st.integers(0, 100))
def test_rounds_without_training_change_no_bit_of_narrow_parameters(
    merge: str, dtype: torch.dtype, workers: int, seed: int
) -> None:
    team = Team(toys.Mlp(seed).to(dtype), Strategy((MERGES[merge],)), workers)
    before = [live_anchor_outer(sync) for sync in team.syncs]
    assert [live_anchor_outer(sync) for sync in team.run(7, still).syncs] == before


@examples(8)
@given(dtype=NARROW, workers=st.integers(1, 5))
def test_an_anchor_between_two_narrow_values_stays_there_while_nobody_trains(dtype: torch.dtype, workers: int) -> None:
    team = Team(toys.Mlp().to(dtype), Strategy((Rule(every(2), outer=sgd(0.3)),)), workers).run(4)
    before = [live_anchor_outer(sync) for sync in team.syncs]
    anchor = shared(team.syncs[0])["first.weight"]
    assert not torch.equal(anchor, anchor.to(dtype).float())
    assert [live_anchor_outer(sync) for sync in team.run(6, still).syncs] == before


def test_updates_below_bf16_resolution_add_up_in_the_anchor_and_show_in_the_end() -> None:
    """Below 1, neighbours in bf16 are 2^-8 apart. One of four workers moves that far: a mean of 2^-10 a round."""

    def move(worker: int, step: int, model: nn.Module) -> None:
        if worker == 0:
            with torch.no_grad():
                model.get_parameter("w").sub_(2**-8)

    team = Team(Numbers([1.0], torch.bfloat16), Strategy((Rule(every(1), outer=sgd(1.0)),)), 4)
    seen: list[tuple[float, float]] = []
    for _ in range(4):
        team.run(1, move)
        seen.append((shared(team.syncs[1])["w"].item(), values(team.models[1])["w"].item()))
    assert seen == [(1 - k * 2**-10, 1.0 if k < 3 else 1 - 2**-8) for k in (1, 2, 3, 4)]


class Mixed(nn.Module):
    """fp16, bf16 and fp32 parameters side by side."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.float16)):
            self.register_parameter(name, nn.Parameter(torch.randn(3, 2, generator=draw).to(dtype)))


@pytest.mark.parametrize("fold", [None, Keep(), Reduce(exact()), Reduce(HALF)])
@pytest.mark.parametrize("codec", [exact(), HALF, BRAIN])
@examples(4)
@given(workers=st.integers(1, 5), seed=st.integers(0, 100))
def test_a_mixed_model_over_any_wire_is_the_plain_loop_in_fp32_bit_for_bit(
    codec: Codec, fold: Fold | None, workers: int, seed: int
) -> None:
    """Every part is rounded for the wire, one's own too; sums, anchors and momentum are fp32."""
    wire = {exact(): torch.float32, HALF: torch.float16, BRAIN: torch.bfloat16}
    back = wire[fold.result] if isinstance(fold, Reduce) else torch.float32  # pyright: ignore[reportArgumentType]
    model = Mixed(seed)
    anchor = {name: tensor.float() for name, tensor in values(model).items()}
    live = [values(model) for _ in range(workers)]
    momentum = {name: torch.zeros_like(tensor) for name, tensor in anchor.items()}
    for step in range(1, 10):
        for worker in range(workers):
            trained = list(live[worker].values())
            for tensor, move in zip(trained, draws(0, worker, step, trained), strict=True):
                tensor.sub_(move, alpha=0.01)
        if step % 3 == 0:
            for name, theta in anchor.items():
                total = torch.zeros_like(theta)
                for worker in range(workers):
                    start, now = theta.to(live[worker][name].dtype).float(), live[worker][name].float()
                    total = total + (start - now).to(wire[codec]).float()  # pyright: ignore[reportArgumentType]
                gradient = (total / workers).to(back).float()
                momentum[name] = momentum[name] * 0.9 + gradient
                anchor[name] = theta - (gradient + momentum[name] * 0.9) * 0.7
                for worker in range(workers):
                    live[worker][name].copy_(anchor[name])
    rule = Rule(every(3), outer=nesterov(0.7, 0.9), codec=codec, mixer=all_mean(fold))
    team = Team(Mixed(seed), Strategy((rule,)), workers).run(9)
    for worker, sync in enumerate(team.syncs):
        assert same(shared(sync), anchor)
        assert same(values(team.models[worker]), live[worker])


@pytest.mark.parametrize(
    ("codec", "fold"), [(HALF, Keep()), (HALF, Reduce(exact())), (HALF, Reduce(HALF)), (exact(), Reduce(HALF))]
)
@examples(8)
@given(size=st.sampled_from([65_000.0, 65_504.0, 65_519.0, 65_520.0, 1e6, 1e30]), sign=st.sampled_from([1, -1]))
def test_what_does_not_fit_an_fp16_wire_is_refused_and_no_anchor_becomes_infinite(
    codec: Codec, fold: Fold, size: float, sign: int
) -> None:
    def move(worker: int, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w")[0] -= sign * size if worker == 1 else 1.0

    rule = Rule(every(1), outer=sgd(1.0), codec=codec, mixer=all_mean(fold))
    team = Team(Numbers([0.0, 1.0], torch.float32), Strategy((rule,)), 3).run(1, move)
    fits = math.isfinite(torch.tensor(size).half().item())
    for worker in range(3):
        (landed,) = team.landed(worker)
        assert landed.peers == ((0, 1, 2) if fits else (0, 2))
        assert landed.refused == (() if fits else ("worker 1 sent values that are not finite",))
        assert values(team.models[worker])["w"].isfinite().all()
        assert same(values(team.models[worker]), values(team.models[0]))
    if not fits:
        assert values(team.models[1])["w"].tolist() == [-1.0, 1.0]


def test_what_rounds_to_infinity_on_a_bf16_wire_is_refused() -> None:
    most = torch.finfo(torch.float32).max / 1e19

    def move(worker: int, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("w").fill_(float("inf") if worker == 1 else most)

    rule = Rule(every(1), outer=sgd(1.0), codec=BRAIN)
    team = Team(Numbers([0.0], torch.float32), Strategy((rule,)), 3).run(1, move)
    assert team.landed()[0].peers == (0, 2)
    assert values(team.models[1])["w"].isfinite().all()


def test_buffers_are_averaged_exactly_where_parameters_are_rounded() -> None:
    module = toys.BufferedMlp().float()
    module.get_buffer("running").fill_(1e6)

    def move(worker: int, step: int, model: nn.Module) -> None:
        model.get_buffer("running").copy_(torch.tensor([1e6 + 1 + worker, 0.1 * worker, 2.0]))

    rule = Rule(every(1), outer=nesterov(0.7, 0.9), codec=HALF, mixer=all_mean(Reduce(HALF)))
    team = Team(module, Strategy((rule,)), 3).run(1, move)
    want = torch.tensor([1e6 + 2, 0.1, 2.0])
    for model in team.models:
        assert torch.allclose(model.get_buffer("running"), want, rtol=1e-7, atol=0.1)
        assert bits(model.get_buffer("running")) == bits(team.models[0].get_buffer("running"))

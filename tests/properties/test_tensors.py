"""Every kind of tensor that a model may hold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import GroupError, ModelError
from atoll.parts.landings import After
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import all_mean, by_share, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.peers.memory import Hub
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing import toys
from tests.properties.teams import (
    Numbers,
    Team,
    bits,
    close,
    examples,
    mean,
    push,
    same,
    shared,
    training,
    values,
)

DILOCO = Strategy((Rule(every(3), outer=nesterov(0.7, 0.9)),))
STREAMING = Strategy((Rule(every(3), outer=nesterov(0.7, 0.9), landing=After(1), merge=blend(0.5)),))
DATA_PARALLEL = Strategy((Rule(every(1), carry=Carry.GRADIENT, merge=leave()),))


def double(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) / 10


class Shapes(nn.Module):
    """The same numbers, laid out plainly or as awkwardly as memory allows."""

    def __init__(self, awkward: bool) -> None:
        super().__init__()
        shapes = {
            "scalar": (),
            "empty": (0, 3),
            "matrix": (3, 4),
            "image": (2, 3, 2, 5),
            "column": (1, 6),
            "last": (2,),
        }
        tensors = {name: double(*shape) for name, shape in shapes.items()}
        if awkward:
            tensors["matrix"] = tensors["matrix"].t().contiguous().t()
            tensors["image"] = tensors["image"].to(memory_format=torch.channels_last)
            tensors["column"] = tensors["column"].as_strided((1, 6), (77, 1))
            tensors["last"] = torch.cat([double(5), tensors["last"], double(3)])[5:7]
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


@pytest.mark.parametrize("strategy", [DILOCO, STREAMING, Strategy((Rule(every(3), carry=Carry.LIVE),))])
@examples(5)
@given(workers=st.integers(1, 5))
def test_where_a_tensor_lies_in_memory_changes_no_bit(strategy: Strategy, workers: int) -> None:
    plain, awkward = (Team(Shapes(kind), strategy, workers).run(11) for kind in (False, True))
    for model, other, sync, twin in zip(plain.models, awkward.models, plain.syncs, awkward.syncs, strict=True):
        assert same(values(model), values(other))
        assert same(shared(sync), shared(twin))
        assert sync.state.digest() == twin.state.digest()
    assert not same(values(plain.models[0]), values(Shapes(False)))


@pytest.mark.parametrize("assigned", ["plainly", "transposed"])
def test_gradients_meet_by_name_and_index_however_they_lie_in_memory(assigned: str) -> None:
    def backward(worker: int, step: int, model: nn.Module) -> None:
        for index, (name, tensor) in enumerate(model.named_parameters()):
            grad = double(*tensor.shape) * (worker + 1) + index
            if name == "matrix" and worker == 2:
                tensor.grad = None
            elif name == "matrix" and assigned == "transposed":
                tensor.grad = grad.t().contiguous().t()
            else:
                tensor.grad = grad

    team = Team(Shapes(awkward=True), DATA_PARALLEL, 3).run(1, lambda *_: None, backward=backward)
    for model in team.models:
        for index, (name, tensor) in enumerate(model.named_parameters()):
            each = [double(*tensor.shape) * (worker + 1) + index for worker in range(3)]
            if name == "matrix":
                each[2] = torch.zeros_like(each[2])
            assert tensor.grad is not None
            assert torch.allclose(tensor.grad, mean(each), rtol=1e-14), name


def test_a_sparse_gradient_is_refused_with_a_sentence() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 1, 3])).sum().backward()
    with pytest.raises(ModelError, match=r"gradient of 'weight' is sparse, .* sparse=False, or carry DELTA"):
        Synchronizer(model, DATA_PARALLEL, Hub(1).group(0)).before_step()


def test_a_parameter_without_a_gradient_counts_as_one_with_a_gradient_of_zero() -> None:
    def backward(worker: int, step: int, model: nn.Module) -> None:
        model.get_parameter("w").grad = torch.tensor([6.0], dtype=torch.float64) if worker == 1 else None

    team = Team(Numbers([0.0]), DATA_PARALLEL, 3).run(1, lambda *_: None, backward=backward)
    assert [model.get_parameter("w").grad.item() for model in team.models] == [2.0] * 3  # pyright: ignore


@pytest.mark.parametrize("tensor", [double(4, 4)[:, :2], double(3, 1).expand(3, 4), double(8)[::2]])
def test_a_parameter_with_gaps_is_refused_with_a_sentence(tensor: Tensor) -> None:
    model = nn.Module()
    model.gappy = nn.Parameter(tensor)
    with pytest.raises(ModelError, match=r"'gappy' has gaps in memory .* make it contiguous before"):
        Synchronizer(model, DILOCO, Hub(1).group(0))


class Frozen(toys.Mlp):
    """`Mlp` whose `middle` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.get_submodule("middle").requires_grad_(False)


@pytest.mark.parametrize("strategy", [DILOCO, DATA_PARALLEL])
def test_frozen_parameters_are_in_no_fragment_and_keep_their_bits(strategy: Strategy) -> None:
    team = Team(Frozen(), strategy, 2).run(7, **training(toys.adamw))
    names = {spec.name for fragment in team.syncs[0].state.fragments for spec in fragment.layout.specs}
    assert names == {name for name, _ in Frozen().named_parameters() if not name.startswith("middle")}
    for model, sync in zip(team.models, team.syncs, strict=True):
        for name in ("middle.weight", "middle.bias"):
            assert bits(model.get_parameter(name)) == bits(Frozen().get_parameter(name)) == bits(shared(sync)[name])


@pytest.mark.parametrize("name", ["middle.weight", "head.bias", "running", "batches"])
def test_workers_that_start_from_different_values_are_refused_whatever_the_tensor(name: str) -> None:
    hub, model, other = Hub(2), toys.BufferedMlp(), toys.BufferedMlp()
    for each in (model, other):
        each.get_submodule("middle").requires_grad_(False)
    other.state_dict()[name].add_(1)
    Synchronizer(model, DILOCO, hub.group(0))
    with pytest.raises(GroupError, match=r"worker 1 trains .* but worker 0 trains"):
        Synchronizer(other, DILOCO, hub.group(1))


def test_workers_that_freeze_different_parameters_are_refused() -> None:
    hub = Hub(2)
    Synchronizer(toys.Mlp(), DILOCO, hub.group(0))
    with pytest.raises(GroupError):
        Synchronizer(Frozen(), DILOCO, hub.group(1))


def test_a_tied_weight_is_synced_once_under_its_first_name() -> None:
    team = Team(toys.TiedMlp(), DILOCO, 3).run(7, **training(toys.adamw))
    (fragment,) = team.syncs[0].state.fragments
    assert "middle.weight" in [spec.name for spec in fragment.layout.specs]
    assert fragment.layout.numel == 61
    for model in team.models:
        assert model.get_parameter("last.weight") is model.get_parameter("middle.weight")


class Buffers(nn.Module):
    """Every kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(double(2))
        self.register_buffer("running", double(3).float())
        self.register_buffer("narrow", double(2).bfloat16())
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("table", torch.full((3,), 0.1))
        self.register_buffer("least", torch.full((2,), torch.finfo(torch.float32).min))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", double(2), persistent=False)


def _note(worker: int, step: int, model: nn.Module) -> None:
    for name in ("running", "narrow", "scalar", "count", "scratch"):
        model.get_buffer(name).mul_(2).add_(worker + step)
    push(worker, step, model)


@pytest.mark.parametrize("strategy", [DILOCO, STREAMING, DATA_PARALLEL])
@examples(4)
@given(workers=st.integers(1, 7), rounds=st.integers(1, 3))
def test_floating_persistent_buffers_are_averaged_and_all_others_stay_local(
    strategy: Strategy, workers: int, rounds: int
) -> None:
    period = strategy.rules[0].schedule.next(0, 0, {})
    team = Team(Buffers(), strategy, workers)
    plain = [Buffers() for _ in range(workers)]
    for step in range(1, rounds * period + 1):
        team.run(1, _note)
        for worker, model in enumerate(plain):
            _note(worker, step, model)
        if step % period == 0:
            for name in ("running", "narrow", "scalar", "table"):
                average = mean([model.get_buffer(name) for model in plain])
                for model in plain:
                    model.get_buffer(name).copy_(average)
    for model, want in zip(team.models, plain, strict=True):
        for name in ("running", "scalar"):
            assert torch.allclose(model.get_buffer(name), want.get_buffer(name), rtol=1e-6), name
        assert torch.allclose(model.get_buffer("narrow"), want.get_buffer("narrow"), rtol=2**-6)
        for name in ("table", "least", "mask", "count", "flags", "scratch"):
            assert bits(model.get_buffer(name)) == bits(want.get_buffer(name)), name
    assert not team.lost()
    assert set(shared(team.syncs[0])) == {*Buffers().state_dict()}


def test_buffers_are_averaged_to_1e_10_in_float64_by_the_weights_of_the_first_rule() -> None:
    strategy = Strategy((Rule(every(2), outer=nesterov(0.7, 0.9), mixer=weighted(by_share(), all_mean())),))
    shares = [0.5, 2.0, 0.5]
    team = Team(toys.BufferedMlp(), strategy, 3, shares=shares).run(1, **training(toys.adamw))
    alone = [model.get_buffer("running").clone() for model in team.models]
    team.run(1, **training(toys.adamw))
    each = [running * 0.9 + toys.batch(0, w, 2)[0].mean(0) * 0.1 for w, running in enumerate(alone)]
    assert all(close(model.get_buffer("running"), mean(each, shares)) for model in team.models)


def test_a_lost_round_leaves_buffers_alone() -> None:
    def move(worker: int, step: int, model: nn.Module) -> None:
        model.get_buffer("running").fill_(math.nan if worker == 0 and step == 1 else worker)

    team = Team(toys.BufferedMlp(), Strategy((Rule(every(1), outer=sgd(1.0)),)), 2).run(1, move)
    assert [model.get_buffer("running").tolist() for model in team.models[1:]] == [[1.0] * 3]
    assert len(team.lost()) == len(team.landed()) == 1
    assert [model.get_buffer("running").tolist() for model in team.run(1, move).models] == [[0.5] * 3] * 2

"""What a synchronizer does to the model it is given, and what it leaves alone."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import ModelError
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend, leave
from atoll.parts.mixers import alone
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every, staggered
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import toys
from atoll.trees import digest
from tests.properties.teams import Numbers, Team, bits, examples, mean, push, same, shared, still, training, values

DILOCO = Strategy((Rule(every(3), outer=nesterov(0.7, 0.9)),))
STREAMING = Strategy(
    (Rule(staggered(6, 3), outer=nesterov(0.4, 0.9), landing=After(2), merge=blend(0.5)),),
    by_name("first.*", "[ml]*", "head.*"),
)
DATA_PARALLEL = Strategy((Rule(every(1), carry=Carry.GRADIENT, merge=leave()),))
AVERAGING = Strategy((Rule(every(3), carry=Carry.LIVE),))
ALL = {"diloco": DILOCO, "streaming": STREAMING, "data-parallel": DATA_PARALLEL, "averaging": AVERAGING}


def places(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(tensor), tensor.data_ptr()) for tensor in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("name", ALL)
def test_live_tensors_are_never_re_pointed(name: str) -> None:
    team = Team(toys.BufferedMlp(), ALL[name], 2)
    before = [places(model) for model in team.models]
    team.run(14, **training(toys.adamw)).drain()
    with team.syncs[0].shared_weights() as model:
        assert places(model) == before[0]
    assert [places(model) for model in team.models] == before


def tensors_of(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)


@pytest.mark.parametrize("name", ["diloco", "streaming", "averaging"])
def test_a_sync_leaves_the_inner_optimizer_alone(name: str) -> None:
    team = Team(toys.Mlp(), ALL[name], 2)
    inner = [toys.adamw(model.parameters()) for model in team.models]
    left: dict[int, tuple[list[int], list[bytes]]] = {}

    def state_of(worker: int) -> tuple[list[int], list[bytes]]:
        held = list(tensors_of(inner[worker].state_dict()["state"]))
        return [id(group) for group in inner[worker].param_groups], [bits(tensor) for tensor in held]

    def move(worker: int, step: int, model: nn.Module) -> None:
        assert step == 1 or state_of(worker) == left[worker]
        toys.backward(model, 0, worker, step)
        toys.move(model.parameters(), inner[worker])
        left[worker] = state_of(worker)

    team.run(14, move)
    assert len(team.landed()) > 2


@examples(15)
@given(period=st.integers(1, 20))
def test_the_first_sync_comes_after_exactly_h_steps_and_then_every_h(period: int) -> None:
    team = Team(Numbers([0.0]), Strategy((Rule(every(period), outer=sgd(1.0)),)), 2).run(45)
    assert [step for step, _ in team.launched()] == list(range(period, 46, period))


def test_micro_batches_are_not_steps_and_only_after_step_counts() -> None:
    team = Team(Numbers([0.0]), DATA_PARALLEL, 2)
    team.run(3, tokens=lambda worker, step: 40)
    assert team.syncs[0].state.work[:2] == (3, 120)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_shared_weights_lends_anchors_and_brings_live_back_to_the_bit(
    name: str, dtype: torch.dtype, fails: bool
) -> None:
    team = Team(toys.BufferedMlp().to(dtype), ALL[name], 2).run(11)
    sync, before = team.syncs[1], copy.deepcopy(team.models[1].state_dict())
    try:
        with sync.shared_weights() as model:
            assert model is team.models[1]
            want = {n: tensor.to(model.state_dict()[n].dtype) for n, tensor in shared(sync).items()}
            assert same(dict(model.state_dict()), want)
            if fails:
                raise InterruptedError
    except InterruptedError:
        assert fails
    assert same(dict(team.models[1].state_dict()), before)


@pytest.mark.parametrize("name", ALL)
def test_the_shared_model_is_the_same_on_all_workers(name: str) -> None:
    team = Team(toys.Mlp(), ALL[name], 3)
    for _ in range(14):
        team.run(1, **training(toys.sgd))
        assert len({sync.state.digest() for sync in team.syncs}) == 1


NAMES = st.sampled_from("abc")
TENSORS = st.builds(
    lambda values, dtype, column: torch.tensor(values).to(dtype).reshape((-1, 1) if column else (-1,)),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, float("nan")]), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.booleans(),
)


@examples(150)
@given(one=st.dictionaries(NAMES, TENSORS, max_size=2), other=st.dictionaries(NAMES, TENSORS, max_size=2))
def test_digests_are_equal_if_and_only_if_names_dtypes_shapes_and_bits_are(
    one: dict[str, Tensor], other: dict[str, Tensor]
) -> None:
    shapes = {n: tensor.shape for n, tensor in one.items()} == {n: tensor.shape for n, tensor in other.items()}
    assert (digest(one) == digest(other)) == (shapes and same(one, other))
    assert digest(one) == digest(dict(reversed(copy.deepcopy(one).items())))
    laid_out_otherwise = {n: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for n, tensor in one.items()}
    assert digest(one) == digest(laid_out_otherwise)


class Replacing(nn.Module):
    """A module that assigns a new tensor to its buffer at every step, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("ema", torch.zeros(3, dtype=torch.float64))

    def note(self, worker: int, step: int) -> None:
        self.ema = self.get_buffer("ema") * 0.5 + (worker + 1) * step


def test_a_buffer_that_its_module_replaces_is_averaged_all_the_same() -> None:
    team = Team(Replacing(), DILOCO, 3)
    team.run(2, lambda worker, step, model: model.note(worker, step))
    alike = [model.get_buffer("ema").clone() for model in team.models]
    team.run(1, lambda worker, step, model: model.note(worker, step))
    want = mean([tensor * 0.5 + (worker + 1) * 3 for worker, tensor in enumerate(alike)])
    for model, sync in zip(team.models, team.syncs, strict=True):
        assert torch.allclose(model.get_buffer("ema"), want, rtol=1e-12)
        model.get_submodule("").note(0, 1)
        with sync.shared_weights():
            assert torch.allclose(model.get_buffer("ema"), want, rtol=1e-12)


def test_a_parameter_whose_storage_was_exchanged_is_found_again() -> None:
    team = Team(toys.Mlp(), DILOCO, 2)
    for model in team.models:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    team.run(3)
    assert same(values(team.models[0]), values(team.models[1]))


def test_a_model_that_changed_its_dtype_on_the_way_is_refused_with_a_sentence() -> None:
    team = Team(toys.Mlp(), DILOCO, 1).run(2)
    team.models[0].float()
    with pytest.raises(ModelError, match="another shape, dtype or memory layout"):
        team.run(1)


def test_a_run_without_rules_leaves_the_model_to_its_optimizer() -> None:
    team = Team(toys.BufferedMlp(), Strategy(), 2).run(5)
    for worker, model in enumerate(team.models):
        want = toys.BufferedMlp()
        for step in range(1, 6):
            push(worker, step, want)
        assert same(dict(model.state_dict()), dict(want.state_dict()))
        assert same(dict(team.syncs[worker].state.shared()), dict(want.state_dict()))


def test_alone_is_each_workers_own_lookahead() -> None:
    strategy = Strategy((Rule(every(3), outer=nesterov(0.7, 0.9), mixer=alone()),))
    together = Team(toys.BufferedMlp(), strategy, 3).run(10)
    for worker, model in enumerate(together.models):
        single = Team(toys.BufferedMlp(), strategy, 1)
        single.run(10, lambda _, step, model, worker=worker: push(worker, step, model))
        assert same(dict(model.state_dict()), dict(single.models[0].state_dict()))
    assert all(landed.sent == 0 and landed.peers == (1,) for landed in together.landed(1))


def test_a_round_without_training_changes_no_bit() -> None:
    team = Team(toys.BufferedMlp(), DILOCO, 7)
    before = copy.deepcopy(team.models[0].state_dict())
    team.run(9, still)
    assert all(same(dict(model.state_dict()), before) for model in team.models)

"""The toy problems: the same bits as a module and as a list, and data that is a pure function of its arguments."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.testing import reference, toys

SEED = 3


def frozen() -> nn.Module:
    module = toys.Mlp()
    module.get_parameter("middle.bias").requires_grad_(False)
    return module


@pytest.mark.parametrize("max_norm", [float("inf"), 0.1])
@pytest.mark.parametrize("make", [toys.sgd, toys.adamw])
@pytest.mark.parametrize("toy", [toys.Quadratic, toys.Mlp, toys.TiedMlp, toys.BufferedMlp, frozen])
def test_a_toy_trains_to_the_same_bits_as_a_module_and_as_a_list(
    toy: Callable[[], nn.Module], make: toys.MakeOptimizer, max_norm: float
) -> None:
    module = toy()
    inner = toys.inner_step(toy(), make, SEED, max_norm)
    listed, _ = reference.single(toys.initial(module), steps=10, inner_step=inner)
    optimizer = make(module.parameters())
    for step in range(1, 11):
        toys.backward(module, SEED, 0, step)
        toys.move(module.parameters(), optimizer, max_norm)
    assert toys.same_bits(listed, toys.initial(module))
    assert toys.distance(listed, toys.initial(toy())) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_toy_moved_to_another_dtype_trains_in_it(dtype: torch.dtype) -> None:
    module = toys.BufferedMlp().to(dtype)
    inner = toys.inner_step(module, toys.adamw, SEED)
    trained, _ = reference.single(toys.initial(module), steps=3, inner_step=inner)
    assert {tensor.dtype for tensor in trained} == {dtype}
    assert toys.distance(trained, toys.initial(module)) > 1e-3


def test_training_lowers_the_loss() -> None:
    module = toys.Mlp()
    held_out = [toys.batch(SEED + 1, 0, step) for step in range(20)]
    before = sum(module(*batch).item() for batch in held_out)
    optimizer = toys.adamw(module.parameters())
    for step in range(1, 101):
        toys.backward(module, SEED, 0, step)
        toys.move(module.parameters(), optimizer)
    assert sum(module(*batch).item() for batch in held_out) < 0.7 * before


def test_buffers_note_the_batches_and_leave_the_parameters_alone() -> None:
    module = toys.BufferedMlp()
    inner = toys.inner_step(toys.Mlp(), toys.adamw, SEED)
    plain, _ = reference.single(toys.initial(module), steps=5, inner_step=inner)
    optimizer = toys.adamw(module.parameters())
    running = torch.zeros(toys.FEATURES, dtype=torch.float64)
    for step in range(1, 6):
        toys.backward(module, SEED, 0, step)
        toys.move(module.parameters(), optimizer)
        running = 0.9 * running + 0.1 * toys.batch(SEED, 0, step)[0].mean(0)
    assert toys.same_bits(toys.initial(module), plain)
    assert toys.distance([module.get_buffer("running")], [running]) < 1e-12
    assert module.get_buffer("batches").item() == 5


def test_a_tied_weight_is_one_tensor_under_its_first_name() -> None:
    module = toys.TiedMlp()
    names = [name for name, _ in module.named_parameters()]
    assert "middle.weight" in names
    assert "last.weight" not in names
    assert module.get_parameter("last.weight") is module.get_parameter("middle.weight")
    assert sum(tensor.numel() for tensor in toys.initial(module)) == 61


def test_batches_differ_between_seeds_workers_and_steps_and_repeat_for_the_same_three() -> None:
    keys = [(seed, worker, step) for seed in range(3) for worker in range(3) for step in range(3)]
    batches = {key: toys.batch(*key)[0] for key in keys}
    assert all(torch.equal(toys.batch(*key)[0], x) for key, x in batches.items())
    assert not any(torch.equal(batches[a], batches[b]) for a in keys for b in keys if a < b)


def test_toys_draw_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    module = toys.Mlp(seed=5)
    toys.backward(module, SEED, 0, 1)
    toys.draws(SEED, 0, 1, toys.initial(module))
    assert torch.equal(torch.get_rng_state(), before)


def test_bits_tell_zeros_of_either_sign_apart_and_dtypes_too() -> None:
    zero = torch.zeros(2)
    assert toys.same_bits([zero], [zero.clone()])
    assert not toys.same_bits([zero], [-zero])
    assert not toys.same_bits([zero], [zero.int()])

"""Are the inner optimizers and their schedule those that torch and transformers have, on the parameters promised?"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, get_cosine_schedule_with_warmup

from atoll.errors import CheckpointError, ModelError, UsageError
from atoll.train.inner import AdamW, InnerOptimizer, Muon, autocast, clip_gradients, warmup_cosine
from atoll.train.model import build_model, next_token_loss


def toy() -> nn.Sequential:
    """Float64: then fused and plain kernels may differ by their order of operations only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def tiny() -> LlamaForCausalLM:
    return build_model("tiny", vocab=64, length=16, seed=0)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(inner: InnerOptimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        gradients(model, step)
        inner.set_lr_scale(1 / (1 + step))
        inner.step()
        inner.zero_grad()


def test_adamw_is_that_of_torch_with_decay_on_matrices_only() -> None:
    mine, theirs = toy(), toy()
    run(AdamW(lr=0.01, betas=(0.8, 0.9), weight_decay=0.3, eps=1e-6).build(mine), mine, range(8))
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim == 1]
    plain = [
        torch.optim.AdamW(group, betas=(0.8, 0.9), weight_decay=decay, eps=1e-6, fused=False, foreach=False)
        for group, decay in ((matrices, 0.3), (vectors, 0.0))
    ]
    for step in range(8):
        gradients(theirs, step)
        for each in plain:
            each.param_groups[0]["lr"] = 0.01 / (1 + step)
            each.step()
    for one, other in zip(weights(mine), weights(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_muon_takes_the_hidden_matrices_and_adamw_all_others() -> None:
    model = tiny()
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, adamw = Muon().build(model).optimizers
    assert isinstance(muon, torch.optim.Muon)
    hidden = {names[parameter] for group in muon.param_groups for parameter in group["params"]}
    rest = {names[parameter] for group in adamw.param_groups for parameter in group["params"]}
    assert hidden == {name for name in names.values() if name.endswith("_proj.weight")}
    assert rest == {"model.embed_tokens.weight", "lm_head.weight"} | {name for name in names.values() if "norm" in name}
    assert len(hidden) == 2 * 7


def test_muon_leaves_a_tied_head_to_adamw() -> None:
    config = tiny().config
    config.tie_word_embeddings = True
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    _, adamw = Muon().build(model).optimizers
    assert any(parameter is model.lm_head.weight for group in adamw.param_groups for parameter in group["params"])


def orthogonal(momentum: Tensor) -> Tensor:
    """Torch's own Newton-Schulz: one step of its Muon from zero without momentum, with the adjustment undone."""
    zero = nn.Parameter(torch.zeros_like(momentum))
    zero.grad = momentum
    torch.optim.Muon([zero], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -zero.detach() / math.sqrt(max(1, momentum.shape[0] / momentum.shape[1]))


def test_muon_moves_hidden_matrices_as_the_formula_says_and_the_rest_by_adamw() -> None:
    mine, theirs, beside = tiny(), tiny(), tiny()
    run(Muon(lr=0.02, momentum=0.9, weight_decay=0.1, adamw=AdamW(lr=0.01)).build(mine), mine, range(4))
    run(AdamW(lr=0.01).build(beside), beside, range(4))
    momenta = {name: torch.zeros_like(parameter) for name, parameter in theirs.named_parameters()}
    for step in range(4):
        gradients(theirs, step)
        lr = 0.02 / (1 + step)
        for name, parameter in theirs.named_parameters():
            if name.endswith("_proj.weight"):
                assert parameter.grad is not None
                momenta[name] = 0.9 * momenta[name] + 0.1 * parameter.grad
                scale = math.sqrt(parameter.shape[0] / parameter.shape[1])
                parameter.data = (1 - lr * 0.1) * parameter - lr * scale * orthogonal(momenta[name])
    expected = dict(theirs.named_parameters()) | {
        name: parameter for name, parameter in beside.named_parameters() if not name.endswith("_proj.weight")
    }
    # Newton-Schulz works in bf16, where a last bit of the momentum can move its result by 2^-8 of a singular value.
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=2e-4)


def test_muon_is_bit_for_bit_that_of_torch_on_matrices_at_least_as_tall_as_wide() -> None:
    mine, theirs = tiny(), tiny()
    run(Muon(lr=0.02, momentum=0.9, weight_decay=0.1).build(mine), mine, range(4))
    tall = {
        name: each for name, each in theirs.named_parameters() if "_proj" in name and each.shape[0] >= each.shape[1]
    }
    plain = torch.optim.Muon(tall.values(), lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=False)
    for step in range(4):
        gradients(theirs, step)
        plain.param_groups[0]["lr"] = 0.02 / (1 + step)
        plain.step()
    assert len(tall) == 2 * 6
    moved = dict(mine.named_parameters())
    for name, parameter in tall.items():
        assert torch.equal(moved[name], parameter)


def test_muon_of_a_model_that_does_not_name_its_head_is_refused_in_words() -> None:
    with pytest.raises(ModelError, match="get_output_embeddings"):
        Muon().build(toy())


@pytest.mark.parametrize("inner", [AdamW(), Muon()])
def test_a_model_with_nothing_to_train_is_refused(inner: AdamW | Muon) -> None:
    model = tiny().requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameter"):
        inner.build(model)


@pytest.mark.parametrize("inner", [AdamW(), Muon()])
def test_frozen_parameters_stay(inner: AdamW | Muon) -> None:
    model = tiny()
    model.model.layers[0].requires_grad_(False)
    before = weights(model.model.layers[0])
    run(inner.build(model), model, range(2))
    assert all(map(torch.equal, weights(model.model.layers[0]), before))


@pytest.mark.parametrize("inner", [AdamW(lr=0.01), Muon()])
def test_a_saved_state_goes_on_bit_for_bit(inner: AdamW | Muon) -> None:
    straight, stopped = tiny(), tiny()
    run(inner.build(straight), straight, range(6))
    first = inner.build(stopped)
    run(first, stopped, range(3))
    saved = {name: value.clone() for name, value in first.state_dict().items()}
    second = inner.build(stopped)
    second.load_state_dict(saved)
    run(second, stopped, range(3, 6))
    assert all(map(torch.equal, weights(stopped), weights(straight)))


def test_a_loaded_state_shares_no_memory_with_what_was_loaded() -> None:
    model = tiny()
    inner = AdamW().build(model)
    run(inner, model, range(1))
    saved = {name: value.clone() for name, value in inner.state_dict().items()}
    kept = {name: value.clone() for name, value in saved.items()}
    inner.load_state_dict(saved)
    run(inner, model, range(1, 3))
    assert all(torch.equal(saved[name], kept[name]) for name in saved)


def test_state_is_tensors_named_after_parameters_and_empty_before_the_first_step() -> None:
    model = tiny()
    inner = Muon().build(model)
    assert inner.state_dict() == {}
    run(inner, model, range(1))
    names = set(inner.state_dict())
    assert {"lm_head.weight.exp_avg", "model.layers.1.mlp.up_proj.weight.momentum_buffer"} <= names
    assert (
        len(names) == 14 * 1 + 7 * 3
    )  # 14 hidden matrices with a momentum; two tables and five norms with Adam's three


def test_state_of_another_model_or_optimizer_is_refused() -> None:
    model, other = tiny(), build_model("tiny", vocab=65, length=16, seed=0)
    inner = AdamW().build(other)
    run(inner, other, range(1))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight.exp_avg of shape \(65, 64\)"):
        AdamW().build(model).load_state_dict(inner.state_dict())
    with pytest.raises(CheckpointError, match=r"0\.weight\.exp_avg"):
        AdamW().build(model).load_state_dict({"0.weight.exp_avg": torch.zeros(2, 2)})


def test_values_are_rebuilt_by_their_repr() -> None:
    for value in (AdamW(lr=0.5), Muon(adamw=AdamW(eps=1e-3)), warmup_cosine(3, 9)):
        assert eval(repr(value)) == value


def theirs(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR], steps: int) -> list[float]:
    """The factors a scheduler of transformers gives at steps 0, 1, ..."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, factors = make(optimizer), list[float]()
    for _ in range(steps):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("warmup", [0, 1, 10, 100])
def test_the_schedule_is_that_of_transformers_which_opendiloco_uses(warmup: int) -> None:
    expected = theirs(lambda optimizer: get_cosine_schedule_with_warmup(optimizer, warmup, 100), 100)
    assert [warmup_cosine(warmup, 100)(step) for step in range(100)] == pytest.approx(expected, abs=1e-12)


def test_the_schedule_stays_at_0_after_the_last_step() -> None:
    assert [warmup_cosine(10, 100)(step) for step in (100, 150, 10**9)] == [0.0] * 3


@pytest.mark.parametrize("arguments", [(-1, 10), (0, 0)])
def test_a_schedule_that_makes_no_sense_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="warm-up"):
        warmup_cosine(*arguments)


@pytest.mark.parametrize("most", [0.5, 1e6])
def test_clipping_bounds_the_joint_norm_and_keeps_directions(most: float) -> None:
    model = toy()
    gradients(model, 0)
    before = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    norm = clip_gradients(model.parameters(), most)
    after = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(norm, before.norm())
    # torch divides by norm + 1e-6 and not by the norm
    torch.testing.assert_close(after, before * min(1.0, most / float(norm)), rtol=1e-5, atol=0)


def test_bf16_autocast_leaves_parameters_in_fp32_and_the_loss_near() -> None:
    model = tiny()
    batch = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    with autocast("bf16"):
        narrow = next_token_loss(model, batch)
        assert model(batch).logits.dtype == torch.bfloat16
    with autocast("fp32"):
        wide = next_token_loss(model, batch)
    assert narrow.dtype == torch.float32
    assert not torch.equal(narrow, wide)
    torch.testing.assert_close(narrow, wide, rtol=0.01, atol=0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="fp32, bf16"):
        autocast("fp8")

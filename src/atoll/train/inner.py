"""Inner optimizers, the schedule of their learning rate, clipping and autocast: what happens within an inner step.

`AdamW(...)` and `Muon(...)` are values that a run's `repr` rebuilds; `build(model)` makes what moves the parameters. No
sync touches its state, and its learning rate is set from the step number, so resuming needs no scheduler state.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from atoll.errors import CheckpointError, ModelError, UsageError


class InnerOptimizer:
    """Optimizers of torch that share a model's parameters among them and step as one.

    Args: model: whose parameter names the state is saved under. optimizers: each parameter in at most one of them.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self._parameters = dict(model.named_parameters())
        self._peaks = [(group, float(group["lr"])) for each in optimizers for group in each.param_groups]

    def set_lr_scale(self, factor: float) -> None:
        """Let the coming steps use `factor` times the peak learning rate."""
        for group, peak in self._peaks:
            group["lr"] = peak * factor

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for each in self.optimizers:
            each.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizers' own tensors, not copies, by `parameter.slot`, such as `lm_head.weight.exp_avg`.

        Empty before the first step. Learning rates and the like are not in it: they belong to the configuration.
        """
        return {
            f"{name}.{slot}": value
            for name, parameter in self._parameters.items()
            for each in self.optimizers
            if parameter in each.state
            for slot, value in cast(dict[str, Tensor], each.state[parameter]).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state that `state_dict` gave; its tensors are copied.

        Raises: CheckpointError if it is not of this model.
        """
        owners: dict[Tensor, torch.optim.Optimizer] = {
            parameter: each for each in self.optimizers for group in each.param_groups for parameter in group["params"]
        }
        for each in self.optimizers:
            each.state.clear()
        for key, value in state.items():
            name, _, slot = key.rpartition(".")
            parameter = self._parameters.get(name)
            if parameter is None or parameter not in owners or (value.ndim and value.shape != parameter.shape):
                raise CheckpointError(
                    f"the checkpoint holds inner optimizer state {key} of shape {tuple(value.shape)}, which fits no "
                    "parameter of this model; resume with the model and inner optimizer that wrote it"
                )
            owners[parameter].state[parameter][slot] = value.detach().to(parameter.device, copy=True)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (`torch.optim.AdamW`, fused).

    Only parameters with two or more dimensions decay; norms and biases do not. The DiLoCo papers state a decay of 0.1
    and not which parameters; OpenDiLoCo's code decays all of them.

    Args: lr: peak learning rate; the default suits the sizes for a CPU, the papers' 60 M to 400 M models take 4e-4.
    betas: decay per step of the first and second moment. weight_decay: times lr, per step. eps: added to the root of
    the second moment.

    Example:
        >>> inner = AdamW(lr=4e-4).build(nn.Linear(2, 2))
        >>> inner.step()
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8

    def build(self, model: nn.Module) -> InnerOptimizer:
        """An optimizer of all trainable parameters.

        Raises: ModelError if there are none.
        """
        return InnerOptimizer(model, self.over(_trainable(model).values()))

    def over(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """The same for some parameters."""
        matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        return torch.optim.AdamW(filled, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True)
class Muon:
    """Muon for the hidden matrices (`torch.optim.Muon`), AdamW for embedding, head and all that is not a matrix.

    With G the gradient and NS the Newton-Schulz iteration that sets all singular values to about 1,

        M <- momentum M + (1 - momentum) G
        θ <- (1 - lr weight_decay) θ - lr sqrt(fan_out / fan_in) NS(M)

    without Nesterov's look-ahead, as in MuLoCo. The root turns a spectral norm of 1 into an RMS-to-RMS norm of 1;
    torch's "original" adjustment is max(1, root), so matrices wider than tall get the rest in a learning rate of their
    own. MuLoCo's code takes other Newton-Schulz coefficients, and the same learning rate for AdamW.

    Args: lr: peak learning rate of the hidden matrices. momentum. weight_decay: times lr, per step; below AdamW's, as
    lr is above. adamw: for the rest; MuLoCo's betas by default.

    The model must say which weight is its head: `get_output_embeddings()`, as models of transformers do.
    """

    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 0.01
    adamw: AdamW = AdamW(betas=(0.9, 0.99))

    def build(self, model: nn.Module) -> InnerOptimizer:
        """An optimizer of all trainable parameters.

        Raises: ModelError if there are none, or none of them is a hidden matrix, or the model does not name its head.
        """
        trainable = _trainable(model)
        outer = _tables(model)
        hidden = [each for each in trainable.values() if each.ndim == 2 and each not in outer]
        if not hidden:
            raise ModelError("Muon was asked for, but the model has no hidden matrix to train; use AdamW")
        rest = [each for each in trainable.values() if each.ndim != 2 or each in outer]
        by_root = dict[float, list[nn.Parameter]]()
        for each in hidden:
            by_root.setdefault(min(1.0, math.sqrt(each.shape[0] / each.shape[1])), []).append(each)
        groups = [
            {"params": matrices, "lr": self.lr * root, "weight_decay": self.weight_decay / root}
            for root, matrices in by_root.items()
        ]
        muon = torch.optim.Muon(groups, momentum=self.momentum, nesterov=False, adjust_lr_fn="original")
        return InnerOptimizer(model, muon, self.adamw.over(rest)) if rest else InnerOptimizer(model, muon)


Inner = AdamW | Muon
"""How a worker trains."""


class _NamesItsHead(Protocol):
    def get_output_embeddings(self) -> nn.Module | None: ...


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ModelError(f"the model {type(model).__name__} has no trainable parameter; unfreeze some")
    return found


def _tables(model: nn.Module) -> set[nn.Parameter]:
    """Weights with a row per token."""
    if not hasattr(model, "get_output_embeddings"):
        raise ModelError(
            f"Muon must leave a model's head to AdamW, but {type(model).__name__} does not name its own; "
            "give it a method get_output_embeddings() that returns the head, or None"
        )
    head = cast(_NamesItsHead, model).get_output_embeddings()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {parameter for module in [*embeddings, head] if module is not None for parameter in module.parameters()}


@dataclass(frozen=True)
class warmup_cosine:
    """Linear warm-up, then a cosine down to 0: over the whole run, never restarted by a sync.

        factor(t) = t / warmup                                      for t < warmup
                    (1 + cos(π x)) / 2                              after, x = (t - warmup) / (steps - warmup)

    with t the inner steps done before this one. As in OpenDiLoCo, which takes transformers' schedule; the first step
    of a warm-up therefore has factor 0 and only fills the moments. MuLoCo ends at 0.1 instead.

    Args: warmup, steps: in inner steps, of the whole run.

    Example:
        >>> [warmup_cosine(2, 6)(t) for t in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    warmup: int
    steps: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.steps < 1:
            raise UsageError(
                f"{self.warmup} warm-up steps in a run of {self.steps} were asked for; give a warm-up of 0 or more, "
                "and at least one step"
            )

    def __call__(self, step: int) -> float:
        """The factor of the learning rate, in [0, 1], after `step` inner steps."""
        if step < self.warmup:
            return step / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients down together so that their joint 2-norm is at most `max_norm`.

    Returns the norm before, a scalar still on its device. A norm that is not finite makes every gradient so.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
"""What the forward pass computes in, by name; parameters keep their own dtype."""


def autocast(precision: str, device: str = "cpu") -> AbstractContextManager[object]:
    """A context in which a forward pass computes in a precision.

    Args: precision: one of `PRECISIONS`. device: type of the model's device.

    Raises: UsageError if there is no such precision.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"there is no precision {precision!r}; give one of {', '.join(PRECISIONS)}")
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device, dtype)

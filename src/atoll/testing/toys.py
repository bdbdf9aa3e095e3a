"""Small deterministic problems in float64, trained to the same bits as an `nn.Module` and as a plain list of tensors.

A toy's `forward(x, y)` returns its loss. The two ways to train worker m on it share every operation:

    module:  backward(module, seed, m, step); move(parameters, optimizer)
    list:    inner_step(module, adamw, seed)(m, step, params)       the callback of `atoll.testing.reference`

where `params = initial(module)` and `optimizer = adamw(module.parameters())`. A module moved to another dtype trains in
that dtype. Nothing here draws from torch's global generator.
"""

import copy
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.testing.reference import Gradient, InnerStep, Update

FEATURES = 3
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Quadratic(nn.Module):
    """Linear least squares: the loss mean((x·w - y)²) / 2 is quadratic in the one parameter `w` [3].

    >>> Quadratic()(*batch(seed=0, worker=0, step=1)).shape
    torch.Size([])
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, FEATURES, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of one batch, x [b, 3] and y [b]."""
        return (x.to(self.w.dtype) @ self.w - y.to(self.w.dtype)).square().mean() / 2


class Mlp(nn.Module):
    """A smooth regression network, 3-5-5-5-1 with tanh: `first`, `middle`, `last`, `head`; 8 tensors, 86 numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        sizes = {"first": (FEATURES, 5), "middle": (5, 5), "last": (5, 5), "head": (5, 1)}
        generator = torch.Generator().manual_seed(seed)
        for name, (inputs, outputs) in sizes.items():
            layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64)
            for parameter in layer.parameters():
                parameter.data.normal_(std=inputs**-0.5, generator=generator)
            self.add_module(name, layer)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of one batch, x [b, 3] and y [b]."""
        *hidden, head = self.children()
        h = x.to(next(self.parameters()).dtype)
        for layer in hidden:
            h = layer(h).tanh()
        return (head(h).squeeze(1) - y.to(h.dtype)).square().mean() / 2


class TiedMlp(Mlp):
    """`Mlp` whose `last.weight` is `middle.weight`: seven parameter tensors, 61 numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.get_submodule("last").register_parameter("weight", self.get_parameter("middle.weight"))


class BufferedMlp(Mlp):
    """`Mlp` with the buffers of a batch norm: `running`, a mean of the inputs [3], and `batches`, an integer count.

    Both are written in training mode and never read there, so the parameters train exactly as those of `Mlp`.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("running", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The scalar loss of one batch; in training mode the buffers take note of it."""
        if self.training:
            self.get_buffer("running").mul_(0.9).add_(x.mean(0) * 0.1)
            self.get_buffer("batches").add_(1)
        return super().forward(x, y)


def batch(seed: int, worker: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """One inner step's x [size, 3] and y [size], a pure function of its arguments; a worker's targets are its own."""
    generator = torch.Generator().manual_seed((seed * 1009 + worker) * 100_003 + step)
    x = torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
    noise = torch.randn(size, dtype=torch.float64, generator=generator)
    return x, x.sum(1).sin() + 0.3 * worker + 0.1 * noise


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An inner SGD without momentum, learning rate 0.05."""
    return torch.optim.SGD(params, lr=0.05)


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An inner AdamW, learning rate 0.01, betas (0.9, 0.95), weight decay 0.1."""
    return torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def initial(module: nn.Module) -> list[Tensor]:
    """Copies of the trainable parameters in the order of `named_parameters`, a tied one once, under its first name."""
    return [parameter.detach().clone() for parameter in module.parameters() if parameter.requires_grad]


def draws(seed: int, worker: int, step: int, like: list[Tensor]) -> list[Tensor]:
    """Standard normal tensors of the shapes and dtypes of `like`, a pure function of the first three arguments."""
    generator = torch.Generator().manual_seed((seed * 1009 + worker) * 100_003 + step)
    return [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for tensor in like]


def pushes(seed: int) -> InnerStep:
    """Inner steps blind to the parameters, θ ← θ - draws(seed, worker, step) / 100: the deltas are known beforehand."""

    def push(worker: int, step: int, params: list[Tensor]) -> None:
        for tensor, displacement in zip(params, draws(seed, worker, step, params), strict=True):
            tensor.sub_(displacement / 100)

    return push


def same_bits(got: list[Tensor], want: list[Tensor]) -> bool:
    """Whether the tensors agree in dtype and in every bit: +0 is not -0 here, and a NaN is itself."""
    return [tensor.dtype for tensor in got] == [tensor.dtype for tensor in want] and all(
        torch.equal(g.flatten().view(torch.uint8), w.flatten().view(torch.uint8))
        for g, w in zip(got, want, strict=True)
    )


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """|got - want| / |want|, the Euclidean norms taken over all tensors together, in float64."""
    flat = [torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (got, want)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def backward(module: nn.Module, seed: int, worker: int, step: int) -> None:
    """Write the gradient of this step's loss into the module's parameters."""
    module.zero_grad()
    module(*batch(seed, worker, step)).backward()


def move(params: Iterable[Tensor], optimizer: torch.optim.Optimizer, max_norm: float = math.inf) -> None:
    """Clip the gradients in `.grad` to `max_norm` (infinite: a factor of exactly one) and take the optimizer's step."""
    nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()


def inner_step(module: nn.Module, make: MakeOptimizer, seed: int, max_norm: float = math.inf) -> InnerStep:
    """The reference loops' callback: one inner step on a list of tensors, by the worker's own optimizer.

    `module` gives the form of the problem; of its values only frozen parameters and buffers count, one copy a worker.
    """
    optimizers: dict[int, torch.optim.Optimizer] = {}
    shells: dict[int, nn.Module] = {}

    def step_of(worker: int, step: int, params: list[Tensor]) -> None:
        if worker not in optimizers:
            optimizers[worker], shells[worker] = make(params), copy.deepcopy(module)
        _set_grads(params, _gradient(shells[worker], params, seed, worker, step))
        move(params, optimizers[worker], max_norm)

    return step_of


def gradient(module: nn.Module, seed: int) -> Gradient:
    """The first callback of `reference.data_parallel`: one worker's gradients at the given parameters."""

    def gradient_of(worker: int, step: int, params: list[Tensor]) -> list[Tensor]:
        return _gradient(module, params, seed, worker, step)

    return gradient_of


def update(make: MakeOptimizer, max_norm: float = math.inf) -> Update:
    """The second callback of `reference.data_parallel`: clip the mean gradient, then take the optimizer's step."""
    optimizers: list[torch.optim.Optimizer] = []

    def update_with(step: int, params: list[Tensor], grads: list[Tensor]) -> None:
        if not optimizers:
            optimizers.append(make(params))
        _set_grads(params, grads)
        move(params, optimizers[0], max_norm)

    return update_with


def _gradient(module: nn.Module, params: list[Tensor], seed: int, worker: int, step: int) -> list[Tensor]:
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    leaves = [tensor.detach().requires_grad_() for tensor in params]
    loss = functional_call(module, dict(zip(names, leaves, strict=True)), batch(seed, worker, step))
    return list(torch.autograd.grad(loss, leaves))


def _set_grads(params: list[Tensor], grads: list[Tensor]) -> None:
    for tensor, grad in zip(params, grads, strict=True):
        tensor.grad = grad

"""One worker: a replica of the model, its data, its inner optimizer and its synchronizer."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atoll.sync.synchronizer import Synchronizer
from atoll.train.inner import autocast, clip_gradients, warmup_cosine
from atoll.train.model import build_model, load_pretrained, next_token_loss
from atoll.train.run import Run
from atoll.train.shards import Shard
from atoll.wire import PeerGroup


class Worker:
    """What one worker does in an inner step, in two halves: `backward` before gradients are shared, `update` after.

    Random numbers of the forward pass (dropout) come from a generator state of the worker's own, so workers that take
    turns in one process draw what they would draw in processes of their own.

    Args: run: what to do; model: this worker's own, on its device; shard: its data; share: its part of all the data (1
    on average); group.
    """

    def __init__(self, run: Run, model: nn.Module, shard: Shard, share: float, group: PeerGroup) -> None:
        self.run = run
        self.number = group.membership.me
        self.precision = run.precision_of(self.number)
        self.model = model
        self.shard = shard
        self.inner = run.method.inner.build(self.model)
        self.lr_scale = warmup_cosine(run.warmup, run.steps)
        self.sync = Synchronizer(self.model, run.method.strategy, group, share=share)
        self.loss: Tensor = torch.zeros(())
        seed = (run.seed << 16) + self.number
        self._random = [torch.Generator(device).manual_seed(seed).get_state() for device in self._drawing()]

    def backward(self) -> int:
        """Forward and backward over all micro-batches: leaves the mean gradient and `loss`. Returns the tokens
        trained."""
        tokens, losses = 0, list[Tensor]()
        batches = self.run.accumulate * self.run.load_of(self.number)
        with self._drawing_its_own():
            for _ in range(batches):
                batch = self.shard.next_batch().to(self.run.device, non_blocking=True)
                with autocast(self.precision, self.run.device):
                    loss = next_token_loss(self.model, batch) / batches
                loss.backward()  # pyright: ignore[reportUnknownMemberType]  # torch leaves its signature untyped
                losses.append(loss.detach())
                tokens += batch[:, 1:].numel()
        self.loss = torch.stack(losses).sum()
        return tokens

    def update(self, done: int) -> None:
        """Clip, set the learning rate, move, forget the gradient.

        Args: done: inner steps that the fastest worker could have done before this one. By them the learning rate goes,
        so that workers who are slower, or wait for such, come to the end of the schedule with the others.
        """
        clip_gradients(self.model.parameters(), self.run.clip)
        self.inner.set_lr_scale(self.lr_scale(done))
        self.inner.step()
        self.inner.zero_grad()

    def join(self, other: "Worker") -> None:
        """Enter a run that goes on: anchors, outer state and counts are another worker's, live is the anchor, and the
        inner optimizer and what a codec remembers begin anew. The share of the data stays this worker's."""
        self.sync.state.take_over(other.sync.state.meta(), dict(other.sync.state.tensors()))
        self.begin_anew()
        if self.sync.state.gradient_tracks():
            # all take one and the same step, so live and the inner optimizer are the shared model's
            theirs = other._model_tensors()
            for name, tensor in self._model_tensors().items():
                tensor.detach().copy_(theirs[name].detach())
            self.inner.load_state_dict({name: tensor.clone() for name, tensor in other.inner.state_dict().items()})

    def begin_anew(self) -> None:
        """Forget what the inner optimizer knows: what it moved is another worker's now."""
        self.inner = self.run.method.inner.build(self.model)

    def save(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything that decides what comes next, as JSON-able values and tensors. Exchanges in flight must have been
        collected."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in self._model_tensors().items()}
        tensors |= {f"sync.{name}": tensor for name, tensor in self.sync.state.tensors()}
        tensors |= {f"random.{place}": state for place, state in enumerate(self._random)}
        tensors |= {f"inner.{name}": tensor for name, tensor in self.inner.state_dict().items()}
        return {"sync": self.sync.state.meta(), "shard": self.shard.state_dict()}, tensors

    def load(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up where `save` left off."""
        for name, tensor in self._model_tensors().items():
            tensor.detach().copy_(tensors[f"model.{name}"])
        self.sync.state.load(meta["sync"], under("sync.", tensors))
        self.inner.load_state_dict(under("inner.", tensors))
        self.shard.load_state_dict(meta["shard"])
        self._random = [tensors[f"random.{place}"] for place in range(len(self._random))]

    def _drawing(self) -> list[str]:
        """Devices whose generators a forward pass may draw from."""
        return ["cpu"] if self.run.device == "cpu" else ["cpu", self.run.device]

    @contextmanager
    def _drawing_its_own(self) -> Generator[None]:
        """Let the devices' global generators continue where this worker left them."""
        outside = [_state(device) for device in self._drawing()]
        _put(self._drawing(), self._random)
        try:
            yield
        finally:
            self._random = [_state(device) for device in self._drawing()]
            _put(self._drawing(), outside)

    def _model_tensors(self) -> dict[str, Tensor]:
        saved = self.model.state_dict(keep_vars=True)
        return {
            name: tensor
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]
            if name in saved
        }


def make_model(run: Run, vocab: int, build: Callable[[], nn.Module] | None) -> nn.Module:
    """The model of one worker on the run's device: a module of the caller's own, a pretrained one, or a named size.

    Raises: ModelError.
    """
    if build:
        model = build()
    elif run.init:
        model = load_pretrained(run.init, vocab=vocab, length=run.data.length)
    else:
        model = build_model(run.model, vocab=vocab, length=run.data.length, seed=run.seed)
    return nn.Module.to(model, run.device)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def _put(devices: list[str], states: list[Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)

"""One worker: a replica of the model, its data, its inner optimizer and its synchronizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.sync.synchronizer import Synchronizer
from atoll.train.checkpoint import pack, unpack
from atoll.train.inner import autocast, clip_gradients, warmup_cosine
from atoll.train.model import build_model, load_pretrained, next_token_loss
from atoll.train.run import Run
from atoll.train.shards import Shard
from atoll.wire import PeerGroup


class Worker:
    """What one worker does in an inner step, in two halves: `backward` before gradients are shared, `update` after.

    Random numbers of the forward pass (dropout) come from a generator state of the worker's own, so workers that take
    turns in one process draw what they would draw in processes of their own.

    Args: run: what to do; vocab: of the tokenizer; shard: this worker's data; share: its part of all the data (1 on
    average); group.
    """

    def __init__(self, run: Run, vocab: int, shard: Shard, share: float, group: PeerGroup) -> None:
        self.run = run
        self.number = group.membership.me
        self.shard = shard
        if run.init:
            self.model = load_pretrained(run.init, vocab=vocab, length=run.data.length)
        else:
            self.model = build_model(run.model, vocab=vocab, length=run.data.length, seed=run.seed)
        self.inner = run.method.inner.build(self.model)
        self.lr_scale = warmup_cosine(run.warmup, run.steps)
        self.sync = Synchronizer(self.model, run.method.strategy, group, share=share)
        self.loss: Tensor = torch.zeros(())
        self._random = torch.Generator().manual_seed((run.seed << 16) + self.number).get_state()

    @property
    def step(self) -> int:
        """Inner steps done."""
        return self.sync.state.step

    def backward(self) -> int:
        """Forward and backward over all micro-batches: leaves the mean gradient and `loss`. Returns the tokens
        trained."""
        tokens, losses = 0, list[Tensor]()
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random)
        for _ in range(self.run.accumulate):
            batch = self.shard.next_batch()
            with autocast(self.run.precision):
                loss = next_token_loss(self.model, batch) / self.run.accumulate
            loss.backward()  # pyright: ignore[reportUnknownMemberType]  # torch leaves its signature untyped
            losses.append(loss.detach())
            tokens += batch[:, 1:].numel()
        self._random = torch.get_rng_state()
        torch.set_rng_state(outside)
        self.loss = torch.stack(losses).sum()
        return tokens

    def update(self) -> None:
        """Clip, set the learning rate of this step of the whole run, move, forget the gradient."""
        clip_gradients(self.model.parameters(), self.run.clip)
        self.inner.set_lr_scale(self.lr_scale(self.step))
        self.inner.step()
        self.inner.zero_grad()

    def save(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything that decides what comes next, as JSON-able values and tensors. Exchanges in flight must have been
        collected."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in self._model_tensors().items()}
        tensors |= {f"sync.{name}": tensor for name, tensor in self.sync.state.tensors()}
        tensors["random"] = self._random
        inner, inner_tensors = pack(self.inner.state_dict(), "inner")
        meta = {"sync": self.sync.state.meta(), "inner": inner, "shard": self.shard.state_dict(), "step": self.step}
        return meta, tensors | inner_tensors

    def load(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up where `save` left off."""
        for name, tensor in self._model_tensors().items():
            tensor.detach().copy_(tensors[f"model.{name}"])
        prefix = "sync."
        self.sync.state.load(
            meta["sync"],
            {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)},
        )
        self.inner.load_state_dict(unpack(meta["inner"], tensors))
        self.shard.load_state_dict(meta["shard"])
        self._random = tensors["random"]

    def _model_tensors(self) -> dict[str, Tensor]:
        saved = self.model.state_dict(keep_vars=True)
        return {
            name: tensor
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]
            if name in saved
        }

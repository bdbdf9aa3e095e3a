"""Runs of a tenth of a second: a model of 5,000 numbers with the names that methods select by, on the made-up text."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.peers.faults import Dropping
from atoll.peers.memory import Hub
from atoll.train.checkpoint import Checkpoints
from atoll.train.inner import AdamW
from atoll.train.run import Data, Method, Result, Run
from atoll.train.trainer import train


class Reef(nn.Module):
    """Logits from one token through three residual layers: embedding and head for Muon and gossip to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed_tokens = nn.utils.skip_init(nn.Embedding, 256, 8)
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, 8, 8) for _ in range(3))
        self.lm_head = nn.utils.skip_init(nn.Linear, 8, 256, bias=False)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.lm_head(hidden)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def small(text: Path, method: Method, **options: Any) -> Run:
    """Two workers, twelve steps; AdamW that moves fast, unless the method brings another."""
    inner = AdamW(lr=1e-2) if isinstance(method.inner, AdamW) else method.inner
    run = Run(
        replace(method, inner=inner), data=Data(f"text:{text}", batch=2, length=16), workers=2, steps=12, warmup=2
    )
    return replace(run, **options)


def go(run: Run, **options: Any) -> Result:
    """Train all workers in turns, quietly, with the faults that the run asks for."""
    hub = Hub(run.workers, Dropping(run.faults.loss, run.faults.seed) if run.faults.loss else None)
    groups = [hub.group(worker) for worker in range(run.workers)]
    return train(run, groups, **{"build": Reef, "quiet": True} | options)


def records(out: Path) -> list[dict[str, Any]]:
    """What a run wrote down, without times."""
    timed = ("seconds", "tokens_per_s")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def everything(out: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint of all workers, byte for byte."""
    checkpoints = Checkpoints(out)
    step = checkpoints.steps()[-1]
    parts = sorted((checkpoints.folder / f"step-{step:08d}").glob("*.safetensors"))
    read = [checkpoints.read(step, worker)[1] for worker in range(len(parts))]
    named = {f"{worker}.{name}": tensor for worker, tensors in enumerate(read) for name, tensor in tensors.items()}
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in named.items()}


def copies(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, save_every: int) -> tuple[Result, dict[int, Path]]:
    """Train in `out`, and copy the directory whenever a checkpoint is complete, as a kill would leave it.

    Returns the result, and the copies by step.
    """
    found: dict[int, Path] = {}
    real = Checkpoints.complete

    def complete(checkpoints: Checkpoints, step: int, workers: Iterable[int]) -> None:
        real(checkpoints, step, workers)
        found[step] = Path(copytree(out, out.with_name(f"{out.name}-{step}")))

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "complete", complete)
        return go(run, out=out, save_every=save_every), found


def check_resumes(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, save_every: int = 3) -> dict[int, Path]:
    """Resume from every checkpoint: all that comes out is what the uninterrupted run gave. Returns the copies."""
    whole, found = copies(run, out, monkeypatch, save_every)
    for step, cut in found.items():
        again = go(run, out=cut, save_every=save_every, resume=True)
        assert replace(again, wall_s=whole.wall_s) == whole, step
        assert records(cut) == records(out), step
        assert everything(cut) == everything(out), step
    return found

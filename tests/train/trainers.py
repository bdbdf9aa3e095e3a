"""Small problems for the Trainer of transformers, and what the tests of SyncCallback share."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from atoll.trees import digest

BATCH, CLIP, LR, STEPS = 4, 0.05, 0.02, 11  # a clip low enough to bite at every step, and no multiple of any period
Data = list[dict[str, Tensor]]


class Net(nn.Module):
    """Regression with two blocks (for `strided`), dropout (for the state of torch's generator) and a running mean."""

    seen: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 1)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(3))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.5, generator=generator)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.1)
        for block in self.blocks:
            x = self.dropout(block(x).tanh())
        return {"loss": (self.head(x) - labels).square().mean()}


def data_of(worker: int, batches: int) -> Data:
    generator = torch.Generator().manual_seed(worker)
    x = torch.randn(batches * BATCH, 3, generator=generator)
    return [{"x": row, "labels": row.sum(0, keepdim=True).sin() + worker} for row in x]


def trainer(
    out: Path, callbacks: list[TrainerCallback], *, data: Data, model: nn.Module | None = None, **options: Any
) -> Trainer:
    defaults: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "no", "max_grad_norm": CLIP}
    args = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **defaults | options,
    )
    return Trainer(model or Net(), args, train_dataset=data, eval_dataset=data_of(7, 2), callbacks=callbacks)


def held(model: nn.Module) -> str:
    return digest(dict(model.named_parameters()) | dict(model.named_buffers()))


class Watch(TrainerCallback):
    """Notes every evaluation loss, and the digest of live weights at each step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.live: list[str] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses[state.global_step] = kwargs["metrics"]["eval_loss"]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.live.append(digest(kwargs["model"].named_parameters()))


def loss_on(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return model.eval()(*(torch.stack([row[name] for row in data]) for name in ("x", "labels")))["loss"].item()

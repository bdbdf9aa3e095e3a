"""Held-out loss."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from atoll.train.model import next_token_loss


def held_out_loss(model: nn.Module, batches: Sequence[Tensor], precision: AbstractContextManager[object]) -> float:
    """Mean loss in nats per token over `batches` of [batch, length + 1] tokens, each token weighing the same; the
    model's mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), precision:
            losses = torch.stack([next_token_loss(model, batch).double() for batch in batches])
    finally:
        model.train(training)
    sizes = torch.tensor([batch[:, 1:].numel() for batch in batches], dtype=torch.float64)
    return float((losses.cpu() * sizes).sum() / sizes.sum())

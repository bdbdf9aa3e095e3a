"""How fast is `atoll train single` beside a loop that anyone would write?

The same model, data, optimizer, clipping and schedule; the loop knows nothing of workers, rounds, records or resuming,
and logs nothing. Both are timed over their inner steps only: loading data, building the model and evaluation are not
in it.
"""

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from atoll.peers.memory import Hub
from atoll.recipes.methods import single
from atoll.train.inner import AdamW
from atoll.train.model import build_model
from atoll.train.run import Data, Run
from atoll.train.trainer import train
from bench.measure import Figure

GOAL = 0.97
VOCAB = 256


def figures(
    size: str = "tiny", steps: int = 100, turns: int = 9, threads: tuple[int, ...] = (1, 2)
) -> Iterator[Figure]:
    """The library's tokens per second, as a ratio of the loop's, at each number of threads."""
    threads_before = torch.get_num_threads()
    text = bytes(torch.randint(97, 123, (1 << 21,), generator=torch.Generator().manual_seed(0)).tolist())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "letters.txt"
        path.write_bytes(text)
        try:
            for count in threads:
                data = Data(source=f"text:{path}")
                run = Run(single(), model=size, data=data, workers=1, steps=steps, threads=count)
                # The first turn warms up.
                pairs = [_turn(run, text) for _ in range(turns + 1)][1:]
                what = f"{size}, {count} thread{'s' if count > 1 else ''}"
                yield Figure(what, [bare / mine for mine, bare in pairs], "of the bare loop's tokens/s", least=GOAL)
                yield Figure(what, [1e3 * mine / steps for mine, _ in pairs], "ms per step")
        finally:
            torch.set_num_threads(threads_before)


def _turn(run: Run, text: bytes) -> tuple[float, float]:
    return train(run, [Hub(1).group(0)], quiet=True).wall_s, bare_loop(run, torch.tensor(list(text), dtype=torch.uint8))


def bare_loop(run: Run, tokens: Tensor) -> float:
    """Seconds of a plain loop over `run.steps` steps."""
    batch, length = run.data.batch, run.data.length
    model = build_model(run.model, vocab=VOCAB, length=length, seed=run.seed)
    inner = AdamW()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=inner.lr,
        betas=inner.betas,
        eps=inner.eps,
        fused=True,
    )

    def factor(step: int) -> float:
        if step < run.warmup:
            return step / run.warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - run.warmup) / max(1, run.steps - run.warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rows = tokens[: tokens.numel() // (length + 1) * (length + 1)].view(-1, length + 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(run.seed))
    start = time.perf_counter()
    for step in range(run.steps):
        taken = rows[order[torch.arange(step * batch, (step + 1) * batch) % len(rows)]].long()
        logits = model(input_ids=taken[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), taken[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return time.perf_counter() - start

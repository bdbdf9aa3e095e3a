"""DiLoCo in a training loop of your own: four workers learn to predict the next byte of the standard library's source.

    python examples/own_loop.py                                      the workers are threads of this process
    torchrun --standalone --nproc-per-node 4 examples/own_loop.py    the workers are processes

Both print the digest of each worker's shared model, and it is the same one.
"""

import argparse
import copy
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.peers.memory import Hub
from atoll.peers.torchdist import TorchGroup
from atoll.recipes.methods import diloco
from atoll.sync.synchronizer import Synchronizer
from atoll.trees import digest
from atoll.wire import PeerGroup

CONTEXT, BATCH = 8, 64
STRATEGY = diloco(period=20).strategy


def read_text() -> Tensor:
    """About a megabyte of Python, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:64]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def make_model() -> nn.Module:
    """Any module will do, as long as all workers start from the same values."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    )


def train(model: nn.Module, group: PeerGroup, text: Tensor, steps: int) -> str:
    """One worker, with an optimizer and a shard of the text of its own."""
    worker, workers = group.membership.me, len(group.membership.workers)
    shard = text.chunk(workers)[worker]
    draw = torch.Generator().manual_seed(worker)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with Synchronizer(model, STRATEGY, group) as sync:
        for step in range(steps):
            windows = shard.unfold(0, CONTEXT + 1, 1)
            batch = windows[torch.randint(len(windows), (BATCH,), generator=draw)]
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()
            sync.before_step()  # averages gradients, if the strategy says so
            inner.step()
            inner.zero_grad()
            sync.after_step(tokens=BATCH)  # all communication of DiLoCo happens here, every 20 steps
            if worker == 0 and step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    # by all workers: with some methods it is a mean over them
    with sync.shared_weights() as shared, torch.no_grad():
        batch = text.unfold(0, CONTEXT + 1, 997)
        loss = nn.functional.cross_entropy(shared(batch[:, :-1]), batch[:, -1])
        ended = digest(shared.state_dict())
    return f"worker {worker}: loss of the shared model {loss.item():.3f}, digest {ended}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=4, help="threads; torchrun says how many processes")
    options = parser.parse_args()
    torch.set_num_threads(1)  # part of what decides the bits
    model, text = make_model(), read_text()
    if torch.distributed.is_torchelastic_launched():
        with TorchGroup.connect() as group:
            print(train(model, group, text, options.steps))
        return
    hub = Hub(options.workers)
    with ThreadPoolExecutor(options.workers) as pool:
        runs = [
            pool.submit(train, copy.deepcopy(model), hub.group(worker), text, options.steps)
            for worker in range(options.workers)
        ]
    for run in runs:
        print(run.result())


if __name__ == "__main__":
    main()

"""What does it cost to train on virtual time?

Eight workers of one process on a simulated network, beside a bare PyTorch loop that takes as many steps of the same
model (see `bench.throughput`), eight times over. Loading data, building models and evaluation are in neither.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from atoll.cli.simulate import Scene, simulated
from atoll.recipes.methods import METHODS
from atoll.sim.network import Between, Island, Network
from atoll.train.run import Data, Run
from bench.measure import Figure
from bench.throughput import bare_loop

WORKERS = 8


def figures(
    size: str = "tiny", steps: int = 60, turns: int = 5, names: tuple[str, ...] = ("diloco",)
) -> Iterator[Figure]:
    """Seconds of a simulated run as a multiple of the bare loop's."""
    text = bytes(torch.randint(97, 123, (1 << 21,), generator=torch.Generator().manual_seed(0)).tolist())
    ports = tuple(Island(f"site {m}", 1e8, 1e8, 0.1 + 0.01 * m, jitter=0.05) for m in range(WORKERS))
    scene = Scene(Network(ports, elsewhere=Between(latency=0.05)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "letters.txt"
        path.write_bytes(text)
        for name in names:
            run = Run(
                METHODS[name](period=20), model=size, data=Data(source=f"text:{path}"), workers=WORKERS, steps=steps
            )
            # the first turn warms up
            ratios = [_turn(run, scene, text) for _ in range(turns + 1)][1:]
            yield Figure(f"{name}, {WORKERS} workers of {size}", ratios, "of as many bare steps", most=1.1)


def _turn(run: Run, scene: Scene, text: bytes) -> float:
    tokens = torch.tensor(list(text), dtype=torch.uint8)
    before = bare_loop(run, tokens)
    mine = simulated(run, scene, quiet=True)[0].wall_s
    return mine / (WORKERS * (before + bare_loop(run, tokens)) / 2)

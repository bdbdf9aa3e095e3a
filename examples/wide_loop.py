"""The loop of own_loop.py on islands far apart: here they are two processes of this machine, and this one coordinates.

    python examples/wide_loop.py                    all on this machine
    python examples/wide_loop.py --invitation FILE --out DIR --listen HOST:PORT
                                                    one island, of a coordinator that runs elsewhere; FILE has a line
                                                    that `atoll coordinator RUN` has printed

Each island prints the digest of its shared model: the same one, and the one of own_loop.py with as many workers and
steps. Kill an island while it trains, and the other one goes on. Start it again as it says that it was started: it
fetches the other's state, and takes part again.
"""

import argparse
import multiprocessing
import socket
import sysconfig
import tempfile
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.errors import LeftBehind
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.recipes.methods import diloco
from atoll.sync.synchronizer import Synchronizer
from atoll.trees import digest

CONTEXT, BATCH = 8, 64
STRATEGY = diloco(period=20).strategy


def read_text() -> Tensor:
    """About a megabyte of Python, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:64]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def make_model() -> nn.Module:
    """Any module will do, as long as all islands start from the same values."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    )


def train(invitation: Path, out: Path, listen: str, islands: int, steps: int) -> None:
    """One island."""
    torch.set_num_threads(1)  # part of what decides the bits
    enrolled = enrol(invitation.read_text(), out / "credentials")
    worker, text, model = enrolled.worker, read_text(), make_model()
    where = f"--invitation {invitation} --out {out} --listen {listen}"
    print(f"worker {worker}: started with {where} --islands {islands} --steps {steps}", flush=True)
    windows = text.chunk(islands)[worker].unfold(0, CONTEXT + 1, 1)
    draw = torch.Generator().manual_seed(worker)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with (
        connect(enrolled, out / "credentials", [listen]) as group,
        Synchronizer(model, STRATEGY, group) as sync,
    ):
        if sync.state.step:
            print(f"worker {worker}: came to the others at step {sync.state.step}", flush=True)
        while sync.state.step < steps:
            batch = windows[torch.randint(len(windows), (BATCH,), generator=draw)]
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()
            inner.step()
            inner.zero_grad()
            try:
                sync.after_step(tokens=BATCH)  # all communication of DiLoCo happens here, every 20 steps
            except LeftBehind as left:
                print(f"worker {worker}: {left}", flush=True)
                sync.come_again()
        sync.drain()
        with sync.shared_weights() as shared, torch.no_grad():
            batch = text.unfold(0, CONTEXT + 1, 997)
            loss = nn.functional.cross_entropy(shared(batch[:, :-1]), batch[:, -1])
            ended = digest(shared.state_dict())
        # the others may need what this one has
        group.finish()
    print(f"worker {worker}: loss of the shared model {loss.item():.3f}, digest {ended}", flush=True)


def free_ports(count: int) -> int:
    """The first of so many in a row that nobody has now."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            first = one.getsockname()[1]
        try:
            for offset in range(count):
                socket.create_server(("127.0.0.1", first + offset)).close()
        except OSError:
            continue
        return first


def here(out: Path, islands: int, steps: int) -> None:
    """A coordinator in this process, and islands in others."""
    home = Home.open(out / "coordinator", address="127.0.0.1", port=free_ports(2))
    spawn = multiprocessing.get_context("spawn")
    with home.serve(islands, 10.0, lambda sentence: print(f"coordinator: {sentence}", flush=True)):
        processes: list[SpawnProcess] = []
        for number, one in enumerate(home.invite(islands, 3600.0)):
            invitation, folder = out / f"invitation-{number}.txt", out / f"island-{number}"
            invitation.write_text(one.text())
            words = (invitation, folder, f"127.0.0.1:{free_ports(1)}", islands, steps)
            processes.append(spawn.Process(target=train, args=words))
            processes[-1].start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--islands", type=int, default=2, help="among how many the text is divided, alike on all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="directory; one that is not kept, if left out")
    parser.add_argument("--invitation", type=Path, help="be one island only, of a run that is coordinated elsewhere")
    parser.add_argument("--listen", default="0.0.0.0:7450", help="where the others reach this one island")
    options = parser.parse_args()
    if options.invitation:
        out = options.out or Path("island")
        train(options.invitation, out, options.listen, options.islands, options.steps)
    elif options.out:
        here(options.out, options.islands, options.steps)
    else:
        with tempfile.TemporaryDirectory() as out:
            here(Path(out), options.islands, options.steps)


if __name__ == "__main__":
    main()

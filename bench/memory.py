"""What does a worker hold beside its model?

A worker of 100 M fp32 parameters runs a few rounds in a fresh process, and the growth of that process's resident memory
at its highest point is compared with what the method must hold: anchor, outer state, and for an overlapped method one
fragment per exchange in flight. The kernel keeps the highest point itself (VmHWM, set back before the library is
handed the model), so no peak is missed between samples, and everything counts: tensors of all threads, gloo's buffers,
pages that the allocator keeps. It does not see memory that was asked for and never written, nor scratch that fits
into pages freed before the measurement; those are given back to the system first. The inner optimizer is left out.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from atoll.peers.memory import Hub
from atoll.peers.torchdist import TorchGroup
from atoll.recipes import methods
from atoll.sync.drive import take_turns
from atoll.sync.rule import Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.wire import PeerGroup
from bench.measure import Figure
from bench.toys import transformer

STRATEGIES = {
    "diloco": methods.diloco(6).strategy,
    "opendiloco": methods.opendiloco(6).strategy,
    # fragments leave two steps apart and land one step later: one exchange is in flight at a time
    "streaming": methods.streaming(6, fragments=2, delay=1).strategy,
}
IN_FLIGHT = {"diloco": 0, "opendiloco": 0, "streaming": 1}
"""Exchanges in flight at most."""
STEPS = 16
WORKERS = 2
MIB = 1 << 20
GOAL = 64.0
"""MiB."""


def figures(
    names: Sequence[str] = tuple(STRATEGIES), width: int = 1024, layers: int = 7, vocab: int = 12000, turns: int = 5
) -> Iterator[Figure]:
    """MiB per worker above what must be held, for both groups."""
    for group, run in (("in turns", _in_turns), ("gloo", _over_gloo)):
        for name in names:
            reports = [run(name, str(width), str(layers), str(vocab)) for _ in range(turns)]
            must = reports[0]["must"] / MIB
            over = [(report["grown"] - report["must"]) / MIB for report in reports]
            held = "anchor + outer" + (" + fragment" if IN_FLIGHT[name] else "")
            yield Figure(f"{name}, {group}", over, f"MiB above {held} of {must:.0f} MiB", most=GOAL)


def _in_turns(*arguments: str) -> dict[str, float]:
    return json.loads(subprocess.run(_child("in-turns", *arguments), check=True, stdout=subprocess.PIPE).stdout)


def _over_gloo(*arguments: str) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}
    command = _child("gloo", *arguments)
    children = [
        subprocess.Popen(command, env=os.environ | launch | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(WORKERS)
    ]
    try:
        reports = [json.loads(child.communicate()[0]) for child in children]
    finally:
        for child in children:
            child.kill()
    return max(reports, key=lambda report: report["grown"])


def _child(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.memory", *arguments]


def child(group: str, name: str, width: int, layers: int, vocab: int) -> dict[str, float]:
    """Bytes per worker: by how much this process has grown, and what of it must be held."""
    torch.set_num_threads(1)
    strategy = STRATEGIES[name]
    with TorchGroup.connect() if group == "gloo" else nullcontext() as connected:
        count = 1 if connected else WORKERS
        _run([transformer(16, layers, 256) for _ in range(count)], strategy, connected)  # loads all code
        models = [transformer(width, layers, vocab) for _ in range(count)]
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        syncs = _run(models, strategy, connected)
        state = syncs[0].state
        own = sum(tensor.nbytes for key, tensor in state.tensors() if key.startswith(("anchor", "outer")))
        fragment = max(each.layout.numel * each.layout.dtype.itemsize for each in state.fragments)
        return {"grown": (_resident("VmHWM") - before) / count, "must": own + IN_FLIGHT[name] * fragment}


def _run(models: Sequence[nn.Module], strategy: Strategy, connected: TorchGroup | None) -> list[Synchronizer]:
    hub = Hub(len(models))
    groups: list[PeerGroup] = [connected] if connected else [hub.group(worker) for worker in range(len(models))]
    syncs = [Synchronizer(model, strategy, group) for model, group in zip(models, groups, strict=True)]
    for _ in range(STEPS):
        for model in models:
            for parameter in model.parameters():
                parameter.detach().add_(1e-3)
        flows = [flow for sync in syncs if (flow := sync.after(tokens=1))]
        if flows:
            take_turns(flows, groups)
    return syncs


def _resident(field: str) -> int:
    """Bytes, from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))

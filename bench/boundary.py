"""What does a blocking DiLoCo boundary cost above its arithmetic?

Four workers in turns, 25 M fp32 parameters each, against the same arithmetic on the same tensors written by hand: M
deltas, one ordered sum and one division, M outer Nesterov steps (each worker has its own anchor and momentum), M copies
into live. By hand it is a list of tensors and a few foreach calls, all buffers allocated beforehand. A second
hand-written form works on flat buffers in pieces that fit the cache: the least that this machine needs. Neither of the
two measures norms, so neither could refuse a contribution.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from atoll.peers.memory import Hub
from atoll.recipes.methods import diloco
from atoll.sync.drive import take_turns
from atoll.sync.synchronizer import Synchronizer
from bench.measure import Figure, in_turns, ratios
from bench.toys import size, transformer

WORKERS = 4
LR, MOMENTUM = 0.7, 0.9
GOAL = 1.5
PIECE = 1 << 17
"""Elements of a piece that, with its scratch, stays in a second-level cache of 1 to 2 MiB."""


class ByAtoll:
    """The library."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        hub = Hub(WORKERS)
        self.groups = [hub.group(worker) for worker in range(WORKERS)]
        strategy = diloco(1, LR, MOMENTUM).strategy
        models = [transformer(width, layers, vocab) for _ in self.groups]
        self.live = [[parameter.detach() for parameter in model.parameters()] for model in models]
        self.syncs = [Synchronizer(model, strategy, group) for model, group in zip(models, self.groups, strict=True)]

    def boundary(self) -> None:
        flows = [flow for sync in self.syncs if (flow := sync.after(tokens=1))]
        take_turns(flows, self.groups)


class ByForeach:
    """By hand, tensor by tensor, with buffers for M deltas."""

    def __init__(self, start: list[list[Tensor]]) -> None:
        self.live, self.anchors, self.momenta, self.deltas = (
            [[tensor.clone() for tensor in tensors] for tensors in start] for _ in range(4)
        )
        for momentum in self.momenta:
            torch._foreach_zero_(momentum)

    def boundary(self) -> None:
        for anchor, live, delta in zip(self.anchors, self.live, self.deltas, strict=True):
            for a, b, out in zip(anchor, live, delta, strict=True):
                torch.sub(a, b, out=out)
        mean, *others = self.deltas
        for delta in others:
            torch._foreach_add_(mean, delta)
        torch._foreach_div_(mean, float(WORKERS))
        for anchor, live, momentum in zip(self.anchors, self.live, self.momenta, strict=True):
            torch._foreach_mul_(momentum, MOMENTUM)
            torch._foreach_add_(momentum, mean)
            torch._foreach_add_(anchor, mean, alpha=-LR)
            torch._foreach_add_(anchor, momentum, alpha=-LR * MOMENTUM)
            torch._foreach_copy_(live, anchor)


class ByPieces:
    """By hand, on flat buffers (live too), one piece after the other."""

    def __init__(self, start: list[list[Tensor]]) -> None:
        self.live = [torch.cat([tensor.flatten() for tensor in tensors]) for tensors in start]
        self.anchors = [flat.clone() for flat in self.live]
        self.momenta = [torch.zeros_like(flat) for flat in self.live]
        self.mean, self.delta = torch.empty(2, PIECE)

    def boundary(self) -> None:
        for first in range(0, len(self.live[0]), PIECE):
            cut = slice(first, first + PIECE)
            rows = [(a[cut], b[cut], u[cut]) for a, b, u in zip(self.anchors, self.live, self.momenta, strict=True)]
            anchor, live, _ = rows[0]
            mean, delta = self.mean[: len(live)], self.delta[: len(live)]
            torch.sub(anchor, live, out=mean)
            for anchor, live, _ in rows[1:]:
                mean.add_(torch.sub(anchor, live, out=delta))
            mean.div_(WORKERS)
            for anchor, live, momentum in rows:
                momentum.mul_(MOMENTUM).add_(mean)
                live.copy_(anchor.add_(mean, alpha=-LR).add_(momentum, alpha=-LR * MOMENTUM))


def figures(
    width: int = 512, layers: int = 7, vocab: int = 5000, turns: int = 15, threads: tuple[int, ...] = (1, 2)
) -> Iterator[Figure]:
    """Ratios at each number of threads."""
    atoll = ByAtoll(width, layers, vocab)
    foreach, pieces = ByForeach(atoll.live), ByPieces(atoll.live)
    trained = [torch.randn_like(tensor).mul_(1e-3) for tensor in atoll.live[0]]
    flat = torch.cat([tensor.flatten() for tensor in trained])

    def train() -> None:
        """Something for the deltas to be, another for each worker."""
        for worker in range(WORKERS):
            for live in (atoll.live[worker], foreach.live[worker]):
                torch._foreach_add_(live, trained, alpha=worker + 1)
            pieces.live[worker].add_(flat, alpha=worker + 1)

    threads_before = torch.get_num_threads()
    millions = f"{size(atoll.syncs[0].state.model) / 1e6:.1f} M x {WORKERS}"
    try:
        for count in threads:
            torch.set_num_threads(count)
            actions = [atoll.boundary, foreach.boundary, pieces.boundary]
            mine, bare, least = (seconds[1:] for seconds in in_turns(actions, turns + 1, train))
            what = f"{millions}, {count} thread{'s' if count > 1 else ''}"
            yield Figure(what, ratios(mine, bare), "times the bare arithmetic", most=GOAL)
            yield Figure(what, ratios(mine, least), "times the same in cache-sized pieces")
            yield Figure(what, [1e3 * taken for taken in mine], "ms")
    finally:
        torch.set_num_threads(threads_before)
    check(atoll, foreach, pieces)


def check(atoll: ByAtoll, foreach: ByForeach, pieces: ByPieces) -> None:
    """All three have computed the same, to rounding: else the ratios mean nothing."""
    for worker in range(WORKERS):
        mine = torch.cat([tensor.flatten() for tensor in atoll.live[worker]])
        for other in (torch.cat([tensor.flatten() for tensor in foreach.live[worker]]), pieces.live[worker]):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)

"""The wide group of Atoll: over zenoh, under mutual TLS, with a coordinator beside the first member."""

import itertools
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.peers.wide.connect import connect as connected
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.home import Home
from atoll.trees import Layout, Spec, Tree
from atoll.wire import Keep, Key, Landed, Post, Reduce, Snapshot, Take
from bench.engines import TIMEOUT_S, Exchange, Seat, address
from bench.engines.meeting import store

LISTEN = 29500


@contextmanager
def connect(seat: Seat, lease: float = TIMEOUT_S) -> Generator[Callable[[Tensor], Exchange]]:
    """Members that have enrolled, each with links to all others."""
    met, rounds = store(seat), itertools.count()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if seat.place == 0:
            home = Home.open(Path(folder) / "home", address=address(seat.rank))
            stack.enter_context(home.serve(len(seat.members), lease, lambda said: None))
            for place, invitation in enumerate(home.invite(len(seat.members), TIMEOUT_S)):
                met.set(f"invitation {place}", invitation.text())
        credentials = Path(folder) / "island"
        enrolled = enrol(met.get(f"invitation {seat.place}").decode(), credentials, worker=seat.place)
        listen = [f"{address(seat.rank)}:{LISTEN}"]
        group = stack.enter_context(connected(enrolled, credentials, listen, lease=lease))
        group.agree("bench")
        yield lambda own: partial(_exchange, group, own, next(rounds))


def _exchange(group: WideGroup, own: Tensor, number: int) -> Tensor:
    layout = Layout.of([Spec("values", (own.numel(),), (1,), torch.float32)])
    to = group.membership.workers
    fold = Keep() if len(to) == 2 else Reduce(exact())
    key = Key(0, 0, number)
    group.post(Post(key, to, Snapshot(Tree(layout, own)), exact(), {}, fold, 1.0, 0.5, {}))
    landed = group.take(Take(key))
    assert isinstance(landed, Landed)
    return own

"""hivemind's averager. Finding a group is made ready before the clock, as its optimizer does it during training."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.p2p import P2P
from torch import Tensor

from bench.engines import Exchange, Seat, address
from bench.engines.meeting import store

MATCHMAKING_S, CHUNK_S, ROUND_S = 4.0, 5.0, 30.0


@contextmanager
def connect(seat: Seat) -> Generator[Callable[[Tensor], Exchange]]:
    """An averager whose groups are all members; they find one another through the first one's table."""
    # It leaves its sockets behind, and this folder is the peer's own.
    P2P._UNIX_SOCKET_PREFIX = "/unix/dev/shm/hivemind-"
    met = store(seat)
    known = [] if seat.place == 0 else met.get("first").decode().split()
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{address(seat.rank)}/tcp/0"], initial_peers=known, start=True)
    if seat.place == 0:
        met.set("first", " ".join(map(str, dht.get_visible_maddrs())))
    averager = hivemind.DecentralizedAverager(
        [torch.zeros(seat.elements)],
        dht,
        prefix="wide",
        target_group_size=len(seat.members),
        min_group_size=len(seat.members),
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=MATCHMAKING_S / 2,
        next_chunk_timeout=CHUNK_S,
        allreduce_timeout=ROUND_S,
        start=True,
    )
    try:
        yield partial(_ready, averager)
    finally:
        averager.shutdown()
        dht.shutdown()


def _ready(averager: hivemind.DecentralizedAverager, own: Tensor) -> Exchange:
    with averager.get_tensors() as tensors:
        tensors[0].copy_(own)
    step = averager.step(wait=False, require_trigger=True, allow_retries=False)
    assert isinstance(step, StepControl)
    while step.stage != AveragingStage.AWAITING_TRIGGER and not step.done():
        time.sleep(0.01)
    return partial(_all, averager, step)


def _all(averager: hivemind.DecentralizedAverager, step: StepControl) -> Tensor:
    step.allow_allreduce()
    step.exception()  # it may have failed, or passed for whole with part of the values: what there is, is looked at
    with averager.get_tensors() as tensors:
        return tensors[0].clone()

"""`torch.distributed` over gloo: `all_reduce`, and `isend` with `irecv` between two."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.engines import Exchange, Seat
from bench.engines.meeting import TIMEOUT, store


@contextmanager
def connect(seat: Seat) -> Generator[Callable[[Tensor], Exchange]]:
    """A process group of the members, met at their store."""
    dist.init_process_group("gloo", store=store(seat), rank=seat.place, world_size=len(seat.members), timeout=TIMEOUT)
    try:
        if len(seat.members) == 2:
            theirs = torch.empty(seat.elements)
            yield lambda own: partial(_pair, own, theirs, 1 - seat.place)
        else:
            yield lambda own: partial(_all, own, len(seat.members))
    finally:
        dist.destroy_process_group()


def _pair(own: Tensor, theirs: Tensor, other: int) -> Tensor:
    for work in (dist.isend(own, other), dist.irecv(theirs, other)):
        assert work is not None
        work.wait()
    return theirs.add_(own).div_(2)


def _all(own: Tensor, members: int) -> Tensor:
    dist.all_reduce(own)
    return own.div_(members)

"""torchft's reconfigurable process group over gloo: what its manager reduces with."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torchft.process_group import ProcessGroupGloo

from bench.engines import Exchange, Seat
from bench.engines.meeting import TIMEOUT, store


@contextmanager
def connect(seat: Seat) -> Generator[Callable[[Tensor], Exchange]]:
    """A process group of the members, met at their store."""
    met = store(seat)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    group.configure(f"{met.host}:{met.port}/torchft", f"peer{seat.rank}", seat.place, len(seat.members))
    try:
        yield lambda own: partial(_all, group, own, len(seat.members))
    finally:
        group.shutdown()


def _all(group: ProcessGroupGloo, own: Tensor, members: int) -> Tensor:
    group.allreduce([own], dist.ReduceOp.SUM).wait()
    return own.div_(members)

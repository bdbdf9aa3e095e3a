"""Every group against one conformance suite, and what only some of them can show: deaths, aborts, lanes, launches."""

import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atoll.errors import GroupError, UsageError
from atoll.peers.memory import Hub
from atoll.peers.torchdist import TorchGroup
from atoll.sync.drive import take_turns
from atoll.testing.exchanges import Case, Member
from atoll.testing.groups import Advance, check_peer_group, in_threads
from atoll.testing.processes import Died, gloo, launch
from atoll.wire import Landed, Lost, PeerGroup, Take


def memory(members: int) -> AbstractContextManager[Sequence[PeerGroup]]:
    hub = Hub(members)
    return nullcontext([hub.group(worker) for worker in range(members)])


@pytest.mark.parametrize("advance", [take_turns, in_threads])
def test_a_memory_group_does_what_a_group_must(advance: Advance) -> None:
    check_peer_group(memory, advance=advance)


def over_gloo(rank: int, folder: Path) -> Callable[[int], AbstractContextManager[Sequence[PeerGroup]]]:
    """Fresh groups of this process and the first of its fellows, met at numbered files."""
    numbers = count()

    @contextmanager
    def make(members: int) -> Generator[Sequence[PeerGroup]]:
        meeting = folder / str(next(numbers))
        if rank >= members:
            yield []
            return
        with gloo(rank, members, meeting), closing(TorchGroup(timeout=timedelta(seconds=30))) as group:
            yield [group]

    return make


def conform(rank: int, folder: Path) -> None:
    check_peer_group(over_gloo(rank, folder))


def test_a_torch_group_over_gloo_does_what_a_group_must(tmp_path: Path) -> None:
    launch(conform, 5, tmp_path)

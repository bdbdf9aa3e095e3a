"""Peers of one launch (`torchrun`, Slurm) over `torch.distributed`: gloo between hosts, NCCL between GPUs.

All of a group's work is done by one thread of its own, in the order in which exchanges start, which is the same on
every rank: an exchange of a `Snapshot` starts when it is posted, one that reads live tensors when it is taken, for only
then do they stand still. Messages go from point to point, so any subset of the members can meet. The process groups
they use are made once and are ours alone: what the ranks of an island do among themselves (DDP, FSDP2) never meets it.

    start    measure the contribution (`rounds.header_of`); with lanes, agree on the island's norm
    headers  one row of float64 from everyone to everyone; `rounds.admit` decides alike on every rank
    bulk     `pipeline`: encode, send, receive, decode, sum, and hand out, chunk by chunk

An error in the thread reaches every waiting and every later `take` as a `GroupError`. A dead peer is noticed when its
connections close, a silent one after the timeout. gloo cannot break off a wait: after an abort the thread stays in it
until then, but holds up neither `take` nor the process.
"""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.errors import GroupError, UsageError
from atoll.peers.background import Background
from atoll.peers.headers import of_island, pack, unpack
from atoll.peers.links import TorchLink
from atoll.peers.pipeline import Meeting, Pool
from atoll.peers.rounds import admit, check_alike, header_of, heard
from atoll.wire import KEEPER, Key, Landed, Lost, Membership, Post, Snapshot, Take

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for one that is silent: it must be longer than any worker is behind another when they meet."""


@dataclass
class _Exchange:
    """What was posted, and the answer to come once the exchange has started."""

    post: Post
    answer: "Future[Landed | Lost] | None" = None


class TorchGroup:
    """One rank's way to the others, within the default process group; `connect` makes that one too.

    Ranks are counted island by island: worker = rank // lanes, lane = rank % lanes; lane i exchanges with lane i of the
    other workers. Making a group is collective: all ranks do it.

    Args:
        lanes: ranks per island.
        device: where wires travel: "cpu" over gloo, or "cuda" over NCCL from this process's current device, while
            headers stay on gloo.
        timeout: how long to wait for a rank that is silent.
    Raises: UsageError if the ranks cannot be divided into islands.
    """

    def __init__(self, lanes: int = 1, *, device: str = "cpu", timeout: timedelta = TIMEOUT) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        _check_lanes(world, lanes)
        self.membership = Membership(tuple(range(world // lanes)), rank // lanes, lane=rank % lanes, lanes=lanes)
        islands = [list(range(first, first + lanes)) for first in range(0, world, lanes)]
        across = [[island[lane] for island in islands] for lane in range(lanes)]
        home = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._link = TorchLink(_one_of(across, _backend(device), timeout), home, timeout)
        self._island = TorchLink(_one_of(islands, "gloo", timeout), torch.device("cpu"), timeout) if lanes > 1 else None
        self._pool = Pool()
        self._open: dict[Key, _Exchange] = {}
        self._thread = Background("atoll-peers")

    @classmethod
    @contextmanager
    def connect(cls, lanes: int = 1, *, device: str = "cpu", timeout: timedelta = TIMEOUT) -> "Generator[TorchGroup]":
        """Join the processes that torchrun started together, and leave nothing behind.

        Args: as of the class.
        Raises: UsageError if this process was not started by torchrun, the port is taken, or the ranks cannot be
            divided into islands; GroupError if the others do not come.

        Example, run by `torchrun --nproc-per-node 4`:
            with TorchGroup.connect() as group, Synchronizer(model, strategy, group) as sync: ...
        """
        _join(lanes, device, timeout)
        try:
            group = cls(lanes, device=device, timeout=timeout)
            try:
                yield group
            except BaseException:
                group.abort()
                raise
            finally:
                group.close()
        finally:
            dist.destroy_process_group()

    def agree(self, fingerprint: str) -> None:
        """Raise `GroupError` unless all members train the same, lane by lane. Waits for all of them."""
        self._thread.run(lambda: self._compare(fingerprint)).result()

    def post(self, post: Post) -> Key:
        """Start an exchange of a snapshot; one that reads live tensors is noted, and starts when it is taken.

        Raises: UsageError for a message to a keeper.
        """
        if post.to == (KEEPER,):
            raise UsageError(
                "a message was to go to a keeper, but a keeper needs all workers in one process here; run without "
                "torchrun"
            )
        self._thread.check()
        if post.key not in self._open:
            self._open[post.key] = exchange = _Exchange(post)
            if isinstance(post.source, Snapshot):
                self._start(exchange, None)
        return post.key

    def take(self, take: Take, wait: bool = True) -> Landed | Lost | None:
        """The answer. An exchange that reads live tensors starts now, with `wait` or without: let them stand still."""
        self._thread.check()
        exchange = self._open.get(take.ticket)
        if exchange is None:
            raise GroupError(
                f"worker {self.membership.me} asked for {take.ticket}, which it has not posted or has taken already"
            )
        answer = exchange.answer or self._start(exchange, take)
        if not wait and not answer.done():
            return None
        outcome = answer.result()
        del self._open[take.ticket]
        return outcome

    def abort(self) -> None:
        """Answer every `take` of this process with a `GroupError`, now and from now on.

        The others notice when this process ends.
        """
        me = self.membership.me
        self._thread.fail(
            GroupError(f"worker {me} aborted the group, and what was in flight is lost; go on from the last checkpoint")
        )
        self._link.abort()

    def close(self) -> None:
        """End the thread, after what was asked of it, and free the process groups made here."""
        self._thread.close()
        for link in (self._link, self._island):
            if link:
                link.close()

    def _start(self, exchange: _Exchange, take: Take | None) -> "Future[Landed | Lost]":
        if not torch.cuda.is_initialized():
            exchange.answer = self._thread.run(lambda: self._exchange(exchange.post, take))
            return exchange.answer
        # live tensors stand still once the taker's stream has come this far; it goes on when ours has written them
        still, ours = torch.cuda.current_stream().record_event(), torch.cuda.Stream()

        def job() -> Landed | Lost:
            with torch.cuda.stream(ours):
                ours.wait_event(still)
                outcome = self._exchange(exchange.post, take)
                ours.synchronize()
                return outcome

        exchange.answer = self._thread.run(job)
        return exchange.answer

    def _exchange(self, post: Post, take: Take | None) -> Landed | Lost:
        """The whole of an exchange, in the thread."""
        me, before = self.membership.me, self._link.sent
        row = pack(post, header_of(post))
        if self._island:
            lane, lanes = self.membership.lane, range(self.membership.lanes)
            rows = self._island.gather(lane, lanes, row)
            row = of_island([rows[other] for other in lanes], lane)
        headers = unpack(self._link.gather(me, post.to, row), me, post)
        verdict = admit(post.key, post.to, [headers[worker] for worker in post.to], post.quorum)
        if isinstance(verdict, Lost):
            return verdict
        landed = heard(verdict, post.edges)
        mean_norm = Meeting(me, post, take, landed).run(self._link, self._pool)
        if not sum(landed.weights) > 0:
            return Lost(post.key, "; ".join([f"nothing that worker {me} hears counts", *landed.refused]))
        return replace(landed, mean_norm=mean_norm, sent=self._link.sent - before)

    def _compare(self, fingerprint: str) -> None:
        me, workers = self.membership.me, self.membership.workers
        text = fingerprint.encode()
        sizes = self._link.gather(me, workers, torch.tensor([len(text)]))
        row = torch.zeros(max(int(size) for size in sizes.values()), dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._link.gather(me, workers, row)
        seen = {worker: bytes(rows[worker][: int(sizes[worker])].tolist()).decode() for worker in workers}
        if different := check_alike(seen, me):
            raise GroupError(different)


def _backend(device: str) -> str:
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def _one_of(subsets: Sequence[Sequence[int]], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group for each subset of the ranks, made by all of them; the one this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in subsets], timeout=timeout, backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _check_lanes(world: int, lanes: int) -> None:
    if lanes < 1 or world % lanes:
        raise UsageError(
            f"{world} ranks were to form islands of {lanes}, which does not divide them; start a multiple of that many "
            "ranks, or give the number of ranks that each island has"
        )


def _join(lanes: int, device: str, timeout: timedelta) -> None:
    """Make the default process group from torchrun's environment."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"this process was not started by torchrun: {', '.join(missing)} not set; write "
            "`torchrun --nproc-per-node N ...`, or run all workers in this process"
        )
    _check_lanes(int(os.environ["WORLD_SIZE"]), lanes)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        dist.init_process_group(_backend(device), timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"port {port} of {address} is taken by another program; give a free one: `torchrun --master-port PORT`"
            ) from error
        raise GroupError(
            f"the {os.environ['WORLD_SIZE']} ranks did not all meet at {address}:{port} within "
            f"{timeout.total_seconds():g} s ({reason}); start all of them, and check that they reach this address"
        ) from error

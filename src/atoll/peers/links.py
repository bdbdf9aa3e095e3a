"""Messages between the members of one process group of `torch.distributed`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.errors import GroupError

Wait = Callable[[], None]


class TorchLink:
    """Point-to-point messages by rank within `group`, on `device`; counts the bytes it is given to send.

    Two ranks match their messages by order alone, so both start the same ones in the same order. gloo waits until
    bytes are on the host; NCCL's wait orders the calling thread's stream, and copying to the host waits for that.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self.sent = 0
        self._group, self._device, self._timeout = group, device, timeout
        self._aborted = False
        if device.type == "cuda":
            # NCCL wants all ranks at the first operation of a group; later ones may be between any of them
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> Wait:
        """Start to send each (rank, bytes) of `out` and to receive those of `into`; the result waits for all.

        Empty messages are not sent.
        """
        out = [(to, wire.to(self._device)) for to, wire in out if len(wire)]
        into = [(origin, wire) for origin, wire in into if len(wire)]
        here = [
            wire if wire.device == self._device else torch.empty_like(wire, device=self._device) for _, wire in into
        ]
        self.sent += sum(wire.nbytes for _, wire in out)
        ops = [dist.P2POp(dist.isend, wire, group=self._group, group_peer=to) for to, wire in out]
        for (origin, _), arriving in zip(into, here, strict=True):
            ops.append(dist.P2POp(dist.irecv, arriving, group=self._group, group_peer=origin))
        works = self._start(ops)

        # the closure keeps the wires alive while they are on their way: gloo does not
        def wait() -> None:
            self._wait(works, [rank for rank, _ in [*out, *into]])
            for (_, wire), arrived in zip(into, here, strict=True):
                if arrived is not wire:
                    wire.copy_(arrived)

        return wait

    def reduces(self, to: Sequence[int]) -> bool:
        """Whether `to` is the whole process group."""
        return len(to) == dist.get_world_size(self._group)

    def all_reduce(self, VALUES: Tensor) -> Wait:
        """Start the backend's sum over all ranks, in place; counted as a ring sends it."""
        members = dist.get_world_size(self._group)
        self.sent += 2 * (members - 1) * VALUES.nbytes // members
        values = VALUES.to(self._device)
        work = dist.all_reduce(values, group=self._group, async_op=True)

        def wait() -> None:
            self._wait([work], [])
            if values is not VALUES:
                VALUES.copy_(values)

        return wait

    def gather(self, me: int, to: Sequence[int], row: Tensor) -> dict[int, Tensor]:
        """The row of every member of `to`, this one's included; on the host, small, not counted."""
        rows = {rank: row if rank == me else torch.empty_like(row) for rank in to}
        others = [rank for rank in to if rank != me]
        ops = [dist.P2POp(dist.isend, row, group=self._group, group_peer=rank) for rank in others]
        ops += [dist.P2POp(dist.irecv, rows[rank], group=self._group, group_peer=rank) for rank in others]
        self._wait(self._start(ops), others * 2)
        return rows

    def abort(self) -> None:
        """Start nothing more; NCCL also breaks off what it waits for."""
        self._aborted = True
        if self._device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        """Free the process group."""
        dist.destroy_process_group(self._group)

    def _start(self, ops: list[dist.P2POp]) -> Sequence[Any]:
        if self._aborted:
            raise GroupError("the group was aborted, and so was this exchange")
        try:
            return dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise GroupError(self._sentence("another worker", error)) from error

    def _wait(self, works: Sequence[Any], ranks: Sequence[int]) -> None:
        for index, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                # NCCL answers for all messages of a batch at once
                who = f"worker {ranks[index]}" if len(works) == len(ranks) else "another worker"
                raise GroupError(self._sentence(who, error)) from error

    def _sentence(self, who: str, error: RuntimeError) -> str:
        said = str(error).strip().partition("\n")[0]
        if "timed out" in said.lower():
            what = f"did not answer within {self._timeout.total_seconds():g} s"
        elif "closed by peer" in said or "reset by peer" in said or "Broken pipe" in said:
            what = "has gone: its connection was closed"
        else:
            what = f"cannot be reached ({said})"
        return f"{who} {what}; look at the output of the others, and go on from the last checkpoint"

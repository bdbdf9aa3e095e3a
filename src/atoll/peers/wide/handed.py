"""Units of data on an island's way to the coordinator: what it tells of them, and what it is handed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.peers.wide.account import Account, Lease
from atoll.peers.wide.messages import Welcome


@dataclass
class Handed:
    """Between the training thread and the group's.

    Args: tell: sends a message to the coordinator, from the group's thread; do: runs something there, in order.
    Attributes: first: the unit from which this island's own shard goes on.
    """

    tell: Callable[[Account], None]
    do: Callable[[Callable[[], None]], None]
    first: int = 0
    _life: str = ""
    _account: Account | None = None
    _leases: deque[tuple[int, int, int]] = field(default_factory=deque[tuple[int, int, int]])
    _seen: set[Lease] = field(default_factory=set[Lease])

    # the training thread

    def lease(self) -> tuple[int, int, int] | None:
        """(shard, first, end) of what was handed to this island, once each."""
        return self._leases.popleft() if self._leases else None

    def account(
        self,
        *,
        shards: int,
        next: int,
        over: int,
        loads: tuple[int, ...],
        runs: tuple[tuple[int, int, int, int], ...],
        counts: tuple[tuple[int, tuple[int, ...]], ...],
        leases: tuple[tuple[int, int, int], ...],
    ) -> None:
        """Tell it before anything that is posted from now on, and again with each sign of life."""
        self._account = Account(self._life, shards, next, over, loads, runs, counts, leases)
        self.do(self.again)

    # the group's thread

    def again(self) -> None:
        """Tell the newest account."""
        if self._account:
            self.tell(self._account)

    def welcomed(self, welcome: Welcome) -> None:
        """The coordinator answers the hello of a new life: what was handed to one before it is not its own."""
        if welcome.life != self._life:
            self._life, self._account = welcome.life, None
            self._leases.clear()
            self._seen.clear()
        self.first = welcome.unit

    def handed(self, lease: Lease) -> None:
        """The coordinator hands out units, and may say so again."""
        if lease.life == self._life and lease not in self._seen:
            self._seen.add(lease)
            self._leases.append((lease.shard, lease.first, lease.end))

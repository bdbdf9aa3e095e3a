"""What islands and the coordinator tell each other of units of data (`atoll.peers.wide.units`)."""

from dataclasses import dataclass

from atoll.peers.wide.ranges import Load, Owner, Step, Worker


@dataclass(frozen=True)
class Account:
    """To the coordinator: what an island trained, and what it saw land. All of it again each time, so that nothing
    hangs on one message.

    Args: life: of its process, as it said hello. shards: of the data; 0 if nothing of them can be handed out. next: the
    unit of its own shard that comes next. over: all that was launched by this inner step has landed, or is lost. loads:
    units that each worker trains in an inner step; one if empty. runs: (ordinal, shard, unit, count) of what it trained
    in a row, all of late; with a load of k, its units k (t - 1) + 1 to k t are those of inner step t. counts: of each
    worker the step at which the last message left that landed, by fragment. leases: (shard, first, end) in its hands.
    """

    life: str
    shards: Owner
    next: Step
    over: Step
    loads: tuple[Load, ...]
    runs: tuple[tuple[Step, Worker, Step, Step], ...]
    counts: tuple[tuple[Worker, tuple[Step, ...]], ...]
    leases: tuple[tuple[Worker, Step, Step], ...]


@dataclass(frozen=True)
class Lease:
    """To the island of a life: train the units `first` to `end - 1` of a shard too."""

    life: str
    shard: Worker
    first: Step
    end: Step

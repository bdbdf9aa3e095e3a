"""Where members meet: a store that their first one has, for engines which need one."""

from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from bench.engines import PORT, TIMEOUT_S, Seat, address

TIMEOUT = timedelta(seconds=TIMEOUT_S)


def store(seat: Seat) -> TCPStore:
    """The members' store; it ends with what its first member was given."""
    first = seat.members[0]
    return TCPStore(address(first), PORT, is_master=seat.rank == first, wait_for_workers=False, timeout=TIMEOUT)

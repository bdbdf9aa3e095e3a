"""From an invitation to a group: what an island does before it trains."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll import __version__
from atoll.peers.wide.enrol import Enrolled
from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.link import ZenohLink

LEASE_S = 10.0
"""Seconds of silence after which someone counts as gone, unless the coordinator says otherwise."""


@contextmanager
def connect(
    enrolled: Enrolled, credentials: Path, listen: Sequence[str], told: str = "", step: int = 0, lease: float = LEASE_S
) -> Generator[WideGroup]:
    """A group of an island that has enrolled.

    Args: credentials: its certificates. listen: "host:port" each, where other islands reach it; none if they cannot.
    told: what is trained, beside the strategy, as all must train it. step: from which it could go on by itself.
    Raises: GroupError if the coordinator cannot be reached.
    """
    link = ZenohLink(
        enrolled.run, enrolled.worker, credentials, listen=listen, connect=enrolled.endpoints, lease_s=lease
    )
    group = WideGroup(link, enrolled.run, __version__, step, lease, told=told)
    try:
        yield group
    except BaseException:
        group.abort()
        raise
    finally:
        group.close()

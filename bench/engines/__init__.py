"""Engines that move one exchange over a link, each in its own way, for `bench.wide` to compare.

An exchange is the mean of 4 bytes times `Seat.elements` over the `Seat.members`. To add an engine, write a module here
that has a function `connect` of the type `Connect`, and name it in `ENGINES`. The module may import what ours need not
have: it is imported in the peers' own processes only, by an interpreter that has it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PORT = 29400
"""Free, since each peer has a network namespace to itself."""
TIMEOUT_S = 120.0
"""How long an engine may take to connect, or for one exchange."""


@dataclass(frozen=True)
class Seat:
    """Where a peer is. Args: rank: its own. members: the ranks that exchange with one another. elements: fp32."""

    rank: int
    members: tuple[int, ...]
    elements: int

    @property
    def place(self) -> int:
        """This peer's position among the members."""
        return self.members.index(self.rank)

    @property
    def others(self) -> tuple[int, ...]:
        """All members but this peer."""
        return tuple(rank for rank in self.members if rank != self.rank)


def address(rank: int) -> str:
    """Where a peer can be reached."""
    return f"10.0.0.{rank + 1}"


Exchange = Callable[[], "Tensor | None"]
"""One exchange, whose time counts: the mean over members, or None from an engine that moves bytes without meaning."""
Connect = Callable[[Seat], AbstractContextManager[Callable[["Tensor"], Exchange]]]
"""Connects a peer with the others; yields what makes an exchange of the peer's own values ready before the clock."""


@dataclass(frozen=True)
class Engine:
    """One way to exchange.

    Args: name: of its module here. needs: the module that an interpreter must have. install: what pip calls that.
    of_link, of_raw: goals on a slow link, as parts of the nominal one and of what the first engine reaches. cpu: on a
    fast one, seconds for each GB. Others' work has none.
    """

    name: str
    needs: str
    install: str
    of_link: float | None = None
    of_raw: float | None = None
    cpu: float | None = None


@dataclass(frozen=True)
class Job:
    """What a peer shall do. Args: engine: its name. door: of the network. rounds: exchanges."""

    engine: str
    door: str
    seat: Seat
    rounds: int


@dataclass(frozen=True)
class Told:
    """Of one exchange. Args: began, ended: on the machine's clock. cpu: seconds. right: whether it was the mean."""

    began: float
    ended: float
    cpu: float
    right: bool


ENGINES = (
    Engine("raw", needs="torch", install="torch"),
    Engine("atoll", needs="atoll", install="atoll", of_link=0.80, of_raw=0.90, cpu=5.0),
    Engine("gloo", needs="torch", install="torch"),
    Engine("torchft", needs="torchft", install="torchft==0.2.0"),
    Engine("hivemind", needs="hivemind", install="hivemind==1.1.12"),
)
"""The first is what the others are compared with."""

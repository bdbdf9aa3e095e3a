"""Islands, sites, and what moves between them: a fluid model of links that meetings share.

    island --up--> site a --link a,b--> site b --down--> island        full duplex: up and down do not meet

A meeting of several islands is made of flows, all of the same size: one from each teller to each hearer. They begin
together and advance together, as chunks of a pipelined exchange do, so each meeting has one rate per flow. A link
divides its capacity evenly among the flows that cross it; a flow gets the least share of its links.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.errors import UsageError


@dataclass(frozen=True)
class Island:
    """The hardware under one worker.

    Args: site: where it stands. up, down: bits per second of its own link. step_s: seconds of an inner step. jitter:
    standard deviation of a step's duration, as a part of it.
    """

    site: str = "here"
    up: float = math.inf
    down: float = math.inf
    step_s: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up", "down", "step_s"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    f"an island's {name} was {getattr(self, name)}, but nothing would ever move; give a number above 0"
                )
        if not 0 <= self.jitter < 1:
            raise UsageError(f"an island's jitter was {self.jitter}, but it is a part of a step; give 0 <= jitter < 1")


@dataclass(frozen=True)
class Between:
    """A link between two sites, shared by all islands of both.

    Args: capacity: bits per second in each direction. latency: seconds one way. loss: part of what is sent that is
    lost and sent again.
    """

    capacity: float = math.inf
    latency: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not self.capacity > 0 or self.latency < 0 or not 0 <= self.loss < 1:
            raise UsageError(
                f"a link was given capacity {self.capacity}, latency {self.latency} and loss {self.loss}; give a "
                "capacity above 0, a latency of 0 or more, and a loss from 0 up to, but not including, 1"
            )


@dataclass(frozen=True)
class Network:
    """Islands in order of worker numbers, and the links between their sites.

    Args: islands. between: by pair of site names, in either order; `elsewhere` where a pair is not named. `elsewhere`
    is also the link within a site.
    """

    islands: tuple[Island, ...]
    between: tuple[tuple[str, str, Between], ...] = ()
    elsewhere: Between = Between()

    def __post_init__(self) -> None:
        sites = {island.site for island in self.islands}
        for a, b, _ in self.between:
            if unknown := {a, b} - sites:
                raise UsageError(
                    f"the network links {a} and {b}, but no island stands at {sorted(unknown)[0]}; the sites are "
                    f"{', '.join(sorted(sites))}"
                )

    def link(self, a: str, b: str) -> Between:
        """The link from site a to site b."""
        return self._links.get((a, b), self.elsewhere)

    @property
    def _links(self) -> Mapping[tuple[str, str], Between]:
        found = self.__dict__.get("_by_sites")
        if found is None:
            found = {(a, b): link for a, b, link in self.between} | {(b, a): link for a, b, link in self.between}
            object.__setattr__(self, "_by_sites", found)
        return found


Resource = tuple[str, str | int, str | int]
"""What flows share: ("up", worker, ""), ("down", worker, ""), or ("between", site, site)."""


@dataclass
class Moving:
    """A meeting under way: bits left of each of its flows, their rate, and since when."""

    uses: Mapping[Resource, int]
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass
class Traffic:
    """All that moves, on the virtual clock: `begin` a meeting, `next` says when one ends, `end` takes it off."""

    network: Network
    _moving: dict[int, Moving] = field(default_factory=dict[int, Moving])
    _on: defaultdict[Resource, set[int]] = field(default_factory=lambda: defaultdict(set))
    _flows: defaultdict[Resource, int] = field(default_factory=lambda: defaultdict(int))
    _ends: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    _capacity: dict[Resource, float] = field(default_factory=dict[Resource, float])
    _number: int = 0

    def begin(self, now: float, uses: Mapping[Resource, int], bits: float) -> int:
        """Start a meeting whose flows have `bits` each; returns its number.

        Args: uses: how many of its flows cross each resource.
        """
        self._number += 1
        self._moving[self._number] = Moving(uses, bits, since=now)
        for resource, flows in uses.items():
            self._on[resource].add(self._number)
            self._flows[resource] += flows
        self._share(now, uses, {self._number})
        return self._number

    def uses(self, edges: Iterable[tuple[int, int]]) -> dict[Resource, int]:
        """Flows on each resource, one from each teller to its hearer."""
        islands, found = self.network.islands, defaultdict[Resource, int](int)
        for teller, hearer in edges:
            found["up", teller, ""] += 1
            found["down", hearer, ""] += 1
            found["between", islands[teller].site, islands[hearer].site] += 1
        return self._felt(found)

    def all_to_all(self, members: Sequence[int]) -> dict[Resource, int]:
        """The same for a flow from each member to each other one, without listing them."""
        others = len(members) - 1
        found: dict[Resource, int] = {}
        for member in members:
            found["up", member, ""] = found["down", member, ""] = others
        at = Counter(self.network.islands[member].site for member in members)
        for a, here in at.items():
            for b, there in at.items():
                found["between", a, b] = here * (there - (a == b))
        return self._felt(found)

    def _felt(self, uses: Mapping[Resource, int]) -> dict[Resource, int]:
        """Those that can hold anyone up."""
        return {resource: flows for resource, flows in uses.items() if flows and self.capacity(resource) < math.inf}

    def capacity(self, resource: Resource) -> float:
        """Bits per second, after loss."""
        if resource not in self._capacity:
            kind, first, second = resource
            if kind == "between":
                link = self.network.link(str(first), str(second))
                self._capacity[resource] = link.capacity * (1 - link.loss)
            else:
                island = self.network.islands[int(first)]
                self._capacity[resource] = island.up if kind == "up" else island.down
        return self._capacity[resource]

    def next(self) -> tuple[float, int] | None:
        """When the next meeting ends, and which."""
        while self._ends:
            when, number, version = self._ends[0]
            moving = self._moving.get(number)
            if moving and moving.version == version:
                return when, number
            heapq.heappop(self._ends)
        return None

    def end(self, now: float, number: int) -> None:
        """Take a meeting off its links, whether or not all of it has come."""
        moving = self._moving.pop(number)
        for resource, flows in moving.uses.items():
            self._on[resource].discard(number)
            self._flows[resource] -= flows
        self._share(now, moving.uses)

    def _share(self, now: float, resources: Iterable[Resource], also: Iterable[int] = ()) -> None:
        """New rates for all meetings on these resources, and some others."""
        touched = {number for resource in resources for number in self._on[resource]}.union(also)
        for number in touched:
            moving = self._moving[number]
            rate = min((self.capacity(resource) / self._flows[resource] for resource in moving.uses), default=math.inf)
            if rate == moving.rate:
                continue
            if moving.rate < math.inf:
                moving.left = max(0.0, moving.left - moving.rate * (now - moving.since))
            moving.rate, moving.since, moving.version = rate, now, moving.version + 1
            if rate > 0:
                heapq.heappush(self._ends, (now + (moving.left / rate if moving.left else 0.0), number, moving.version))

    def latency(self, members: Sequence[int]) -> float:
        """Seconds until all have heard from all, one way."""
        sites = {self.network.islands[member].site for member in members}
        return max((self.network.link(a, b).latency for a in sites for b in sites if a != b), default=self.within)

    @property
    def within(self) -> float:
        """Latency within a site."""
        return self.network.elsewhere.latency

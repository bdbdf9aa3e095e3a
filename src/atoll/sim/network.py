"""Islands, sites, and what moves between them: a fluid model of links that meetings share.

    island --up--> site a --link a,b--> site b --down--> island        full duplex: up and down do not meet

A meeting of several islands is made of flows, all of the same size: one from each teller to each hearer. They begin
together and advance together, as chunks of a pipelined exchange do, so each meeting has one rate per flow. A link
divides its capacity evenly among the flows that cross it; a flow gets the least share of its links.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from atoll.errors import UsageError
from atoll.sim.traffic import Fluid, Load


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

    Args: islands. between: by pair of site names, in either order; `elsewhere` where a pair is not named. within: the
    link within a site.
    """

    islands: tuple[Island, ...]
    between: tuple[tuple[str, str, Between], ...] = ()
    elsewhere: Between = Between()
    within: Between = Between()

    def __post_init__(self) -> None:
        sites = {island.site for island in self.islands}
        for a, b, _ in self.between:
            if unknown := {a, b} - sites:
                raise UsageError(
                    f"the network links {a} and {b}, but no island stands at {sorted(unknown)[0]}; the sites are "
                    f"{', '.join(sorted(sites))}"
                )
            if a == b:
                raise UsageError(f"the network links {a} to itself; give the link within each site as `within`")

    def link(self, a: str, b: str) -> Between:
        """The link from site a to site b."""
        return self.within if a == b else self.named.get((a, b), self.elsewhere)

    def first(self, count: int) -> "Network":
        """The same with the first islands only, and the links between their sites."""
        sites = {island.site for island in self.islands[:count]}
        links = tuple((a, b, link) for a, b, link in self.between if {a, b} <= sites)
        return replace(self, islands=self.islands[:count], between=links)

    @cached_property
    def named(self) -> Mapping[tuple[str, str], Between]:
        """Links between sites that are named, from each site to the other."""
        return {(a, b): link for a, b, link in self.between} | {(b, a): link for a, b, link in self.between}


Resource = tuple[str, str | int, str | int]
"""What flows share: ("up", worker, ""), ("down", worker, ""), or ("between", site, site)."""


class Loads(dict[Resource, "Load | None"]):
    """What crosses each resource, made when it is first asked for; None for one that never holds anyone up."""

    def __init__(self, make: Callable[[Resource], "Load | None"]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, resource: Resource) -> "Load | None":
        load = self[resource] = self._make(resource)
        return load


class Traffic:
    """All that moves, on the virtual clock: `begin` a meeting, `next` says when one ends, `end` takes it off.

    Args: network. limited: resources that may be limited although they are infinite. Other infinite ones cost nothing:
    who crosses them is not known.
    Attributes: start: `begin`, for what `loads` told. next: when the next meeting ends, and which: of several, the one
    that began first. end: take a meeting off its links, whether or not all of it has come.
    """

    def __init__(self, network: Network, limited: frozenset[Resource] = frozenset()) -> None:
        self.network = network
        self._limited, self._fluid = limited, Fluid()
        self.start, self.next, self.end = self._fluid.begin, self._fluid.next, self._fluid.end
        self._sites = [island.site for island in network.islands]
        self._loads = Loads(self._load)
        self._slowest: dict[tuple[frozenset[str], bool], float] = {}

    def begin(self, now: float, uses: Mapping[Resource, int], bits: float) -> int:
        """Start a meeting whose flows have `bits` each; returns its number.

        Args: uses: how many of its flows cross each resource.
        """
        return self.start(now, self.loads(uses), bits)

    def loads(self, uses: Mapping[Resource, int]) -> dict[Load, int]:
        """The same as loads, for `start`: worth keeping where meetings are alike."""
        loads = self._loads
        return {load: flows for resource, flows in uses.items() if (load := loads[resource])}

    @property
    def sent(self) -> dict[Resource, float]:
        """Bits that have crossed each resource that can hold anyone up, in meetings that are over."""
        return {resource: load.sent for resource, load in self._loads.items() if load and load.sent}

    def limit(self, now: float, resource: Resource, part: float) -> None:
        """Leave only a part of a resource's capacity from now on: 0 stalls what crosses it, 1 makes it whole again.

        Raises: UsageError if `part` is no part, or the resource is infinite and not one of those that may be limited.
        """
        if not 0 <= part <= 1:
            raise UsageError(f"{resource} was limited to {part} of its capacity, which is no part; give 0 to 1")
        load = self._loads[resource]
        if load is None:
            raise UsageError(
                f"{resource} is infinite, so who crosses it is not known and it cannot be limited; name it in `limited`"
            )
        self._fluid.limit(now, load, self.capacity(resource) * part if part else 0.0)

    def uses(self, edges: Iterable[tuple[int, int]]) -> dict[Resource, int]:
        """Flows on each resource, one from each teller to its hearer."""
        sites, found = self._sites, defaultdict[Resource, int](int)
        for teller, hearer in edges:
            found["up", teller, ""] += 1
            found["down", hearer, ""] += 1
            found["between", sites[teller], sites[hearer]] += 1
        return self._felt(found)

    def all_to_all(self, members: Sequence[int]) -> dict[Resource, int]:
        """The same for a flow from each member to each other one, without listing them."""
        others = len(members) - 1
        found, at = dict[Resource, int](), dict[str, int]()
        for member in members:
            found["up", member, ""] = found["down", member, ""] = others
            site = self._sites[member]
            at[site] = at.get(site, 0) + 1
        pairs = product(at, at)
        if self.network.elsewhere.capacity == math.inf and not self._limited:
            pairs = [*self._named(at), *zip(at, at, strict=True)]
        for a, b in pairs:
            found["between", a, b] = at[a] * (at[b] - (a == b))
        return self._felt(found)

    def latency(self, members: Sequence[int]) -> float:
        """Seconds until all have heard from all, one way."""
        sites = frozenset([self._sites[member] for member in members])
        place = sites, len(members) > len(sites)
        if place not in self._slowest:
            named = [self.network.named[pair].latency for pair in self._named(sites)]
            if len(named) < len(sites) * (len(sites) - 1):
                named.append(self.network.elsewhere.latency)
            if len(members) > len(sites) or len(sites) == 1:
                named.append(self.network.within.latency)
            self._slowest[place] = max(named)
        return self._slowest[place]

    def capacity(self, resource: Resource) -> float:
        """Bits per second, after loss, of the whole resource."""
        kind, first, second = resource
        if kind == "between":
            link = self.network.link(str(first), str(second))
            return link.capacity * (1 - link.loss)
        island = self.network.islands[int(first)]
        return island.up if kind == "up" else island.down

    def _load(self, resource: Resource) -> Load | None:
        whole = self.capacity(resource)
        return Load(whole) if whole < math.inf or resource in self._limited else None

    def _felt(self, uses: Mapping[Resource, int]) -> dict[Resource, int]:
        """Those that can hold anyone up."""
        loads = self._loads
        return {resource: flows for resource, flows in uses.items() if flows and loads[resource]}

    def _named(self, sites: Collection[str]) -> Iterable[tuple[str, str]]:
        """The pairs of these sites with a link of their own, found in the shorter way."""
        named = self.network.named
        if len(sites) ** 2 < len(named):
            return [pair for pair in product(sites, sites) if pair in named]
        return [pair for pair in named if pair[0] in sites and pair[1] in sites]

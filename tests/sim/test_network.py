"""Meetings that share links: against a plain fluid model that looks at everything at each event."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.sim.network import Between, Island, Network, Resource, Traffic


class Plain:
    """A link divides its capacity evenly among the flows that cross it; a flow gets the least share of its links."""

    def __init__(self, capacity: Callable[[Resource], float]) -> None:
        self.whole, self.part = capacity, defaultdict[Resource, float](lambda: 1.0)
        self.sent = defaultdict[Resource, float](float)
        self.now, self.number = 0.0, 0
        self.uses: dict[int, Mapping[Resource, int]] = {}
        self.bits: dict[int, float] = {}
        self.left: dict[int, float] = {}

    def rates(self) -> dict[int, float]:
        flows = Counter[Resource]()
        for uses in self.uses.values():
            flows.update(uses)
        share = {at: self.whole(at) * self.part[at] / flows[at] if self.part[at] else 0.0 for at in flows}
        return {number: min((share[at] for at in uses), default=math.inf) for number, uses in self.uses.items()}

    def move(self, now: float) -> None:
        for number, rate in self.rates().items():
            if rate < math.inf:
                self.left[number] = max(0.0, self.left[number] - rate * (now - self.now))
        self.now = now

    def begin(self, now: float, uses: Mapping[Resource, int], bits: float) -> int:
        self.move(now)
        self.number += 1
        self.uses[self.number], self.bits[self.number], self.left[self.number] = uses, bits, bits
        return self.number

    def next(self) -> tuple[float, int] | None:
        rates = self.rates()
        return min(((self.now + self.left[n] / rate, n) for n, rate in rates.items() if rate), default=None)

    def end(self, now: float, number: int) -> None:
        over = self.next()
        self.move(now)
        moved = self.bits.pop(number) - (0.0 if over == (now, number) else self.left[number])
        del self.left[number]
        for at, flows in self.uses.pop(number).items():
            self.sent[at] += moved * flows

    def limit(self, now: float, resource: Resource, part: float) -> None:
        self.move(now)
        self.part[resource] = part


@dataclass
class Script:
    """Begins and aborts of meetings by label, limits; and which meeting begins whenever one ends."""

    meetings: Sequence[tuple[Mapping[Resource, int], float]]
    due: list[tuple[float, str, Any]] = field(default_factory=list[tuple[float, str, Any]])
    then: dict[int, int] = field(default_factory=dict[int, int])


def play(moves: Traffic | Plain, script: Script) -> dict[int, float]:
    """When each meeting ended, by label, in order."""
    numbers: dict[int, int] = {}
    ends: dict[int, float] = {}
    due = sorted(script.due, key=lambda planned: planned[0], reverse=True)
    now = 0.0
    while due or moves.next():
        over = moves.next()
        assert over is None or over[0] >= now
        if over and (not due or over[0] < due[-1][0]):
            now, number = over
            moves.end(now, number)
            label = numbers.pop(number)
            ends[label] = now
            if label in script.then:
                due.append((now, "begin", script.then[label]))
            continue
        now, kind, what = due.pop()
        if kind == "begin":
            numbers[moves.begin(now, *script.meetings[what])] = what
        elif kind == "limit":
            moves.limit(now, *what)
        else:
            for number in [number for number, label in numbers.items() if label == what]:
                moves.end(now, number)
                del numbers[number]
    return ends


def uses_of(draw: random.Random, traffic: Traffic, islands: int) -> dict[Resource, int]:
    kind = draw.random()
    members = draw.sample(range(islands), draw.randint(2, min(islands, 5)))
    if kind < 0.4:
        return traffic.uses([(members[0], members[1]), (members[1], members[0])])
    if kind < 0.6:
        return traffic.uses([(members[1], 0)] if members[1] else [(0, members[0])])
    if kind < 0.8:
        return traffic.all_to_all(members)
    return traffic.uses([(draw.choice(members), draw.choice(members)) for _ in range(4)])


def random_case(seed: int, meetings: int, islands: int, sites: int, *, faults: bool) -> tuple[Network, Script]:
    draw = random.Random(seed)
    capacities = draw.choice([[1.0], [1.0, 2.0, math.inf], [3.0, 10.0], [0.7, 1.9, 4.3, 20.0, math.inf]])
    names = [f"s{i}" for i in range(min(sites, islands))]
    ports = tuple(Island(names[i % len(names)], *draw.choices(capacities, k=2)) for i in range(islands))
    named = [pair for pair in combinations(names, 2) if draw.random() < 0.7]
    between = tuple((a, b, Between(draw.choice(capacities), loss=draw.choice([0.0, 0.25]))) for a, b in named)
    network = Network(ports, between, Between(draw.choice(capacities)), Between(draw.choice(capacities)))
    traffic = Traffic(network, resources(network))
    sizes = draw.choice([[1.0], [0.0, 1.0, 2.0], [draw.uniform(0.1, 50) for _ in range(20)]])
    script = Script(meetings=[(uses_of(draw, traffic, islands), draw.choice(sizes)) for _ in range(meetings)])
    chained = draw.choice([0.0, 0.5])
    for label in range(meetings):
        if label and draw.random() < chained and label - 1 not in script.then:
            script.then[label - 1] = label
        else:
            start = draw.choice([0.0, 1.0, 1.0 + draw.random(), 30 * draw.random()])
            script.due.append((start, "begin", label))
    if faults:
        places = sorted(resources(network), key=repr)
        for _ in range(meetings // 3):
            # at odd times: whether something is cut just before or just after it ends is up to rounding
            at, start = draw.choice(places), 40 * draw.random()
            script.due.append((start, "limit", (at, draw.choice([0.0, 0.0, 0.1, 0.5, 1.0]))))
            script.due.append((start + 20 * draw.random(), "limit", (at, 1.0)))
            script.due.append((40 * draw.random(), "abort", draw.randrange(meetings)))
    return network, script


def resources(network: Network) -> frozenset[Resource]:
    islands, sites = range(len(network.islands)), {island.site for island in network.islands}
    own: set[Resource] = {(way, island, "") for way in ("up", "down") for island in islands}
    return frozenset(own | {("between", a, b) for a in sites for b in sites})


def agree(network: Network, script: Script) -> None:
    traffic = Traffic(network, resources(network))
    plain = Plain(traffic.capacity)
    got, want = play(traffic, script), play(plain, script)
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    places = resources(network)
    want_sent = {at: plain.sent[at] for at in places}
    assert {at: traffic.sent.get(at, 0.0) for at in places} == pytest.approx(want_sent, rel=1e-9, abs=1e-9)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(2, 6), st.integers(1, 3), st.booleans())
def test_meetings_end_when_a_plain_fluid_model_says(
    seed: int, meetings: int, islands: int, sites: int, faults: bool
) -> None:
    agree(*random_case(seed, meetings, islands, sites, faults=faults))


def crowd(seed: int, at_once: int, rounds: int, *, equal: bool, faults: bool) -> tuple[Network, Script]:
    """Many meetings at a time over few links; whenever one ends, another one begins."""
    draw = random.Random(seed)
    capacities = [10.0] if equal else [1.0, 1.7, 8.0, 31.0, 200.0, math.inf]
    islands = 40
    ports = tuple(Island(f"s{i % 3}", draw.choice(capacities), draw.choice(capacities)) for i in range(islands))
    between = (("s0", "s1", Between(100.0)), ("s0", "s2", Between(draw.choice([40.0, 900.0]))))
    network = Network(ports, between, Between(300.0), Between(250.0))
    places = resources(network)
    traffic = Traffic(network, places)
    meetings = [
        (uses_of(draw, traffic, islands), 5.0 if equal else draw.uniform(0, 9)) for _ in range(at_once * rounds)
    ]
    begins: list[tuple[float, str, Any]]
    begins = [(0.0 if equal else draw.random(), "begin", label) for label in range(at_once)]
    script = Script(meetings, begins, {label: label + at_once for label in range(at_once * (rounds - 1))})
    if faults:
        for _ in range(30):
            at, start = draw.choice(sorted(places, key=repr)), 10 * rounds * draw.random()
            script.due.append((start, "limit", (at, draw.choice([0.0, 0.01, 0.3]))))
            script.due.append((start + 10 * draw.random(), "limit", (at, 1.0)))
    return network, script


@pytest.mark.parametrize("equal", [False, True], ids=["unequal", "equal"])
@pytest.mark.parametrize("faults", [False, True], ids=["whole", "limited"])
@pytest.mark.parametrize("seed", range(3))
def test_crowds_of_meetings_end_when_a_plain_fluid_model_says(seed: int, equal: bool, faults: bool) -> None:
    agree(*crowd(seed, at_once=60, rounds=6, equal=equal, faults=faults))


def test_an_error_does_not_grow_while_a_link_is_never_idle() -> None:
    """Meetings begin at given times: where one begins as another ends, the plain model itself is chaotic."""
    draw = random.Random(5)
    network = Network(tuple(Island("ab"[i > 0], draw.uniform(2, 9), 25.0) for i in range(60)), elsewhere=Between(40.0))
    traffic = Traffic(network, resources(network))
    uses = [traffic.uses([(draw.randrange(1, 60), 0)]) for _ in range(3000)]
    bits = [draw.uniform(0.5, 1.5) + 2000 * (label < 10) for label in range(3000)]
    due = [(label * 0.05 + draw.random(), "begin", label) for label in range(3000)]
    agree(network, Script(list(zip(uses, bits, strict=True)), due))


@pytest.mark.parametrize("seed", range(50))
def test_meetings_that_are_equal_end_at_one_time_in_the_order_in_which_they_began(seed: int) -> None:
    draw = random.Random(seed)
    traffic = Traffic(Network(tuple(Island("ab"[i > 0], 7.0) for i in range(40)), elsewhere=Between(3.0)))
    for _ in range(9):
        traffic.begin(0.0, traffic.uses([(39, 0)]), 1e3)
    start, bits = 5 * draw.random(), 3 * draw.random()
    numbers = [traffic.begin(start, traffic.uses([(i, 0)]), bits) for i in range(1, 31)]
    for late in sorted(start + 2 * draw.random() for _ in range(6)):
        traffic.begin(late, traffic.uses([(38, 0)]), 1e3)
    ends: list[tuple[float, int]] = []
    while len(ends) < len(numbers) and (over := traffic.next()):
        traffic.end(*over)
        traffic.begin(over[0], traffic.uses([(35, 0), (36, 0)]), 1e3)
        ends.append(over)
    assert [number for _, number in ends] == numbers
    assert len({time for time, _ in ends}) == 1


def test_who_is_no_longer_held_up_by_a_link_leaves_it_to_the_others() -> None:
    """40 meetings share a port; half of them, due before the others, come over a link that others fill meanwhile."""
    ports = (Island("a", down=100.0), Island("a"), *(Island("bc"[i % 2]) for i in range(2, 42)))
    network = Network(ports, (("a", "c", Between(100.0)),))
    meetings: list[tuple[Mapping[Resource, int], float]] = []
    uses = Traffic(network).uses
    meetings += [(uses([(i, 0)]), 20.0 + 10 * (ports[i].site == "b") + i) for i in range(2, 42)]
    meetings += [(uses([(3, 1)]), 1e3) for _ in range(60)]
    due = [(0.0 if label < 40 else 1.0, "begin", label) for label in range(len(meetings))]
    agree(network, Script(meetings, due))


def test_what_ends_at_one_time_ends_in_the_order_in_which_it_began_whatever_could_hold_it_up() -> None:
    network = Network((Island("a", down=8.0), *(Island("b", up=5.0 + i % 3) for i in range(24))))
    traffic = Traffic(network)
    numbers = [traffic.begin(0.0, traffic.uses([(i, 0)]), 2.0) for i in range(1, 25)]
    ends: list[tuple[float, int]] = []
    while over := traffic.next():
        traffic.end(*over)
        ends.append(over)
    assert ends == [(pytest.approx(6.0), number) for number in numbers]
    assert len({time for time, _ in ends}) == 1


def test_a_link_that_is_cut_between_two_ends_at_one_time_keeps_the_second() -> None:
    traffic = Traffic(Network((Island("a", down=2.0), Island("b"), Island("b"))))
    first, second = (traffic.begin(0.0, traffic.uses([(i, 0)]), 3.0) for i in (1, 2))
    assert traffic.next() == (3.0, first)
    traffic.end(3.0, first)
    traffic.limit(3.0, ("down", 0, ""), 0.0)
    assert traffic.next() is None
    traffic.limit(4.0, ("down", 0, ""), 1.0)
    assert traffic.next() == (4.0, second)
    traffic.end(4.0, second)
    assert traffic.sent == {("down", 0, ""): 6.0}


def test_the_same_calls_give_the_same_endings() -> None:
    network, script = crowd(3, at_once=60, rounds=4, equal=True, faults=True)
    first, second = (play(Traffic(network, resources(network)), script) for _ in range(2))
    assert list(first.items()) == list(second.items())


UP: Resource = ("up", 0, "")


def two(up: float) -> Network:
    return Network((Island("a", up), Island("b")))


def test_a_link_without_capacity_stalls_what_crosses_it_until_it_is_whole_again() -> None:
    """8 bits at 2 bits/s: 1 s whole, 3 s cut, 2 s at half, and what is left, 4 bits, at 2 bits/s."""
    traffic = Traffic(two(2.0))
    number = traffic.begin(0.0, traffic.uses([(0, 1)]), 8.0)
    traffic.limit(1.0, UP, 0.0)
    assert traffic.next() is None
    traffic.limit(4.0, UP, 0.5)
    traffic.limit(6.0, UP, 1.0)
    assert traffic.next() == (8.0, number)


def test_a_meeting_of_no_bits_ends_at_once_but_not_over_a_link_that_is_cut() -> None:
    traffic = Traffic(two(2.0))
    number = traffic.begin(1.0, traffic.uses([(0, 1)]), 0.0)
    assert traffic.next() == (1.0, number)
    traffic.limit(1.0, UP, 0.0)
    assert traffic.next() is None
    traffic.limit(2.0, UP, 1.0)
    assert traffic.next() == (2.0, number)


def test_an_infinite_link_can_be_cut_if_it_was_named_and_costs_nothing_if_not() -> None:
    traffic = Traffic(two(math.inf))
    assert traffic.uses([(0, 1)]) == traffic.all_to_all((0, 1)) == {}
    with pytest.raises(UsageError, match="limited"):
        traffic.limit(0.0, UP, 0.0)
    traffic = Traffic(two(math.inf), frozenset({UP}))
    assert traffic.uses([(0, 1)]) == traffic.all_to_all((0, 1)) == {UP: 1}
    number = traffic.begin(0.0, traffic.uses([(0, 1)]), 5.0)
    assert traffic.next() == (0.0, number)
    traffic.limit(0.0, UP, 0.0)
    assert traffic.next() is None
    traffic.limit(3.0, UP, 0.5)
    assert traffic.next() == (3.0, number)
    traffic.end(3.0, number)
    assert traffic.sent == {UP: 5.0}


@pytest.mark.parametrize("part", [-0.1, 1.5, math.nan])
def test_a_limit_is_a_part(part: float) -> None:
    with pytest.raises(UsageError, match="part"):
        Traffic(two(1.0)).limit(0.0, UP, part)


def test_what_a_meeting_has_sent_counts_when_it_is_over_even_if_it_is_broken_off() -> None:
    """Two flows over one link of 3 bits/s, less a third: 1 bit/s each."""
    network = Network((Island("a"), Island("b"), Island("b")), elsewhere=Between(3.0, loss=1 / 3))
    traffic = Traffic(network)
    number = traffic.begin(0.0, traffic.uses([(0, 1), (0, 2)]), 10.0)
    assert traffic.sent == {}
    traffic.end(4.0, number)
    assert traffic.next() is None
    assert traffic.sent == pytest.approx({("between", "a", "b"): 8.0}, rel=1e-12)
    over = traffic.begin(4.0, traffic.uses([(0, 1)]), 10.0)
    assert traffic.next() == (pytest.approx(9.0), over)
    traffic.end(9.0, over)
    assert traffic.sent == pytest.approx({("between", "a", "b"): 18.0}, rel=1e-12)


def test_a_link_is_the_named_one_or_elsewhere_and_within_a_site_another() -> None:
    ports = (Island("a"), Island("a"), Island("b"), Island("c"), Island("c"))
    near, far, here = Between(1.0, 0.2), Between(2.0, 0.3), Between(4.0, 0.1)
    network = Network(ports, (("a", "b", near),), far, here)
    assert [network.link(*pair) for pair in ("ab", "ba", "ac", "cb", "aa", "cc")] == [near, near, far, far, here, here]
    traffic = Traffic(network)
    assert traffic.uses([(0, 1), (0, 2), (2, 3)]).keys() == {("between", *pair) for pair in ("aa", "ab", "bc")}
    with pytest.raises(UsageError, match="within"):
        Network(ports, (("a", "a", near),))
    with pytest.raises(UsageError, match="no island stands at d"):
        Network(ports, (("a", "d", near),))


@pytest.mark.parametrize("here", [0.0, 0.25, 9.0])
def test_latency_is_that_of_the_slowest_pair(here: float) -> None:
    draw = random.Random(1)
    sites = "abcde"
    ports = tuple(Island(draw.choice(sites)) for _ in range(12))
    between = tuple((a, b, Between(latency=draw.random())) for a, b in ("ab", "ca", "bc", "cd"))
    named = {frozenset((a, b)): link for a, b, link in between}
    network = Network(ports, between, Between(latency=0.3), Between(latency=here))
    traffic = Traffic(network)
    for _ in range(300):
        members = draw.sample(range(12), draw.randint(2, 8))
        pairs = list(combinations([ports[member].site for member in members], 2))
        want = max(here if a == b else named.get(frozenset((a, b)), network.elsewhere).latency for a, b in pairs)
        assert traffic.latency(members) == want
    assert traffic.latency((3,)) == here


def test_all_to_all_counts_the_flows_that_a_list_of_edges_does() -> None:
    draw = random.Random(2)
    for capacity in (1.0, math.inf):
        ports = tuple(Island("abcd"[i % 4], 1.0, draw.choice([1.0, math.inf])) for i in range(9))
        network = Network(ports, (("a", "b", Between(5.0)),), Between(capacity), Between(2.0))
        for _ in range(50):
            members = draw.sample(range(9), draw.randint(2, 6))
            edges = [(a, b) for a in members for b in members if a != b]
            for traffic in (Traffic(network), Traffic(network, resources(network))):
                assert traffic.all_to_all(members) == traffic.uses(edges)

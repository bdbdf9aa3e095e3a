"""What a meeting costs the simulator does not grow with how many are under way."""

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from atoll.sim.network import Between, Island, Network, Traffic


def calls(act: Callable[[], object]) -> int:
    """Function calls made by `act`, built-in ones included."""
    count = 0

    def counted(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def pairs_under_way(count: int) -> Traffic:
    """Pairs of islands at two sites, the last one of which is idle."""
    draw = random.Random(0)
    ports = tuple(Island("ab"[i % 2], draw.uniform(1, 9), draw.uniform(1, 9)) for i in range(2 * count + 2))
    traffic = Traffic(Network(ports, elsewhere=Between(3.0 * count)))
    for i in range(0, 2 * count, 2):
        traffic.begin(draw.random(), traffic.uses([(i, i + 1), (i + 1, i)]), 1e6)
    return traffic


def pushes_under_way(count: int) -> Traffic:
    """Islands at one site that push to the one at another."""
    ports = (Island("a", down=1.0), *(Island("b", 1.0 + i % 7) for i in range(count + 2)))
    traffic = Traffic(Network(ports, elsewhere=Between(3.0 * count)))
    for i in range(count):
        traffic.begin(i / count, traffic.uses([(i + 1, 0)]), 1e6)
    return traffic


@pytest.mark.parametrize("under_way", [pairs_under_way, pushes_under_way])
def test_a_meeting_among_thousands_costs_what_one_among_hundreds_does(under_way: Callable[[int], Traffic]) -> None:
    def cost(count: int) -> int:
        traffic = under_way(count)
        last = len(traffic.network.islands) - 1
        uses = traffic.uses([(last - 1, last), (last, last - 1)] if under_way is pairs_under_way else [(last, 0)])

        def one() -> None:
            number = traffic.begin(2.0, uses, 1.0)
            traffic.next()
            traffic.end(2.1, number)

        return min(calls(one) for _ in range(5))

    assert cost(3000) <= cost(300) * 1.5

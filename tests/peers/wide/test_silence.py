"""What is not there yet is asked for again, and held against somebody, only where nothing comes from there."""

from pathlib import Path

import pytest
import torch

from atoll.parts.codecs import exact
from atoll.peers.wide.link import Priority
from atoll.peers.wide.member import AGAIN_S
from atoll.peers.wide.messages import CONTRIBUTION, COORDINATOR, Bulk, Message, Report, Want, read
from atoll.wire import Key, Reduce
from tests.peers.wide.scripted import LEASE_S, SIZE, World

OTHER = Key(1, 0, 0)
TO_COORDINATOR, TO_OTHER = (0, COORDINATOR, Priority.CONTROL), (0, 1, Priority.CONTROL)


class Waiting:
    """Worker 0 has an exchange with worker 1, of which no piece comes."""

    def __init__(self, folder: Path) -> None:
        self.world = World(2, 0, folder)
        self.world.post(
            {worker: torch.ones(SIZE, dtype=torch.float64) for worker in (0, 1)}, Reduce(exact()), (0, 1), {}
        )
        while self.world.step():
            self.world._queues[1, 0, Priority.OVERLAPPED].clear()
        self.world._queues.clear()

    def wait(self, seconds: float, comes: bool) -> list[Message]:
        """What worker 0 says meanwhile. Args: comes: whether pieces of another exchange come from worker 1."""
        world, said = self.world, list[Message]()
        for _ in range(round(4 * seconds)):
            world.now += 0.25
            if comes:
                world.members[0].heard(1, Bulk(OTHER, CONTRIBUTION, 0, (0,), 0, b"12345678"), world.now)
            world.members[0].tick(world.now)
            for way in (TO_COORDINATOR, TO_OTHER):
                said += [read(frame) for frame in world._queues.pop(way, ())]
        return said


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    """Worker 0 waits."""
    return Waiting(tmp_path)


def test_while_another_exchange_fills_the_link_nothing_is_asked_for_or_reported(waiting: Waiting) -> None:
    said = waiting.wait(10 * LEASE_S, comes=True)
    assert not [message for message in said if isinstance(message, Want | Report)]
    assert said, "what is small is said again all the same"


def test_in_silence_it_is_asked_for_and_then_reported(waiting: Waiting) -> None:
    waiting.wait(10 * LEASE_S, comes=True)
    before = waiting.wait(AGAIN_S - 0.25, comes=False)
    assert not [message for message in before if isinstance(message, Want | Report)]
    after = waiting.wait(2 * LEASE_S, comes=False)
    assert [message for message in after if isinstance(message, Want)]
    reports = [message for message in after if isinstance(message, Report)]
    assert {report.silent for report in reports} == {(1,)}

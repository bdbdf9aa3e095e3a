"""A coordinator whose machine is lost, and one that takes its place."""

from pathlib import Path

from atoll.testing.islands import Sea, serve
from atoll.testing.toys import Mlp
from atoll.wire import Lost
from tests.peers.wide.crew import Sailor
from tests.peers.wide.test_elastic import DILOCO, until


def test_a_coordinator_that_knows_nothing_learns_from_a_majority_and_the_run_goes_on(tmp_path: Path) -> None:
    sea, said = Sea(), list[str]()
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = serve(sea, tmp_path / "first", 3, said.append)
    crew = [Sailor(sea, worker, Mlp(), DILOCO, 300, lambda step: 0.005) for worker in range(3)]
    until(lambda: len(crew[0].log) > 4)
    first.close()
    at = len(crew[0].log)
    until(lambda: len(crew[0].log) > at + 6)  # rounds count while nobody coordinates
    second = serve(sea, tmp_path / "second", 3, said.append, recovers=True)
    until(lambda: any("it goes on" in line for line in said))
    crew[1].kill()
    until(lambda: any("worker 1 is gone" in line for line in said))
    crew[1] = Sailor(sea, 1, Mlp(), DILOCO, 300, lambda step: 0.005)
    for sailor in crew:
        sailor.join()
    second.close()
    assert crew[1].entered[0] > 0
    assert len({sailor.digests[300] for sailor in crew}) == 1
    assert not [event for _, event in crew[0].log if isinstance(event, Lost)]


def test_less_than_a_majority_does_not_begin_a_run_again(tmp_path: Path) -> None:
    sea, said = Sea(), list[str]()
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = serve(sea, tmp_path / "first", 3, said.append)
    crew = [Sailor(sea, worker, Mlp(), DILOCO, 10_000, lambda step: 0.005) for worker in range(3)]
    until(lambda: len(crew[0].log) > 4)
    first.close()
    for sailor in crew[1:]:
        sailor.kill()
    second = serve(sea, tmp_path / "second", 1, said.append, recovers=True)
    until(lambda: second.link.sent > 0)
    assert second.coordinator.epoch is None
    crew[0].kill()
    second.close()
    assert not any("it goes on" in line for line in said)

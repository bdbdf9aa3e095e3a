"""What the doctor sees before a run, and that it leaves everything as it was."""

import socket
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll import __version__
from atoll.cli.doctor import Verdict, coordinator, shortest
from atoll.cli.lock import alone
from atoll.cli.wide import free_port
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.peers.wide.probe import Told
from atoll.recipes.methods import diloco
from atoll.sim.plan import Setting, utilisation
from atoll.sim.run import spec
from tests.cli.conftest import Call


@dataclass
class Scene:
    """A coordinator, and the doctor called in its machine."""

    home: Home
    folder: Path
    atoll: Call

    def checks(self, *words: str | Path, status: int = 0) -> dict[str, dict[str, Any]]:
        said = self.atoll("doctor", *words, "--json")
        assert said.status == status, said
        return {check["what"]: check for check in said.json}


@pytest.fixture
def scene(tmp_path: Path, atoll: Call) -> Generator[Scene]:
    home = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port(2))
    with home.serve(3, 10.0, lambda said: None):
        yield Scene(home, tmp_path, atoll)


def test_with_an_invitation_all_is_seen_and_nothing_is_used_up_or_written(scene: Scene) -> None:
    (invitation,) = scene.home.invite(1, 60.0)
    island, listen = scene.folder / "island", f"127.0.0.1:{free_port()}"
    for _ in range(2):
        checks = scene.checks(invitation.text(), "--out", island, "--listen", listen, "--params", "1e6")
        assert {check["verdict"] for check in checks.values()} == {"good"}
    assert not island.exists()
    assert list(checks) == [
        "versions",
        "machine",
        "disk",
        "listening",
        f"enrolment at 127.0.0.1:{scene.home.port + 1}",
        "invitation",
        "coordinator",
        "clock",
        f"links at 127.0.0.1:{scene.home.port}",
    ]
    assert "3 checkpoints of 1e+06 parameters are about 60.0 MB" in checks["disk"]["seen"]
    assert "who is silent for 10 s counts as gone" in checks["coordinator"]["seen"]
    assert enrol(invitation.text(), island / "credentials").worker == 0


def test_what_would_stop_a_run_is_status_1_with_what_to_do(scene: Scene) -> None:
    used, revoked = scene.home.invite(2, 60.0)
    (expired,) = scene.home.invite(1, -1.0)
    enrol(used.text(), scene.folder / "someone")
    scene.home.revoke(revoked.name)
    for invitation, why in ((used, "was used already, by worker 0"), (revoked, "was revoked"), (expired, "expired at")):
        checks = scene.checks(invitation.text(), "--out", scene.folder / "island", status=1)
        assert why in checks["invitation"]["seen"]
        assert checks["invitation"]["advice"] == "ask the run's coordinator for a new one"
    garbled = scene.checks("atoll1.AAAA", status=1)["invitation"]
    assert garbled["advice"] == "copy the whole line anew"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        checks = scene.checks("--listen", listen, "--params", "1e12", "--out", scene.folder / "i", status=1)
    assert {name for name, check in checks.items() if check["verdict"] == "stops"} == {"machine", "disk", "listening"}
    assert "is taken by another program" in checks["listening"]["seen"]
    said = scene.atoll("doctor", "atoll1.AAAA")
    assert said.status == 1
    assert "would stop a run: invitation" in said.err
    assert "copy the whole line anew" in " ".join(said.out.split())


def test_a_coordinator_that_is_not_there_stops_who_has_yet_to_enrol(tmp_path: Path, atoll: Call) -> None:
    home = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port(2))
    (invitation,) = home.invite(1, 60.0)
    said = atoll("doctor", invitation.text(), "--out", tmp_path / "island", "--json")
    assert said.status == 1
    (enrolment,) = (check for check in said.json if check["what"].startswith("enrolment"))
    assert enrolment["verdict"] == "stops"
    assert "check that the coordinator runs there" in enrolment["advice"]


@pytest.mark.parametrize(
    ("ahead", "verdict", "seen"),
    [
        (59.0, Verdict.GOOD, "59.0 s behind the coordinator's"),
        (-61.0, Verdict.LOOK, "61.0 s ahead of the coordinator's"),
        (3599.0, Verdict.LOOK, "3599.0 s behind the coordinator's"),
        (-3601.0, Verdict.STOPS, "3601.0 s ahead of the coordinator's"),
    ],
)
def test_clocks_may_differ_by_a_minute_and_stop_a_run_from_an_hour(ahead: float, verdict: Verdict, seen: str) -> None:
    _, clock = coordinator(Told(__version__, 10.0, (), ahead, "", 0.0), "run", b"")
    assert (clock.what, clock.verdict, clock.seen) == ("clock", verdict, seen)


def test_another_version_stops_a_run() -> None:
    version, _ = coordinator(Told("0.0.1", 10.0, (), 0.0, "", 0.0), "run", b"")
    assert version.verdict is Verdict.STOPS
    assert version.seen == f"runs atoll 0.0.1, this is {__version__}"


def test_from_each_island_that_is_there_speed_is_measured_and_a_plan_made_of_it(scene: Scene) -> None:
    """Two islands that wait for a third, of which one is the doctor's own. Costs three seconds."""
    folders = [scene.folder / f"island-{number}" for number in range(2)]
    with ExitStack() as stack:
        for folder, invitation in zip(folders, scene.home.invite(2, 60.0), strict=True):
            enrolled = enrol(invitation.text(), folder / "credentials")
            stack.enter_context(connect(enrolled, folder / "credentials", [f"127.0.0.1:{free_port()}"]))
        stack.enter_context(alone(folders[1]))
        checks = scene.checks("--out", folders[1], "--params", "1e6", "--listen", f"127.0.0.1:{free_port()}")
    assert {check["verdict"] for check in checks.values()} == {"good"}
    assert checks["island"]["seen"] == f"one runs in {folders[1]}; it is left alone"
    assert checks["run"]["seen"] == "an island takes part as worker 1 already; it is left alone"
    assert "bit/s" in checks["from worker 0"]["seen"]
    assert "diloco trains 95% of the time with rounds of" in checks["plan"]["seen"]


def test_the_shortest_period_is_that_of_the_plan() -> None:
    """250 MB each way of 1 Gbit/s, both directions at once: a round of two islands waits about 1 s for each half."""
    where = Setting((spec(62.5e6, "weight"),), 2, 1.0, 1e9, 0.01)
    period, _ = shortest(where)
    assert period is not None
    assert utilisation(diloco(period=period).strategy, period, where)[0] >= 0.95
    assert utilisation(diloco(period=period - 1).strategy, period - 1, where)[0] < 0.95

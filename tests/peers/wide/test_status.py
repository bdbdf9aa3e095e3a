"""How a run stands, asked from an island's directory: beside the island, and when the coordinator is away."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.cli.wide import CREDENTIALS, free_port
from atoll.errors import GroupError
from atoll.peers.wide import status as asking
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.peers.wide.status import status, watching
from atoll.wire import Key


def test_an_islands_machine_is_told_what_the_coordinators_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And last stood, when the coordinator is away."""
    monkeypatch.setattr(asking, "ANSWER_S", 0.5)
    home, said = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port(2)), list[str]()
    island = tmp_path / "island"
    with ExitStack() as stack, ExitStack() as office:
        server = office.enter_context(home.serve(1, 10.0, said.append))
        enrolled = enrol(home.invite(1, 60.0)[0].text(), island / CREDENTIALS)
        group = stack.enter_context(connect(enrolled, island / CREDENTIALS, [f"127.0.0.1:{free_port()}"]))
        group.agree("a run")
        known, before = json.loads(json.dumps(server.look(status))), list(said)

        assert main(["status", str(island), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told.keys() == known.keys()
        assert [told[name] for name in ("run", "lease_s", "epoch")] == [
            known[name] for name in ("run", "lease_s", "epoch")
        ]
        assert [(each["worker"], each["state"]) for each in told["islands"]] == [(0, "trains")]
        assert told["islands"][0].keys() == known["islands"][0].keys()
        assert main(["status", str(island)]) == 0
        assert f"run {home.run}  epoch 0 from step 1" in capsys.readouterr().out
        assert said == before, "a visitor is not told of"
        assert server.coordinator.known.keys() == {0}

        look = stack.enter_context(watching(enrolled, island / CREDENTIALS))
        last = look()["at"]
        assert abs(last - time.time()) < 5.0
        office.close()
        assert look()["at"] == last


def test_a_coordinator_that_does_not_answer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of an earlier version."""
    monkeypatch.setattr(asking, "ANSWER_S", 0.05)
    monkeypatch.setattr(asking, "STATUS", Key(-99, 0, 0))
    home = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port(2))
    with home.serve(1, 10.0, lambda said: None):
        enrolled = enrol(home.invite(1, 60.0)[0].text(), tmp_path / "island")
        with (
            watching(enrolled, tmp_path / "island") as look,
            pytest.raises(GroupError, match=r"did not answer at 127.0.0.1:\d+; check that it runs there"),
        ):
            look()

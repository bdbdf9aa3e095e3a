"""A visitor sees who is there and how fast the way is, and neither it nor a question to the desk changes anything."""

import socket
import time
from pathlib import Path

import pytest

from atoll.errors import GroupError, UsageError
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol, read_enrolled
from atoll.peers.wide.home import Home
from atoll.peers.wide.messages import Fetch
from atoll.peers.wide.offers import PIECE, sample_key
from atoll.peers.wide.probe import VISITOR, ask, knock, listenable, moved, visit
from atoll.peers.wide.samples import Samples
from atoll.peers.wide.status import status
from tests.peers.wide.desks import Start, until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def test_no_more_than_the_allowance_is_given_in_a_span_whoever_asks() -> None:
    now = [100.0]
    samples = Samples(lambda: now[0])
    given = [samples.take(1 << 30) for _ in range(20)]
    assert sum(len(part) for part, _ in given) == Samples.MOST
    assert all(len(part) == (PIECE if count else 0) for part, count in given)
    assert samples.take(0) == (memoryview(b""), 1), "a round trip costs nothing"
    now[0] += Samples.SPAN_S - 1
    assert samples.take(1)[1] == 0
    now[0] += 1
    assert samples.take(3)[1] == 1


def test_the_desk_tells_the_time_and_whether_an_invitation_holds_without_using_it_up(
    start: Start, tmp_path: Path
) -> None:
    coordinator = start(clock=-300.0)
    invitation = coordinator.invite()
    address = invitation.addresses[0]
    for _ in range(2):
        told = told_of(coordinator, address, invitation)
        assert told["holds"] == ""
        assert abs(told["time"] - (time.time() - 300.0)) < 5.0
    assert not coordinator.places
    coordinator.clock = 0.0
    enrol(invitation.text(), tmp_path / "island")
    assert "was used already, by worker 0" in told_of(coordinator, address, invitation)["holds"]
    revoked = coordinator.invite()
    coordinator.invitations.revoke(revoked.name)
    assert "was revoked" in told_of(coordinator, address, revoked)["holds"]
    expired = coordinator.invite(lasts=-1.0)
    assert "expired at" in told_of(coordinator, address, expired)["holds"]
    other = start("other").invite()
    assert "this run has no invitation" in told_of(coordinator, address, other)["holds"]


def told_of(coordinator: object, address: str, invitation: object) -> dict[str, object]:
    import json

    question = {"protocol": 1, "ask": "time", "name": invitation.name, "secret": invitation.secret}  # type: ignore[attr-defined]
    with coordinator.talk() as talk:  # type: ignore[attr-defined]
        talk.sendall(json.dumps(question).encode() + b"\n")
        return json.loads(talk.makefile().readline())


def test_another_runs_authority_a_closed_port_and_a_name_that_is_none_are_sentences(start: Start) -> None:
    one, other = start(), start("other")
    mine, theirs = one.invite(), other.invite()
    with pytest.raises(GroupError, match="is not of this run, by its certificate"):
        knock(theirs.addresses[0], "demo", mine.authority)
    with pytest.raises(GroupError, match="check that the coordinator runs there"):
        knock(f"127.0.0.1:{free_port()}", "demo", mine.authority)
    with pytest.raises(GroupError, match="cannot be resolved here"):
        ask("no-such-host.invalid:7448", "demo", mine.authority)
    with pytest.raises(GroupError, match="install the same version on both"):
        ask(mine.addresses[0], "demo", mine.authority)  # this desk was not told what to tell


def test_an_island_follows_its_coordinator_to_where_an_invitation_of_today_says(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port())
    with home.serve(1, 10.0, lambda said: None):
        (first,) = home.invite(1, 60.0)
        enrolled = enrol(first.text(), tmp_path / "island")
        assert moved(enrolled, first) == enrolled
    home = Home.open(tmp_path / "run", address="localhost")
    (of_today,) = home.invite(1, 60.0)
    with home.serve(1, 10.0, lambda said: None):
        again = enrol(of_today.text(), tmp_path / "island")
        assert again == enrolled, "it has credentials, so this one is not used up"
        assert moved(again, of_today).endpoints == (f"localhost:{home.port}",)
        assert enrol(of_today.text(), tmp_path / "another").worker == 1


def test_whether_one_can_listen_is_known_before() -> None:
    listenable(f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as one, pytest.raises(UsageError, match="is taken by another program"):
        listenable(f"127.0.0.1:{one.getsockname()[1]}")
    with pytest.raises(UsageError, match="is no address of this machine"):
        listenable("192.0.2.1:7000")
    with pytest.raises(UsageError, match="cannot be resolved here"):
        listenable("no-such-host.invalid:7000")
    with pytest.raises(UsageError, match='write "host:port"'):
        listenable("somewhere")


def test_a_visitor_measures_everybody_and_disturbs_not_even_its_own_island(tmp_path: Path) -> None:
    """Two islands that wait for a third; costs three seconds."""
    home = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port())
    said: list[str] = []
    with home.serve(3, 10.0, said.append) as server:
        folders = [tmp_path / f"island-{number}" for number in range(2)]
        enrolled = [enrol(one.text(), folder) for one, folder in zip(home.invite(2, 60.0), folders, strict=True)]
        assert [read_enrolled(folder)[0] for folder in folders] == enrolled
        with (
            connect(enrolled[0], folders[0], [f"127.0.0.1:{free_port()}"]),
            connect(enrolled[1], folders[1], [f"127.0.0.1:{free_port()}"]) as group,
        ):
            before = len(said)
            told = ask(home.invite(1, 60.0)[0].addresses[0], home.run, home.invite(1, 60.0)[0].authority)
            assert told.lease_s == 10.0
            assert abs(told.clock) < 1.0
            assert knock(told.endpoints[0], home.run, home.invite(1, 60.0)[0].authority) < 1.0
            seen = visit(enrolled[1], folders[1])
            assert seen.here
            assert [peer.worker for peer in seen.peers] == [0]
            assert seen.peers[0].rtt is not None
            assert seen.peers[0].speed is not None
            assert seen.peers[0].rtt < 1.0
            assert seen.peers[0].speed > 1e6
            # its own island is still the one that frames to its number go to
            answered: list[object] = []
            group._fetching.arrived = lambda sender, bulk: answered.append(sender)  # type: ignore[method-assign]
            group._fetch(0, Fetch(sample_key(0), 0))
            until(lambda: answered == [0])
            assert said[before:] == []
            assert [each["worker"] for each in server.look(status)["islands"]] == []  # type: ignore[attr-defined]
            assert VISITOR - 1 not in server.coordinator.known

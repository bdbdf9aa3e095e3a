"""Islands far apart from the command line: the bits of one process, sentences for what cannot be, no process left."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.cli.wide import free_port
from atoll.errors import UsageError
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.peers.wide.invitations import Invitation
from tests.cli.conftest import Call
from tests.cli.test_jobs import alive

ROOT = Path(__file__).parents[2]
SMALL = ["--steps", "6", "--batch", "2", "--length", "16", "--lr", "0.003"]


@pytest.fixture
def run(text: Path) -> list[str]:
    return ["diloco", "--period", "3", "--data", f"text:{text}", *SMALL]


@contextmanager
def served(folder: Path, islands: int = 2) -> Generator[Home]:
    home = Home.open(folder, address="127.0.0.1", port=None if (folder / "run.json").exists() else free_port(2))
    with home.serve(islands, 10.0, lambda said: None):
        yield home


def test_islands_of_one_machine_end_in_the_bits_of_one_process(run: list[str], tmp_path: Path) -> None:
    """Costs the start of four processes: some fifteen seconds of two free cores."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(["train", *run, "--workers", "3", "--json"]) == 0
    alone = json.loads(out.getvalue())["digest"]
    words = ["launch", *run, "--islands=3", "--out", str(tmp_path / "run"), "--json"]
    launched = subprocess.run([sys.executable, "-m", "atoll.cli", *words], cwd=ROOT, capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr
    results = json.loads(launched.stdout)
    assert [each["worker"] for each in results] == [0, 1, 2]
    assert {each["digest"] for each in results} == {alone}
    assert launched.stderr.splitlines()[-1].endswith("workers [0, 1, 2] have come to the end of the run")
    assert "Traceback" not in launched.stderr
    with redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--resume"]) == 0
    assert json.loads(out.getvalue()) == results, "what has come to its end is not begun again"


def test_a_launch_goes_on_without_who_died_and_ctrl_c_leaves_no_process(run: list[str], tmp_path: Path) -> None:
    """Costs the start of three processes."""
    words = ["launch", *run, "--islands", "2", "--steps", "100000", "--out", str(tmp_path / "run")]
    with launching(words) as process:
        until(lambda: all((tmp_path / f"run/worker-{each}/checkpoints").exists() for each in range(2)))
        first, second = (child_of(process, f"worker-{each}") for each in range(2))
        os.kill(second, signal.SIGKILL)
        died = "worker 1 was killed (SIGKILL); the others go on. To bring it back: atoll join "
        heard = until_said(process, died, "worker 0 trains ALONE")
        assert heard[died].endswith("--resume\n")
        assert alive(first)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].endswith("--resume goes on from the last complete checkpoint")
    assert "Traceback" not in said
    assert not alive(first)


def test_islands_end_when_their_launch_is_killed(run: list[str], tmp_path: Path) -> None:
    """Costs the start of two processes."""
    words = ["launch", *run, "--islands", "1", "--steps", "100000", "--out", str(tmp_path / "run")]
    with launching(words) as process:
        until(lambda: (tmp_path / "run/worker-0/metrics.jsonl").exists())
        island = child_of(process, "worker-0")
        process.kill()
        until(lambda: not alive(island))


@contextmanager
def launching(words: list[str]) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "atoll.cli", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(holds: Callable[[], bool]) -> None:
    """Processes take long to start where others are busy."""
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def child_of(process: subprocess.Popen[str], folder: str) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if str(process.pid) in words and any(word.endswith(folder) for word in words):
            return int(path.parent.name)
    raise AssertionError(f"no child has {folder}")


def until_said(process: subprocess.Popen[str], *sentences: str) -> dict[str, str]:
    """Wait for lines with these, in any order; an end of the process ends the wait too."""
    found = dict[str, str]()
    assert process.stderr
    for line in process.stderr:
        found |= {sentence: line for sentence in sentences if sentence in line}
        if len(found) == len(sentences):
            return found
    raise AssertionError(f"of {sentences} it only said {found}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("join", "atoll join needs an invitation before the method"),
        ("join diloco --steps 6", "atoll join needs an invitation before the method"),
        ("join --steps 6", "atoll join needs an invitation before the method"),
        ("join atoll1.xyz", "atoll join needs a method before its options"),
        ("join atoll1.xyz dilco", "did you mean diloco?"),
        ("join nonsense diloco", "the invitation was 'nonsense'..., which is none"),
        ("join atoll1.AAAA diloco", "has a part missing or mistyped; copy the whole line anew"),
        ("join atoll9.AAAA diloco", "which is of another version of Atoll"),
        ("join atoll1.xyz data-parallel", "data-parallel cannot be trained by islands that come and go"),
        ("join atoll1.xyz decoupled", "decoupled cannot be trained by islands that come and go"),
        ("join atoll1.xyz diloco --pool halving", "--pool, --drop, --speeds and --faults are experiments"),
        ("join atoll1.xyz diloco --speeds 1,1,1,0.5", "--pool, --drop, --speeds and --faults are experiments"),
        ("join atoll1.xyz diloco --drop 0.1", "--pool, --drop, --speeds and --faults are experiments"),
        ("join atoll1.xyz diloco --hidden --listen 127.0.0.1:1", "--hidden and --listen were both given"),
        ("join atoll1.xyz diloco --lease 0s", "--lease was 0s, but it must be more than nothing"),
        ("join atoll1.xyz diloco --lease 1s", "an island gives a sign of life each second, and one may be lost"),
        ("join atoll1.xyz diloco --lease 10", "--lease was '10', which has no unit; write 10s"),
        ("join atoll1.xyz diloco --listen here", "'here' is no address"),
        ("join atoll1.xyz diloco --listen 192.0.2.1:7450", "192.0.2.1 is no address of this machine"),
        ("join atoll1.xyz diloco --listen no-such-host.invalid:7450", "cannot be resolved here"),
        ("launch data-parallel", "data-parallel cannot be trained by islands that come and go"),
        ("launch async-local-sgd", "async-local-sgd cannot be trained by islands that come and go"),
        ("launch diloco --islands 3 --workers 2", "--islands was 3, but --workers 2 shares the data among fewer"),
        ("launch diloco --pool halving", "--pool, --drop, --speeds and --faults are experiments"),
        ("launch diloco --listen 127.0.0.1:1", "atoll launch diloco has no option --listen"),
        ("coordinator", "atoll coordinator takes one RUN, a directory, and needs one"),
        ("coordinator a b", "atoll coordinator takes one RUN, a directory, and was given 2"),
        ("coordinator run --lease 0s", "--lease was 0s, but it must be more than nothing"),
        ("coordinator run --expires never", "--expires was 'never', but it takes a number with a unit"),
        ("coordinator run --islands 0", "--islands was 0, which makes no sense"),
        ("coordinator run --port 65535", "--port was 65535, but the next one is used too; give 65534 or less"),
        ("coordinator run --address host:7447", "--address was host:7447, but it is a name or a number alone"),
        ("invite run", "run holds no run; give the directory of an atoll coordinator"),
        ("status run", "run holds no run and no island; give the directory of an atoll coordinator, or the --out of"),
        ("status", "atoll status takes one RUN, a directory, and needs one"),
        ("status run --jsno", "atoll status has no option --jsno; did you mean --json?"),
        ("leave run", "run holds no island; give the --out of an atoll join"),
        ("doctor a b", "atoll doctor takes one invitation at most"),
        ("doctor --params=-1", "--params was -1, which makes no sense"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_nothing_is_written(
    words: str, sentence: str, atoll: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = atoll(words)
    assert sentence in said.err
    assert said.status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_invitations_that_are_used_revoked_expired_or_of_another_run_are_refused_with_the_reason(
    run: list[str], atoll: Call, tmp_path: Path
) -> None:
    def join(invitation: Invitation, folder: str) -> str:
        said = atoll("join", invitation.text(), *run, "--out", tmp_path / folder)
        assert said.status == 2
        return said.err

    with served(tmp_path / "run") as home, served(tmp_path / "other") as other:
        used, revoked = home.invite(2, 60.0)
        (expired,) = home.invite(1, -1.0)
        enrol(used.text(), tmp_path / "island" / "credentials")
        home.revoke(revoked.name)
        assert f"invitation {used.name} was used already, by worker 0; ask" in join(used, "new")
        assert f"invitation {revoked.name} was revoked; ask" in join(revoked, "new")
        assert f"invitation {expired.name} expired at" in join(expired, "new")
        assert "holds credentials of another run" in join(other.invite(1, 60.0)[0], "island")
        listed = atoll("invite", tmp_path / "run", "--list").out
        assert f"{used.name}  worker 0" in listed
        assert f"{revoked.name}  revoked" in listed
        assert f"{expired.name}  expired" in listed
        assert "it cannot be revoked any more" in atoll("invite", tmp_path / "run", "--revoke", used.name).err


def test_an_invitation_may_be_in_a_file(run: list[str], atoll: Call, tmp_path: Path) -> None:
    with served(tmp_path / "run") as home:
        (revoked,) = home.invite(1, 60.0)
        home.revoke(revoked.name)
        (tmp_path / "invitation.txt").write_text(revoked.text() + "\n")
        said = atoll("join", tmp_path / "invitation.txt", *run, "--out", tmp_path / "island")
    assert "was revoked" in said.err


def test_a_coordinator_that_is_not_there_is_a_sentence_at_once_and_uses_nothing_up(
    run: list[str], atoll: Call, tmp_path: Path
) -> None:
    home = Home.open(tmp_path / "run", address="127.0.0.1", port=free_port(2))
    (invitation,) = home.invite(1, 60.0)
    start = time.monotonic()
    said = atoll("join", invitation.text(), *run, "--out", tmp_path / "island")
    assert time.monotonic() - start < 5
    assert said.status == 1
    assert "could not be asked: 127.0.0.1:" in said.err
    assert "check that the coordinator runs there" in said.err
    assert "no coordinator runs there" in atoll("status", tmp_path / "run").err
    with home.serve(1, 10.0, lambda said: None):
        assert enrol(invitation.text(), tmp_path / "island" / "credentials").worker == 0


def test_ports_that_are_taken_are_sentences(run: list[str], atoll: Call, tmp_path: Path) -> None:
    for offset in range(2):
        port = free_port(2)
        with socket.create_server(("0.0.0.0", port + offset)):
            said = atoll("coordinator", tmp_path / f"run-{offset}", "--port", str(port), "--address", "127.0.0.1")
        assert said.status == 2
        assert str(port + offset) in said.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = atoll("join", "atoll1.x", *run, "--listen", address, "--out", tmp_path / "island")
        assert f"the port of {address} is taken by another program" in said.err


def test_a_directory_that_holds_something_else_is_left_as_it_is(run: list[str], atoll: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert "holds something that is no run" in atoll("coordinator", tmp_path).err
    assert "holds something that is no run" in atoll("coordinator", tmp_path / "thesis.tex").err
    assert "already holds something; give --resume" in atoll("launch", *run, "--out", tmp_path).err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("[1]")
    assert "run.json cannot be read" in atoll("coordinator", tmp_path / "run").err
    (tmp_path / "island").mkdir()
    (tmp_path / "island" / "config.json").write_text("{}")
    said = atoll("join", "atoll1.x", *run, "--out", tmp_path / "island")
    assert "already holds a run; give --resume to go on with it" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["island", "run", "thesis.tex"]


def test_what_islands_know_a_run_by_does_not_change(atoll: Call, tmp_path: Path) -> None:
    port = free_port(2)
    first = Home.open(tmp_path / "run", address="127.0.0.1", port=port)
    assert f"know it by port {port}; leave --port out" in atoll("coordinator", tmp_path / "run", "--port", "7000").err
    moved = Home.open(tmp_path / "run", address="localhost")
    assert Home.open(tmp_path / "run") == moved != first
    assert (moved.run, moved.port) == (first.run, port)


def test_a_second_island_in_the_same_directory_is_refused(run: list[str], atoll: Call, tmp_path: Path) -> None:
    from atoll.cli.lock import alone, taken

    island = tmp_path / "island"
    with alone(island):
        assert "an island runs in" in atoll("join", "atoll1.x", *run, "--out", island).err
        assert taken(island)
    assert not taken(island)


def test_to_leave_needs_an_island_and_not_a_coordinator(atoll: Call, tmp_path: Path) -> None:
    Home.open(tmp_path / "run", address="127.0.0.1", port=free_port(2))
    assert "holds no island" in atoll("leave", tmp_path / "run").err


def test_a_full_disk_stops_the_coordinator_with_a_sentence_and_it_goes_on_once_there_is_room(tmp_path: Path) -> None:
    """The island that waits meanwhile is let in by the second one."""
    with small_disk(tmp_path) as disk, ExitStack() as first, ExitStack() as stack:
        home = Home.open(disk / "run", address="127.0.0.1", port=free_port(2))
        server = first.enter_context(home.serve(1, 10.0, lambda said: None))
        mine, another = home.invite(2, 60.0)
        enrolled = enrol(mine.text(), tmp_path / "island")
        fill(disk / "full")
        group = stack.enter_context(connect(enrolled, tmp_path / "island", []))
        waits = ThreadPoolExecutor(1).submit(group.agree, "a run")
        assert server.wait(20.0)
        assert "ledger.sqlite could not be written (the disk is full)" in str(server.error)
        assert "start the coordinator again: the islands train on meanwhile" in str(server.error)
        with pytest.raises(UsageError, match="the disk is full"):
            enrol(another.text(), tmp_path / "another")
        assert not waits.done()
        first.close()
        (disk / "full").unlink()
        stack.enter_context(home.serve(1, 10.0, lambda said: None))
        waits.result(30.0)
        assert group.membership.workers == (0,)
        assert enrol(another.text(), tmp_path / "another").worker == 1


@contextmanager
def small_disk(tmp_path: Path) -> Generator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a disk that is full needs the right to mount one")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return

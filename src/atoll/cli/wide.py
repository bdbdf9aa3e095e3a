"""Commands for islands far apart: `atoll coordinator`, `invite`, `join`, `launch`, `status`, `leave`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from atoll.cli.show import json_line, summary
from atoll.cli.wide_options import Coordinating, Inviting, Joining, Launching
from atoll.errors import AtollError, GroupError, UsageError
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.train.island import Island, IslandGroup
from atoll.train.metrics import size
from atoll.train.plots import plot_curves
from atoll.train.run import Run
from atoll.units import seconds

LEAVE = "leave"
"""A file in an island's directory by which it is told to leave."""


def coordinate(folder: Path, asked: Coordinating) -> None:
    """`atoll coordinator RUN`: serve until interrupted."""
    new = not (folder / "run.json").exists()
    home = Home.open(folder, address=asked.address, port=asked.port)
    console = Console(stderr=True)

    def say(sentence: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')}  {sentence}", highlight=False)

    lease = positive("--lease", asked.lease)
    with home.serve(asked.islands, lease, say) as server:
        say(f"run {home.run}: islands reach this machine at {home.address}, ports {home.port} and {home.port + 1}")
        if new:
            _print_invitations(home, asked.islands, asked.expires)
            say(
                "each line above is for one island: atoll join INVITATION METHOD --out DIR; more by atoll invite "
                f"{folder}"
            )
        while not server.wait(1.0):
            pass
        if server.error:
            raise server.error


def invite(folder: Path, asked: Inviting, stdout: TextIO) -> None:
    """`atoll invite RUN`: make, show or revoke invitations."""
    if not (folder / "run.json").exists():
        raise UsageError(f"{folder} holds no run; give the directory of an atoll coordinator")
    home = Home.open(folder)
    if asked.revoke:
        home.revoke(asked.revoke)
        print(f"invitation {asked.revoke} is worth nothing any more", file=stdout)
    elif asked.list:
        now = time.time()
        for each in home.invited():
            used = "revoked" if each.revoked else f"worker {each.worker}" if each.worker is not None else ""
            left = "expired" if each.expires < now else f"{(each.expires - now) / 3600:.1f} h left"
            print(f"{each.name}  {used or left}", file=stdout)
    else:
        _print_invitations(home, asked.count, asked.expires, stdout)


def _print_invitations(home: Home, count: int, expires: str, stdout: TextIO = sys.stdout) -> None:
    for invitation in home.invite(count, positive("--expires", expires)):
        print(invitation.text(), file=stdout, flush=True)


def join(invitation: str, run: Run, place: Joining, stdout: TextIO) -> None:
    """`atoll join INVITATION METHOD`: train on this island, until the run has ended or it is told to leave."""
    if place.hidden and place.listen:
        raise UsageError("--hidden and --listen were both given, but who is hidden listens nowhere; leave one out")
    credentials = place.out / "credentials"
    enrolled = enrol(invitation, credentials)
    told_to_leave = place.out / LEAVE
    told_to_leave.unlink(missing_ok=True)
    lease = positive("--lease", place.lease)
    listen = [] if place.hidden else [place.listen or f"0.0.0.0:{free_port()}"]

    @contextmanager
    def way(told: str, step: int) -> Generator[IslandGroup]:
        with connect(enrolled, credentials, listen, told, step, lease) as group:
            yield group

    island = Island(
        run,
        enrolled.worker,
        way,
        out=place.out,
        resume=place.resume,
        save_every=place.save_every,
        leaves=told_to_leave.exists,
    )
    result = island.train()
    plot_curves(place.out / "curves.png", {run.method.name: [result]})
    print(json_line(result.as_json()) if place.json else summary(result, place.out), file=stdout)


def leave(folder: Path) -> None:
    """`atoll leave DIR`: let an island of this machine leave after its round."""
    if not (folder / "credentials").exists():
        raise UsageError(f"{folder} holds no island; give the --out of an atoll join")
    (folder / LEAVE).touch()
    print(f"the island in {folder} leaves after its next boundary", file=sys.stderr)


def status(folder: Path, stdout: TextIO, *, as_json: bool) -> None:
    """`atoll status RUN`: how the run stands, live on a terminal."""
    path = folder / "status.json"
    if not (folder / "run.json").exists():
        raise UsageError(f"{folder} holds no run; give the directory of an atoll coordinator")
    if as_json or not stdout.isatty():
        shown = _read(path)
        print(json.dumps(shown) if as_json else "", end="\n" if as_json else "", file=stdout)
        if not as_json:
            Console(file=stdout, width=120).print(_table(shown))
        return
    with Live(console=Console(file=stdout), auto_refresh=False) as live:
        while True:
            live.update(_table(_read(path)), refresh=True)
            time.sleep(1.0)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        raise GroupError(f"{path} is not there yet, so no coordinator runs there; start atoll coordinator") from None


def _table(status: dict[str, Any]) -> Table:
    epoch, late = status["epoch"], time.time() - status["at"]
    title = f"run {status['run']}"
    if epoch:
        title += f"  epoch {epoch['number']} from step {epoch['from_step']}"
    if late > 5:
        title += f"  COORDINATOR AWAY for {late:.0f} s: islands train on, but nobody can come, and no death be settled"
    alive = sum(island["state"] in ("trains", "fetches", "done") for island in status["islands"])
    last = next((each for each in status["rounds"] if not each["lost"]), None)
    if last:
        title += f"\n{alive} alive; round {last['round']} of {last['workers']}, digest {last['digest'][:12]}"
    table = Table(title=title, title_justify="left")
    for column in ("worker", "state", "heard", "step", "loss", "tokens/s", "sent"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for island in status["islands"]:
        ago, loss, speed, sent = (island[name] for name in ("heard_s", "loss", "tokens_per_s", "sent"))
        table.add_row(
            str(island["worker"]),
            island["state"],
            "never" if ago is None else f"{ago:.0f} s ago",
            str(island["step"] or ""),
            "" if loss is None else f"{loss:.3f}",
            "" if speed is None else f"{speed:,}",
            "" if sent is None else size(sent),
        )
    return table


def launch(method: Sequence[str], asked: Launching, stdout: TextIO) -> None:
    """`atoll launch METHOD`: a coordinator and islands of this machine, each in a process of its own.

    Args: method: METHOD and the options of the run, as they were given.
    """
    out = asked.out
    if out.exists() and any(out.iterdir()) and not asked.resume:
        raise UsageError(f"{out} already holds something; give --resume to go on with it, or another --out")
    home = Home.open(out / "coordinator", address="127.0.0.1", port=free_port(2))
    console = Console(stderr=True)
    with home.serve(asked.islands, 10.0, lambda said: console.print(said, highlight=False)) as server:
        begun = [out / f"worker-{number}" / "credentials" / "joined.json" for number in range(asked.islands)]
        invitations = iter(home.invite(asked.islands, 3600.0))
        with _processes() as processes:
            for number, joined in enumerate(begun):
                folder = joined.parent.parent
                folder.mkdir(parents=True, exist_ok=True)
                words = [*method, "--out", str(folder), "--listen", f"127.0.0.1:{free_port()}", "--json"]
                words += ["--resume"] if asked.resume else []
                invitation = next(invitations).text()
                processes.start(["join", invitation, *words], folder, f"worker {number}")
                _await(lambda joined=joined: joined.exists() or processes.ended() is not None, processes)
            _await(
                lambda: all(process.poll() is not None for process, *_ in processes.started) or server.wait(0),
                processes,
            )
            results = processes.results()
    for result in results:
        print(json_line(result) if asked.json else _in_a_line(result), file=stdout)


def _in_a_line(result: dict[str, Any]) -> str:
    return (
        f"held-out loss {result['val_loss']:.4f} nats per token after {result['steps']} steps, "
        f"{size(result['bytes_sent_per_worker'])} sent, digest {result['digest'][:16]}"
    )


class _Processes:
    """Islands in processes of their own, which do not outlive this one."""

    def __init__(self) -> None:
        self.started: list[tuple[subprocess.Popen[bytes], Path, str]] = []
        self._files: list[IO[bytes]] = []

    def start(self, words: Sequence[str], folder: Path, name: str) -> None:
        out, err = (folder / "stdout.txt").open("wb"), (folder / "stderr.txt").open("ab")
        self._files += [out, err]
        command = [sys.executable, "-m", "atoll.cli", *words]
        # a group of its own, so that Ctrl-C comes to it from here, once
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        self.started.append((process, folder, name))

    def ended(self) -> str | None:
        """What an island that failed said last."""
        for process, folder, name in self.started:
            if process.poll():
                said = (folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
                return f"{name} ended with status {process.returncode}: {said[-1] if said else 'without a word'}"
        return None

    def results(self) -> list[dict[str, Any]]:
        """What the islands printed at their end."""
        found: list[dict[str, Any]] = []
        for process, folder, name in self.started:
            lines = (folder / "stdout.txt").read_text().strip().splitlines()
            if process.poll() or not lines:
                raise AtollError(self.ended() or f"{name} said nothing; see {folder / 'stderr.txt'}")
            found.append(json.loads(lines[-1]))
        return found

    def stop(self) -> None:
        for process, *_ in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        end = time.monotonic() + 10
        for process, *_ in self.started:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in self._files:
            file.close()


@contextmanager
def _processes() -> Generator[_Processes]:
    processes = _Processes()
    try:
        yield processes
    finally:
        processes.stop()


def _await(true: Any, processes: _Processes) -> None:
    while not true():
        time.sleep(0.2)
    if said := processes.ended():
        raise AtollError(said)


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody has now."""
    import socket

    while True:
        with socket.socket() as first:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
        try:
            for offset in range(1, count):
                with socket.socket() as other:
                    other.bind(("", port + offset))
        except OSError:
            continue
        return port


def positive(flag: str, words: str) -> float:
    """A duration above 0, in seconds."""
    found = seconds(flag, words)
    if not found > 0:
        raise UsageError(f"{flag} was {words}, but it must be more than nothing; give such as 10s")
    return found

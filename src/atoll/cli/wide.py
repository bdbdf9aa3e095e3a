"""Commands for islands far apart: `atoll coordinator`, `invite`, `join`, `status`, `leave`."""

import json
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from atoll.cli.lock import alone
from atoll.cli.show import json_line, summary
from atoll.cli.wide_options import Coordinating, Inviting, Joining, Looking
from atoll.errors import GroupError, UsageError
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import JOINED, Enrolled, enrol, read_enrolled
from atoll.peers.wide.home import Home
from atoll.peers.wide.invitations import PREFIX, Invitation
from atoll.peers.wide.probe import listenable, moved
from atoll.peers.wide.status import watching
from atoll.train.island import Island, IslandGroup, check
from atoll.train.metrics import size
from atoll.train.plots import plot_curves
from atoll.train.run import Run
from atoll.units import seconds

LEAVE, INVITATION, CREDENTIALS = "leave", "invitation.txt", "credentials"
"""In an island's directory: a file by which it is told to leave, one where a launch keeps an invitation, and a folder.
"""
BEATS_S = 3.0
"""Seconds in which a sign of life comes even if one is lost: a lease is not shorter."""


def coordinate(folder: Path, asked: Coordinating) -> None:
    """`atoll coordinator RUN`: serve until interrupted."""
    new = not (folder / "run.json").exists()
    lease, _ = lease_of(asked.lease), positive("--expires", asked.expires)
    if asked.recover and new:
        raise UsageError(
            f"--recover was given, but {folder} holds no copy of a run; put run.json and credentials/ of the lost "
            "machine there"
        )
    home = Home.open(folder, address=asked.address, port=asked.port)
    console = Console(stderr=True)

    with home.serve(asked.islands, lease, lambda said: say(console, said), recovers=asked.recover) as server:
        at = f"{home.address}, ports {home.port} and {home.port + 1}"
        say(
            console, f"run {home.run}: islands reach this machine at {at}; who is silent for {lease:g} s counts as gone"
        )
        if new:
            _print_invitations(home, asked.islands, asked.expires)
            say(
                console,
                "each line above is for one island: atoll join INVITATION METHOD --out DIR; more by atoll invite "
                f"{folder}",
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
    # all that can be refused here is, before the invitation is used up
    check(run)
    lease, listen = lease_of(place.lease), listening(place)
    if (place.out / "config.json").exists() and not place.resume:
        raise UsageError(f"{place.out} already holds a run; give --resume to go on with it, or another --out")
    line = text_of(invitation)
    with alone(place.out):
        enrolled = moved(enrol(line, place.out / CREDENTIALS), Invitation.parse(line))
        _train(enrolled, run, place, listen, lease, stdout)


def _train(enrolled: Enrolled, run: Run, place: Joining, listen: Sequence[str], lease: float, stdout: TextIO) -> None:
    told_to_leave = place.out / LEAVE
    told_to_leave.unlink(missing_ok=True)

    @contextmanager
    def way(told: str, step: int) -> Generator[IslandGroup]:
        with connect(enrolled, place.out / CREDENTIALS, listen, told, step, lease) as group:
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


def text_of(invitation: str) -> str:
    """The line of an invitation, which may be in a file of this name.

    Raises: UsageError if it is neither.
    """
    if invitation.startswith(PREFIX) or not Path(invitation).is_file():
        return invitation
    try:
        return Path(invitation).read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"the invitation in {invitation} cannot be read ({error}); give the line itself") from None


def listening(place: Joining) -> list[str]:
    """Where the others reach this island, if they can.

    Raises: UsageError for an address that cannot be listened at.
    """
    if place.hidden:
        return []
    if place.listen is None:
        return [f"0.0.0.0:{free_port()}"]
    listenable(place.listen)
    return [place.listen]


def leave(folder: Path) -> None:
    """`atoll leave DIR`: let an island of this machine leave after its round."""
    if not (folder / CREDENTIALS / JOINED).exists():
        raise UsageError(f"{folder} holds no island; give the --out of an atoll join")
    (folder / LEAVE).touch()
    print(f"the island in {folder} leaves after its next boundary", file=sys.stderr)


def status(folder: Path, asked: Looking, stdout: TextIO) -> None:
    """`atoll status RUN`: how the run stands, live on a terminal."""
    with _looking(folder) as look:
        if asked.json:
            print(json.dumps(look()), file=stdout)
            return
        if not stdout.isatty():
            Console(file=stdout, width=120).print(standing(look()))
            return
        with Live(console=Console(file=stdout), auto_refresh=False) as live:
            while True:
                live.update(standing(look()), refresh=True)
                time.sleep(1.0)


@contextmanager
def _looking(folder: Path) -> Generator[Callable[[], dict[str, Any]]]:
    """What returns how a run stands: from the coordinator's directory, or as it tells an island of this machine."""
    if (folder / "run.json").exists():
        yield partial(_read, folder / "status.json")
    elif (folder / CREDENTIALS / JOINED).exists():
        enrolled, _ = read_enrolled(folder / CREDENTIALS)
        with watching(enrolled, folder / CREDENTIALS) as look:
            yield look
    else:
        raise UsageError(
            f"{folder} holds no run and no island; give the directory of an atoll coordinator, or the --out of an "
            "atoll join"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        raise GroupError(f"{path} is not there yet, so no coordinator runs there; start atoll coordinator") from None


def standing(status: dict[str, Any]) -> Table:
    """How a run stands, for people."""
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
    caption = f"who is silent for {status['lease_s']:g} s counts as gone"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
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


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody has now."""
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


def say(console: Console, sentence: str) -> None:
    """With the time of day."""
    console.print(f"{time.strftime('%H:%M:%S')}  {sentence}", highlight=False, markup=False, soft_wrap=True)


def positive(flag: str, words: str) -> float:
    """A duration above 0, in seconds."""
    found = seconds(flag, words)
    if not found > 0:
        raise UsageError(f"{flag} was {words}, but it must be more than nothing; give such as 10s")
    return found


def lease_of(words: str) -> float:
    """A lease in seconds.

    Raises: UsageError for one in which nobody could give a sign of life.
    """
    if (found := positive("--lease", words)) < BEATS_S:
        raise UsageError(
            f"--lease was {words}, but an island gives a sign of life each second, and one may be lost; give "
            f"{BEATS_S:g}s or more"
        )
    return found

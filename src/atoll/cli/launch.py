"""`atoll launch METHOD`: a coordinator and islands of this machine, each in a process of its own."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console
from rich.live import Live

from atoll.cli.show import json_line
from atoll.cli.wide import INVITATION, free_port, say, standing
from atoll.cli.wide_options import Launching
from atoll.errors import AtollError, UsageError
from atoll.peers.wide.credentials import write_private
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.peers.wide.server import Server
from atoll.peers.wide.status import status
from atoll.train.island import check
from atoll.train.metrics import size
from atoll.train.run import Run

LEASE_S = 10.0
LOOK_EVERY = 0.5
"""Seconds between two looks at the islands."""
PATIENCE_S = 10.0
"""Seconds that islands get to end by themselves when the launch is interrupted; then they are killed."""
HERE = ("trains", "fetches", "waits", "leaves")
"""States of islands that are not at their end, whoever started them."""


def launch(run: Run, method: Sequence[str], asked: Launching, stdout: TextIO) -> None:
    """Go on until no island is left to train.

    Args: method: METHOD and the options of the run, as they were given.
    Raises: UsageError for what islands that come and go cannot train; AtollError if no island came to the end, or one
        ended before the run had begun.
    """
    out, console = asked.out, Console(stderr=True)
    check(run)
    if asked.islands > run.workers:
        raise UsageError(
            f"--islands was {asked.islands}, but --workers {run.workers} shares the data among fewer; leave --workers "
            "out"
        )
    if out.exists() and any(out.iterdir()) and not asked.resume:
        raise UsageError(f"{out} already holds something; give --resume to go on with it, or another --out")
    # who was at the end has nothing to go on with, and who was not comes too late
    results = _kept(out, run) or _trained(run, method, asked, console)
    if asked.json:
        print(json_line([{"worker": worker, **result} for worker, result in results.items()]), file=stdout)
    else:
        print("\n".join(_in_a_line(worker, result) for worker, result in results.items()), file=stdout)


def _kept(out: Path, run: Run) -> dict[int, dict[str, Any]]:
    """The results of a run that has come to its end, by worker."""
    found = {int(path.parent.name.rpartition("-")[2]): path for path in out.glob("worker-*/result.json")}
    return {worker: json.loads(path.read_text()) for worker, path in sorted(found.items()) if _of(path.parent, run)}


def _of(folder: Path, run: Run) -> bool:
    config = folder / "config.json"
    return config.exists() and json.loads(config.read_text())["run"] == repr(run)


def _trained(run: Run, method: Sequence[str], asked: Launching, console: Console) -> dict[int, dict[str, Any]]:
    """The results of those islands that come to the end, by worker."""
    out, coordinator = asked.out, asked.out / "coordinator"
    port = None if (coordinator / "run.json").exists() else free_port(2)
    home = Home.open(coordinator, address="127.0.0.1", port=port)
    with ExitStack() as stack:
        server = stack.enter_context(home.serve(asked.islands, LEASE_S, lambda said: say(console, said)))
        invitations = home.invite(asked.islands, 3600.0)
        islands = _Islands()
        stack.callback(islands.stop)
        for number, invitation in enumerate(invitations):
            folder = out / f"worker-{number}"
            enrol(invitation.text(), folder / "credentials")
            write_private(folder, {INVITATION: invitation.text().encode() + b"\n"})
            words = [*method, "--out", str(folder), "--listen", f"127.0.0.1:{free_port()}"]
            begun = (folder / "config.json").exists()
            islands.start(number, [str(folder / INVITATION), *words], folder, resume=begun)
        say(console, f"what each island says is in {out}/worker-*/stderr.txt; Ctrl-C ends all, and --resume goes on")
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        _watch(server, islands, lambda said: say(console, said), live)
        results = _kept(out, run)
    if not results:
        raise AtollError(f"no island came to the end; {islands.last_words()}")
    return results


def _watch(server: Server, islands: "_Islands", tell: Callable[[str], None], live: Live | None) -> None:
    """Until nobody trains any more; those who die are told of."""
    while True:
        if server.wait(LOOK_EVERY):
            raise server.error or AtollError("the coordinator has stopped")
        seen: dict[str, Any] = dict(server.look(status))
        if live:
            live.update(standing(seen), refresh=True)
        for death in islands.deaths():
            if not seen["epoch"]:
                raise AtollError(f"{death.said} before the run had begun")
            tell(f"{death.said}; the others go on. To bring it back: {death.again}")
        if islands.over() and not _others(seen, islands):
            return


def _others(seen: dict[str, Any], islands: "_Islands") -> bool:
    """Whether islands train that were brought back by hand."""
    left = [each for each in seen["islands"] if each["worker"] not in islands.ended()]
    return any(each["state"] in HERE and (each["heard_s"] or 0.0) <= LEASE_S for each in left)


def _in_a_line(worker: int, result: dict[str, Any]) -> str:
    return (
        f"worker {worker}: held-out loss {result['val_loss']:.4f} nats per token after {result['steps']} steps, "
        f"{size(result['bytes_sent_per_worker'])} sent, digest {result['digest'][:16]}"
    )


@dataclass(frozen=True)
class _Death:
    """How an island ended that did not come to its end, and the command that brings it back."""

    said: str
    again: str


@dataclass
class _One:
    """A process. Args: words: of `atoll join`."""

    process: subprocess.Popen[bytes]
    folder: Path
    words: Sequence[str]
    files: tuple[IO[bytes], IO[bytes]]
    told: bool = False


@dataclass
class _Islands:
    """Islands in processes of their own, which do not outlive this one. `each`: by number."""

    each: dict[int, _One] = field(default_factory=dict[int, _One])

    def start(self, number: int, words: Sequence[str], folder: Path, *, resume: bool) -> None:
        out, err = (folder / "stdout.txt").open("wb"), (folder / "stderr.txt").open("ab")
        command = [sys.executable, "-m", "atoll.cli.launched", str(os.getpid()), "join", *words, "--json"]
        command += ["--resume"] if resume else []
        # a group of its own, so that Ctrl-C comes to it from here, once
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        self.each[number] = _One(process, folder, words, (out, err))

    def over(self) -> bool:
        return all(one.process.poll() is not None for one in self.each.values())

    def ended(self) -> set[int]:
        """Those whose process has come to its end by itself."""
        return {number for number, one in self.each.items() if one.process.poll() == 0}

    def deaths(self) -> list[_Death]:
        """Those that have not been told of."""
        found = [number for number, one in self.each.items() if one.process.poll() and not one.told]
        for number in found:
            self.each[number].told = True
        return [self._death(number) for number in found]

    def _death(self, number: int) -> _Death:
        one = self.each[number]
        status, said = one.process.returncode, _lines(one.folder / "stderr.txt")
        how = f"was killed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
        last = f": {said[-1]}" if said and status > 0 else ""
        return _Death(f"worker {number} {how}{last}", f"atoll join {shlex.join(one.words)} --resume")

    def last_words(self) -> str:
        return "; ".join(self._death(number).said for number, one in self.each.items() if one.process.poll())

    def stop(self) -> None:
        left = [one.process for one in self.each.values() if one.process.poll() is None]
        for process in left:
            os.killpg(process.pid, signal.SIGINT)
        end = time.monotonic() + PATIENCE_S
        for process in left:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for one in self.each.values():
            for file in one.files:
                file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()

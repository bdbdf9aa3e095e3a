"""`atoll doctor`: whether an island can train here, seen before it does."""

import math
import os
import platform
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.table import Table

from atoll import __version__
from atoll.cli.lock import taken
from atoll.cli.options import PLANNED, Planning
from atoll.cli.plan import specs_of
from atoll.cli.planned import rate
from atoll.cli.show import json_line
from atoll.cli.wide import CREDENTIALS, text_of
from atoll.cli.wide_options import Examining
from atoll.errors import AtollError, UsageError
from atoll.peers.wide.credentials import CA, HOUR, shown
from atoll.peers.wide.enrol import JOINED, Enrolled, read_enrolled
from atoll.peers.wide.invitations import Invitation, split
from atoll.peers.wide.probe import Told, Visit, ask, knock, listenable, visit
from atoll.recipes.methods import diloco
from atoll.sim.plan import Setting, used
from atoll.train.checkpoint import KEPT
from atoll.train.metrics import duration, size

CHECKPOINT, MEMORY = 20, 32
"""Bytes per parameter, roughly: in a checkpoint the parameters, Adam's two, the anchor and the outer momentum; in
memory those, gradients, and what travels."""
MINUTE = 60.0
GOAL = 0.95
"""Part of the time that a plan is to train."""
LITTLE = 1e9
"""Bytes of free disk that are hardly enough for anything."""


class Verdict(Enum):
    """What a check means for a run."""

    GOOD = "good"
    LOOK = "look at it"
    STOPS = "would stop a run"


@dataclass(frozen=True)
class Check:
    """Args: what: was looked at. seen: what there was. advice: what to do, unless it is good."""

    what: str
    seen: str
    verdict: Verdict = Verdict.GOOD
    advice: str = ""


def examine(invitation: str | None, asked: Examining, stdout: TextIO) -> None:
    """Look at everything, show it.

    Raises: AtollError if something would stop a run.
    """
    if asked.params is not None and not PLANNED["params"][0] <= asked.params <= PLANNED["params"][1]:
        raise UsageError(f"--params was {asked.params:g}, which is no size of a model; give one such as 1.5e9")
    checks = [versions(), *machine(asked.params), disk(asked.out, asked.params)]
    runs = taken(asked.out)
    if runs:
        checks.append(Check("island", f"one runs in {asked.out}; it is left alone"))
    checks.append(listening(asked.listen, runs=runs))
    checks += _of_run(invitation, asked)
    _show(checks, asked, stdout)
    if stops := [check.what for check in checks if check.verdict is Verdict.STOPS]:
        raise AtollError(f"{len(stops)} of {len(checks)} checks would stop a run: {', '.join(stops)}")


def _show(checks: list[Check], asked: Examining, stdout: TextIO) -> None:
    if asked.json:
        listed = [{**vars(check), "verdict": check.verdict.name.lower()} for check in checks]
        print(json_line(listed), file=stdout)
        return
    colours = {Verdict.GOOD: "green", Verdict.LOOK: "yellow", Verdict.STOPS: "red"}
    table = Table("check", "seen", "verdict", "what to do")
    for check in checks:
        word = f"[{colours[check.verdict]}]{check.verdict.value}"
        table.add_row(check.what, check.seen, word, check.advice)
    Console(file=stdout, width=None if stdout.isatty() else 160).print(table)


def _seen(what: str, look: Callable[[], str], otherwise: Verdict = Verdict.STOPS) -> Check:
    """What a look finds, or the sentence with which it fails: what was seen; and what to do."""
    try:
        return Check(what, look())
    except AtollError as error:
        seen, _, advice = str(error).rpartition("; ")
        return Check(what, seen or advice, otherwise, advice if seen else "")


def versions() -> Check:
    """Of what matters to all islands alike."""
    found = f"atoll {__version__}, python {platform.python_version()}, torch {torch.__version__}"
    return Check("versions", f"{found}, zenoh {version('eclipse-zenoh')}")


def machine(params: float | None) -> Iterator[Check]:
    """Cores, memory, GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = f"{cores} cores, {size(memory)} of memory, {', '.join(gpus) or 'no GPU that torch can use'}"
    need = MEMORY * (params or 0.0)
    if need > memory and not gpus:
        advice = f"so many parameters need about {size(int(need))}; take a smaller model or a larger machine"
        yield Check("machine", said, Verdict.STOPS, advice)
    else:
        yield Check("machine", said)


def disk(out: Path, params: float | None) -> Check:
    """Whether checkpoints have room, and may be written."""
    there = next(each for each in (out.resolve(), *out.resolve().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check("disk", f"{out} cannot be written", Verdict.STOPS, "give another --out, or its permissions")
    free, files = shutil.disk_usage(there).free, KEPT + 1
    seen = f"{size(free)} free at {out}"
    if params is None:
        most = free / (CHECKPOINT * files)
        seen += f": enough for checkpoints of a model of about {most:.1g} parameters"
        little = Check("disk", seen, Verdict.LOOK, "make room, or give another --out")
        return little if free < LITTLE else Check("disk", seen)
    need = int(CHECKPOINT * files * params)
    seen += f"; {files} checkpoints of {params:.3g} parameters are about {size(need)}"
    if need > free:
        return Check("disk", seen, Verdict.STOPS, "make room, or give another --out")
    return Check("disk", seen)


def listening(listen: str | None, *, runs: bool) -> Check:
    """Whether others can be let in."""
    if listen is None:
        advice = "give a port that the firewall lets in as --listen HOST:PORT, or join --hidden if there is none"
        return Check("listening", "at a free port of all addresses, a new one each time", Verdict.LOOK, advice)

    def look() -> str:
        listenable(listen)
        return f"{listen} is free, and of this machine; whether others come through is seen when they do"

    found = _seen("listening", look)
    if runs and "is taken" in found.seen:
        return Check("listening", f"{listen} is taken, as by the island that runs here")
    return found


def _of_run(invitation: str | None, asked: Examining) -> Iterator[Check]:
    """What an invitation, or the credentials in the directory, lead to."""
    folder = asked.out / CREDENTIALS
    enrolled: Enrolled | None = None
    if (folder / JOINED).exists():
        try:
            enrolled, until = read_enrolled(folder)
        except AtollError as error:
            yield Check("credentials", str(error), Verdict.STOPS, "enrol into an empty folder with a new invitation")
            return
        yield _credentials(enrolled, until)
    read: Invitation | None = None
    if invitation:
        try:
            read = Invitation.parse(text_of(invitation))
        except AtollError as error:
            yield _seen("invitation", _raising(error))
            return
        if enrolled and enrolled.run != read.run:
            seen = f"of run {read.run}, but {folder} holds credentials of {enrolled.run}"
            yield Check("invitation", seen, Verdict.STOPS, "give another --out")
            return
    if read:
        addresses, run, authority = read.addresses, read.run, read.authority
    elif enrolled:
        authority = ssl.PEM_cert_to_DER_cert((folder / CA).read_text())
        addresses, run = tuple(map(_desk_of, enrolled.endpoints)), enrolled.run
    else:
        advice = "give the line that atoll coordinator or atoll invite printed"
        yield Check("invitation", f"none was given, and {asked.out} has not joined a run", Verdict.LOOK, advice)
        return
    told: Told | None = None
    for address in addresses:
        try:
            told = ask(address, run, authority, None if enrolled else read)
        except AtollError as error:
            # an island that has joined trains on without the desk
            yield _seen(f"enrolment at {address}", _raising(error), Verdict.LOOK if enrolled else Verdict.STOPS)
        else:
            yield Check(f"enrolment at {address}", f"run {run}, {_ms(told.rtt)} there and back")
            break
    if read and not enrolled:
        yield _invitation(read, told)
    if told:
        yield from coordinator(told, run, authority)
    if enrolled:
        yield from _links(enrolled, folder, asked)


def _raising(error: AtollError) -> Callable[[], str]:
    def look() -> str:
        raise error

    return look


def _desk_of(endpoint: str) -> str:
    host, port = split(endpoint)
    return f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _credentials(enrolled: Enrolled, until: float) -> Check:
    seen = f"worker {enrolled.worker} of run {enrolled.run}, until {shown(until)}"
    if until <= time.time():
        return Check("credentials", seen, Verdict.STOPS, "join with the invitation of before, or a new one")
    return Check("credentials", seen)


def _invitation(read: Invitation, told: Told | None) -> Check:
    seen = f"{read.name}, for run {read.run}, until {shown(read.expires)}"
    if told and told.holds:
        why, _, advice = told.holds.rpartition("; ")
        return Check("invitation", why, Verdict.STOPS, advice)
    if read.expires <= time.time():
        return Check("invitation", seen, Verdict.STOPS, "ask the run's coordinator for a new one")
    return Check("invitation", seen if told else f"{seen}; whether it was used is not known")


def coordinator(told: Told, run: str, authority: bytes) -> Iterator[Check]:
    """Version, clock, lease and links of a coordinator that answers."""
    if told.version != __version__:
        advice = "install the same version of atoll on all"
        yield Check("coordinator", f"runs atoll {told.version}, this is {__version__}", Verdict.STOPS, advice)
    else:
        yield Check("coordinator", f"atoll {told.version}; who is silent for {told.lease_s:g} s counts as gone")
    apart = abs(told.clock)
    way = "behind" if told.clock > 0 else "ahead of"
    seen = f"{apart:.1f} s {way} the coordinator's"
    advice = "set the wrong one; certificates need clocks that agree within an hour"
    verdict = Verdict.GOOD if apart < MINUTE else Verdict.LOOK if apart < HOUR else Verdict.STOPS
    yield Check("clock", seen, verdict, advice if apart >= MINUTE else "")
    for endpoint in told.endpoints:
        yield _seen(
            f"links at {endpoint}", lambda at=endpoint: f"answers in {_ms(knock(at, run, authority))} there and back"
        )


def _links(enrolled: Enrolled, folder: Path, asked: Examining) -> Iterator[Check]:
    """The way from each island that is there."""
    try:
        visited = visit(enrolled, folder)
    except AtollError as error:
        yield _seen("run", _raising(error))
        return
    if visited.here:
        yield Check("run", f"an island takes part as worker {enrolled.worker} already; it is left alone")
    if not visited.peers:
        yield Check("islands", "no other one is there, so no link was measured")
    for peer in visited.peers:
        what = f"from worker {peer.worker}"
        if peer.rtt is None:
            advice = "look whether it runs on, and whether its --listen is reached from here"
            yield Check(what, "it does not answer", Verdict.LOOK, advice)
        elif peer.speed is None:
            yield Check(what, f"{_ms(peer.rtt)}; its speed was measured often lately, or it is too slow to tell")
        else:
            yield Check(what, f"{_ms(peer.rtt)} there and back, {rate(8 * peer.speed)}")
    if asked.params is not None:
        yield from _period(visited, asked.params)


def _period(visited: Visit, params: float) -> Iterator[Check]:
    """What diloco would need on the slowest link."""
    speeds = [8 * peer.speed for peer in visited.peers if peer.speed]
    if not speeds:
        return
    trips = [peer.rtt for peer in visited.peers if peer.rtt is not None]
    where = Setting(specs_of(Planning(params=params)), len(speeds) + 1, 1.0, min(speeds), max(trips) / 2)
    period, seconds = shortest(where)
    seen = f"{params:.3g} parameters at {rate(min(speeds))}: diloco trains {GOAL:.0%} of the time with rounds of "
    if period is None:
        longest = duration(PLANNED["period"][1])
        advice = "take fewer bits on the wire, as streaming or sparseloco do, or faster links"
        yield Check("plan", f"{seen}more than {longest}", Verdict.LOOK, advice)
    else:
        yield Check("plan", f"{seen}{duration(period)} of training: {period} inner steps of a second ({seconds})")


def shortest(where: Setting) -> tuple[int | None, str]:
    """The shortest period, in inner steps of a second, with which diloco reaches the goal; and how long it waits."""

    def busy(period: int) -> float:
        return used(diloco(period=period).strategy, period, where)[0]

    most = int(PLANNED["period"][1])
    low, high = 0, 1
    while busy(high) < GOAL:
        if high >= most:
            return None, ""
        low, high = high, min(2 * high, most)
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if busy(middle) >= GOAL else (middle, high)
    waits = high * (1 / busy(high) - 1)
    return high, f"a round waits {duration(waits)}" if math.isfinite(waits) else ""

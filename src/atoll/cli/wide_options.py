"""The options of commands for islands far apart."""

from dataclasses import dataclass
from pathlib import Path

from atoll.cli.values import Count, Positive


@dataclass(frozen=True)
class Coordinating:
    """What `atoll coordinator` needs to know.

    Args:
        islands: how many must be there before the run begins, and the invitations that a new run comes with
        address: by which islands reach this machine, such as a name or an outer address; found out if left out
        port: of the links; the next one is for enrolment; 7447 if left out
        expires: how long invitations hold, such as 12h or 7days
        lease: silence after which an island counts as gone, such as 10s
        recover: the coordinator's machine was lost: RUN holds copies of its run.json and credentials/ alone, and the
        islands, which find this machine at the same address, tell the rest
    """

    islands: Count = 2
    address: str | None = None
    port: Count | None = None
    expires: str = "7days"
    lease: str = "10s"
    recover: bool = False


@dataclass(frozen=True)
class Inviting:
    """What `atoll invite` does.

    Args:
        count: invitations to make, each for one island
        expires: how long they hold, such as 12h or 7days
        revoke: the name of one that is to be worth nothing, instead
        list: show those that were made, instead
    """

    count: Count = 1
    expires: str = "7days"
    revoke: str | None = None
    list: bool = False


@dataclass(frozen=True)
class Joining:
    """Where an island lives.

    Args:
        out: directory of this island: credentials, config, metrics, checkpoints and model
        listen: where the other islands reach this one, such as 203.0.113.7:7448; a free port here if left out
        hidden: others cannot reach this island: everything goes through the coordinator
        resume: go on from the last checkpoint in --out, or with the others' state if they are further
        save_every: inner steps between checkpoints; the period if left out
        lease: silence after which someone counts as gone, as of the coordinator
        json: end with one line of JSON on stdout; everything else goes to stderr
    """

    out: Path = Path("island")
    listen: str | None = None
    hidden: bool = False
    resume: bool = False
    save_every: Count | None = None
    lease: str = "10s"
    json: bool = False


@dataclass(frozen=True)
class Launching:
    """Islands of one machine.

    Args:
        islands: processes, each one island
        out: directory of the run: the coordinator's, and one for each island
        resume: go on with the run in --out
        json: end with one line of JSON on stdout, the islands' results; everything else goes to stderr
    """

    islands: Count = 4
    out: Path = Path("runs/islands")
    resume: bool = False
    json: bool = False


@dataclass(frozen=True)
class Looking:
    """How `atoll status` shows a run.

    Args:
        json: print one line of JSON instead
    """

    json: bool = False


@dataclass(frozen=True)
class Examining:
    """What `atoll doctor` looks at.

    Args:
        out: directory of the island: whether there is room, and the credentials if it has joined before
        listen: where the other islands are to reach this one, such as 203.0.113.7:7448
        params: parameters of the model that is to be trained, such as 1.5e9: what they need here, and on these links
        json: end with one line of JSON on stdout; everything else goes to stderr
    """

    out: Path = Path("island")
    listen: str | None = None
    params: Positive | None = None
    json: bool = False

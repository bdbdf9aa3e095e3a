"""Commands for islands far apart, as words: `atoll launch`, `coordinator`, `invite`, `join`, `doctor`, `status` and
`leave`."""

import sys
from dataclasses import replace

from atoll.cli.values import kind_of, parameters
from atoll.cli.words import folder_and, method_and, results_on, resumable, terminable
from atoll.errors import UsageError


def launch(args: list[str]) -> None:
    """`atoll launch METHOD`."""
    from atoll.cli.options import Options
    from atoll.cli.wide_options import Launching

    method, values = method_and("launch", args, run=Options, islands=Launching)
    asked: Launching = values["islands"]
    options: Options = values["run"]
    own = {"--" + name.replace("_", "-"): kind_of(each.annotation) for name, each in parameters(Launching).items()}
    words, rest = list[str](), list(args)
    while rest:
        flag, given, _ = rest[0].replace("_", "-").partition("=")
        kind = own.get(flag)
        words += [] if kind else rest[:1]
        rest = rest[2 if kind and kind.base is not bool and not given else 1 :]
    if not options.workers:
        options = replace(options, workers=asked.islands)
        words += ["--workers", str(asked.islands)]
    from atoll.cli.launch import launch

    with results_on(asked.json) as stdout, resumable(asked.out), terminable():
        launch(options.run(method), words, asked, stdout)


def coordinator(args: list[str]) -> None:
    """`atoll coordinator RUN`."""
    from atoll.cli.wide_options import Coordinating

    about = "Look after a run of islands far apart."
    folder, values = folder_and("coordinator", "RUN", about, args, asked=Coordinating)
    from atoll.cli.wide import coordinate

    try:
        with terminable():
            coordinate(folder, values["asked"])
    except KeyboardInterrupt:
        how = "islands train on meanwhile"
        raise KeyboardInterrupt(f"stopped; the same command goes on with the run in {folder}, and {how}") from None


def invite(args: list[str]) -> None:
    """`atoll invite RUN`."""
    from atoll.cli.wide_options import Inviting

    about = "Make invitations to a run, each for one island."
    folder, values = folder_and("invite", "RUN", about, args, asked=Inviting)
    from atoll.cli.wide import invite

    invite(folder, values["asked"], sys.stdout)


def join(args: list[str]) -> None:
    """`atoll join INVITATION METHOD`."""
    from atoll.cli.options import Options
    from atoll.cli.wide_options import Joining
    from atoll.recipes.methods import METHODS

    match args:
        case [invitation, *rest] if not invitation.startswith("-") and invitation not in METHODS:
            pass
        case _ if {"-h", "--help"} & set(args):
            invitation, rest = "", [*[word for word in args if word in METHODS][:1], "--help"]
        case _:
            raise UsageError(
                "atoll join needs an invitation before the method; atoll coordinator and atoll invite make them"
            )
    method, values = method_and("join", rest, run=Options, place=Joining)
    from atoll.cli.wide import join

    with results_on(values["place"].json) as stdout, resumable(values["place"].out), terminable():
        join(invitation, values["run"].run(method), values["place"], stdout)


def doctor(args: list[str]) -> None:
    """`atoll doctor [INVITATION]`."""
    from atoll.cli.flags import parsed
    from atoll.cli.wide_options import Examining

    about = "Look whether an island can train here, before it does; INVITATION if it has not joined before."
    values, words = parsed("atoll doctor", args, about, "INVITATION", asked=Examining)
    if len(words) > 1:
        raise UsageError(f"atoll doctor takes one invitation at most, and was given {len(words)}; leave the others out")
    from atoll.cli.doctor import examine

    with results_on(values["asked"].json) as stdout:
        examine(words[0] if words else None, values["asked"], stdout)


def status(args: list[str]) -> None:
    """`atoll status RUN`."""
    from atoll.cli.wide_options import Looking

    about = (
        "Who is there, how far, and what the last rounds came to; RUN is the coordinator's directory, or an island's "
        "on any machine."
    )
    folder, values = folder_and("status", "RUN", about, args, asked=Looking)
    from atoll.cli.wide import status

    status(folder, values["asked"], sys.stdout)


def leave(args: list[str]) -> None:
    """`atoll leave DIR`."""
    folder, _ = folder_and("leave", "DIR", "Let an island of this machine leave after its round.", args)
    from atoll.cli.wide import leave

    leave(folder)

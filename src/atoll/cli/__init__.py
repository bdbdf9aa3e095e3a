"""The command line: `atoll train METHOD`, `atoll compare METHOD...`, `atoll explain METHOD`, `atoll sensitivity DIR`.

Options are those of typed signatures: a method's function, and the dataclasses in `cli.options`. Nothing heavy is
imported before it is known what was asked. Exit status: 0; 2 for what cannot work as asked; 1 for what went wrong on
the way; 130 for an interrupt.
"""

import gc
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from atoll import __version__
from atoll.cli import wide_commands
from atoll.cli.words import launched, method_and, results_on, resumable
from atoll.errors import AtollError, UsageError, suggestion
from atoll.units import bits_per_second

if TYPE_CHECKING:
    from atoll.cli.options import Options
    from atoll.train.run import Method, Run
    from atoll.wire import PeerGroup

USAGE = """usage: atoll COMMAND ...

  atoll train METHOD       train a language model, all workers in this process, or one in each under torchrun
  atoll compare METHOD...  several methods on the same data, seeds and budget: a table, a picture, a file
  atoll explain METHOD     what a method sends, when it leaves and lands, how long a link takes; its paper, its loop
  atoll plan METHOD...     utilisation, bytes and time on a network, what bandwidth is needed, what to change first
  atoll simulate METHOD    train it for real on the virtual time of a network with faults: loss against time
  atoll launch METHOD      islands in processes of this machine, that come and go as they would far apart
  atoll coordinator RUN    look after a run of islands far apart; atoll invite RUN for more invitations
  atoll join INVITATION METHOD   train on this island with the others; atoll leave DIR to take it out
  atoll doctor INVITATION  before that: whether this machine, its links, clock and disk will do
  atoll status RUN         who is there, how far, and what the last rounds came to
  atoll sensitivity DIR    which blocks of a run's model make its workers disagree: which to mix, where links are slow

  atoll COMMAND --help     the methods; after METHOD its options
  atoll --version
"""


def run(args: Sequence[str] | None = None) -> NoReturn:
    """Be the process that does what the command line asks."""
    status = main(args)
    # else Python looks through all objects again, several times, before it ends: a second of a core with torch
    gc.freeze()
    sys.exit(status)


def main(args: Sequence[str] | None = None) -> int:
    """Do what the command line asks. Returns the exit status."""
    try:
        return _dispatch(list(sys.argv[1:] if args is None else args))
    except SystemExit as end:  # tyro has printed help
        return int(end.code or 0)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except AtollError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        what = f"{error.filename or 'a file'} could not be used ({error.strerror or error})"
        print(f"{what}; what was complete before stays complete", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(*interrupt.args or ["interrupted"], file=sys.stderr)
        return 130


def _dispatch(args: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "compare": _compare,
        "explain": _explain,
        "plan": _plan,
        "simulate": _simulate,
        "sensitivity": _sensitivity,
        "launch": wide_commands.launch,
        "coordinator": wide_commands.coordinator,
        "invite": wide_commands.invite,
        "join": wide_commands.join,
        "doctor": wide_commands.doctor,
        "status": wide_commands.status,
        "leave": wide_commands.leave,
    }
    match args:
        case []:
            print(USAGE, end="", file=sys.stderr)
            return 2
        case ["--version", *_]:
            print(f"atoll {__version__}")
        case ["-h" | "--help", *_]:
            print(USAGE, end="")
        case _:
            if args[0] not in commands:
                known = [*commands, "--help", "--version"]
                raise UsageError(f"atoll has no command {args[0]!r}; {suggestion(args[0], known)}")
            commands[args[0]](args[1:])
    return 0


def _train(args: list[str]) -> None:
    from atoll.cli.options import Keeping, Options

    method, values = method_and("train", args, run=Options, output=Keeping)
    keeping: Keeping = values["output"]
    with results_on(keeping.json) as stdout, resumable(keeping.out), _groups(values["run"], method) as (run, groups):
        from atoll.cli.show import json_line, summary
        from atoll.train.plots import plot_curves
        from atoll.train.trainer import train

        result = train(run, groups, out=keeping.out, resume=keeping.resume, save_every=keeping.save_every)
        if groups[0].membership.me == 0:
            if keeping.out:
                plot_curves(keeping.out / "curves.png", {method.name: [result]})
            print(json_line(result.as_json()) if keeping.json else summary(result, keeping.out), file=stdout)


def _compare(args: list[str]) -> None:
    from rich.console import Console

    from atoll.cli.compare import as_json, compare, entries, side_by_side_at_most
    from atoll.cli.flags import parsed
    from atoll.cli.options import Comparing, Options, Simulating
    from atoll.cli.show import json_line
    from atoll.cli.specs import rows
    from atoll.cli.table import lines, table

    if launched():
        raise UsageError("atoll compare starts processes of its own; start it without torchrun")
    description = "Compare methods, each given as METHOD or METHOD:KEY=VALUE,..., such as diloco:period=10."
    parts = {"run": Options, "comparison": Comparing, "simulation": Simulating}
    values, specs = parsed("atoll compare", args, description, "METHOD...", **parts)
    comparing: Comparing = values["comparison"]
    options, scenes = values["run"], None
    if values["simulation"] != Simulating():
        from atoll.cli.simulate import at_home, scene

        options = at_home(options, values["simulation"])
        scenes = {row.label: scene(values["simulation"], row.run) for row in rows(specs, options, comparing.period)}
    compared = rows(specs, options, comparing.period)
    out = comparing.directory()
    planned = entries(compared, seeds=comparing.seeds, out=out, scenes=scenes)
    jobs = side_by_side_at_most([entry.run for entry in planned], comparing.jobs)
    with results_on(comparing.json) as stdout, resumable(out):
        results = compare(planned, out, jobs=jobs, resume=comparing.resume, save_every=comparing.save_every)
        shown = lines(compared, results, options.steps * options.accumulate * options.batch)
        wall_s = sum(result.wall_s for each in results.values() for result in each)
        data = next(iter(results.values()))[0].data
        shows = sys.stderr if comparing.json else stdout
        console = Console(file=shows, width=None if shows.isatty() else 120)
        console.print(table(shown, seeds=comparing.seeds, wall_s=wall_s, jobs=jobs, data=data))
        print(f"{out / 'compare.png'} shows the curves, {out / 'compare.json'} has the numbers", file=sys.stderr)
        if comparing.json:
            print(json_line(as_json(results)), file=stdout)


def _explain(args: list[str]) -> None:
    from atoll.cli.options import Asking

    method, values = method_and("explain", args, question=Asking)
    asking: Asking = values["question"]
    rate = bits_per_second("--bandwidth", asking.bandwidth) if asking.bandwidth else None
    if asking.cite:
        from atoll.recipes.papers import citation

        print(citation(method.name), end="")
    elif asking.as_loop:
        import inspect

        from atoll.testing import reference

        own = getattr(reference, method.name.replace("-", "_"), None)
        print(inspect.getsource(own or reference.LOOPS[method.name]), end="")
    else:
        from atoll.cli.show import in_words
        from atoll.sync.explain import explain
        from atoll.train.model import meta_model
        from atoll.train.run import Data

        model = meta_model(asking.model, vocab=asking.vocab, length=Data.length)
        explained = explain(
            model, method.strategy, workers=asking.workers, steps=asking.steps, rate=rate, step_time=asking.step_time
        )
        print(f"{method.name} with {asking.model}, {asking.workers} workers, {asking.steps} steps\n")
        print(in_words(explained, asking.bandwidth))


def _plan(args: list[str]) -> None:
    from atoll.cli.flags import parsed
    from atoll.cli.options import Planning

    description = "Plan a run before anything is rented: METHOD... on islands with links of a given speed."
    values, names = parsed("atoll plan", args, description, "METHOD...", planning=Planning)
    asked: Planning = values["planning"]
    if bool(names) == bool(asked.paper):
        raise UsageError("atoll plan needs methods, or --paper NAME without any; give some, such as diloco streaming")
    from atoll.cli.planned import show, show_paper

    with results_on(asked.json) as stdout:
        if asked.paper:
            show_paper(asked.paper, stdout, json=asked.json)
        else:
            show(names, asked, stdout)


def _simulate(args: list[str]) -> None:
    from atoll.cli.options import Options, Showing, Simulating

    if launched():
        raise UsageError("atoll simulate has all workers in one process; start it without torchrun")
    method, values = method_and("simulate", args, run=Options, scene=Simulating, output=Showing)
    showing: Showing = values["output"]
    if showing.out and (showing.out / "config.json").exists():
        raise UsageError(f"{showing.out} already holds a run, and a simulated one is not resumed; give another --out")
    with results_on(showing.json) as stdout:
        from atoll.cli.show import json_line, summary, troubles
        from atoll.cli.simulate import at_home, scene, simulated
        from atoll.files import write_json
        from atoll.sim.picture import draw
        from atoll.train.plots import plot_curves

        run = at_home(values["run"], values["scene"]).run(method)
        where = scene(values["scene"], run)
        result, trace = simulated(run, where, out=showing.out)
        if showing.out:
            plot_curves(showing.out / "curves.png", {method.name: [result]})
            draw(showing.out / "lanes.png", trace)
            write_json(showing.out / "trace.json", trace.as_json())
            print(f"{showing.out / 'lanes.png'} shows what the islands did, trace.json has it", file=sys.stderr)
        if said := troubles(trace, where.faults.changes()):
            print(said, file=sys.stderr)
        print(json_line(result.as_json()) if showing.json else summary(result, showing.out), file=stdout)


def _sensitivity(args: list[str]) -> None:
    from atoll.cli.flags import parsed
    from atoll.cli.options import Measuring

    description = "Find the blocks of a run's model in which its workers differ most; DIR is the --out of atoll train."
    values, words = parsed("atoll sensitivity", args, description, "DIR", measuring=Measuring)
    if len(words) != 1:
        given = f"was given {len(words)}" if words else "needs one"
        raise UsageError(f"atoll sensitivity takes one run directory and {given}; give the --out of an atoll train")
    from atoll.cli.sensitivity import measure

    measuring: Measuring = values["measuring"]
    with results_on(measuring.json) as stdout:
        measure(Path(words[0]), measuring, stdout)


@contextmanager
def _groups(options: "Options", method: "Method") -> "Generator[tuple[Run, Sequence[PeerGroup]]]":
    """The run, and its workers' ways to one another: all of them, or this process's one if torchrun started it."""
    if launched():
        from atoll.peers.torchdist import TorchGroup

        world = int(os.environ["WORLD_SIZE"])
        if options.workers not in (None, world):
            raise UsageError(
                f"--workers was {options.workers}, but torchrun started {world} processes, one per worker; "
                "leave --workers out"
            )
        run = replace(options, workers=world).run(method)
        with TorchGroup.connect(device=options.device) as group:
            yield run, [group]
    else:
        from atoll.cli.compare import groups_of

        run = options.run(method)
        yield run, groups_of(run)

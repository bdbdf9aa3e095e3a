"""Flags are those of the signatures, and whatever cannot be used is one sentence and exit status 2."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import __version__
from atoll.cli.options import Asking, Comparing, Keeping, Measuring, Options, Planning, Showing, Simulating
from atoll.cli.values import kind_of, parameters
from atoll.cli.wide_options import Coordinating, Examining, Inviting, Joining, Launching, Looking
from atoll.recipes import methods
from atoll.train.run import Method
from tests.cli.conftest import Call

GOLDEN = Path(__file__).parents[1] / "golden" / "flags.txt"


def flags_of(*parts: Callable[..., Any]) -> list[str]:
    found: list[str] = []
    for part in parts:
        for name, parameter in parameters(part).items():
            kind = kind_of(parameter.annotation)
            flag = "--" + name.replace("_", "-")
            value = "" if kind.base is bool else f" {kind.metavar}"
            default = "" if kind.base is bool or parameter.default is None else f" = {parameter.default}"
            found.append(f"{flag}{value}{default}")
    return found


def commands() -> dict[str, list[str]]:
    each = {f"train {name}": flags_of(method, Options, Keeping) for name, method in methods.METHODS.items()}
    each["compare METHOD..."] = flags_of(Options, Comparing, Simulating)
    each |= {
        f"simulate {name}": flags_of(method, Options, Simulating, Showing) for name, method in methods.METHODS.items()
    }
    each["plan METHOD..."] = flags_of(Planning)
    each["sensitivity DIR"] = flags_of(Measuring)
    # with each method as of train, so that one stands for all
    each["launch diloco"] = flags_of(methods.diloco, Options, Launching)
    each["join INVITATION diloco"] = flags_of(methods.diloco, Options, Joining)
    each["coordinator RUN"] = flags_of(Coordinating)
    each["invite RUN"] = flags_of(Inviting)
    each["status RUN"] = flags_of(Looking)
    each["leave DIR"] = []
    each["doctor INVITATION"] = flags_of(Examining)
    return each | {f"explain {name}": flags_of(method, Asking) for name, method in methods.METHODS.items()}


def test_the_flags_of_every_command_are_those_on_record() -> None:
    """After a change on purpose: python -c "from tests.cli.test_flags import record; record()"."""
    assert as_text() == GOLDEN.read_text()


def as_text() -> str:
    return "\n".join(
        f"{command}\n" + "".join(f"    {flag}\n" for flag in flags) for command, flags in commands().items()
    )


def record() -> None:
    GOLDEN.write_text(as_text())


@pytest.mark.parametrize(
    "command",
    [
        "train diloco",
        "train single",
        "train decoupled",
        "compare METHOD...",
        "simulate noloco",
        "plan METHOD...",
        "explain streaming",
        "launch diloco",
        "join INVITATION diloco",
        "coordinator RUN",
        "invite RUN",
        "status RUN",
        "leave DIR",
        "doctor INVITATION",
    ],
)
def test_help_shows_every_flag_on_record(command: str, atoll: Call) -> None:
    said = atoll(f"{command.removesuffix(' METHOD...')} --help")
    assert said.status == 0
    shown = set(re.findall(r"--[a-z][a-z-]*", said.out))
    assert shown - {"--help"} == {flag.split()[0] for flag in commands()[command]}


def test_a_new_method_is_a_new_command_with_the_options_of_its_signature(
    atoll: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def novel(rhythm: int = 3) -> Method:
        """A method of tomorrow."""
        return Method("novel")

    monkeypatch.setitem(methods.METHODS, "novel", novel)
    assert "A method of tomorrow." in atoll("train --help").out
    assert "--rhythm INT" in atoll("train novel --help").out
    assert atoll("explain novel --rhythm 2 --steps 10").status == 0


def test_no_name_of_a_method_runs_into_what_it_does(atoll: Call) -> None:
    said = atoll("train --help").out
    for name in methods.METHODS:
        assert re.search(rf"^  {re.escape(name)} +[A-Z]", said, re.MULTILINE)


def test_help_and_version_answer_without_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys; from atoll.cli import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"atoll {__version__}\n" in said.stdout


def test_no_command_is_help_on_stderr_and_status_2(atoll: Call) -> None:
    said = atoll()
    assert (said.status, said.out) == (2, "")
    assert "atoll train METHOD" in said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "atoll has no command 'trian'; did you mean train?"),
        ("train", "atoll train needs a method before its options; give one of single, data-parallel,"),
        ("train --steps 3 diloco", "atoll train needs a method before its options"),
        ("train dilco", "atoll train does not know the method 'dilco'; did you mean diloco?"),
        ("explain steaming", "did you mean streaming?"),
        ("train diloco --perod 3", "atoll train diloco has no option --perod; did you mean --period?"),
        ("train diloco --outer_lrr 3", "did you mean --outer-lr?"),
        ("train single --period 3", "single has no option --period, which belongs to local-sgd, diloco,"),
        ("train data-parallel --period=3", "data-parallel has no option --period"),
        ("train diloco --run.steps 3", "atoll train diloco has no option --run.steps; did you mean --steps?"),
        ("train diloco --steps", "--steps was given without a value; write --steps INT"),
        ("train diloco --steps --resume", "--steps was given without a value"),
        ("train diloco --steps many", "--steps was 'many', but it takes a whole number"),
        ("train diloco --steps 1.5", "--steps was '1.5', but it takes a whole number"),
        ("train diloco --steps 0", "--steps was 0, which makes no sense; give 1 or more"),
        ("train diloco --workers -2", "--workers was -2, which makes no sense; give 1 or more"),
        ("train diloco --lr=-1", "--lr was -1, which makes no sense; give a number above 0"),
        ("train diloco --lr nan", "--lr was nan, but it takes a finite number"),
        ("train diloco --seed -1", "--seed was -1, which makes no sense; give 0 or more"),
        ("train diloco --clip 0", "--clip was 0, which makes no sense"),
        ("train diloco --shards bydomain", "--shards was 'bydomain', which it does not know; did you mean by-domain?"),
        ("train diloco --precision fp64", "there is no precision 'fp64'; give one of fp32, bf16"),
        ("train diloco --precision fp16", "there is no precision 'fp16'; give one of fp32, bf16"),
        (
            "train diloco --workers 2 --precision fp32,bf16,bf16",
            "--precision was fp32,bf16,bf16, but there are 2 workers; give one for all, or one for each",
        ),
        ("train diloco --workers 2 --speeds 1,0", "--speeds was 1.0,0.0, but they are parts of the fastest worker's"),
        ("train diloco --workers 2 --speeds 0.5,0.5", "give 1 to that one, and more than 0 to all"),
        ("train diloco --workers 2 --speeds 1,nan", "--speeds was 1.0,nan, but they are parts of the fastest worker's"),
        (
            "train diloco --workers 2 --speeds 1,1,0.5",
            "--speeds gave 3 speeds, but there are 2 workers; give one for each, such as 1,0.5",
        ),
        ("train diloco --workers 2 --speeds fast", "--speeds was 'fast', but it takes numbers with commas between"),
        ("train diloco --workers 2 --loads 2,half", "--loads was '2,half', but it takes whole numbers with commas"),
        ("train diloco --workers 2 --loads 2,1,1", "--loads was 2,1,1, but there are 2 workers"),
        ("train data-parallel --workers 2 --loads 2,1", "data-parallel averages gradients within a step"),
        ("train diloco --workers 2 --speeds 1,0.5 --pool halving", "--pool and --speeds were both given"),
        ("train diloco --drop 1", "--drop was 1.0, but it is a probability, and some must arrive; give 0 to 0.99"),
        ("train diloco --drop=-0.1", "--drop was -0.1, which makes no sense; give 0 or more"),
        ("train diloco --pool doubbling", "--pool was 'doubbling', which it does not know; did you mean doubling?"),
        ("train diloco --probe=-1", "--probe was -1, which makes no sense; give 0 or more"),
        ("train diloco --inner sgd", "--inner was 'sgd', which it does not know; give one of adamw, muon"),
        ("train diloco extra", "atoll train diloco does not know what to do with 'extra'"),
        ("train diloco --json=yes", "atoll train diloco"),
        ("train diloco --period 0", "period was 0, but a round needs at least one inner step"),
        ("train diloco --outer-momentum 1", "momentum was 1.0, but momentum only decays below 1"),
        ("train diloco --period 9 --steps 5", "--period 9 is longer than the run's --steps 5"),
        ("train diloco --resume", "--resume was given without a run directory; give --out DIR too"),
        ("train diloco --save-every 3", "--save-every was given without a run directory"),
        ("train diloco --data text:/not/there", "/not/there"),
        ("train diloco --data builtn", "did you mean builtin?"),
        ("train diloco --model tinny", "there is no model size 'tinny'; did you mean 'tiny'?"),
        ("train diloco --init ./not/there", "no pretrained model at ./not/there"),
        ("compare", "atoll compare needs methods to compare"),
        ("compare diloco dilco", "the method 'dilco' is unknown; did you mean diloco?"),
        ("compare diloco diloco", "'diloco' was given twice"),
        ("compare diloco:perod=3", "'diloco:perod=3' has the unknown key 'perod'; did you mean period?"),
        ("compare diloco:period", "'diloco:period' has 'period' where a KEY=VALUE belongs"),
        ("compare diloco:period=x", "diloco:period was 'x', but it takes a whole number"),
        ("compare single:period=3", "'single:period=3' has the unknown key 'period'"),
        ("compare diloco:seed=3", "has the unknown key 'seed'"),
        ("compare diloco --seed 1 --sedes 3", "atoll compare has no option --sedes; did you mean --seeds?"),
        ("compare diloco --resume", "--resume was given without the directory of the comparison"),
        (
            "explain diloco --bandwidth 100",
            "'100', which has no unit; write 100Mbit for megabits or 100MB for megabytes",
        ),
        ("explain diloco --bandwidth 100Mbot", "whose unit 'Mbot' is unknown; did you mean Mbit?"),
        ("explain diloco --bandwidth fast", "--bandwidth was 'fast'"),
        ("explain diloco --bandwidth 0Mbit", "--bandwidth was 0, which makes no sense"),
        ("explain diloco --step-time 0", "--step-time was 0, which makes no sense"),
        ("sensitivity", "atoll sensitivity takes one run directory and needs one"),
        ("explain diloco --model huge", "there is no model size 'huge'"),
        ("explain streaming --fragments 9", "9 fragments of whole blocks were asked for, but the model has 2"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_status_2(
    words: str, sentence: str, atoll: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = atoll(words)
    assert sentence in said.err
    assert said.status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing is written before it is known that the run can start"

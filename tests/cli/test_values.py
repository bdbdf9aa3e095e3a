"""Words become values of their parameter's type, within its bounds; rows become runs."""

from pathlib import Path
from typing import Literal

import pytest

from atoll.cli.options import Options
from atoll.cli.specs import row, rows
from atoll.cli.values import kind_of, parse
from atoll.errors import suggestion
from atoll.parts.mixers import all_mean, by_share, by_tokens, weighted
from atoll.parts.outers import nesterov
from atoll.train.inner import AdamW, Muon


@pytest.mark.parametrize(
    ("annotation", "word", "value"),
    [
        (int, "-3", -3),
        (float, "1e-3", 0.001),
        (str, "3", "3"),
        (Path, "a/b", Path("a/b")),
        (bool, "false", False),
        (int | None, "3", 3),
        (Literal["a", "b"], "b", "b"),
        (Literal["a", "b"] | None, "b", "b"),
    ],
)
def test_a_word_is_read_as_its_annotation_says(annotation: object, word: str, value: object) -> None:
    assert parse("--x", annotation, word) == value


def test_an_annotation_that_nobody_can_type_is_refused_when_flags_are_made() -> None:
    with pytest.raises(TypeError, match="cannot be typed on a command line"):
        kind_of(dict[str, int])


def test_suggestions_name_the_nearest_or_all() -> None:
    assert suggestion("muno", ["adamw", "muon"]) == "did you mean muon?"
    assert suggestion("q", ["adamw", "muon"]) == "give one of adamw, muon"


def test_a_row_has_the_options_of_its_spec_and_else_those_of_all() -> None:
    made = row("diloco:period=10,outer-momentum=0.6,lr=0.01,batch=3", Options(steps=40, lr=0.1, seed=5), period=20)
    (rule,) = made.run.method.strategy.rules
    assert (made.label, made.run.method.period, rule.outer) == (
        "diloco:period=10,outer-momentum=0.6,lr=0.01,batch=3",
        10,
        nesterov(0.7, 0.6),
    )
    assert (made.run.steps, made.run.seed, made.run.data.batch) == (40, 5, 3)
    assert made.run.method.inner == AdamW(lr=0.01)


def test_a_common_period_goes_to_every_method_that_has_one() -> None:
    made = rows(["single", "data-parallel", "local-sgd", "streaming:period=8"], Options(), period=20)
    assert [each.run.method.period for each in made] == [None, None, 20, 8]


def test_a_method_that_never_syncs_is_one_worker_unless_its_row_says_otherwise() -> None:
    made = rows(["single", "single:workers=3", "data-parallel"], Options(workers=4), period=None)
    assert [each.run.workers for each in made] == [1, 3, 4]
    assert [Options().run(each.run.method).workers for each in made] == [1, 1, 4]
    unequal = rows(["single", "single:workers=2", "diloco"], Options(workers=2, speeds="1,0.5"), period=None)
    assert [each.run.dynamics.speeds for each in unequal] == [(), (1.0, 0.5), (1.0, 0.5)]
    loaded = rows(["single", "diloco"], Options(workers=2, loads="2,1"), period=None)
    assert [each.run.loads for each in loaded] == [(), (2, 1)]
    assert [rule.mixer for rule in loaded[1].run.method.strategy.rules] == [weighted(by_tokens(), all_mean())]


def test_options_make_the_run_they_name() -> None:
    options = Options(shards="by-domain", inner="muon", weight_decay=0.5, steps=100)
    run = options.run(row("diloco", Options(), None).run.method)
    assert run.method.inner == Muon(weight_decay=0.5)
    assert run.method.strategy.rules[0].mixer == weighted(
        by_share(), row("diloco", Options(), None).run.method.strategy.rules[0].mixer
    )
    assert run.warmup == 10
    assert Options(steps=100, warmup=3).run(run.method).warmup == 3

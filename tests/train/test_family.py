"""The whole family through the trainer: every method learns, sends what `explain` says, and resumes bit for bit."""

import math
from pathlib import Path

import pytest

from atoll.recipes import methods
from atoll.recipes.methods import METHODS
from atoll.sync.explain import explain
from atoll.train.checkpoint import Checkpoints
from atoll.train.corpus import load_corpus
from atoll.train.dynamics import Dynamics
from atoll.train.evaluate import held_out_loss
from atoll.train.inner import autocast
from atoll.train.material import EVALUATED, ROWS
from atoll.train.run import Method
from atoll.train.shards import held_out_batches
from atoll.train.tokens import bytes_tokenizer
from tests.train.reef import Reef, check_resumes, copies, go, small

TWO_TO_ONE = Dynamics(speeds=(1.0, 0.5))
PERIODS = {"period": 4}
MADE: dict[str, Method] = {
    name: make() if name in ("single", "data-parallel", "sparta") else make(**PERIODS)
    for name, make in METHODS.items()
    if name not in ("streaming", "decoupled")
} | {"streaming": methods.streaming(3, fragments=2), "decoupled": methods.decoupled(3, fragments=2)}
"""Every method with rounds that fit twelve steps."""

RESUMED: dict[str, tuple[Method, Dynamics]] = {
    name: (MADE[name], Dynamics())
    for name in (
        "eager",
        "factored-gossip",
        "local-m1-m2-subset",
        "noloco",
        "sparseloco",
        "opendiloco-sparse",
        "sparta",
        "muloco",
        "decoupled",
    )
} | {
    "diloco of unequal speeds": (MADE["diloco"], TWO_TO_ONE),
    "decoupled of unequal speeds": (MADE["decoupled"], TWO_TO_ONE),
    "decoupled with grace": (methods.decoupled(3, fragments=2, grace=5), TWO_TO_ONE),
    "async-local-sgd of unequal speeds": (MADE["async-local-sgd"], TWO_TO_ONE),
}


def untrained(text: Path) -> float:
    """Held-out loss of the model that all runs start from."""
    corpus = load_corpus(f"text:{text}", bytes_tokenizer())
    return held_out_loss(Reef(), held_out_batches(corpus, batch=ROWS, length=16, most=EVALUATED), autocast("fp32"))


def test_every_method_is_tried() -> None:
    assert MADE.keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_and_sends_what_explain_says(name: str, text: Path) -> None:
    result = go(small(text, MADE[name], workers=4))
    assert result.val_loss < untrained(text)
    assert result.tokens == 4 * 12 * 2 * 16
    explained = explain(Reef(), MADE[name].strategy, workers=4, steps=12)
    assert result.bytes_sent_per_worker == explained.nbytes
    launched = max((len(each.leaves) for each in explained.exchanges), default=0)
    assert result.rounds == (4 * launched if name == "async-local-sgd" else launched)
    assert result.js is not None
    assert (result.js == 0) == (name == "data-parallel")
    assert math.isfinite(result.js)


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_from_any_checkpoint_changes_no_bit(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, dynamics = RESUMED[name]
    found = check_resumes(small(text, method, dynamics=dynamics), tmp_path / "whole", monkeypatch)
    assert list(found) == ([3, 8, 9, 12] if name.startswith("diloco") else [3, 6, 9, 12])


def test_a_push_that_waits_for_the_keeper_is_handed_in_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grace the keeper waits for the slower worker: what the faster one handed in is saved with it."""
    method, dynamics = RESUMED["decoupled with grace"]
    run = small(text, method, dynamics=dynamics)
    whole, found = copies(run, tmp_path / "whole", monkeypatch, save_every=5)
    for step in (5, 10):
        meta, _ = Checkpoints(found[step]).read(step, 0)
        assert any(entry["outcome"] is None for entry in meta["sync"]["queue"])
        assert any(ready is not None for _, ready in meta["team"]["keeper"]["tracks"])
        assert go(run, out=found[step], resume=True).digest == whole.digest


@pytest.mark.parametrize("name", RESUMED)
def test_another_seed_gives_other_bits(name: str, text: Path) -> None:
    method, dynamics = RESUMED[name]
    first, second = (go(small(text, method, dynamics=dynamics, seed=seed)).digest for seed in (0, 1))
    assert first != second

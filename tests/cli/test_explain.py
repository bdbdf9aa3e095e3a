"""What `explain` says equals the closed forms, and what a run really sends."""

import pytest
import torch
from torch import nn

from atoll.parts.codecs import cast
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean, alone, by_share, weighted
from atoll.parts.outers import sgd
from atoll.parts.schedules import at, every, staggered
from atoll.recipes import methods
from atoll.sync.explain import explain
from atoll.sync.rule import Rule, Strategy
from atoll.testing import reference
from atoll.train.model import build_model, meta_model
from atoll.train.sizes import SIZES, parameter_count
from atoll.wire import Keep, Reduce
from tests.cli.conftest import Call

N = 1 << 20
"""Elements of a model: a power of two, so that every part below is whole."""


def meta(size: int = N) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(size, 1, bias=False)


def one(rule: Rule) -> Strategy:
    return Strategy((rule,))


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_reducing_sends_twice_the_part_of_the_others(workers: int) -> None:
    """(M - 1) / M (w + r) bytes for wires of w and results of r: for fp32, 2 (M - 1) / M times the model."""
    (each,) = explain(meta(), methods.diloco(10).strategy, workers=workers, steps=30).exchanges
    assert isinstance(each.fold, Reduce)
    assert each.nbytes == (workers - 1) * 2 * 4 * N // workers
    assert each.leaves == (10, 20, 30)


def test_half_precision_both_ways_sends_half() -> None:
    assert explain(meta(), methods.opendiloco(10).strategy, workers=4, steps=10).nbytes == 3 * 2 * 2 * N // 4


def test_keeping_is_chosen_while_it_sends_fewer_bytes_and_both_are_shown() -> None:
    """With fp16 wires and fp32 results, KEEP sends (M - 1) 2 n and REDUCE (M - 1)/M 6 n: KEEP below M = 3."""
    rule = Rule(every(10), outer=sgd(1.0), codec=cast(torch.float16))
    (two,) = explain(meta(), one(rule), workers=2, steps=10).exchanges
    assert (two.fold, two.nbytes) == (Keep(), 2 * N)
    assert f"fewer bytes (keeping {2 * N:,} bytes, reducing {3 * N:,} bytes)" in two.why
    (four,) = explain(meta(), one(rule), workers=4, steps=10).exchanges
    assert isinstance(four.fold, Reduce)
    assert four.nbytes == 3 * 6 * N // 4


def test_a_choice_of_the_method_is_called_so_through_weights_too() -> None:
    rule = Rule(every(10), outer=sgd(1.0), mixer=weighted(by_share(), all_mean(Keep())))
    (each,) = explain(meta(), one(rule), workers=4, steps=10).exchanges
    assert each.why.startswith("as the method says")
    assert each.nbytes == 3 * 4 * N


def test_a_worker_that_meets_nobody_sends_nothing() -> None:
    explained = explain(meta(), one(Rule(every(10), outer=sgd(1.0), mixer=alone())), workers=4, steps=10)
    assert explained.nbytes == 0
    assert "meets nobody" in explained.exchanges[0].why


def test_seconds_are_bits_over_the_bandwidth() -> None:
    (each,) = explain(meta(), methods.diloco(10).strategy, workers=2, steps=10, rate=1e8).exchanges
    assert each.seconds == pytest.approx(4 * N * 8 / 1e8)


def test_a_blocking_exchange_blocks_for_as_long_as_it_takes() -> None:
    explained = explain(meta(), methods.diloco(10).strategy, workers=2, steps=40, rate=4 * N * 8, step_time=0.5)
    assert explained.blocked == pytest.approx(4 * 1.0 / (4 * 1.0 + 40 * 0.5))


def test_an_overlapped_exchange_blocks_for_what_its_delay_does_not_cover() -> None:
    rule = Rule(at(10, 20), outer=sgd(1.0), landing=After(3), merge=blend(0.5))
    rate = 4 * N * 8 / 2.0  # two seconds for an exchange
    covered = explain(meta(), one(rule), workers=2, steps=40, rate=rate, step_time=1.0)
    assert covered.blocked == 0
    short = explain(meta(), one(rule), workers=2, steps=40, rate=rate, step_time=0.5)
    assert short.blocked == pytest.approx(2 * (2.0 - 3 * 0.5) / (2 * 0.5 + 40 * 0.5))


def test_fragments_that_leave_close_together_share_the_link() -> None:
    """Two fragments, a second each, leave a step of 0.1 s apart and land 10 steps later: one waits for the other."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(N, 1, bias=False), nn.Linear(N, 1, bias=False))
    rules = tuple(
        Rule(at(10 + index), outer=sgd(1.0), landing=After(10), merge=blend(0.5), only=(index,)) for index in (0, 1)
    )
    strategy = Strategy(rules, by_name("0.*", "1.*"))
    explained = explain(model, strategy, workers=2, steps=40, rate=4 * N * 8, step_time=0.1)
    # at 1.0 s leaves 0, done at 2.0 = its landing; 1 leaves at 1.1, done at 3.0, lands at 2.1
    assert explained.blocked == pytest.approx(0.9 / (0.9 + 4.0))


def test_what_is_in_flight_at_the_end_is_waited_for() -> None:
    rule = Rule(at(10), outer=sgd(1.0), landing=After(5), merge=blend(0.5))
    explained = explain(meta(), one(rule), workers=2, steps=10, rate=4 * N * 8, step_time=0.1)
    assert explained.blocked == pytest.approx(1.0 / (1.0 + 1.0))


def test_streaming_fragments_leave_in_turn_and_land_later() -> None:
    model = meta_model("tiny", vocab=256, length=128)
    explained = explain(model, methods.streaming(30, fragments=2, delay=4).strategy, workers=4, steps=100)
    assert [each.leaves for each in explained.exchanges] == [(30, 60, 90), (40, 70, 100), (50, 80)]
    assert {each.delay for each in explained.exchanges} == {4}
    assert sum(each.parameters for each in explained.exchanges) == parameter_count(SIZES["tiny"], 256)


def test_floating_buffers_are_exchanged_with_the_first_fragment() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8, bias=False))
    rule = Rule(staggered(10, 2), outer=sgd(1.0))
    explained = explain(model, Strategy((rule,), by_name("0.*", "2.*")), workers=2, steps=30)
    assert [(each.parameters, each.leaves) for each in explained.exchanges] == [
        (64, (10, 20, 30)),
        (64, (15, 25)),
        (16, (10, 20, 30)),
    ]


def test_a_shape_is_that_of_the_model_that_is_trained() -> None:
    shapes = {name: parameter.shape for name, parameter in meta_model("tiny", vocab=300, length=128).named_parameters()}
    built = build_model("tiny", vocab=300, length=16, seed=0)
    assert shapes == {name: parameter.shape for name, parameter in built.named_parameters()}


@pytest.mark.parametrize(
    "method", ["data-parallel", "diloco --period 2", "opendiloco --period 3", "streaming --period 4"]
)
def test_what_is_explained_is_what_a_run_sends(method: str, atoll: Call, small: list[str]) -> None:
    name, *options = method.split()
    sent = atoll("train", name, *options, *small, "--workers", "3", "--json").json["bytes_sent_per_worker"]
    said = atoll("explain", name, *options, "--steps", "6", "--workers", "3")
    assert f"({sent:,} bytes)" in said.out


def test_explain_says_it_in_words(atoll: Call) -> None:
    said = atoll("explain diloco --model diloco-150m --workers 8 --bandwidth 100Mbit --step-time 0.5 --steps 100")
    count = parameter_count(SIZES["diloco-150m"], 32_000)
    seconds = 7 * 2 * 4 * count / 8 * 8 / 1e8
    assert said.status == 0
    assert f"{count:,} parameters" in said.out
    assert f"{seconds:.3g} s at 100Mbit" in said.out
    assert f"waits for the link {2 * seconds / (2 * seconds + 50):.1%} of the time" in said.out
    assert "training waits" in said.out
    assert "nothing is sent" in atoll("explain single").out


OTHER_LOOPS = {
    "diloco-restarted": "diloco",
    **dict.fromkeys(("opendiloco-sparse", "sparseloco", "muloco"), "compressed_diloco"),
    **dict.fromkeys(("global-m1", "global-m1-local-m2", "global-m1-local-m2-subset"), "factored_gossip"),
    **dict.fromkeys(("local-m1", "local-m1-m2", "local-m1-m2-subset"), "factored_gossip"),
    **dict.fromkeys(("global-m1-blocking", "local-m1-m2-blocking"), "blocking_gossip"),
}
"""The loops of methods that are written as another's with other parts."""


def test_the_plain_loop_is_the_reference_that_tests_compare_with(atoll: Call) -> None:
    import inspect

    for name in methods.METHODS:
        loop = getattr(reference, OTHER_LOOPS.get(name, name.replace("-", "_")))
        assert atoll(f"explain {name} --as-loop").out == inspect.getsource(loop)


PAPERS = {
    "single": ["2311.08105"],
    "data-parallel": ["2311.08105"],
    "local-sgd": ["1805.09767", "1602.05629"],
    "diloco": ["2311.08105"],
    "diloco-restarted": ["2605.28585"],
    "opendiloco": ["2407.07852"],
    "opendiloco-sparse": ["2407.07852"],
    "streaming": ["2501.18512"],
    "eager": ["2502.12996"],
    **{name: ["2606.22768"] for name in methods.METHODS if "-m1" in name},
    "factored-gossip": ["2606.22768"],
    "noloco": ["2506.10911"],
    "decoupled": ["2604.21428"],
    "async-local-sgd": ["2401.09135"],
    "sparseloco": ["2508.15706"],
    "muloco": ["2505.23725"],
    "sparta": [],
}
"""Numbers at arXiv; SPARTA has a blog post."""


def test_the_papers_are_those_of_all_methods() -> None:
    assert PAPERS.keys() == methods.METHODS.keys()


@pytest.mark.parametrize("method", PAPERS)
def test_every_method_can_be_cited(method: str, atoll: Call) -> None:
    said = atoll(f"explain {method} --cite").out
    assert [line.split("{")[1].rstrip("},") for line in said.splitlines() if "eprint" in line] == PAPERS[method]
    assert said.count("{") == said.count("}") > 0
    assert ("a baseline without a paper of its own" in said) == (method in ("single", "data-parallel"))
    assert ("blog.exolabs.net" in said) == (method == "sparta")

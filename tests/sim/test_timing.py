"""Flows on a virtual clock: published figures, closed forms, and what a run must not depend on."""

import gc
from dataclasses import replace

import pytest
import torch

from atoll.cli.plan import HALF, paper, written
from atoll.parts.codecs import exact
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every
from atoll.recipes.methods import METHODS
from atoll.sim import published
from atoll.sim.faults import Restarts
from atoll.sim.network import Between, Island, Network
from atoll.sim.pace import Pace
from atoll.sim.plan import Setting, needed, utilisation
from atoll.sim.run import Job, simulate, spec
from atoll.sim.trace import Trace
from atoll.sync.explain import explain
from atoll.sync.rule import Rule, Strategy
from atoll.train.model import meta_model
from atoll.trees import Spec, spec_of, trainable
from atoll.wire import Keep, Reduce

PREDICTED = (
    published.Figure("local-m1-m2", 100e6, 0.49),
    published.Figure("local-m1-m2", 200e6, 0.66),
    published.Figure("local-m1", 100e6, 0.98),
    published.Figure("local-m1", 200e6, 1.00),
    published.Figure("global-m1-local-m2-subset", 200e6, 0.82),
    published.Figure("diloco", 100e6, 0.74, period=500),
    published.Figure("diloco", 200e6, 0.85, period=500),
    published.Figure("global-m1", 100e6, 1.00, period=500),
    published.Figure("global-m1", 200e6, 1.00, period=500),
    published.Figure("global-m1-local-m2", 100e6, 0.83, period=500),
    published.Figure("global-m1-local-m2", 200e6, 0.91, period=500),
    published.Figure("diloco", 100e6, 0.85, period=1000),
    published.Figure("diloco", 200e6, 0.92, period=1000),
    published.Figure("global-m1", 100e6, 1.00, period=1000),
    published.Figure("global-m1", 200e6, 1.00, period=1000),
    published.Figure("global-m1-local-m2", 100e6, 0.91, period=1000),
    published.Figure("global-m1-local-m2", 200e6, 0.95, period=1000),
    published.Figure("diloco", 100e6, 0.34, workers=16),
    published.Figure("diloco", 200e6, 0.51, workers=16),
    published.Figure("global-m1", 100e6, 0.52, workers=16),
    published.Figure("global-m1", 200e6, 1.00, workers=16),
    published.Figure("global-m1-local-m2", 100e6, 0.34, workers=16),
    published.Figure("global-m1-local-m2", 200e6, 0.66, workers=16),
)
"""What the closed formula gives where the paper prints nothing."""

MB = 8e6
DILOCO = Strategy((Rule(every(10), outer=nesterov(0.7, 0.9), mixer=all_mean(Reduce(exact()))),))


def gossip_specs() -> tuple[Spec, ...]:
    model = meta_model("factored-gossip-1.5b", vocab=1, length=128)
    return tuple(spec_of(name, tensor) for name, tensor in trainable(model).items())


def islands(count: int, bits: float, step_s: float = 1.0) -> Network:
    return Network(tuple(Island(f"site {i}", bits, bits, step_s) for i in range(count)))


def test_the_published_utilisations_of_factored_gossip_come_out_to_the_percent() -> None:
    rows = list(paper("factored-gossip"))
    assert [row["method"] for row in rows] == [figure.method for figure in published.GOSSIP]
    for row in rows:
        assert round(row["utilisation"], 2) == row["published"], row


@pytest.mark.parametrize("figure", PREDICTED, ids=repr)
def test_what_the_closed_formula_predicts_comes_out_of_events(figure: published.Figure) -> None:
    """round = max(C, T1) + T2 with T = 2 (M - 1) / M payloads for a mean and one for a pair (gossip of 3 GB)."""
    seconds = 8 * 2 * published.GOSSIP_MODEL.parameters / figure.bandwidth_bps
    whole, pair = 2 * (figure.workers - 1) / figure.workers * seconds, seconds
    mix1 = {"diloco": 0.0, "local-m1": pair, "local-m1-m2": pair}.get(figure.method, whole)
    mix2 = {"diloco": whole, "global-m1": 0.0, "local-m1": 0.0, "global-m1-local-m2-subset": 0.432 * pair}
    compute = figure.period * published.GOSSIP_MODEL.step_s
    want = compute / (max(compute, mix1) + mix2.get(figure.method, pair))
    strategy = written(METHODS[figure.method](period=figure.period).strategy, HALF)
    where = Setting(gossip_specs(), figure.workers, published.GOSSIP_MODEL.step_s, figure.bandwidth_bps)
    got, _, _ = utilisation(strategy, figure.period, where)
    assert abs(got - want) < 0.005
    assert abs(got - figure.utilisation) < 0.0051 + 0.005


def test_a_blocking_mean_takes_two_trips_of_most_of_the_payload_over_each_link() -> None:
    """4 islands, 4 MB of fp32, 8 Mbit/s: 3/4 of it out and 3/4 back, so 6 s per round of 10 s."""
    trace = simulate(Job(DILOCO, (spec(1e6),), steps=100), islands(4, MB))
    assert trace.seconds == pytest.approx(10 * 16.0, rel=1e-3)
    assert trace.sent == pytest.approx([10 * 6e6] * 4, rel=1e-3)
    assert trace.blocked == pytest.approx([60.0] * 4, rel=1e-3)


def test_latency_costs_a_round_trip_per_exchange() -> None:
    slow = replace(islands(4, MB), elsewhere=Between(latency=0.5))
    trace = simulate(Job(DILOCO, (spec(1e6),), steps=100), slow)
    assert trace.seconds == pytest.approx(10 * 17.0, rel=1e-3)


def test_a_link_between_sites_is_shared_evenly_by_the_flows_that_cross_it() -> None:
    """Two islands on each side, all-to-all of 1 MB pieces out and back: 4 flows of 2 MB each way over 8 Mbit/s."""
    ports = tuple(Island(site, step_s=1.0) for site in ("a", "a", "b", "b"))
    network = Network(ports, (("a", "b", Between(capacity=MB)),))
    trace = simulate(Job(DILOCO, (spec(1e6),), steps=100), network)
    assert trace.seconds == pytest.approx(10 * 18.0, rel=1e-3)


def test_loss_is_time_spent_on_sending_again() -> None:
    ports = tuple(Island(site, step_s=1.0) for site in ("a", "b"))
    whole, lossy = (
        simulate(
            Job(DILOCO, (spec(1e6),), steps=10), Network(ports, (("a", "b", Between(capacity=MB, loss=loss)),))
        ).seconds
        - 10
        for loss in (0.0, 0.2)
    )
    assert lossy == pytest.approx(whole / 0.8, rel=1e-6)


def test_everyone_waits_for_the_slowest_island() -> None:
    ports = [Island(f"site {i}", MB, MB, step_s=1.0 + (i == 2)) for i in range(4)]
    trace = simulate(Job(DILOCO, (spec(1e6),), steps=100), Network(tuple(ports)))
    assert trace.seconds == pytest.approx(10 * 26.0, rel=1e-3)
    assert trace.blocked[2] == pytest.approx(60.0, rel=1e-3)
    assert trace.blocked[0] == pytest.approx(160.0, rel=1e-3)


def test_an_exchange_behind_inner_steps_costs_nothing_until_it_is_longer_than_they_are() -> None:
    strategy = METHODS["global-m1"](period=10).strategy
    for bits, round_s in ((MB, 10.0), (MB / 2, 12.0)):
        job = Job(strategy, (spec(1e6),), steps=200, warm=100)
        assert simulate(job, islands(4, bits)).utilisation == pytest.approx(10 / round_s, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("single", "decoupled", "async-local-sgd")])
def test_a_simulated_run_sends_what_explain_says(name: str) -> None:
    with torch.device("meta"):
        model = meta_model("tiny", vocab=256, length=128)
    specs = tuple(spec_of(key, tensor) for key, tensor in trainable(model).items())
    strategy = METHODS[name]().strategy
    steps, workers = 150, 4
    trace = simulate(Job(strategy, specs, steps), islands(workers, 1e9))
    want = explain(model, strategy, workers=workers, steps=steps).nbytes
    # pieces of a reduced chunk are whole blocks, and the fluid model splits them evenly
    assert sum(trace.sent) / workers == pytest.approx(want, rel=0.01)


def test_a_keeper_is_heard_and_answers_over_the_link_of_the_island_it_stands_beside() -> None:
    """2 MB to the keeper's island and back, 8 Mbit/s: 2 s each way; beside it, none; and nobody waits."""
    strategy = METHODS["decoupled"](period=20, fragments=1, grace=0).strategy
    specs = (spec(5e5, "embed.weight"), spec(5e5, "layers.0.weight"))
    trace = simulate(Job(strategy, specs, steps=120), islands(2, MB), keeps=True)
    assert trace.utilisation == 1.0
    launched = [moment for moment in trace.moments if moment.kind == "launched"]
    landed = {(moment.island, moment.key): moment.time for moment in trace.moments if moment.kind == "landed"}
    assert len(launched) >= 16
    for moment in launched[:-4]:
        # looks are at the ends of steps of 1 s, the keeper's and the island's
        took = landed[moment.island, moment.key] - moment.time
        assert took == pytest.approx(4.0 if moment.island else 0.0, abs=2.01)
        assert (took > 3.0) == (moment.island == 1)
    assert trace.sent[0] == 0.0
    assert trace.sent[1] == pytest.approx(2e6 * len([each for each in launched if each.island]), rel=0.1)


def run_twice(seed: int) -> list[Trace]:
    ports = tuple(Island(f"site {i % 2}", MB, MB, 1.0, jitter=0.05) for i in range(5))
    strategy = METHODS["local-m1-m2"](period=10).strategy
    job = Job(strategy, (spec(1e6),), steps=100)
    return [simulate(job, Network(ports), pace=Pace(seed), keeps=True) for _ in range(2)]


def test_the_same_seed_gives_the_same_trace_and_another_gives_another() -> None:
    first, second = (list(trace.lines()) for trace in run_twice(1))
    assert first == second
    assert first != list(run_twice(2)[0].lines())


@pytest.mark.parametrize(("bits", "want"), [(100e6, 31.0), (200e6, 47.3)])
def test_a_collective_that_begins_again_costs_what_the_paper_reads(bits: float, want: float) -> None:
    """8 links that fail with 5 % in each attempt, at a uniform time: the mean of 400 rounds, within a point."""
    strategy = written(METHODS["diloco"](period=100).strategy, HALF)
    network = Network(tuple(Island(f"site {i}", bits, bits, 2.36) for i in range(8)))
    trace = simulate(Job(strategy, gossip_specs(), steps=40_000), network, restarts=Restarts(0.05, seed=1))
    assert abs(100 * trace.utilisation - want) < 1.0


def test_the_bandwidth_that_is_needed_reaches_the_target_and_a_little_less_does_not() -> None:
    where = Setting((spec(1e6),), workers=4, step_s=1.0)
    bits = needed(DILOCO, 10, where, 0.9)
    assert bits is not None
    assert utilisation(DILOCO, 10, replace(where, bandwidth=bits))[0] >= 0.9
    assert utilisation(DILOCO, 10, replace(where, bandwidth=bits * 0.98))[0] < 0.9
    # 10 s of steps and 12 MB in each direction: 90 % at 48e6 bits in 10/9 s
    assert bits == pytest.approx(48e6 / (10 / 9), rel=0.011)


def test_a_utilisation_that_latency_forbids_is_not_reached_by_any_link() -> None:
    assert needed(DILOCO, 10, Setting((spec(1e6),), 4, 1.0, latency=5.0), 0.9) is None


def test_every_wire_kept_goes_to_everyone() -> None:
    kept = Strategy((replace(DILOCO.rules[0], mixer=all_mean(Keep())),))
    trace = simulate(Job(kept, (spec(1e6),), steps=10), islands(4, MB))
    assert trace.sent == pytest.approx([12e6] * 4, rel=1e-6)


def test_garbage_is_collected_as_before_once_a_run_is_over_or_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        during.append(gc.get_threshold())
        raise RuntimeError

    before, during = gc.get_threshold(), list[tuple[int, int, int]]()
    simulate(Job(DILOCO, (spec(1e6),), steps=10), islands(4, MB))
    assert gc.get_threshold() == before
    monkeypatch.setattr("atoll.sim.run.run", fail)
    with pytest.raises(RuntimeError):
        simulate(Job(DILOCO, (spec(1e6),), steps=10), islands(4, MB))
    assert gc.get_threshold() == before != during[0]

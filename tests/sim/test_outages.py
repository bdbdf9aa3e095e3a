"""What islands do when others die, freeze or cannot be reached: closed forms of time, and what becomes of anchors."""

from collections.abc import Sequence

import pytest
import torch

from atoll.errors import GroupError, UsageError
from atoll.faults import Cut, Death, Fault, Faults, Freeze, Partition, Rejoin, Slowness
from atoll.parts.codecs import exact
from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import blend
from atoll.parts.mixers import all_mean
from atoll.parts.outers import nesterov
from atoll.parts.schedules import every, staggered
from atoll.peers.faults import Dropping
from atoll.peers.memory import Hub
from atoll.recipes.methods import METHODS
from atoll.sim.network import Between, Island, Network
from atoll.sim.numerics import Real
from atoll.sim.pace import Pace
from atoll.sim.run import Job, Simulation, run, simulate, spec
from atoll.sim.runner import Course
from atoll.sim.trace import Trace
from atoll.sim.trainee import Trainee
from atoll.sync.drive import take_turns
from atoll.sync.flow import drain
from atoll.sync.rule import Rule, Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.toys import Mlp, adamw, backward, move
from atoll.trees import digest
from atoll.wire import Reduce

MB = 8e6
DILOCO = Strategy((Rule(every(10), outer=nesterov(0.7, 0.9), mixer=all_mean(Reduce(exact()))),))


STREAMING = Strategy(
    (Rule(staggered(4, 2), nesterov(0.4, 0.9), landing=After(2), merge=blend(0.5)),), by_name("first*", "*")
)


def strategy_of(name: str) -> Strategy:
    return STREAMING if name == "streaming" else METHODS[name](period=4).strategy


def islands(count: int, bits: float = MB) -> Network:
    return Network(tuple(Island(f"site {m}", bits, bits, step_s=1.0) for m in range(count)))


def timed(*events: Fault, steps: int = 50, workers: int = 4, strategy: Strategy = DILOCO) -> Trace:
    """4 MB, 8 Mbit/s, 10 steps of 1 s a round; a mean over 4 takes 6 s, over 3 it takes 16/3 s. A lease is 5 s."""
    return simulate(
        Job(strategy, (spec(1e6),), steps), islands(workers), faults=Faults(tuple(events), lease=5.0), keeps=True
    )


def times(trace: Trace, kind: str) -> list[float]:
    return [round(moment.time, 6) for moment in trace.ordered() if moment.kind == kind]


def test_who_dies_while_others_train_is_not_waited_for_after_its_lease() -> None:
    """Rounds of 16 s and, from the second on, 10 + 16/3 s; island 3 dies 20 s into the run and is gone at 25 s."""
    trace = timed(Death(3, 20.0))
    assert trace.ended[:3] == pytest.approx([16 + 4 * (10 + 16 / 3)] * 3)
    assert trace.ended[3] == 20.0
    assert times(trace, "died") == [20.0]
    assert sum(trace.lost) == 0


def test_who_dies_in_the_middle_of_a_mean_costs_a_lease_and_the_mean_begins_again() -> None:
    """The second mean begins at 26 s; island 3 dies at 28 s; at 33 s the others begin again."""
    trace = timed(Death(3, 28.0))
    assert trace.ended[0] == pytest.approx(33 + 16 / 3 + 3 * (10 + 16 / 3))
    # what had moved until then is not counted as sent, what moved again is: 4 rounds of 2/3 and 2/3 of 4 MB
    assert trace.sent[0] == pytest.approx(6e6 + 4 * 16e6 / 3)


def test_a_freeze_shorter_than_the_lease_costs_exactly_itself() -> None:
    for at in (3.0, 12.0):  # while it trains, and in a mean
        trace = timed(Freeze(1, at, 4.0))
        assert trace.seconds == pytest.approx(5 * 16.0 + 4.0)
        assert sum(trace.lost) == 0


def test_slow_steps_take_so_much_longer() -> None:
    trace = timed(Slowness(1, 2.0, 4.0, factor=2.0))
    # 4 s at half speed are 2 steps instead of 4
    assert trace.seconds == pytest.approx(5 * 16.0 + 2.0)


def test_a_longer_freeze_lets_the_others_go_on_and_the_island_fetches_and_comes_back() -> None:
    """Island 3 freezes from 12 s to 40 s, in the first mean: gone at 17 s, the others need 16/3 s more, then go on.

    Awake at 40 s, it fetches an anchor and a momentum, 8 MB at 8 Mbit/s, and enters at the end of the next boundary of
    island 0, whose link it shares with nobody's mean until 43 s: see `lands`.
    """
    trace = timed(Freeze(3, 12.0, 28.0), steps=100)
    mean = 16 / 3
    first = 17 + mean
    second = first + 10 + mean
    joined = times(trace, "joined")
    assert len(joined) == 1
    assert joined[0] > 48.0
    boundaries = times(trace, "landed")
    assert round(first, 6) in boundaries
    assert round(second, 6) in boundaries
    assert joined[0] in boundaries
    # from then on means are over four again, and all end together
    assert trace.ended == pytest.approx([trace.seconds] * 4)


def test_the_smaller_side_of_a_partition_loses_its_rounds_and_trains_on() -> None:
    trace = timed(Partition(("site 0", "site 1"), 12.0, 30.0), steps=100, workers=5)
    assert trace.lost[:2] > [0, 0]
    assert trace.lost[2:] == [0, 0, 0]
    assert len(times(trace, "joined")) == 2
    assert trace.ended == pytest.approx([trace.seconds] * 5)


def test_halves_both_wait_for_a_majority_and_go_on_without_fetching() -> None:
    trace = timed(Partition(("site 0", "site 1"), 12.0, 30.0), steps=100)
    assert min(trace.lost) == max(trace.lost) > 0
    assert not times(trace, "joined")


def test_a_cut_between_two_is_no_cut_while_others_reach_both() -> None:
    """Bytes between the two stall until the cut ends: nobody relays them; but nobody is left out."""
    trace = timed(Cut(("site 0", "site 1"), 12.0, 30.0))
    assert sum(trace.lost) == 0
    assert trace.seconds == pytest.approx(5 * 16.0 + 30.0)


class Toy(Trainee):
    """A worker on a toy, trained for real."""

    def __init__(self, number: int, group: Hub, strategy: Strategy) -> None:
        self.number, self.model = number, Mlp(3)
        self.optimizer = adamw(self.model.parameters())
        self.sync = Synchronizer(self.model, strategy, group.group(number))
        super().__init__(self.sync.state)

    def train(self, steps: int, since: float, now: float) -> None:
        for _ in range(steps):
            backward(self.model, 1, self.number, self.step + 1)
            move(list(self.model.parameters()), self.optimizer)
            self.sync.after(8)


def trained(strategy: Strategy, faults: Faults, steps: int = 60, workers: int = 5) -> tuple[list[Toy], Simulation]:
    hub = Hub(workers, Dropping(faults.loss, faults.seed) if faults.loss else None)
    toys = [Toy(number, hub, strategy) for number in range(workers)]
    numerics = Real([toy.sync.group for toy in toys])
    where = Network(
        tuple(Island(f"site {m}", 1e4, 1e4, 1 + 0.05 * m, jitter=0.05) for m in range(workers)),
        elsewhere=Between(latency=0.05),
    )
    return toys, run(toys, where, numerics, Course(steps, pace=Pace(2), faults=faults), None, keeps=True)


ROUGH: Sequence[Fault] = (
    Death(4, 8.0),
    Rejoin(4, 20.0),
    Freeze(1, 25.0, 9.0),
    Slowness(2, 30.0, 6.0, factor=3.0),
    Partition(("site 0", "site 3"), 40.0, 10.0),
    Cut(("site 1", "site 2"), 55.0, 2.0),
)


@pytest.mark.parametrize("name", ["diloco", "streaming", "local-sgd", "muloco"])
def test_where_anchors_agree_they_agree_again_after_everything_that_went_wrong(name: str) -> None:
    strategy = strategy_of(name)
    toys, simulation = trained(strategy, Faults(tuple(ROUGH), lease=3.0))
    kinds = {moment.kind for moment in simulation.trace.moments}
    assert {"died", "joined", "froze", "woke", "lost"} <= kinds
    assert simulation.current == [0, 1, 2, 3, 4]
    assert {toy.step for toy in toys} == {60}
    assert len({toy.state.digest() for toy in toys}) == 1


@pytest.mark.parametrize("name", ["diloco", "streaming", "eager", "factored-gossip", "noloco", "local-m1-m2"])
def test_the_same_faults_give_the_same_trace_and_numbers_again_and_others_do_not(name: str) -> None:
    strategy = strategy_of(name)
    faults = Faults(tuple(ROUGH), loss=0.1, seed=7, lease=3.0)
    (first, one), (second, two) = (trained(strategy, faults) for _ in range(2))
    assert list(one.trace.lines()) == list(two.trace.lines())
    assert [digest(toy.model.named_parameters()) for toy in first] == [
        digest(toy.model.named_parameters()) for toy in second
    ]
    assert all(torch.isfinite(parameter).all() for toy in first for parameter in toy.model.parameters())
    _, three = trained(strategy, Faults(tuple(ROUGH), loss=0.1, seed=8, lease=3.0))
    assert list(one.trace.lines()) != list(three.trace.lines())


@pytest.mark.parametrize("name", ["diloco", "noloco", "local-m1-m2"])
def test_messages_get_lost_as_in_turns(name: str) -> None:
    """The same seed drops the same messages, whoever carries them."""
    strategy, loss = METHODS[name](period=4).strategy, 0.3
    toys, simulation = trained(strategy, Faults(loss=loss, seed=5), steps=40)
    hub = Hub(5, Dropping(loss, 5))
    others = [Toy(number, hub, strategy) for number in range(5)]
    for step in range(1, 41):
        for other in others:
            backward(other.model, 1, other.number, step)
            move(list(other.model.parameters()), other.optimizer)
        flows = [flow for other in others if (flow := other.sync.after(8))]
        take_turns(flows, [other.sync.group for other in others])
    take_turns([drain(other.state) for other in others], [other.sync.group for other in others])
    assert [toy.state.digest() for toy in toys] == [other.state.digest() for other in others]
    assert sum(simulation.trace.lost) + sum("not heard" in moment.note for moment in simulation.trace.moments) > 0


@pytest.mark.parametrize("name", ["diloco", "noloco"])
def test_shapes_and_real_numbers_take_the_same_time_under_the_same_faults(name: str) -> None:
    strategy = METHODS[name](period=4).strategy
    faults = Faults(tuple(ROUGH), loss=0.1, seed=7, lease=3.0)
    toys, real = trained(strategy, faults)
    specs = tuple(spec for fragment in toys[0].state.fragments for spec in fragment.layout.specs)
    shapes = simulate(Job(strategy, specs, 60), real.world.traffic.network, pace=Pace(2), faults=faults, keeps=True)
    assert shapes.seconds == pytest.approx(real.trace.seconds, rel=1e-9)
    told = [[(m.time, m.island, m.kind, m.key) for m in trace.ordered()] for trace in (shapes, real.trace)]
    assert [row[1:] for row in told[0]] == [row[1:] for row in told[1]]


@pytest.mark.parametrize("name", ["async-local-sgd", "decoupled"])
def test_who_was_not_heard_by_a_keeper_is_told_and_goes_on(name: str) -> None:
    strategy = METHODS[name](period=10).strategy
    specs = (spec(1e5, "embed.weight"), *(spec(1e5, f"layers.{block}.weight") for block in range(4)))
    faults = Faults(loss=0.3, seed=3)
    trace = simulate(Job(strategy, specs, 120), islands(4, 1e9), faults=faults, keeps=True)
    lost = {(moment.island, moment.key) for moment in trace.moments if moment.kind == "lost"}
    launched = {(moment.island, moment.key) for moment in trace.moments if moment.kind == "launched"}
    dropping = Dropping(0.3, 3)
    expected = {(island, key) for island, key in launched if dropping(key, (island,))}
    assert lost <= expected
    # what was lost at the very end is not looked for any more
    assert len(expected - lost) <= 4
    assert len(launched) > 0.8 * 4 * 12


def test_who_was_left_out_while_it_was_frozen_fetches_as_soon_as_it_is_known() -> None:
    """Island 3 freezes at 8 s and is gone at 13 s; the others are done without it at 18.3 s; it comes at 19 s."""
    trace = timed(Freeze(3, 8.0, 9.0), steps=100)
    assert len(times(trace, "joined")) == 1
    assert times(trace, "joined")[0] < 60.0
    assert trace.ended == pytest.approx([trace.seconds] * 4)


@pytest.mark.parametrize("away", [2.0, 3.1, 3.5, 5.0, 8.0, 13.0])
def test_after_one_freeze_or_partition_of_any_length_anchors_agree(away: float) -> None:
    for fault in (Freeze(1, 10.0, away), Partition(("site 2",), 10.0, away)):
        toys, simulation = trained(strategy_of("diloco"), Faults((fault,), lease=3.0), workers=3)
        assert simulation.current == [0, 1, 2]
        assert len({toy.state.digest() for toy in toys}) == 1


def test_what_happens_after_the_end_of_a_run_changes_nothing_about_it() -> None:
    plain, late = timed(), timed(Death(1, 1000.0), Freeze(2, 500.0, 5.0))
    assert late.seconds == plain.seconds
    assert late.utilisation == plain.utilisation
    assert list(late.lines()) == list(plain.lines())


def test_a_run_ends_when_what_was_in_flight_has_been_used() -> None:
    """GlobalM1: each mean over 4 takes 6 s behind 10 s of steps, and the last one is waited for."""
    trace = timed(strategy=METHODS["global-m1"](period=10).strategy)
    assert trace.ended == pytest.approx([50.0] * 4)
    assert trace.seconds == pytest.approx(56.0)
    assert trace.utilisation == 1.0


def test_who_averages_gradients_in_every_step_has_nothing_to_come_back_by() -> None:
    strategy = METHODS["data-parallel"]().strategy
    with pytest.raises(UsageError, match="nobody could take part again after the freeze of island 1 at 2s"):
        timed(Freeze(1, 2.0, 3.0), strategy=strategy)
    assert timed(Slowness(1, 2.0, 30.0, factor=2.0), strategy=strategy).seconds > timed(strategy=strategy).seconds


def test_an_island_that_fetches_is_there_and_trains_nothing_until_it_has_joined() -> None:
    trace = timed(Freeze(3, 12.0, 28.0), steps=100)
    fetches, joined = times(trace, "fetches")[0], times(trace, "joined")[0]
    assert 40.0 <= fetches < joined
    trained = [moment for moment in trace.moments if moment.island == 3 and moment.kind == "trained"]
    assert not [each for each in trained if each.time < joined and each.time + each.seconds > fetches]
    assert trace.compute[3] + trace.blocked[3] <= trace.ended[3]


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6])  # 2 draws no death
@pytest.mark.parametrize("name", ["diloco", "local-sgd", "factored-gossip", "noloco", "async-local-sgd"])
def test_under_a_drawn_schedule_a_run_ends_and_all_who_return_take_part_again(name: str, seed: int) -> None:
    drawn = Faults.drawn(5, 60.0, every=100.0, away=5.0, seed=seed)
    kept = name == "async-local-sgd"
    events = [event for event in drawn.events if not (kept and isinstance(event, Death | Rejoin) and event.island == 0)]
    specs = (spec(1e3, "embed.w"), *(spec(1e3, f"layers.{block}.w") for block in range(4)))
    where = Network(tuple(Island(f"site {m % 3}", 1e5, 1e5, 1 + 0.1 * m, 0.05) for m in range(5)))
    strategy, faults = METHODS[name](period=8).strategy, Faults(tuple(events), lease=2.0)
    trace = simulate(Job(strategy, specs, 200), where, faults=faults, keeps=True)
    died = {event.island for event in events if isinstance(event, Death)}
    assert died
    for island in range(5):
        kinds = [moment.kind for moment in trace.ordered() if moment.island == island]
        assert kinds.count("died") >= (island in died)
        assert ("joined" in kinds) == (island in died)
        assert trace.ended[island] > 0.8 * trace.seconds, "to the end of the run"


def test_where_nobody_up_to_date_is_left_a_run_ends_with_a_sentence() -> None:
    """Island 1 has not fetched yet when island 0 dies."""
    faults = Faults((Death(1, 5.0), Rejoin(1, 20.0), Death(0, 20.5)), lease=3.0)
    with pytest.raises(GroupError, match=r"after 20.5 simulated seconds nobody is left whose state is up to date"):
        simulate(Job(DILOCO, (spec(1e6),), 60), islands(2), faults=faults)


def test_nobody_enters_from_a_host_that_is_cut_off_meanwhile() -> None:
    """Island 3 fetches from island 0, which is cut off before its next boundary."""
    events = (Death(3, 2.0), Rejoin(3, 12.0), Partition(("site 0",), 13.0, 10.0))
    toys, simulation = trained(strategy_of("diloco"), Faults(events, lease=1.0), workers=5)
    assert simulation.current == [0, 1, 2, 3, 4]
    assert len({toy.state.digest() for toy in toys}) == 1


@pytest.mark.parametrize("name", ["eager", "noloco", "factored-gossip"])
def test_shapes_fetch_as_many_bytes_as_real_numbers_do(name: str) -> None:
    strategy, faults = strategy_of(name), Faults((Death(1, 10.0), Rejoin(1, 14.0)), lease=1.0)
    toys, real = trained(strategy, faults, workers=3)
    specs = tuple(each for fragment in toys[0].state.fragments for each in fragment.layout.specs)
    network = real.world.traffic.network
    shapes = simulate(Job(strategy, specs, 60), network, pace=Pace(2), faults=faults, keeps=True)
    assert times(shapes, "joined") == times(real.trace, "joined") != []
    assert shapes.seconds == pytest.approx(real.trace.seconds, rel=1e-9)


def test_a_cut_inside_a_site_holds_up_those_who_stand_there() -> None:
    ports = tuple(Island("here", MB, MB, 1.0) for _ in range(4))
    job, cut = Job(DILOCO, (spec(1e6),), 50), Faults((Cut(("here", "here"), 12.0, 7.0),), lease=5.0)
    whole, held = (simulate(job, Network(ports), faults=faults).seconds for faults in (Faults(), cut))
    assert held == pytest.approx(whole + 7.0)

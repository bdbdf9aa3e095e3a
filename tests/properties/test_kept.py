"""A keeper that does not hear everything."""

from fractions import Fraction

import pytest

from atoll.errors import UsageError
from atoll.parts.keepers import evenly, keeper
from atoll.parts.landings import Blocking, OnArrival
from atoll.parts.outers import sgd
from atoll.parts.schedules import every
from atoll.peers.faults import Dropping
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.wire import Key, Landed, Lost
from tests.properties.teams import KeptTeam, Numbers, Team, close, numbers, pushed, values

PERIOD = 3


class Heard:
    """The steps at which each worker handed in what the keeper heard."""

    def __init__(self, team: KeptTeam) -> None:
        self.last = [0] * len(team.paces)
        self._team, self._seen = team, [0] * len(team.paces)

    def look(self) -> None:
        """Once after each tick, before the next."""
        for worker, events in enumerate(self._team.events):
            new, self._seen[worker] = events[self._seen[worker] :], len(events)
            for event in new:
                if isinstance(event, Landed):
                    self.last[worker] = self._team.syncs[worker].state.step - event.age


@pytest.mark.parametrize("probability", [0.0, 0.4])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_a_worker_learned_in_a_push_that_was_lost_reaches_the_keeper_with_its_next(
    workers: int, probability: float
) -> None:
    """Every delta is applied in full, so that the anchor holds each step up to the last push that was heard, once."""
    strategy = Strategy((Rule(every(PERIOD), mixer=keeper(1, 0, evenly(), sgd(1.0))),))
    paces = [Fraction(1), Fraction(2, 3), Fraction(1, 2)][:workers]
    team = KeptTeam(numbers(), strategy, paces, Dropping(probability, seed=3))
    heard = Heard(team)
    for _ in range(30):
        team.run(1)
        heard.look()
    want = numbers().w.detach().clone()
    for worker in range(workers):
        want += sum(pushed(worker, step) for step in range(1, heard.last[worker] + 1))
    anchor = team.keeping.anchors[0]
    assert anchor is not None
    assert close(anchor.flat, want, 1e-13)
    lost = [event for events in team.events for event in events if isinstance(event, Lost)]
    assert bool(lost) == bool(probability)
    assert all("was not heard" in event.why for event in lost)
    assert len(team.closed) + len(lost) == sum(sync.state.tracks[0].round for sync in team.syncs)


def test_a_worker_whose_push_is_lost_goes_on_with_its_live_and_hands_in_all_of_it_in_its_turn() -> None:
    """Alone with a keeper that takes over what it gets: the anchor is live as of the last push that was heard."""
    part, faults = keeper(1, 0, evenly(), sgd(1.0)), Dropping(0.4, seed=3)
    rule = Rule(every(PERIOD), carry=Carry.LIVE, mixer=part, landing=OnArrival())
    team = KeptTeam(numbers(), Strategy((rule,)), [Fraction(1)], faults)
    handed_in = numbers().w.detach()
    for step in range(1, 31):
        team.run(1)
        if step % PERIOD == 0 and not faults(Key(0, 0, step // PERIOD - 1), (0,)):
            handed_in = values(team.models[0])["w"]
        anchor = team.keeping.anchors[0]
        assert anchor is not None
        assert close(anchor.flat, handed_in, 1e-14)
    lost = [event.key.round for event in team.events[0] if isinstance(event, Lost)]
    assert lost == [round for round in range(9) if faults(Key(0, 0, round), (0,))] != []


@pytest.mark.parametrize("landing", [Blocking(), OnArrival()])
def test_handing_in_where_nobody_keeps_is_refused_with_what_to_do(landing: Blocking | OnArrival) -> None:
    carry = Carry.LIVE if isinstance(landing, OnArrival) else Carry.DELTA
    rule = Rule(every(2), mixer=keeper(1, 0, evenly(), sgd(1.0)), carry=carry, landing=landing)
    with pytest.raises(UsageError, match=r"nobody keeps, so nobody would answer; carry out .* or use atoll train"):
        Team(Numbers([1.0]), Strategy((rule,)), 1).run(2)

"""Weights, rules that share a model, and messages that carry live."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.parts.fragments import by_name
from atoll.parts.landings import After
from atoll.parts.merges import Merge, blend, carry_on, leave
from atoll.parts.mixers import all_mean, alone, by_share, by_tokens, weighted
from atoll.parts.outers import nesterov, sgd
from atoll.parts.schedules import every
from atoll.sync.rule import Carry, Rule, Strategy
from atoll.testing import reference, toys
from atoll.testing.toys import draws
from tests.properties.teams import Numbers, Team, close, examples, mean, push, same, shared, training, values

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def plain_weighted_diloco(module: toys.Mlp, weights: list[list[float]], period: int, steps: int) -> dict[str, Tensor]:
    """DiLoCo's outer step on sum_m w_m d_m / sum_m w_m. `weights`: of each worker, by round."""
    anchor = values(module)
    live = [values(module) for _ in weights]
    momentum = {name: torch.zeros_like(tensor) for name, tensor in anchor.items()}
    for step in range(1, steps + 1):
        for worker, params in enumerate(live):
            for tensor, move in zip(params.values(), draws(0, worker, step, list(params.values())), strict=True):
                tensor.sub_(0.01 * move)
        if step % period == 0:
            by = [each[step // period - 1] for each in weights]
            for name, theta in anchor.items():
                gradient = mean([theta - params[name] for params in live], by)
                momentum[name] = 0.9 * momentum[name] + gradient
                theta -= 0.7 * (gradient + 0.9 * momentum[name])
                for params in live:
                    params[name].copy_(theta)
    return anchor


@examples(10)
@given(shares=WEIGHTS)
def test_weighted_by_share_is_the_plain_weighted_mean(shares: list[float]) -> None:
    rule = Rule(every(3), outer=nesterov(0.7, 0.9), mixer=weighted(by_share(), all_mean()))
    team = Team(toys.Mlp(), Strategy((rule,)), len(shares), shares=shares).run(9)
    want = plain_weighted_diloco(toys.Mlp(), [[share] * 3 for share in shares], 3, 9)
    assert all(close(values(model), want) for model in team.models)


@examples(10)
@given(workers=st.integers(1, 5), seed=st.integers(0, 10))
def test_weighted_by_tokens_counts_the_tokens_of_the_round(workers: int, seed: int) -> None:
    def tokens(worker: int, step: int) -> int:
        return 1 + (7 * worker + 5 * step + seed) % 11

    rule = Rule(every(3), outer=nesterov(0.7, 0.9), mixer=weighted(by_tokens(), all_mean()))
    team = Team(toys.Mlp(), Strategy((rule,)), workers).run(9, tokens=tokens)
    rounds = [[sum(tokens(w, 3 * r + s) for s in (1, 2, 3)) + 0.0 for r in range(3)] for w in range(workers)]
    assert all(close(values(model), plain_weighted_diloco(toys.Mlp(), rounds, 3, 9)) for model in team.models)
    assert team.landed()[1].weights == tuple(each[1] for each in rounds)


def test_a_worker_without_tokens_weighs_nothing_and_gets_the_mean() -> None:
    rule = Rule(every(2), outer=sgd(1.0), mixer=weighted(by_tokens(), all_mean()))
    team = Team(toys.Mlp(), Strategy((rule,)), 3).run(2, tokens=lambda worker, step: 0 if worker == 1 else 5)
    apart = [values(model) for model in Team(toys.Mlp(), Strategy(), 3).run(2).models]
    want = {name: mean([apart[0][name], apart[2][name]]) for name in apart[0]}
    assert all(close(values(model), want) for model in team.models)


def test_a_round_in_which_nobody_trained_a_token_is_lost_and_says_so() -> None:
    rule = Rule(every(1), outer=sgd(1.0), mixer=weighted(by_tokens(), all_mean()))
    team = Team(Numbers([0.0]), Strategy((rule,)), 2).run(1, tokens=lambda worker, step: 0)
    assert "the weights of workers (0, 1) are all 0" in team.lost()[0].why


@examples(8)
@given(one=st.integers(1, 6), two=st.integers(1, 6), workers=st.integers(1, 4))
def test_rules_that_serve_different_fragments_do_not_touch_one_another(one: int, two: int, workers: int) -> None:
    """Two periods and two outer optimizers, against two runs of DiLoCo of which each gives its part."""
    first, second = Rule(every(one), outer=nesterov(0.7, 0.9), only=(0, 2)), Rule(every(two), outer=sgd(0.5), only=(1,))
    team = Team(toys.Mlp(), Strategy((first, second), by_name("first.*", "[ml]*", "head.*")), workers).run(13)
    for rule_of in ((first, ("first", "head")), (second, ("middle", "last"))):
        rule, layers = rule_of
        whole = Rule(rule.schedule, outer=rule.outer)
        twin = Team(toys.Mlp(), Strategy((whole,)), workers).run(13)
        for model, other in zip(team.models, twin.models, strict=True):
            mine, its = ({n: t for n, t in values(m).items() if n.startswith(layers)} for m in (model, other))
            assert len(mine) == 4
            assert same(mine, its)


def test_a_fragment_may_go_alone_while_another_is_mixed() -> None:
    mixed = Rule(every(2), outer=sgd(1.0), only=(0,))
    apart = Rule(every(2), outer=sgd(1.0), mixer=alone(), only=(1,))
    team = Team(toys.Mlp(), Strategy((mixed, apart), by_name("[fm]*", "*")), 2).run(6)
    single = [values(model) for model in Team(toys.Mlp(), Strategy(), 2).run(6).models]
    for worker, model in enumerate(team.models):
        for name, tensor in values(model).items():
            want = mean([each[name] for each in single]) if name[0] in "fm" else single[worker][name]
            assert close(tensor, want)


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_blend_of_zero_throws_away_the_steps_taken_in_flight(delay: int) -> None:
    rule = Rule(every(5), outer=nesterov(0.7, 0.9), landing=After(delay), merge=blend(0.0))
    team = Team(toys.Mlp(), Strategy((rule,)), 3).run(5 + delay)
    for model, sync in zip(team.models, team.syncs, strict=True):
        anchors = {name: shared(sync)[name] for name in values(model)}
        assert all(torch.equal(tensor, anchors[name]) for name, tensor in values(model).items())


def test_carrying_live_and_adopting_the_mean_is_parameter_averaging() -> None:
    module = toys.Mlp()
    want, _ = reference.local_sgd(
        toys.initial(module), workers=3, steps=12, inner_step=toys.inner_step(module, toys.adamw, seed=0), period=4
    )
    team = Team(module, Strategy((Rule(every(4), carry=Carry.LIVE),)), 3).run(12, **training(toys.adamw))
    for model, sync in zip(team.models, team.syncs, strict=True):
        assert close(values(model), dict(zip(values(model), want, strict=True)))
        assert same(values(model), {name: shared(sync)[name] for name in values(model)})


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_the_mean_of_live_becomes_the_anchor_to_the_bit_however_far_it_is(size: float) -> None:
    """Without going through anchor - (anchor - mean), which would round it away."""
    team = Team(Numbers([1e12, 0.0]), Strategy((Rule(every(1), carry=Carry.LIVE),)), 2)
    team.run(1, lambda worker, step, model: model.get_parameter("w").data.copy_(torch.tensor([size, worker])))
    assert values(team.models[0])["w"].tolist() == [torch.tensor(size).double().item(), 0.5]


@pytest.mark.parametrize("merge", [carry_on(), blend(0.3), leave()])
@examples(6)
@given(workers=st.integers(1, 5), period=st.integers(2, 6), data=st.data())
def test_live_that_lands_later_is_the_plain_loop(merge: Merge, workers: int, period: int, data: st.DataObject) -> None:
    """carry_on keeps the steps taken in flight: θ ← θ + (mean - what was sent). The anchor becomes the mean."""
    delay = data.draw(st.integers(1, period - 1))
    team = Team(
        toys.Mlp(), Strategy((Rule(every(period), carry=Carry.LIVE, landing=After(delay), merge=merge),)), workers
    )
    plain = Team(toys.Mlp(), Strategy(), workers)
    anchor, sent = values(toys.Mlp()), [values(model) for model in plain.models]
    for step in range(1, 3 * period + delay + 1):
        team.run(1)
        for worker, model in enumerate(plain.models):
            push(worker, step, model)
            if step % period == 0:
                sent[worker] = values(model)
        if step > period and step % period == delay:
            anchor = {name: mean([each[name] for each in sent]) for name in anchor}
            for worker, model in enumerate(plain.models):
                for name, tensor in model.named_parameters():
                    match merge:
                        case carry_on():
                            tensor.data += anchor[name] - sent[worker][name]
                        case blend(alpha):
                            tensor.data.copy_(alpha * tensor.data + (1 - alpha) * anchor[name])
                        case _:
                            pass
        for model, want, sync in zip(team.models, plain.models, team.syncs, strict=True):
            assert close(values(model), values(want))
            assert close(shared(sync), anchor)
            assert same(shared(sync), shared(team.syncs[0]))

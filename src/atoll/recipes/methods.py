"""Every method by its name. Each is a function that returns a composition; its arguments are the knobs its paper turns,
with the paper's values as defaults.

The period is the exception: papers use hundreds of steps in runs of tens of thousands. The default here is 50, the
shortest of DiLoCo's sweep, because a first run on a CPU has a thousand steps; give `period=500` for the published
setting.
"""

from collections.abc import Callable
from dataclasses import replace

from atoll.parts.mixers import Work, weighted
from atoll.recipes.compressed import muloco, opendiloco_sparse, sparseloco, sparta
from atoll.recipes.diloco import (
    data_parallel,
    diloco,
    diloco_restarted,
    eager_diloco,
    local_sgd,
    opendiloco,
    single,
    streaming,
)
from atoll.recipes.gossip import (
    factored_gossip,
    global_m1,
    global_m1_blocking,
    global_m1_local_m2,
    global_m1_local_m2_subset,
    local_m1,
    local_m1_m2,
    local_m1_m2_blocking,
    local_m1_m2_subset,
    noloco,
)
from atoll.recipes.kept import async_local_sgd, decoupled
from atoll.sync.rule import Carry
from atoll.train.run import Method

__all__ = [
    "METHODS",
    "async_local_sgd",
    "data_parallel",
    "decoupled",
    "diloco",
    "diloco_restarted",
    "eager_diloco",
    "factored_gossip",
    "global_m1",
    "global_m1_blocking",
    "global_m1_local_m2",
    "global_m1_local_m2_subset",
    "local_m1",
    "local_m1_m2",
    "local_m1_m2_blocking",
    "local_m1_m2_subset",
    "local_sgd",
    "muloco",
    "noloco",
    "opendiloco",
    "opendiloco_sparse",
    "single",
    "sparseloco",
    "sparta",
    "streaming",
    "weigh",
]

METHODS: dict[str, Callable[..., Method]] = {
    "single": single,
    "data-parallel": data_parallel,
    "local-sgd": local_sgd,
    "diloco": diloco,
    "diloco-restarted": diloco_restarted,
    "opendiloco": opendiloco,
    "opendiloco-sparse": opendiloco_sparse,
    "streaming": streaming,
    "eager": eager_diloco,
    "factored-gossip": factored_gossip,
    "global-m1": global_m1,
    "global-m1-local-m2": global_m1_local_m2,
    "global-m1-local-m2-subset": global_m1_local_m2_subset,
    "local-m1": local_m1,
    "local-m1-m2": local_m1_m2,
    "local-m1-m2-subset": local_m1_m2_subset,
    "global-m1-blocking": global_m1_blocking,
    "local-m1-m2-blocking": local_m1_m2_blocking,
    "noloco": noloco,
    "decoupled": decoupled,
    "async-local-sgd": async_local_sgd,
    "sparseloco": sparseloco,
    "muloco": muloco,
    "sparta": sparta,
}
"""Every method by its name on the command line."""


def weigh(method: Method, by: Callable[[Work], float]) -> Method:
    """The same method with deltas weighted: by the size of each worker's shard (`by_share()`), as DiLoCo does when data
    differ (section 1.3), or by what it has trained (`by_tokens()`)."""
    rules = tuple(
        replace(rule, mixer=weighted(by, rule.mixer)) if rule.carry is Carry.DELTA and not rule.kept else rule
        for rule in method.strategy.rules
    )
    return replace(method, strategy=replace(method.strategy, rules=rules))

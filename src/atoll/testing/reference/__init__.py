"""The methods as plain loops, written from the papers: slow, serial, and meant to be read with the paper open.

Every loop trains `workers` replicas of one model in a single thread and shares one contract:

- `theta`: the initial parameters, a list of tensors; it is left untouched.
- `inner_step(worker, step, params)`: moves that worker's parameters in place by one inner step. Steps are counted
  from 1. Each worker always gets the same tensor objects, so its optimizer state can live in the closure, and must:
  no loop resets it.
- `steps`: inner steps of each worker; ticks of a common clock where workers differ in pace (`keeper`).
- result: `(shared, live)`, the shared model and each worker's live parameters as they stand after `steps`.
  Steps after the last sync are in `live` alone; an exchange still under way at the end is not applied.

Symbols: Θ anchor, θ_m live parameters of worker m, Δ_m = Θ - θ_m delta (old minus new: a gradient for a minimiser),
Δ̄ their mean, η outer learning rate, μ outer momentum. The arithmetic is fixed, so that another implementation can be
compared bit for bit: whatever is averaged over workers is added in worker order, one division ends the sum, and
products and sums are separate operations, never fused.
"""

from atoll.testing.reference.compressed import (
    Codec,
    ErrorFeedback,
    cast,
    compressed_diloco,
    exact,
    float4,
    prune_by_sign,
    quantise_linear,
    quantise_statistical,
    random_mask,
    sparta,
    topk,
)
from atoll.testing.reference.contract import Gradient, InnerStep, Outer, Result, See, Update
from atoll.testing.reference.diloco import data_parallel, diloco, local_sgd, opendiloco, single, streaming
from atoll.testing.reference.eager import eager
from atoll.testing.reference.gossip import Groups, blocking_gossip, factored_gossip, noloco
from atoll.testing.reference.keeper import (
    MergeDeltas,
    async_local_sgd,
    decoupled,
    delayed_nesterov,
    radial_directional,
    weighted_mean,
)
from atoll.testing.reference.outers import adam, nesterov, restarted, sgd

LOOPS = {
    "diloco-restarted": diloco,
    "opendiloco-sparse": compressed_diloco,
    "sparseloco": compressed_diloco,
    "muloco": compressed_diloco,
    "global-m1": factored_gossip,
    "global-m1-local-m2": factored_gossip,
    "global-m1-local-m2-subset": factored_gossip,
    "local-m1": factored_gossip,
    "local-m1-m2": factored_gossip,
    "local-m1-m2-subset": factored_gossip,
    "global-m1-blocking": blocking_gossip,
    "local-m1-m2-blocking": blocking_gossip,
}
"""The loop of each method that has none of its own name."""

__all__ = [
    "LOOPS",
    "Codec",
    "ErrorFeedback",
    "Gradient",
    "Groups",
    "InnerStep",
    "MergeDeltas",
    "Outer",
    "Result",
    "See",
    "Update",
    "adam",
    "async_local_sgd",
    "blocking_gossip",
    "cast",
    "compressed_diloco",
    "data_parallel",
    "decoupled",
    "delayed_nesterov",
    "diloco",
    "eager",
    "exact",
    "factored_gossip",
    "float4",
    "local_sgd",
    "nesterov",
    "noloco",
    "opendiloco",
    "prune_by_sign",
    "quantise_linear",
    "quantise_statistical",
    "radial_directional",
    "random_mask",
    "restarted",
    "sgd",
    "single",
    "sparta",
    "streaming",
    "topk",
    "weighted_mean",
]

"""Merges against NumPy, in the dtypes that live and anchor come in."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.errors import CompositionError
from atoll.parts.merges import Merge, adopt, blend, carry_on, leave

Formula = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

# merge, and live as a function of (live, step, anchor)
CASES: list[tuple[Merge, Formula]] = [
    (leave(), lambda live, step, anchor: live),
    (adopt(), lambda live, step, anchor: anchor),
    (blend(0.0), lambda live, step, anchor: anchor),
    (blend(0.5), lambda live, step, anchor: (live + anchor) / 2),
    (blend(0.9), lambda live, step, anchor: 0.9 * live + (1 - 0.9) * anchor),
    (blend(1.0), lambda live, step, anchor: live),
    (carry_on(), lambda live, step, anchor: live - step),
]


def draw(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("live_dtype", "anchor_dtype", "unit"),
    [
        (torch.float64, torch.float64, 2**-52),
        (torch.float32, torch.float32, 2**-23),
        (torch.bfloat16, torch.float32, 2**-8),
        (torch.float16, torch.float32, 2**-11),
    ],
)
@pytest.mark.parametrize(("merge", "formula"), CASES, ids=[repr(merge) for merge, _ in CASES])
def test_live_becomes_what_the_formula_says(
    merge: Merge, formula: Formula, live_dtype: torch.dtype, anchor_dtype: torch.dtype, unit: float
) -> None:
    """To a few roundings of live's dtype; step and anchor are left as they were."""
    live, step, anchor = draw(live_dtype, 0), draw(anchor_dtype, 1), draw(anchor_dtype, 2)
    want = formula(*(each.double().numpy() for each in (live, step, anchor)))
    memory, lent = live.data_ptr(), (step.clone(), anchor.clone())
    merge(live, step, anchor)
    assert live.data_ptr() == memory
    assert np.allclose(live.double().numpy(), want, rtol=4 * unit, atol=4 * unit)
    assert torch.equal(step, lent[0])
    assert torch.equal(anchor, lent[1])


@pytest.mark.parametrize("merge", [merge for merge, _ in CASES], ids=repr)
def test_the_repr_of_a_merge_rebuilds_it(merge: Merge) -> None:
    assert eval(repr(merge), {"leave": leave, "adopt": adopt, "blend": blend, "carry_on": carry_on}) == merge


@pytest.mark.parametrize("merge", [adopt(), blend(0.0)], ids=repr)
def test_live_in_half_precision_is_the_anchor_rounded_once(merge: Merge) -> None:
    live, anchor = draw(torch.bfloat16, 0), draw(torch.float32, 2)
    merge(live, torch.zeros(300), anchor)
    assert torch.equal(live, anchor.to(torch.bfloat16))


def test_blending_in_half_precision_rounds_only_the_sum() -> None:
    live, anchor = draw(torch.bfloat16, 0), draw(torch.float32, 2)
    want = (0.5 * live.double() + 0.5 * anchor.double()).float().to(torch.bfloat16)
    blend(0.5)(live, torch.zeros(300), anchor)
    assert torch.equal(live, want)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_a_weight_outside_of_zero_to_one_is_refused(alpha: float) -> None:
    with pytest.raises(CompositionError, match="0 <= alpha <= 1"):
        blend(alpha)

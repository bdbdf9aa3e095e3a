"""Published figures of how busy links keep workers, as data to compare ours with."""

import math
from dataclasses import dataclass

from atoll.sim.layers import GRID, Method, Model, data_parallel, diloco, streaming

BITS = 13.0
"""On the wire for each parameter: fitted, as the whole number with the least total distance from both tables below, in
points of the grid. The papers say bfloat16 (16), with which our model asks for about one point more than they print."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Compute utilisations that the tables give a bandwidth for."""


@dataclass(frozen=True)
class Row:
    """Gbit/s that reach each of `TARGETS`, as printed (to 0.1, near a point of the grid); None for 1000 and more."""

    model: Model
    method: Method
    gbits: tuple[float | None, ...]


SMALL, MIDDLE, LARGE = Model(24, 1e9, 0.1), Model(48, 10e9, 0.8), Model(108, 100e9, 4.9)
LLAMA, DEEPSEEK = Model(126, 405e9, 26.0), Model(61, 671e9, 20.0)
"""Layers as in these models' own reports; the tables give size and step time only."""

OVERLAPPED = streaming(100, BITS, delay=1)
FOUR_BIT = streaming(100, BITS / 4, delay=1)
"""4 of 16 bits: a quarter of the fitted width."""

STREAMING = (
    Row(SMALL, data_parallel(BITS), (86.8, 152.6, 184.2, 222.3, 569.0)),
    Row(SMALL, diloco(100, BITS), (1.4, 6.2, 13.3, 23.3, 86.8)),
    Row(SMALL, streaming(100, BITS), (1.4, 5.2, 9.1, 16.0, 28.1)),
    Row(SMALL, OVERLAPPED, (1.4, 4.3, 6.2, 9.1, 11.0)),
    Row(SMALL, FOUR_BIT, (0.4, 0.9, 1.7, 2.0, 3.0)),
    Row(MIDDLE, data_parallel(BITS), (104.8, 222.3, 222.3, 268.3, 471.5)),
    Row(MIDDLE, diloco(100, BITS), (1.7, 7.5, 16.0, 33.9, 104.8)),
    Row(MIDDLE, streaming(100, BITS), (1.7, 5.2, 9.1, 13.3, 19.3)),
    Row(MIDDLE, OVERLAPPED, (1.7, 3.6, 5.2, 6.2, 7.5)),
    Row(MIDDLE, FOUR_BIT, (0.4, 0.9, 1.4, 1.4, 1.7)),
    Row(LARGE, data_parallel(BITS), (184.2, 323.8, 390.7, 390.7, 471.5)),
    Row(LARGE, diloco(100, BITS), (3.0, 11.0, 23.3, 49.4, 184.2)),
    Row(LARGE, streaming(100, BITS), (2.4, 6.2, 9.1, 11.0, 19.3)),
    Row(LARGE, OVERLAPPED, (1.7, 3.6, 4.3, 5.2, 5.2)),
    Row(LARGE, FOUR_BIT, (0.5, 0.9, 1.1, 1.1, 1.4)),
)
"""Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), table 4."""

SCALING = (
    Row(MIDDLE, data_parallel(BITS), (104.8, 184.2, 222.3, 222.3, 390.7)),
    Row(MIDDLE, diloco(10, BITS), (16.0, 49.4, 86.8, 152.6, 222.3)),
    Row(MIDDLE, diloco(50, BITS), (3.0, 11.0, 23.3, 41.0, 126.5)),
    Row(MIDDLE, diloco(100, BITS), (1.4, 6.2, 13.3, 23.3, 86.8)),
    Row(MIDDLE, diloco(300, BITS), (0.5, 2.0, 4.3, 9.1, 41.0)),
    Row(LLAMA, data_parallel(BITS), (126.5, 222.3, 268.3, 323.8, 323.8)),
    Row(LLAMA, diloco(10, BITS), (19.3, 72.0, 126.5, 184.2, 268.3)),
    Row(LLAMA, diloco(50, BITS), (3.6, 13.3, 28.1, 59.6, 184.2)),
    Row(LLAMA, diloco(100, BITS), (2.0, 7.5, 16.0, 33.9, 126.5)),
    Row(LLAMA, diloco(300, BITS), (0.7, 3.0, 6.2, 13.3, 59.6)),
    Row(DEEPSEEK, data_parallel(BITS), (323.8, 569.0, 686.6, 686.6, None)),
    Row(DEEPSEEK, diloco(10, BITS), (49.4, 152.6, 268.3, 390.7, 686.6)),
    Row(DEEPSEEK, diloco(50, BITS), (7.5, 33.9, 72.0, 126.5, 390.7)),
    Row(DEEPSEEK, diloco(100, BITS), (4.3, 16.0, 41.0, 72.0, 268.3)),
    Row(DEEPSEEK, diloco(300, BITS), (1.7, 6.2, 13.3, 28.1, 126.5)),
)
"""Scaling laws for DiLoCo (Charles et al. 2025, arXiv 2503.09799), the table of required bandwidths; `MIDDLE` is its
Chinchilla. It disagrees with the other table on `MIDDLE`, by up to two points of the grid."""


def points_apart(ours: float | None, printed: float | None) -> int:
    """How many points of the grid our bandwidth lies above a printed one; None is the first beyond the grid.

    Args: ours: bits per second, of the grid. printed: Gbit/s, near a point of it.

    Example:
        >>> points_apart(GRID[14], 1.4), points_apart(GRID[14], 2.0)
        (0, -2)
    """
    meant = len(GRID)
    if printed is not None:
        meant = min(range(len(GRID)), key=lambda point: abs(math.log(GRID[point] / (printed * 1e9))))
    return (len(GRID) if ours is None else GRID.index(ours)) - meant


@dataclass(frozen=True)
class Figure:
    """Part of the time that workers compute, to a whole percent, on links of `bandwidth_bps` bits per second."""

    method: str
    bandwidth_bps: float
    utilisation: float
    period: int = 100
    workers: int = 8


GOSSIP_MODEL = Model(16, 1_498_482_688, 2.36)
"""Factored Gossip's 1.5 B: untied Llama 3.2 of 16 layers, 3 GB in bfloat16. Its step time is not published: 2.343 to
2.372 s is where `round = max(H step, mix1) + mix2` gives all seven figures, with 2 (M - 1) / M payloads for a mean over
M workers and one for a pair."""

SUBSET = 0.43
"""Part of the parameters in the subset: embedding, head, and the first two layers."""

GOSSIP = (
    Figure("diloco", 100e6, 0.36),
    Figure("diloco", 200e6, 0.53),
    Figure("global-m1", 100e6, 0.56),
    Figure("global-m1", 200e6, 1.00),
    Figure("global-m1-local-m2", 100e6, 0.36),
    Figure("global-m1-local-m2", 200e6, 0.66),
    Figure("global-m1-local-m2-subset", 100e6, 0.45),
)
"""Factored Gossip DiLoCo (Koneputugodage et al. 2026, arXiv 2606.22768): published."""

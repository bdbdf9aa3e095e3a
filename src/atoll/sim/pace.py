"""How long inner steps take."""

from array import array
from dataclasses import dataclass

import numpy as np

from atoll.sim.network import Island

BLOCK = 512
"""Inner steps whose durations are drawn together."""


@dataclass(frozen=True)
class Pace:
    """How long inner steps take: each the island's mean times 1 + jitter z, z standard normal, and a tenth at least.

    Drawn from the seed by island and step, so that it does not depend on what else happens.
    """

    seed: int = 0

    def of(self, island: Island, number: int) -> "Walk":
        """The durations of one island."""
        return Walk(self.seed, island, number)


class Walk:
    """Durations of the steps of one island: `until(step)` seconds from the first step's begin."""

    def __init__(self, seed: int, island: Island, number: int) -> None:
        self._key, self._island = [seed, number], island
        # an array's own floats are found in a third of the time that those of numpy take
        self._ends = array("d", [0.0])

    def until(self, step: int) -> float:
        """Seconds of all steps up to this one."""
        ends = self._ends
        if step < len(ends):
            return ends[step]
        if not self._island.jitter:
            return step * self._island.step_s
        while step >= len(ends):
            draws = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, len(ends) // BLOCK]))
            each = np.maximum(0.1, 1 + self._island.jitter * draws.standard_normal(BLOCK))
            ends.frombytes((ends[-1] + np.cumsum(each) * self._island.step_s).tobytes())
        return ends[step]

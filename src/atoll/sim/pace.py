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
        self._ends: list[array[float]] = []

    def until(self, step: int) -> float:
        """Seconds of all steps up to this one."""
        if not self._island.jitter or not step:
            return step * self._island.step_s
        block, place = divmod(step - 1, BLOCK)
        while block >= len(self._ends):
            draws = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, len(self._ends)]))
            each = np.maximum(0.1, 1 + self._island.jitter * draws.standard_normal(BLOCK))
            before = self._ends[-1][-1] if self._ends else 0.0
            ends = before + np.cumsum(each) * self._island.step_s
            # an array's own floats are found in a third of the time
            self._ends.append(array("d", ends.tobytes()))
        return self._ends[block][place]

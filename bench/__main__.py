"""Run the benches named on the command line, or all of them; each prints a line per figure."""

import sys
from collections.abc import Callable, Iterator

from bench import (
    after_step,
    apart,
    beside,
    boundary,
    codecs,
    lives,
    memory,
    planned,
    scale,
    simulated,
    throughput,
    used,
    wide,
)
from bench.measure import Figure

BENCHES: dict[str, Callable[[], Iterator[Figure]]] = {
    "after_step": after_step.figures,
    "apart": apart.figures,
    "beside": beside.figures,
    "boundary": boundary.figures,
    "codecs": codecs.figures,
    "lives": lives.figures,
    "memory": memory.figures,
    "planned": planned.figures,
    "scale": scale.figures,
    "simulated": simulated.figures,
    "throughput": throughput.figures,
    "used": used.figures,
    "wide": wide.figures,
}


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        sys.exit(f"there is no bench called {', '.join(unknown)}; name some of {', '.join(BENCHES)}, or none for all")
    for name in names or BENCHES:
        for figure in BENCHES[name]():
            print(f"{name:<11}{figure}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

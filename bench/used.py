"""Is the utilisation of DiLoCo, Streaming DiLoCo and Factored Gossip between islands what `atoll plan` says?

As `bench.planned`, but over the wide group: zenoh under mutual TLS, with a coordinator beside the first of four
islands. What a plan does not know is measured for each method at 50 and 25 Mbit/s, and holds at 100 and for half of
the payload. Beside what it costs that moves no bytes, and what TCP makes of the link, it is what four islands on this
machine need for coding, summing and checking, which grows with the payload and not with the link.

Whatever overlaps inner steps counts as used, so each method is run where it has to wait all the same: Streaming's
fragments land one inner step after they left, before they can have come; Factored Gossip waits for its pairs.

The plan takes links to be as fast at once as they are in the long run. TCP finds out: a pair that did not meet in the
round before begins at the speed that its connection had as one of three, and a message that is shorter than the search
takes longer than its bytes. Hence rounds of Factored Gossip differ, by whether partners have changed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from atoll.peers.wide.connect import LEASE_S, connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.home import Home
from atoll.recipes.methods import diloco, factored_gossip, streaming
from atoll.sync.synchronizer import Synchronizer
from atoll.train.run import Method
from bench import link
from bench.engines import TIMEOUT_S, address
from bench.engines.atoll import LISTEN
from bench.engines.peer import tuned
from bench.measure import Figure
from bench.planned import WORKERS, Case, compared, model, trained

PERIOD, LATENCY = 20, 0.02
METHODS = ((diloco(PERIOD), 3), (streaming(PERIOD), 12), (factored_gossip(PERIOD), 6))
"""Each with rounds that are not measured, in which members learn how fast their links are: more where exchanges are
short, or partners change."""


def figures(
    bandwidth: float = 50e6,
    elements: int = 1_400_000,
    step_s: float = 0.1,
    rounds: int = 4,
    turns: int = 2,
    methods: Sequence[tuple[Method, int]] = METHODS,
) -> Iterator[Figure]:
    """Planned and measured of each method, at twice the bandwidth and at half the payload: twenty-five minutes."""
    if why := link.missing():
        print(f"used       skipped: {why}")
        return
    for method, warm in methods:
        base = Case(method, bandwidth, LATENCY, elements, step_s, rounds, warm)
        others = [replace(base, bandwidth=bandwidth * 2), replace(base, elements=elements // 2)]
        yield from compared(base, replace(base, bandwidth=bandwidth / 2), others, work, turns)


def work(island: int, door: str, folder: str, case: Case) -> list[tuple[float, float]]:
    """One island."""
    link.join(door, island)
    tuned()
    invited, credentials = Path(folder) / "invited", Path(folder) / f"island-{island}"
    with ExitStack() as stack:
        if island == 0:
            home = Home.open(Path(folder) / "home", address=address(0))
            stack.enter_context(home.serve(WORKERS, LEASE_S, lambda said: None))
            lines = "\n".join(invitation.text() for invitation in home.invite(WORKERS, TIMEOUT_S))
            (Path(folder) / "new").write_text(lines)
            (Path(folder) / "new").rename(invited)
        while not invited.exists():
            time.sleep(0.05)
        enrolled = enrol(invited.read_text().splitlines()[island], credentials, worker=island)
        group = stack.enter_context(connect(enrolled, credentials, [f"{address(island)}:{LISTEN}"]))
        with Synchronizer(model(case), case.method.strategy, group) as sync:
            found = trained(case, sync)
        group.finish()
    return found

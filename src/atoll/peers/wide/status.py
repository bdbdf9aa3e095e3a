"""How a run stands, as its coordinator knows it: for people, and for programs."""

import time
from typing import Any

from atoll.files import finite
from atoll.peers.wide.coordinator import Coordinator

ROUNDS = 12


def status(coordinator: Coordinator) -> dict[str, Any]:
    """JSON-able: the epoch, each island, the last rounds, and after what silence who counts as gone."""
    epoch, now, present = coordinator.epoch, time.monotonic(), set(coordinator.present())
    joining = set(epoch.joining if epoch else ())
    islands: list[dict[str, Any]] = []
    for worker in sorted({*coordinator.known, *present}):
        island = coordinator.known.get(worker)
        beat = island.beat if island else None
        away = island is None or (island.hello is None and worker not in present)
        state = "gone" if away else "trains" if worker in present else "fetches" if worker in joining else "waits"
        if island and island.done:
            state = "done"
        elif island and island.leaving:
            state = "leaves" if worker in present else "left"
        islands.append(
            {
                "worker": worker,
                "state": state,
                "heard_s": round(now - island.heard, 1) if island else None,
                "step": beat.step if beat else None,
                "loss": beat.loss if beat else None,
                "tokens_per_s": round(beat.speed) if beat else None,
                "sent": beat.sent if beat else None,
                "epoch": beat.epoch if beat else None,
            }
        )
    rounds = [
        {
            "rule": key.rule,
            "fragment": key.fragment,
            "round": key.round,
            "workers": peers,
            "digest": digest,
            "lost": lost,
        }
        for key, peers, digest, lost in coordinator.ledger.rounds(ROUNDS)
    ]
    return finite(
        {
            "run": coordinator.run,
            "at": time.time(),
            "lease_s": coordinator.lease,
            "epoch": epoch
            and {"number": epoch.number, "from_step": epoch.step, "workers": epoch.workers, "joining": epoch.joining},
            "islands": islands,
            "rounds": rounds,
        }
    )

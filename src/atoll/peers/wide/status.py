"""How a run stands, as its coordinator knows it: for people, and for programs, at its machine and at any island's."""

import json
import os
import queue
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.errors import GroupError
from atoll.files import finite
from atoll.peers.wide.coordinator import Coordinator
from atoll.peers.wide.enrol import Enrolled
from atoll.peers.wide.link import COORDINATOR, Priority, ZenohLink
from atoll.peers.wide.messages import STATE, BadMessage, Bulk, Fetch, read, write
from atoll.wire import Key

ROUNDS = 12
STATUS = Key(-15, 0, 0)
"""Under which the coordinator is asked."""
WATCHER, WATCHERS = -1_000_000, 64
"""Whoever asks has an address of its own, as much below as this, with room for so many at a time from each island."""
ASKED, ANSWER_S = 10, 1.0
"""How often it is asked before it is said that it does not answer, and how long after each."""


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
        if island and island.done is not None:
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


def answer(coordinator: Coordinator) -> Bulk:
    """What a member of the run is told that asks."""
    return Bulk(STATUS, STATE, 1, (), 0, json.dumps(status(coordinator)).encode())


@contextmanager
def watching(enrolled: Enrolled, credentials: Path) -> Generator[Callable[[], dict[str, Any]]]:
    """Ask the coordinator from an island's machine, beside whatever trains there: yields what returns how the run
    stands now, or last stood if no answer comes any more; `at` is this machine's time.

    Raises: UsageError for credentials that cannot be used; GroupError if the coordinator never answers.
    """
    answers, told = queue.SimpleQueue[dict[str, Any]](), dict[str, Any]()

    def hears(sender: int, frame: bytes) -> None:
        try:
            message = read(frame)
        except BadMessage:
            return
        if sender == COORDINATOR and isinstance(message, Bulk) and message.key == STATUS:
            answers.put(json.loads(bytes(message.payload)) | {"at": time.time()})

    def look() -> dict[str, Any]:
        for _ in range(ASKED):
            link.send(COORDINATOR, write(Fetch(STATUS, 0)), Priority.CONTROL)
            with suppress(queue.Empty):
                told.update(answers.get(timeout=ANSWER_S))
            if told:
                return told
        raise GroupError(
            f"the coordinator of run {enrolled.run} did not answer at {' or '.join(enrolled.endpoints)}; check that it "
            "runs there, in the same version of Atoll"
        )

    me = WATCHER - WATCHERS * enrolled.worker - os.getpid() % WATCHERS
    with closing(ZenohLink(enrolled.run, me, credentials, connect=enrolled.endpoints)) as link:
        link.start(hears, lambda address, alive: None)
        yield look

"""Who cannot take part in a run, in the words in which both sides are told."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

from atoll.peers.wide.messages import Epoch, Hello


def unfit(sender: int, hello: Hello, run: str, version: str, fingerprint: str | None) -> str | None:
    """Why a worker that says this cannot take part, or None.

    Args: run: its id. version: of the coordinator's code. fingerprint: of what is trained, once somebody has said it.
    """
    if hello.run != run:
        return f"worker {sender} asked for run {hello.run}, but this is {run}; give it an invitation of this one"
    if hello.version != version:
        return f"worker {sender} runs atoll {hello.version}, the coordinator {version}; install the same on all"
    if fingerprint is not None and hello.fingerprint != fingerprint:
        mine, theirs = _difference(fingerprint, hello.fingerprint)
        return (
            f"worker {sender} trains something else: {theirs} where this run has {mine}; start it with the command of "
            "the others, on the same data"
        )
    return None


def too_late(step: int) -> str:
    """What is told to who comes after the end."""
    return (
        f"the run has come to its end, at step {step}; what it came to is in the directories of the islands that were "
        "there"
    )


def latecomers(epochs: Sequence[Epoch], done: Mapping[int, int | None]) -> set[int]:
    """Who would take part only in what begins after the others have come to the end, and has nothing to wait for.

    Args: epochs: agreed on, one after another. done: the step at which each worker has come to the end, if it has.
    """
    ended = [step for step in done.values() if step is not None]
    late = set[int]()
    for worker, step in done.items():
        its = takewhile(lambda epoch, worker=worker: worker in epoch.workers, reversed(epochs))
        if step is None and ended and min((epoch.step for epoch in its), default=0) > max(ended):
            late.add(worker)
    return late


def _difference(mine: str, theirs: str) -> tuple[str, str]:
    """The first place where two descriptions differ, on both sides, with a little around it."""
    at = next(
        (index for index, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    first = max(mine.rfind(", ", 0, at), mine.rfind("(", 0, at), mine.rfind(" ", 0, at)) + 1
    return mine[first : at + 40].strip(" ,"), theirs[first : at + 40].strip(" ,")

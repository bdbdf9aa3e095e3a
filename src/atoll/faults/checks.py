"""Whether faults make sense for a run: a sentence about the first that does not."""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from atoll.errors import UsageError
from atoll.faults.kinds import Cut, Death, Fault, Freeze, Lasting, Partition, Rejoin, Slowness
from atoll.units import duration


def check(events: Sequence[Fault], islands: int, sites: Collection[str]) -> None:
    """Refuse events, in order of time, that a run of so many islands at these sites cannot have.

    Raises: UsageError for the first.
    """
    for event in events:
        _times(event)
        match event:
            case Cut() | Partition():
                _sites(event, sorted(set(sites)))
            case _:
                _island(event, islands)
    _lives(events, islands)
    _overlaps(events)


def _times(event: Fault) -> None:
    if not 0 <= event.at < math.inf:
        raise UsageError(f"{event!r}: at was {event.at}, but a run begins at 0; give seconds from then on")
    if not isinstance(event, Lasting):
        return
    if event.seconds == math.inf:
        what = "slows a worker down" if isinstance(event, Slowness) else "cuts a worker off"
        raise UsageError(
            f"{event}: seconds (`for` in a file) was inf, which {what} for ever; give a finite number after which it "
            "ends, or write a Death"
        )
    if not event.seconds > 0:
        raise UsageError(
            f"{event}: seconds (`for` in a file) was {event.seconds}, so it would never be; give a number above 0"
        )
    if isinstance(event, Slowness) and not 1 < event.factor < math.inf:
        raise UsageError(
            f"{event}: factor was {event.factor}, but steps take that many times as long; give a number above 1, or "
            "write a Freeze for an island that stands still"
        )
    if isinstance(event, Cut) and not 0 <= event.left < 1:
        raise UsageError(
            f"{event}: left was {event.left}, but it is the part of the capacity that is left; give a number from 0 up "
            "to, but not including, 1"
        )


def _island(event: Death | Rejoin | Freeze | Slowness, islands: int) -> None:
    if event.island not in range(islands):
        raise UsageError(
            f"{event}: island was {event.island}, but the run has {islands}, numbered 0 to {islands - 1}; give one of "
            "these"
        )


def _sites(event: Cut | Partition, known: Sequence[str]) -> None:
    for site in event.sites:
        if site not in known:
            raise UsageError(f"{event}: sites has {site!r}, where no island stands; the sites are {', '.join(known)}")
    if isinstance(event, Cut) and len(event.sites) != 2:
        raise UsageError(f"{event}: sites was {event.sites}, but a cut is between two; give two, or a Partition")
    if isinstance(event, Partition) and (not event.sites or set(event.sites) == set(known)):
        raise UsageError(
            f"{event}: sites was {event.sites}, which cuts nobody off; give some of {', '.join(known)}, but not all"
        )


def _lives(events: Iterable[Fault], islands: int) -> None:
    """Each island dies and rejoins by turns, and somebody is always there."""
    turns = (event for event in events if isinstance(event, Death | Rejoin))
    since: dict[int, float] = {}
    for at, together in groupby(turns, lambda event: event.at):
        moved: set[int] = set()
        for event in together:
            island, dead = event.island, event.island in since
            if isinstance(event, Death) and dead:
                raise UsageError(
                    f"{event}: island was {island}, which is dead since {duration(since[island])}; give a Rejoin "
                    "between, or take one of the two out"
                )
            if island in moved:
                raise UsageError(
                    f"island {island} dies and rejoins at the same time: at was {duration(at)} for both; give one of "
                    "them a later one"
                )
            if isinstance(event, Rejoin) and not dead:
                raise UsageError(
                    f"{event}: island was {island}, which is not dead then; give a Death before, or take it out"
                )
            moved.add(island)
            if dead:
                del since[island]
            else:
                since[island] = at
        if len(since) == islands:
            raise UsageError(
                f"at {duration(at)} island {max(moved)} dies, and nobody is left of {islands}; let another rejoin "
                "before, or take a Death out"
            )


def _overlaps(events: Iterable[Fault]) -> None:
    """Two of one kind at one place would not say which holds."""
    last: dict[tuple[object, ...], Lasting] = {}
    for event in events:
        match event:
            case Freeze(island) | Slowness(island):
                places: list[object] = [island]
            case Cut(sites):
                places = [frozenset(sites)]
            case Partition(sites):
                places = list(dict.fromkeys(sites))
            case _:
                continue
        for place in places:
            before = last.get((type(event), place))
            if before and before.until > event.at:
                raise UsageError(
                    f"{event}: at was {duration(event.at)}, but {before} lasts until {duration(before.until)}; let one "
                    "end before the other begins, or make them one"
                )
            last[type(event), place] = event

"""Faults as a TOML file.

    seed = 3
    loss = 0.01
    lease = "10s"

    [[death]]
    island = 2
    at = "120s"

    [[cut]]
    sites = ["a", "b"]
    at = "200s"
    for = "15s"
    left = 0.1

Each kind of fault is a table of its name with the fields of its arguments, `for` being its `seconds`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.faults.kinds import Cut, Death, Fault, Freeze, Partition, Rejoin, Slowness
from atoll.tables import NUMBER, SECONDS, WHOLE, WORDS, Field, Table, block, load

SETTINGS: Mapping[str, Field[Any]] = {"seed": WHOLE, "loss": NUMBER, "lease": SECONDS}
OF_ISLANDS: Mapping[str, Field[Any]] = {"island": WHOLE, "at": SECONDS}
OF_LINKS: Mapping[str, Field[Any]] = {"sites": WORDS, "at": SECONDS, "for": SECONDS}
KINDS: Mapping[type[Fault], Mapping[str, Field[Any]]] = {
    Death: OF_ISLANDS,
    Rejoin: OF_ISLANDS,
    Freeze: {**OF_ISLANDS, "for": SECONDS},
    Slowness: {**OF_ISLANDS, "for": SECONDS, "factor": NUMBER},
    Cut: {**OF_LINKS, "left": NUMBER},
    Partition: OF_LINKS,
}
"""The fields of each kind, in the order of its arguments. Those with a default may be left out."""


def read(path: Path) -> tuple[tuple[Fault, ...], Mapping[str, Any]]:
    """The faults of a file, and those of its settings that are given.

    Raises: UsageError if the file is missing or not TOML, or for a field that is unknown, missing or of another kind.
    """
    names = {kind.__name__.lower(): kind for kind in KINDS}
    top = load(path, [*SETTINGS, *names])
    events = (_event(kind, table) for name, kind in names.items() for table in top.tables(name, KINDS[kind]))
    return tuple(events), {name: top.get(name, field) for name, field in SETTINGS.items() if name in top}


def _event(kind: type[Fault], table: Table) -> Fault:
    # the default of an argument is an attribute of its class
    values = {name: table.get(name, field, getattr(kind, name, None)) for name, field in KINDS[kind].items()}
    if kind is Cut and len(values["sites"]) != 2:
        raise UsageError(
            f"{table.where}: sites was {list(values['sites'])}, but a cut is between two; give two, or write "
            "[[partition]] for sites that are cut off from all others"
        )
    return kind(*values.values())


def write(events: Iterable[Fault], settings: Mapping[str, Any]) -> str:
    """The text of such a file."""
    return "\n".join(
        [block("", {name: SETTINGS[name].write(value) for name, value in settings.items()}), *_blocks(events)]
    )


def _blocks(events: Iterable[Fault]) -> Iterator[str]:
    for event in events:
        fields = KINDS[type(event)]
        values = {
            name: field.write(getattr(event, "seconds" if name == "for" else name)) for name, field in fields.items()
        }
        yield block(f"[[{type(event).__name__.lower()}]]", values)

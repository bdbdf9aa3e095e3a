"""A network as a TOML file.

    [elsewhere]             # the link between two sites that have none of their own
    capacity = "1Gbit"
    latency = "40ms"

    [within]                # the link inside of each site
    latency = "100us"

    [[island]]              # in order of worker numbers
    site = "a"
    count = 4               # as many as this one
    link = "1Gbit"          # or up and down
    step = "100ms"
    jitter = 0.05

    [[link]]
    sites = ["a", "b"]
    capacity = "100Mbit"
    latency = "120ms"
    loss = 0.001

What is left out is as in `atoll.sim.network`: a link without a capacity holds nobody up.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.sim.network import Between, Island, Network
from atoll.tables import BANDWIDTH, NUMBER, SECONDS, WHOLE, WORD, WORDS, Field, Table, block, load

OF_LINKS: Mapping[str, Field[Any]] = {"capacity": BANDWIDTH, "latency": SECONDS, "loss": NUMBER}
OF_ISLANDS: Mapping[str, Field[Any]] = {
    "site": WORD,
    "count": WHOLE,
    "link": BANDWIDTH,
    "up": BANDWIDTH,
    "down": BANDWIDTH,
    "step": SECONDS,
    "jitter": NUMBER,
}


MOST = 1_000_000
"""Islands of a file, at most: each is simulated."""


def read_network(path: Path) -> Network:
    """The network of a TOML file.

    Raises: UsageError if the file is missing or not TOML; for a field that is unknown, missing, without its unit, or
    has a value with which nothing would move; for a link to where no island stands.
    """
    top = load(path, ["elsewhere", "within", "island", "link"])
    islands = tuple(island for table in top.tables("island", OF_ISLANDS) for island in _islands(table))
    if not islands:
        raise UsageError(f'{path}: no [[island]] is there, so nobody would train; write one with step = "100ms"')
    sites = sorted({island.site for island in islands})
    return Network(
        islands,
        tuple(_links(top, sites)),
        elsewhere=_between(top.table("elsewhere", OF_LINKS)),
        within=_between(top.table("within", OF_LINKS)),
    )


def _islands(table: Table) -> Sequence[Island]:
    if "link" in table and ("up" in table or "down" in table):
        raise UsageError(
            f"{table.where}: link was given beside up or down, for which it stands; leave one or the other out"
        )
    count, step, link = table.get("count", WHOLE, 1), table.get("step", SECONDS), table.get("link", BANDWIDTH, inf)
    if not 1 <= count <= MOST:
        raise UsageError(f"{table.where}: count was {count}, but islands are simulated one by one; give 1 to {MOST}")
    if not step > 0:
        raise UsageError(f"{table.where}: step was {step:g}s, but nothing trains in no time; give a duration above 0s")
    up, down = table.get("up", BANDWIDTH, link), table.get("down", BANDWIDTH, link)
    site, jitter = table.get("site", WORD, Island.site), table.get("jitter", NUMBER, 0.0)
    try:
        return [Island(site, up, down, step, jitter)] * count
    except UsageError as error:
        raise UsageError(f"{table.where}: {error}") from None


def _between(table: Table) -> Between:
    values = {name: table.get(name, field, getattr(Between, name)) for name, field in OF_LINKS.items()}
    try:
        return Between(**values)
    except UsageError as error:
        raise UsageError(f"{table.where}: {error}") from None


def _links(top: Table, known: Sequence[str]) -> Iterator[tuple[str, str, Between]]:
    seen: set[frozenset[str]] = set()
    for table in top.tables("link", ["sites", *OF_LINKS]):
        sites = table.get("sites", WORDS)
        if len(sites) != 2 or sites[0] == sites[1]:
            raise UsageError(
                f"{table.where}: sites was {list(sites)}, but a link joins two; give two, or write [within] for the "
                "link inside of each site"
            )
        for site in sites:
            if site not in known:
                raise UsageError(
                    f"{table.where}: sites has {site!r}, where no [[island]] stands; the sites are {', '.join(known)}"
                )
        if frozenset(sites) in seen:
            raise UsageError(
                f"{table.where}: sites was {list(sites)}, which have a link above; leave one of the two out"
            )
        seen.add(frozenset(sites))
        yield sites[0], sites[1], _between(table)


def network_text(network: Network) -> str:
    """A TOML file of a network, which `read_network` gives back exactly.

    Example:
        >>> print(network_text(Network((Island("a", 1e9, 1e9, 0.1),) * 4)), end="")
        [[island]]
        site = "a"
        count = 4
        link = "1Gbit"
        step = "100ms"
    """
    blocks = [
        block(f"[{name}]", fields)
        for name, between in (("elsewhere", network.elsewhere), ("within", network.within))
        if (fields := _told(between))
    ]
    for island, alike in groupby(network.islands):
        blocks.append(block("[[island]]", _written(island, len(list(alike)))))
    for a, b, between in network.between:
        blocks.append(block("[[link]]", {"sites": WORDS.write((a, b)), **_told(between)}))
    return "\n".join(blocks)


def _written(island: Island, count: int) -> dict[str, str]:
    alike = island.up == island.down
    values = {
        "site": island.site,
        "count": count if count > 1 else None,
        "link": island.up if alike and island.up < inf else None,
        "up": island.up if not alike and island.up < inf else None,
        "down": island.down if not alike and island.down < inf else None,
        "step": island.step_s,
        "jitter": island.jitter or None,
    }
    return {name: OF_ISLANDS[name].write(value) for name, value in values.items() if value is not None}


def _told(between: Between) -> dict[str, str]:
    """The fields of a link that are not as if it were left out."""
    values = {name: getattr(between, name) for name in OF_LINKS}
    return {name: OF_LINKS[name].write(value) for name, value in values.items() if value != getattr(Between, name)}

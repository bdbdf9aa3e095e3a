"""Networks as files: what is written is read back, and what is wrong is refused in a sentence."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.sim.files import network_text, read_network
from atoll.sim.network import Between, Island, Network

BY_HAND = """
elsewhere = {capacity = "1Gbit", latency = "40ms"}
within = {latency = "100us", loss = 0}

[[island]]
site = "a"
count = 2
link = "1Gbit"
step = "100ms"
jitter = 0.05

[[island]]
site = "b"
up = "12.5MB/s"
step = "1.5min"

[[island]]
step = "2s"

[[link]]
sites = ["b", "a"]
capacity = "100Mbit"
latency = "120ms"
loss = 0.001

[[link]]
sites = ["a", "here"]
"""


def test_a_file_by_hand_is_the_network_that_it_says(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(BY_HAND)
    assert read_network(path) == Network(
        (
            Island("a", 1e9, 1e9, 0.1, 0.05),
            Island("a", 1e9, 1e9, 0.1, 0.05),
            Island("b", 1e8, math.inf, 90.0),
            Island("here", math.inf, math.inf, 2.0),
        ),
        (("b", "a", Between(1e8, 0.12, 0.001)), ("a", "here", Between())),
        elsewhere=Between(1e9, 0.04),
        within=Between(latency=1e-4),
    )


ABOVE = st.floats(0, exclude_min=True)
BETWEEN = st.builds(Between, ABOVE, st.floats(0, allow_infinity=False), st.floats(0, 1, exclude_max=True))
SITES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), min_size=1, max_size=4, unique=True)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    sites = draw(SITES)
    kinds = draw(
        st.lists(
            st.builds(
                Island,
                st.sampled_from(sites),
                ABOVE,
                ABOVE,
                st.floats(0, exclude_min=True, allow_infinity=False),
                st.floats(0, 1, exclude_max=True),
            ),
            min_size=1,
            max_size=4,
        )
    )
    islands = [island for kind in kinds for island in [kind] * draw(st.integers(1, 3))]
    islands += [replace(islands[-1], up=1e9, down=1e9)]
    there = sorted({island.site for island in islands})
    pairs = [(a, b) for a in there for b in there if a < b]
    joined = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    between = tuple((a, b, draw(BETWEEN)) for a, b in joined)
    return Network(tuple(islands), between, elsewhere=draw(BETWEEN), within=draw(BETWEEN))


@given(networks())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, network: Network) -> None:
    path = tmp_path_factory.getbasetemp() / "network.toml"
    path.write_text(network_text(network), encoding="utf-8")
    assert read_network(path) == network


def test_islands_that_are_alike_are_written_once() -> None:
    alike = Island("a", 1e9, 1e9, 0.1)
    text = network_text(Network((alike, alike, replace(alike, up=2e8), alike)))
    assert text.split("\n\n") == [
        '[[island]]\nsite = "a"\ncount = 2\nlink = "1Gbit"\nstep = "100ms"',
        '[[island]]\nsite = "a"\nup = "200Mbit"\ndown = "1Gbit"\nstep = "100ms"',
        '[[island]]\nsite = "a"\nlink = "1Gbit"\nstep = "100ms"\n',
    ]


ISLANDS = "[[island]]\nsite = 'a'\nstep = '1s'\n[[island]]\nsite = 'b'\nstep = '1s'\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ': no [[island]] is there, so nobody would train; write one with step = "100ms"'),
        ("[[island]]\nsite = 'a'", ', [[island]] 1: step is missing; write step = "30s"'),
        ("[[island]]\nstep = 0.1", ", [[island]] 1: step was 0.1, which has no unit; write 0.1s"),
        ("[[island]]\nstep = '0s'", ", [[island]] 1: step was 0s, but nothing trains in no time; give a duration above "
            "0s"),
        ("[[island]]\nstep = '1s'\nlink = 100", ", [[island]] 1: link was 100, which has no unit; write 100Mbit for "
            "megabits or 100MB for megabytes per second"),
        ("[[island]]\nstep = '1s'\nup = '0Mbit'", ", [[island]] 1: up was 0, which makes no sense; give a number "
            "above 0"),
        ("[[island]]\nstep = '1s'\nup = '1Mbit'\nlink = '1Mbit'", ", [[island]] 1: link was given beside up or down, "
            "for which it stands; leave one or the other out"),
        ("[[island]]\nstep = '1s'\ncount = 0", ", [[island]] 1: count was 0, but islands are simulated one by one; "
            "give 1 to 1000000"),
        ("[[island]]\nstep = '1s'\ncount = 10000000000000", ", [[island]] 1: count was 10000000000000, but islands are "
            "simulated one by one; give 1 to 1000000"),
        ("[[island]]\nstep = '1s'\njitter = 1" + "0" * 400, ", [[island]] 1: jitter has 401 digits, which is more than "
            "a number can have; give fewer"),
        ("a = " + "[" * 5000, " has lists in lists deeper than anyone writes; mend it there"),
        ("[[island]]\nstep = '1s'\ncount = 2.0", ", [[island]] 1: count was 2.0, but it takes a whole number; give "
            "one, such as 2"),
        ("[[island]]\nstep = '1s'\nsite = 3", ', [[island]] 1: site was 3, but it takes a word; give one, such as '
            '"here"'),
        ("[[island]]\nstep = '1s'\njitter = 1.5", ", [[island]] 1: an island's jitter was 1.5, but it is a part of a "
            "step; give 0 <= jitter < 1"),
        ("[[island]]\nstep = '1s'\nsteps = 3", ", [[island]] 1: steps is not known here; did you mean step?"),
        (ISLANDS + "[[islands]]\n", ": islands is not known here; did you mean island?"),
        ("[island]\nstep = '1s'", ": island was {'step': '1s'}, but there may be several; write [[island]] above the "
            "fields of each"),
        (ISLANDS + "[[elsewhere]]\nlatency = '1s'", ": elsewhere was [{'latency': '1s'}], but there is one; write "
            "[elsewhere] above its fields"),
        (ISLANDS + "[within]\nlatency = 1", ", [within]: latency was 1, which has no unit; write 1s"),
        (ISLANDS + "[elsewhere]\nlatency = '-1s'", ", [elsewhere]: a link was given capacity inf, latency -1.0 and "
            "loss 0.0; give a capacity above 0, a latency of 0 or more, and a loss from 0 up to, but not including, 1"),
        (ISLANDS + "[[link]]\ncapacity = '1Mbit'", ', [[link]] 1: sites is missing; write sites = ["a", "b"]'),
        (ISLANDS + "[[link]]\nsites = ['a']", ", [[link]] 1: sites was ['a'], but a link joins two; give two, or write "
            "[within] for the link inside of each site"),
        (ISLANDS + "[[link]]\nsites = ['a', 'a']", ", [[link]] 1: sites was ['a', 'a'], but a link joins two; give "
            "two, or write [within] for the link inside of each site"),
        (ISLANDS + "[[link]]\nsites = ['a', 'c']", ", [[link]] 1: sites has 'c', where no [[island]] stands; the sites "
            "are a, b"),
        (ISLANDS + "[[link]]\nsites = ['a', 'b']\n[[link]]\nsites = ['b', 'a']", ", [[link]] 2: sites was ['b', 'a'], "
            "which have a link above; leave one of the two out"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_right_is_refused_with_path_field_value_and_what_to_write(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "network.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        read_network(path)
    assert str(refused.value) == f"{path}{sentence}"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.toml cannot be read \(No such file or directory\); give a TOML file"):
        read_network(tmp_path / "none.toml")

"""`atoll simulate` and `atoll compare --network`: real training on virtual time, its files, and what is refused."""

import json
from pathlib import Path

import pytest

from atoll.faults import Faults
from atoll.sim.files import read_network
from tests.cli.conftest import Call

SMALL = "--steps 12 --batch 2 --length 16 --warmup 2 --probe 0"
NETWORK = """
elsewhere = { latency = "20ms" }
[[island]]
site = "a"
count = 2
link = "10Mbit"
step = "500ms"
jitter = 0.1
[[island]]
site = "b"
link = "20Mbit"
step = "700ms"
"""
FAULTS = 'lease = "1s"\n[[death]]\nisland = 2\nat = "2s"\n[[rejoin]]\nisland = 2\nat = "4s"\n'


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {"network": tmp_path / "three.toml", "faults": tmp_path / "death.toml"}
    paths["network"].write_text(NETWORK)
    paths["faults"].write_text(FAULTS)
    return paths


def test_a_simulated_run_is_the_run_in_turns_and_takes_simulated_time(atoll: Call) -> None:
    asked = f"diloco --workers 3 --period 4 {SMALL} --json"
    real = atoll(f"train {asked}").json
    slow, fast = (atoll(f"simulate {asked} --step-time 2 --network {bits}").json for bits in ("1Mbit,50ms", "1Gbit"))
    for each in (slow, fast):
        for name in ("digest", "val_loss", "val_loss_workers", "tokens", "rounds", "bytes_sent_per_worker"):
            assert each[name] == real[name]
    assert [point[::2] for point in slow["curve"]] == [point[::2] for point in real["curve"]]
    # 12 steps of 2 s, and three rounds of 4/3 of the payload of 133,440 fp32 values, with two trips of 50 ms
    assert slow["simulated"]["seconds"] == pytest.approx(24 + 3 * (4 / 3 * 133_440 * 32 / 1e6 + 0.1), rel=1e-3)
    assert fast["simulated"]["seconds"] == pytest.approx(24, rel=1e-2)
    assert slow["simulated"]["utilisation"] == pytest.approx(24 / slow["simulated"]["seconds"])
    times = slow["simulated"]["times"]
    assert len(times) == len(slow["curve"])
    assert times == sorted(times)


def test_a_run_directory_holds_all_that_repeats_it(atoll: Call, files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = (
        f"simulate factored-gossip --period 4 {SMALL} --network {files['network']} --faults {files['faults']} --json"
    )
    first = atoll(f"{asked} --out {out}")
    assert first.status == 0
    assert first.json["workers"] == 3, "as many as the file has islands"
    assert "island 2 died at 2.0 s, joined at" in first.err
    assert read_network(out / "network.toml") == read_network(files["network"])
    assert Faults.read(out / "faults.toml") == Faults.read(files["faults"])
    for picture in ("curves.png", "lanes.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    trace = json.loads((out / "trace.json").read_text())
    assert {"died", "joined", "launched", "landed", "trained"} <= {moment["kind"] for moment in trace["moments"]}
    again = atoll(
        f"simulate factored-gossip --period 4 {SMALL} --network {out}/network.toml --faults {out}/faults.toml "
        f"--out {tmp_path / 'again'} --json"
    )
    assert (tmp_path / "again" / "trace.json").read_text() == (out / "trace.json").read_text()
    assert again.json["digest"] == first.json["digest"]
    assert "already holds a run, and a simulated one is not resumed" in atoll(f"{asked} --out {out}").err


def test_a_comparison_on_a_network_shows_time_and_goes_on_where_it_stopped(
    atoll: Call, files: dict[str, Path], tmp_path: Path
) -> None:
    asked = f"compare single diloco global-m1 --period 4 {SMALL} --jobs 1 --json --out {tmp_path / 'out'}"
    said = atoll(f"{asked} --network {files['network']} --faults {files['faults']}")
    single, diloco, overlapped = said.json["runs"]
    assert single["simulated"]["utilisation"] == 1.0
    assert diloco["simulated"]["seconds"] > overlapped["simulated"]["seconds"] > single["simulated"]["seconds"]
    assert "simulated" in said.err
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    more = atoll(f"{asked} --network {files['network']} --faults {files['faults']} --resume")
    assert more.json == said.json
    other = atoll(f"{asked} --network 1Mbit --step-time 1 --workers 3 --resume")
    assert other.status != 0
    assert "on virtual time with another network" in other.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "there is no network to simulate; give --network 100Mbit,50ms, or a file"),
        ("--network 100 --step-time 1", "--network was '100', which has no unit; write 100Mbit"),
        ("--network 100Mbit", "--network was given without --step-time"),
        ("--network 0Mbit --step-time 1", "--network was 0"),
        ("--network 100Mbit,50 --step-time 1", "--network had the latency '50', which has no unit; write 100Mbit,50ms"),
        ("--network 100Mbit --step-time 0", "--step-time was 0, which makes no sense"),
        ("--network 100Mbit --step-time -1", "--step-time was -1, which makes no sense"),
        ("--network nowhere.toml", "nowhere.toml cannot be read"),
        ("--network {network} --step-time 1", "have their own; leave it out"),
        ("--network {network} --workers 4", "has 3 islands, but the run has 4 workers"),
        ("--network 100Mbit --step-time 1 --pool halving", "write deaths and rejoins into --faults"),
        ("--network 100Mbit --step-time 1 --workers 2 --faults {faults}", "island was 2, but the run has 2"),
        ("--network {network} --faults {faults} --drop 1", "--drop was 1"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    options: str, sentence: str, atoll: Call, files: dict[str, Path]
) -> None:
    said = atoll(f"simulate diloco {SMALL} --period 4 {options.format(**files)}")
    assert said.status == 2
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_a_keeper_that_would_die_is_refused(atoll: Call, tmp_path: Path) -> None:
    path = tmp_path / "first.toml"
    path.write_text('[[death]]\nisland = 0\nat = "2s"\n')
    said = atoll(f"simulate async-local-sgd {SMALL} --period 4 --network 1Mbit --step-time 1 --faults {path}")
    assert said.status == 2
    assert "the keeper stands beside it and nobody else has the anchors" in said.err

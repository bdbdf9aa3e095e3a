"""Whatever keeps a link from being opened is named in a sentence."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.errors import GroupError, UsageError
from atoll.peers.wide import sessions
from atoll.peers.wide.credentials import Authority
from atoll.peers.wide.link import COORDINATOR, ZenohLink
from tests.peers.wide.links import equip


@pytest.mark.parametrize("run", ["", "a/b", "a*", "$x"])
def test_a_run_needs_a_plain_name(folder: Path, run: str) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        ZenohLink(run, 0, folder / "0")


@pytest.mark.parametrize("address", ["", "host", "tls/127.0.0.1:7447", "127.0.0.1:seven", "127.0.0.1:70000", ":7447"])
def test_an_address_is_a_host_and_a_port(folder: Path, address: str) -> None:
    for side in ("listen", "connect"):
        with pytest.raises(UsageError, match='write "host:port"'):
            ZenohLink("r1", 0, folder / "0", **{side: [address]})


def test_a_name_that_nobody_knows_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"the name no-such-host\.invalid .* cannot be resolved"):
        ZenohLink("r1", 0, folder / "0", connect=["no-such-host.invalid:7447"])


def test_an_address_where_nobody_listens_is_named(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "CONNECT_S", 0.3)
    with pytest.raises(GroupError, match=f"no member of the run answered within 0.3 s at {place}: connection refused"):
        ZenohLink("r1", 0, folder / "0", connect=[place])


def test_a_taken_port_and_an_address_of_another_machine_are_named(
    open_link: Callable[..., ZenohLink], folder: Path, place: str
) -> None:
    open_link(COORDINATOR)
    with pytest.raises(UsageError, match=f"the port of {place} is taken"):
        ZenohLink("r1", 0, folder / "0", listen=[place])
    with pytest.raises(UsageError, match=r"has no address 192\.0\.2\.1:7447"):
        ZenohLink("r1", 0, folder / "0", listen=["192.0.2.1:7447"])


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path, place: str) -> None:
    other = equip(Authority.open(tmp_path / "authority", "r1", time.time()), tmp_path / "other")
    for name, source, match in [
        ("key.pem", folder / "1/key.pem", "cannot be used together"),
        ("ca.pem", other / "0/ca.pem", "cannot be used together"),
        ("cert.pem", folder / "0/key.pem", "cannot be used together"),
        ("cert.pem", None, r"cert\.pem.*No such file"),
    ]:
        mixed = tmp_path / f"mixed-{name}-{source is None}"
        shutil.copytree(folder / "0", mixed, dirs_exist_ok=True)
        (mixed / name).unlink()
        if source:
            shutil.copy(source, mixed / name)
        with pytest.raises(UsageError, match=match):
            ZenohLink("r1", 0, mixed, connect=[place])

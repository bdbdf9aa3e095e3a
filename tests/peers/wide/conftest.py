"""Coordinators at whose desks islands enrol."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.wide.desks import Coordinator, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Coordinator] = []

    def one(run: str = "demo", **given: object) -> Coordinator:
        started.append(Coordinator(tmp_path / f"coordinator-{len(started)}", run, **given))  # type: ignore[arg-type]
        return started[-1]

    yield one
    for each in started:
        each.service.close()

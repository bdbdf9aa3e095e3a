"""Coordinators at whose desks islands enrol, and links between members of a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.wide.desks import Coordinator, Start
from tests.peers.wide.links import folder, open_link, place

__all__ = ["folder", "open_link", "place", "start"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Coordinator] = []

    def one(run: str = "demo", **given: object) -> Coordinator:
        started.append(Coordinator(tmp_path / f"coordinator-{len(started)}", run, **given))  # type: ignore[arg-type]
        return started[-1]

    yield one
    for each in started:
        each.service.close()

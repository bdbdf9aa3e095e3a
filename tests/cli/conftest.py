"""A small text, and the command line called in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from atoll.cli import main

PROSE = "islands that slow links join train on their own and now and then they share what each of them has learned"


@dataclass
class Said:
    """Exit status and what was printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Said]
"""What the fixture `atoll` is."""


@pytest.fixture
def atoll(capsys: pytest.CaptureFixture[str]) -> Call:
    """`atoll("train diloco --steps 4")`, or the words one by one."""

    def call(*words: str | Path) -> Said:
        capsys.readouterr()
        split = words[0].split() if len(words) == 1 and isinstance(words[0], str) else list(map(str, words))
        status = main(split)
        said = capsys.readouterr()
        return Said(status, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of made-up sentences, about 90 kB."""
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    random = Random(0)
    path.write_text("".join(" ".join(random.choices(PROSE.split(), k=9)) + ".\n" for _ in range(2000)))
    return path


@pytest.fixture
def small(text: Path) -> list[str]:
    """Options of a run of a second."""
    return ["--data", f"text:{text}", "--steps", "6", "--batch", "2", "--length", "16", "--lr", "0.003"]

"""A small text of its own, so that nothing here depends on the interpreter's files."""

from pathlib import Path
from random import Random

import pytest

PROSE = "the sea rises over islands where slow links carry what each of them has learned and nothing is lost"
WORDS = PROSE.split()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four files of made-up sentences, about 240 kB."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        random = Random(number)
        lines = (" ".join(random.choices(WORDS, k=9)) + ".\n" for _ in range(1200))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder

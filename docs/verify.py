"""Checks that the documentation tells the truth: its code runs, and what it points at exists.

In README.md, CONTRIBUTING.md, docs/ and dev/, each ```python block is run (the blocks of one page share their names, so
a page reads like one program), each ```pycon block and each docstring example in src/atoll is compared with what it
prints, and each relative link, heading, repository path in `code` and `make` target must exist. Links to other hosts
are not followed.
"""

import doctest
import importlib
import os
import pkgutil
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS_IN_CODE = ("src/", "tests/", "docs/", "bench/", "examples/", "dev/", ".ci/")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("dev/**/*.md")]
    return sorted(found)


def keep(text: str, language: str | None) -> str:
    """Blank all but the blocks of `language` (None: all but the prose), so that line numbers stay those of the page."""
    kept: list[str] = []
    inside: str | None = None
    for line in text.splitlines():
        fence = re.match(r"\s*```(.*)", line)
        if fence:
            inside = None if inside is not None else fence[1].strip()
        kept.append(line if not fence and inside == language else "")
    return "\n".join(kept) + "\n"


def slugs(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", keep(page.read_text(), None), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_references(page: Path) -> Iterator[str]:
    prose = keep(page.read_text(), None)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            yield f"links to {target}, which does not exist"
        elif anchor and anchor not in slugs(file):
            yield f"links to {target}, which has no such heading"
    makefile = (ROOT / "Makefile").read_text()
    for code in re.findall(r"`([^`\n]+)`", prose):
        is_path = code.startswith(PATHS_IN_CODE) and " " not in code
        if is_path and not any(ROOT.glob(code.rstrip("/"))):
            yield f"names `{code}`, which does not exist"
        if (goal := re.fullmatch(r"make (\w+)", code)) and not re.search(rf"^{goal[1]}:", makefile, re.MULTILINE):
            yield f"names `{code}`, which the Makefile does not know"


def failing_code(page: Path) -> Iterator[str]:
    name = str(page.relative_to(ROOT))
    text = page.read_text()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            names: dict[str, object] = {"__name__": "__main__"}
            exec(compile(keep(text, "python"), name, "exec"), names)
            examples = doctest.DocTestParser().get_doctest(keep(text, "pycon"), names, name, name, 0)
            failed = doctest.DocTestRunner(optionflags=OPTIONS).run(examples).failed
            if failed:
                yield f"{failed} printed example(s) differ"
        except Exception:
            yield "a python block fails:\n" + traceback.format_exc()
        finally:
            os.chdir(before)


def failing_docstrings() -> Iterator[str]:
    package = importlib.import_module("atoll")
    for info in pkgutil.walk_packages(package.__path__, "atoll."):
        failed = doctest.testmod(importlib.import_module(info.name), optionflags=OPTIONS).failed
        if failed:
            yield f"{info.name}: {failed} docstring example(s) differ"


def main() -> None:
    findings = [f"{page.relative_to(ROOT)}: {each}" for page in pages() for each in broken_references(page)]
    findings += [f"{page.relative_to(ROOT)}: {each}" for page in pages() for each in failing_code(page)]
    findings += failing_docstrings()
    print("\n".join(findings) or f"{len(pages())} pages and the docstrings of src/atoll hold")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()

"""Documents: pieces of text with the domain they belong to, read from the standard library or from files."""

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from atoll.errors import DataError

OWN_DOMAIN = 32 * 1024
"""Bytes from which a package or module of the standard library is a domain of its own."""
# Tests are most of the library's bytes and repeat themselves; the others are not the library's own or hold nothing.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"}
_PACKED = {".gz", ".xz", ".zst", ".bz2", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".arrow", ".bin", ".pt", ".npy", ".pdf"}


class Document(NamedTuple):
    """A text and the domain it belongs to."""

    domain: str
    text: str


def standard_library() -> Iterator[Document]:
    """The running interpreter's standard library: its .py files without tests, about 11 MB in CPython, by path.

    Top-level packages and modules of 32 KiB and more are domains; the smaller ones together are the domain `others`.

    Raises: DataError where the interpreter comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _files(root, without=_LEFT_OUT) if file.suffix == ".py"]
    if not files:
        raise DataError(
            f"builtin was asked for, but this interpreter has no source of its library at {root}; use text:PATH instead"
        )
    tops = [file.relative_to(root).parts[0].removesuffix(".py") for file in files]
    sizes = Counter[str]()
    for file, top in zip(files, tops, strict=True):
        sizes[top] += file.stat().st_size
    for file, top in zip(files, tops, strict=True):
        yield Document(top if sizes[top] >= OWN_DOMAIN else "others", file.read_bytes().decode(errors="replace"))


def text_documents(path: Path, field: str) -> Iterator[Document]:
    """A file, or all files in a folder by path; names that begin with a dot are left out.

    `.jsonl`, `.ndjson` and `.json` hold one object per line (or one list of them), `.parquet` one row per document,
    with the text in `field`; every other file is one document of UTF-8 text. A folder's subfolders and files are its
    domains; a single file is one domain.

    Raises: DataError naming the file, when it is missing, unreadable, packed, not UTF-8, or without the field.
    """
    if not path.exists():
        raise DataError(
            f"text:{path} was asked for, but nothing is there (looked in {path.parent.resolve()}); check the path"
        )
    if path.is_file():
        files = [(path.name, path)]
    else:
        files = [(file.relative_to(path).parts[0], file) for file in _files(path)]
    if not files:
        raise DataError(
            f"text:{path} was asked for, but the folder holds no files; put .txt, .jsonl or .parquet files into it"
        )
    for domain, file in files:
        try:
            for text in _read(file, field):
                yield Document(domain, text)
        except OSError as error:
            raise DataError(
                f"{file} was to be read, but cannot be ({error.strerror}); check its permissions"
            ) from error


def checked_text(value: object, field: str, where: str) -> str:
    """`value` if it is text, nothing for a missing one; else an error that says where it was found."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"the field {field!r} of {where} was to be text, but holds {type(value).__name__}; "
            "choose another field with SOURCE#FIELD"
        )
    return value


def no_field(field: str, where: str, seen: Iterable[str]) -> DataError:
    """The error for records without the field that was to hold the text."""
    return DataError(
        f"{where} was to have its text in the field {field!r}, but has only {', '.join(map(repr, seen)) or 'none'}; "
        "choose one that it has with SOURCE#FIELD"
    )


def _files(root: Path, without: Set[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    # os.walk, because it need not enter what is left out: site-packages may hold a hundred thousand files.
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=Path.as_posix)


def _read(file: Path, field: str) -> Iterator[str]:
    match file.suffix.lower():
        case ".jsonl" | ".ndjson" | ".json":
            return _json(file, field)
        case ".parquet":
            return _parquet(file, field)
        case suffix if suffix in _PACKED:
            raise DataError(
                f"{file} was to be read as text, but {suffix} files hold something else; "
                "unpack it, or give .txt, .jsonl or .parquet files"
            )
        case _:
            return iter((_plain(file),))


def _plain(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(str(file), error) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where} was to be text, but is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); "
        "convert it to UTF-8, or leave it out"
    )


def _json(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        first = next(lines, b"")
        if first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            numbered = iter([(1, first + lines.read())])
        else:
            numbered = chain([(1, first)], enumerate(lines, 2))
        for number, line in numbered:
            if line.strip():
                yield from _records(line, field, f"line {number} of {file}")


def _records(line: bytes, field: str, where: str) -> Iterator[str]:
    try:
        parsed: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} was to be a JSON object, but is not JSON ({error}); write one object per line, or one list"
        ) from error
    for record in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(record, dict):
            raise DataError(
                f"{where} was to be a JSON object, but holds {type(record).__name__}; "
                "write one object per line, or one list"
            )
        if field not in record:
            raise no_field(field, where, sorted(record))
        # JSON can spell half a character, which no tokenizer takes.
        yield checked_text(record[field], field, where).encode(errors="replace").decode()


def _parquet(file: Path, field: str) -> Iterator[str]:
    import pyarrow as pa  # here, because most sources do without
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise no_field(field, str(file), table.schema_arrow.names)
        for rows in table.iter_batches(columns=[field]):
            for value in rows.column(0).to_pylist():
                yield checked_text(value, field, str(file))
    except pa.ArrowException as error:
        raise DataError(
            f"{file} was to be a Parquet file, but cannot be read as one ({error}); check that it is whole"
        ) from error

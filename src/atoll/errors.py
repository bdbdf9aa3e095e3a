"""Every error a person can meet, in one tree.

    AtollError
    ├── UsageError            the person asked for something that cannot work; nothing was started
    │   ├── CompositionError    parts that do not fit together (sync, recipes)
    │   ├── DataError           a text, tokenizer or shard that cannot be used (train.data)
    │   └── ModelError          a model, size or pretrained start that cannot be used (train.model)
    ├── CheckpointError       a checkpoint that is missing, incomplete, or of another run
    └── GroupError            peers that did not answer, differ, or were aborted
        └── LeftBehind          the others went on without this island (peers.wide)

Each message is one sentence (two at most) that says what was asked, what was seen, and what to do. The command line
prints the message alone and exits with status 2 for `UsageError`, 1 for the others; a traceback means a defect of
ours.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class AtollError(Exception):
    """The root: catch this to catch everything Atoll raises on purpose."""


class UsageError(AtollError):
    """What was asked for cannot work; nothing has been started or written."""


class CompositionError(UsageError):
    """Parts that cannot be composed; the message says what to write instead."""


class DataError(UsageError):
    """Data that is missing, empty, too small or not readable as asked."""


class ModelError(UsageError):
    """A model, a named size or a pretrained start that cannot be used."""


class CheckpointError(AtollError):
    """A checkpoint that is missing, incomplete, or belongs to another run or version."""


class GroupError(AtollError):
    """A group of peers that cannot go on: someone is missing, differs, or aborted."""


class LeftBehind(GroupError):
    """The others went on without this island: it can come again, and fetch their state."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known one, or all.

    Example:
        >>> suggestion("dilco", ["single", "diloco"]), suggestion("xyz", ["single", "diloco"])
        ('did you mean diloco?', 'give one of single, diloco')
    """
    known = list(known)
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}"

"""Headers as they travel: rows of float64 of one length, so that nobody needs to know a size beforehand.

    rule, fragment, round | elements, their bytes | weight, norm | count of signals, checksum of their names | signals

Signals stand in the order of their names.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.errors import GroupError, UsageError
from atoll.peers.rounds import Header
from atoll.wire import Key, Post

ROW = 32
_KEY, _ELEMENTS, _WEIGHT, _NORM, _NAMES, _SIGNALS = slice(0, 3), slice(3, 5), 5, 6, slice(7, 9), slice(9, ROW)


def pack(post: Post, header: Header) -> Tensor:
    """This rank's row.

    Raises: UsageError for more signals than fit.
    """
    names, layout = sorted(header.signals), post.source.layout
    room = ROW - _SIGNALS.start
    if len(names) > room:
        raise UsageError(
            f"{len(names)} signals were given to one exchange ({', '.join(names[:3])}, ...), but {room} fit; give fewer"
        )
    row = torch.zeros(ROW, dtype=torch.float64)
    row[_KEY] = row.new_tensor(post.key[:3])
    row[_ELEMENTS] = row.new_tensor([layout.numel, layout.dtype.itemsize])
    row[_WEIGHT], row[_NORM] = header.weight, header.norm
    row[_NAMES] = row.new_tensor([len(names), zlib.crc32("\n".join(names).encode())])
    row[_SIGNALS][: len(names)] = row.new_tensor([header.signals[name] for name in names])
    return row


def of_island(rows: Sequence[Tensor], lane: int) -> Tensor:
    """The row by which lane `lane` speaks for its island: weight and signals are lane 0's, and the norm is that of all
    shards together, squares summed in lane order, so that all lanes decide alike.

    Raises: GroupError if the lanes came to different exchanges, or with different signals.
    """
    _check("lane", dict(enumerate(rows)), lane)
    row, norms = rows[lane].clone(), [other[_NORM].item() for other in rows]
    row[_NORM] = math.sqrt(sum(norm * norm for norm in norms))
    row[_WEIGHT], row[_SIGNALS] = rows[0][_WEIGHT], rows[0][_SIGNALS]
    return row


def unpack(rows: Mapping[int, Tensor], me: int, post: Post) -> dict[int, Header]:
    """Every member's header, by worker.

    Raises: GroupError if the members came to different exchanges, with different elements, or with different signals.
    """
    _check("worker", rows, me)
    for worker, row in rows.items():
        (mine, size), (theirs, their_size) = rows[me][_ELEMENTS].tolist(), row[_ELEMENTS].tolist()
        if (theirs, their_size) != (mine, size):
            raise GroupError(
                f"worker {me} sends {mine:.0f} elements of {size:.0f} bytes for {post.key} but worker {worker} "
                f"{theirs:.0f} of {their_size:.0f}; they must train the same model"
            )
    names = sorted(post.signals)
    return {
        worker: Header(row[_WEIGHT].item(), row[_NORM].item(), dict(zip(names, row[_SIGNALS].tolist(), strict=False)))
        for worker, row in rows.items()
    }


def _check(what: str, rows: Mapping[int, Tensor], me: int) -> None:
    for other, row in rows.items():
        mine, theirs = (Key(*map(int, each[_KEY].tolist())) for each in (rows[me], row))
        if mine != theirs:
            raise GroupError(
                f"{what} {me} came to {mine} but {what} {other} to {theirs}; all must run the same strategy from the "
                "same step"
            )
        if not torch.equal(row[_NAMES], rows[me][_NAMES]):
            raise GroupError(
                f"{what} {me} gave {rows[me][_NAMES][0]:.0f} signals for {mine} but {what} {other} gave "
                f"{row[_NAMES][0]:.0f} (or as many by other names); all must give after_step the same signals, by "
                "name, at the same steps"
            )

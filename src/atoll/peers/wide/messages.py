"""Messages as they travel: one frame each, in one form only, and nothing in it is code.

    frame    "At", version, kind | checksum of all the rest, xxh3 | body
    record   kind 0: a JSON list of a record's name and fields; floats in hexadecimal, so that they arrive to the bit
    bulk     kind 1: where a piece of a contribution, a mean or a state belongs, and its bytes

A frame that is read is checked whole: version, checksum, kinds and ranges of all fields, and that what was read would
be written as it came. So a message cannot be changed on its way without being refused or meaning the same. What is in
it is then still a peer's word: who handles it checks that it fits what this side has.
"""

import json
import struct
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from xxhash import xxh3_64

from atoll.peers.wide.account import Account, Lease
from atoll.peers.wide.ranges import Index, Owner, Step, Worker
from atoll.wire import Key

PROTOCOL = 3
"""Whoever speaks another version is refused by name."""
MOST, MOST_RECORD = 3 << 20, 1 << 17
"""Bytes of a frame: a chunk of fp64 in the widest codec, and what says where it belongs; and of a record."""
COORDINATOR = -2
"""The coordinator's address; a worker's is its number."""
DEEP, LONG = 64, 4096
"""How often a part may have been split; how long a list or a text of a record may be."""

_HEAD, _SUM = struct.Struct("<2sBB"), 8
_BULK = struct.Struct("<iqqBIIB")
_RECORD, _PIECE = 0, 1
_WIDE = range(-(1 << 63), 1 << 63)


class BadMessage(Exception):
    """A frame that is not a message: whoever gets it drops it, and counts it."""


@dataclass(frozen=True)
class Bulk:
    """Bytes of an exchange, or of a state.

    Args: key: of the exchange. phase: what they are, one of `CONTRIBUTION`, `MEAN`, `STATE`. version: of the exchange's
    membership; the number of chunks, of a state. part: whose part of the elements (`segments`). chunk: of the message's
    grid, or of the state. payload: the bytes.
    """

    key: Key
    phase: int
    version: int
    part: tuple[int, ...]
    chunk: int
    payload: bytes | memoryview


CONTRIBUTION, MEAN, STATE = 0, 1, 2


@dataclass(frozen=True)
class Head:
    """What goes ahead of a contribution. `form`: elements, bytes of each, and what the codec and fold are called.
    `state`: a digest of what all should hold alike, if they do."""

    key: Key
    to: tuple[Worker, ...]
    weight: float
    norm: float
    signals: tuple[tuple[str, float], ...]
    form: str
    state: str = ""


@dataclass(frozen=True)
class Want:
    """Send again: chunks of a part that have not come."""

    key: Key
    phase: Annotated[int, range(2)]
    version: Index
    part: tuple[Owner, ...]
    chunks: tuple[Index, ...]


@dataclass(frozen=True)
class Have:
    """All of it is here, and it has this digest: a promise never to say otherwise of this version. `all`: and so have
    all who were to say so, so it counts."""

    key: Key
    version: Index
    digest: str
    all: bool


@dataclass(frozen=True)
class Report:
    """To the coordinator, of an exchange that somebody gone, or silent, was to take part in.

    Args: epoch: in which it began. number: of this worker's reports on it. silent: whom it waits for.
    """

    key: Key
    to: tuple[Worker, ...]
    epoch: Step
    version: Index
    number: Step
    complete: bool
    silent: tuple[Worker, ...]


@dataclass(frozen=True)
class Settle:
    """The coordinator's word on an exchange: who is out, in the order of decisions, and whether what they contributed
    still counts (then only their vote is not waited for). `answers`: the report that it holds against nobody any more.
    """

    key: Key
    to: tuple[Worker, ...]
    out: tuple[tuple[tuple[Worker, ...], bool], ...]
    answers: Step


@dataclass(frozen=True)
class Committed:
    """To the coordinator: an exchange counts, and what it came to. `tokens`: this worker's, that are in it."""

    key: Key
    to: tuple[Worker, ...]
    peers: tuple[Worker, ...]
    digest: str
    lost: bool


@dataclass(frozen=True)
class Hello:
    """An island says what it trains, and from which step it could go on by itself (0: from the first weights). `life`:
    of its process, unlike any other's."""

    run: str
    fingerprint: str
    version: str
    step: Step
    life: str


@dataclass(frozen=True)
class Welcome:
    """And is told from which epoch on it is meant, if it is `life`: what was said to one before it is not for it.
    `unit`: from which its own shard goes on."""

    life: str
    epoch: Step
    unit: Step


@dataclass(frozen=True)
class Refused:
    """And is told why it cannot take part, with what both sides said."""

    why: Annotated[str, range(4 * LONG)]


@dataclass(frozen=True)
class Beat:
    """A sign of life each second: where an island is, the bytes it has sent, nats and tokens per second."""

    step: Step
    epoch: Annotated[int, range(-1, 1 << 53)]
    sent: Step
    loss: float
    speed: float


@dataclass(frozen=True)
class Propose:
    """The coordinator is about to change the epoch: say how far you are, and launch nothing more until you hear."""

    epoch: Step


@dataclass(frozen=True)
class Promise:
    """The last step at which this island looked who takes part."""

    epoch: Step
    step: Step


@dataclass(frozen=True)
class Epoch:
    """Who takes part in what is launched at inner step `step` or later. `joining`: who fetches a state of that step.
    `donors`: from whom."""

    number: Step
    step: Step
    workers: tuple[Worker, ...]
    joining: tuple[Worker, ...]
    donors: tuple[Worker, ...]


@dataclass(frozen=True)
class Gone:
    """The coordinator counts these workers as gone."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True)
class Leave:
    """This worker leaves, of its own will, after what it has launched."""

    why: str


@dataclass(frozen=True)
class Done:
    """This worker has come to the end of the run; to it: so have all."""

    step: Step


@dataclass(frozen=True)
class Fetch:
    """Send a chunk of what is offered under this key."""

    key: Key
    chunk: Index


@dataclass(frozen=True)
class Tell:
    """To an island, from a coordinator that knows nothing any more: tell the newest epoch that you know of."""


@dataclass(frozen=True)
class Ready:
    """A joiner has the state, as of this step."""

    step: Step


_OfExchanges = Head | Want | Have | Report | Settle | Committed
_OfMembers = Hello | Welcome | Refused | Beat | Propose | Promise | Epoch | Gone | Leave | Ready | Tell | Done
Record = _OfExchanges | _OfMembers | Fetch | Account | Lease
Message = Record | Bulk
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Record)}


def write(message: Message) -> list[bytes | memoryview]:
    """The parts of a frame: their concatenation is what travels."""
    if isinstance(message, Bulk):
        key, count = message.key, len(message.part)
        place = _BULK.pack(key.rule, key.fragment, key.round, message.phase, message.version, message.chunk, count)
        body: list[bytes | memoryview] = [place + struct.pack(f"<{count}H", *message.part), message.payload]
        kind = _PIECE
    else:
        body = [_text(message)]
        kind = _RECORD
    head = _HEAD.pack(b"At", PROTOCOL, kind)
    return [head + _checksum(head, *body), *body]


def read(frame: bytes) -> Message:
    """The message of a frame.

    Raises: BadMessage.
    """
    if not _HEAD.size + _SUM <= len(frame) <= MOST:
        raise BadMessage(f"{len(frame)} bytes are no message")
    magic, version, kind = _HEAD.unpack_from(frame)
    if magic != b"At":
        raise BadMessage("not a message of atoll")
    if version != PROTOCOL:
        raise BadMessage(f"protocol {version}, this side speaks {PROTOCOL}")
    whole = memoryview(frame)
    head, checksum, body = whole[: _HEAD.size], whole[_HEAD.size :][:_SUM], whole[_HEAD.size + _SUM :]
    if _checksum(head, body) != bytes(checksum):
        raise BadMessage("its checksum is another")
    match kind:
        case 0:
            if len(body) > MOST_RECORD:
                raise BadMessage(f"{len(body)} bytes are no record")
            return _record(bytes(body))
        case 1:
            return _bulk(body)
        case _:
            raise BadMessage(f"kind {kind} is unknown")


def _checksum(*parts: bytes | memoryview) -> bytes:
    total = xxh3_64()
    for part in parts:
        total.update(part)
    return total.digest()


def _bulk(body: memoryview) -> Bulk:
    try:
        rule, fragment, round_, phase, version, chunk, count = _BULK.unpack_from(body)
        part = struct.unpack_from(f"<{count}H", body, _BULK.size)
    except struct.error:
        raise BadMessage("it ends too soon") from None
    if phase > STATE or not count <= DEEP:
        raise BadMessage("its place is none")
    return Bulk(Key(rule, fragment, round_), phase, version, part, chunk, body[_BULK.size + 2 * count :])


def _record(body: bytes) -> Record:
    try:
        listed = json.loads(body)
    except (ValueError, RecursionError):
        raise BadMessage("it is not JSON") from None
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str) or listed[0] not in _KINDS:
        raise BadMessage("no record is called so")
    kind = _KINDS[listed[0]]
    hints = _fields(kind)
    if len(listed) != len(hints) + 1:
        raise BadMessage(f"a {listed[0]} has {len(hints)} fields")
    record = kind(*(_value(hint, value) for hint, value in zip(hints, listed[1:], strict=True)))
    if _text(record) != body:
        raise BadMessage("it is written in another form than its own")
    return record


@cache
def _fields(kind: type[Any]) -> list[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return [hints[field.name] for field in fields(kind)]


_KEY = tuple[Annotated[int, range(-(1 << 31), 1 << 31)], Annotated[int, _WIDE], Annotated[int, _WIDE]]


def _value(hint: Any, value: Any) -> Any:
    """A field's value from what JSON holds."""
    if hint is Key:
        return Key(*_value(_KEY, value))
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or len(value) > LONG or len(kinds := _kinds(hint, len(value))) != len(value):
            raise BadMessage("a list was expected, or one of another length")
        return tuple(_value(each, of) for each, of in zip(kinds, value, strict=True))
    if hint is float:
        try:
            return float.fromhex(value)
        except (ValueError, OverflowError, TypeError):
            raise BadMessage("a number was expected") from None
    kind, room = get_args(hint) if get_origin(hint) is Annotated else (hint, range(LONG))
    match value:
        case bool():
            fits = kind is bool
        case int():
            fits = kind is int and value in room
        case str():
            fits = kind is str and len(value) in room and value.isprintable()
        case _:
            fits = False
    if not fits:
        raise BadMessage(f"{kind.__name__} was expected")
    return value


def _kinds(hint: Any, count: int) -> tuple[Any, ...]:
    """What each entry of a tuple is, for so many."""
    kinds = get_args(hint)
    return (kinds[0],) * count if kinds[1:] == (Ellipsis,) else kinds


def _text(record: Record) -> bytes:
    kind = type(record)
    values = (getattr(record, field.name) for field in fields(kind))
    listed = [_plain(hint, value) for hint, value in zip(_fields(kind), values, strict=True)]
    return json.dumps([kind.__name__, *listed], separators=(",", ":")).encode()


def _plain(hint: Any, value: Any) -> Any:
    """What JSON holds for a field's value."""
    if hint is Key:
        return list(value[:3])
    if get_origin(hint) is tuple:
        return [_plain(each, of) for each, of in zip(_kinds(hint, len(value)), value, strict=True)]
    return float(value).hex() if hint is float else value

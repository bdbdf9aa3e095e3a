"""Mutated messages of the wide runtime, and which of them must change nothing."""

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from atoll.peers.wide import messages
from atoll.peers.wide.messages import BadMessage, Bulk, Committed, Have, Head, Hello, Leave, Report, read
from atoll.wire import Key

HEAD = 12
"""Bytes before the body of a frame."""
FAR = 1 << 40
"""A round that no run comes to."""
NUMBERS = (
    *(-(1 << 70), -(1 << 63), -1, 0, 1, 2, 3, 255, 1 << 16),
    *(1 << 31, (1 << 32) - 1, 1 << 32, 1 << 52, 1 << 62, 1 << 63),
)
TEXTS = ("", "x" * 4096, "x" * 4097, "\ud800", "\x1b[2J", "a\nb", "\u00e9", "lost")


@dataclass(frozen=True)
class Sent:
    """A frame on its way."""

    sender: int
    hearer: int
    frame: bytes


def harmless(true: Sent, hearer: int, frame: bytes) -> bool:
    """Whether a frame that was made of a true one, and comes from the same member, must change nothing."""
    try:
        message, was = read(frame), read(true.frame)
    except BadMessage:
        return True
    if hearer == messages.COORDINATOR:
        match message:
            case Report():
                return message.key.round >= FAR and not message.silent
            case Committed():
                return message.key.round >= FAR
            case Hello() | Leave() | messages.Promise():
                return False
            case _:
                return True
    match message:
        case Head() | Have():
            return message.key.round >= FAR
        case Bulk():
            assert isinstance(was, Bulk)
            same = [(each.phase, each.part, each.chunk) for each in (message, was)]
            lies = same[0] == same[1] and len(message.payload) == len(was.payload) and message.payload != was.payload
            return message.key.round >= FAR or (message.key == was.key and hearer == true.hearer and not lies)
        case _:
            return True


def fits(true: Sent, frame: bytes) -> bool:
    """Whether a frame that was made of a true one is the hello of an island that may take part."""
    try:
        message, was = read(frame), read(true.frame)
    except BadMessage:
        return False
    told = [(each.run, each.fingerprint, each.version) for each in (message, was) if isinstance(each, Hello)]
    return len(told) == 2 and told[0] == told[1]


@dataclass
class Mutator:
    """Mutations drawn with `rng`."""

    rng: random.Random

    def noise(self, frame: bytes) -> bytes:
        """What is no frame: bytes are others than the checksum is of, or a record is spelled in another way."""
        ways = [self._flip, self._set, self._cut, self._repeat, self._insert, self._spell]
        while True:
            way = self.rng.choice(ways)
            made = way(frame)
            if made != frame and (way != self._spell or frame[3] or not _another(made, frame)):
                return made

    def changed(self, frame: bytes) -> bytes:
        """A frame of a message of which something is another, or in another order, under a right checksum."""
        message = read(frame)
        for _ in range(self.rng.choice([1, 1, 1, 2, 4])):
            name = self.rng.choice([field.name for field in fields(message)])
            changed = object.__new__(type(message))
            changed.__dict__.update(message.__dict__)
            changed.__dict__[name] = self._other(getattr(message, name))
            message = changed
        return forged(message)

    def _other(self, value: Any) -> Any:
        rng = self.rng
        match value:
            case bool():
                return rng.choice([not value, 0, 1, None])
            case Key():
                listed = list(value[:3])
                listed[rng.randrange(3)] = rng.choice(NUMBERS)
                listed[2] = rng.choice([listed[2], value[2] + FAR, value[2] + FAR])
                return tuple(listed)
            case int():
                return rng.choice([*NUMBERS, value - 1, value + 1, value + 1, float(value), True, str(value)])
            case float():
                return rng.choice([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, -value, value * 3, 1])
            case str():
                return rng.choice([*TEXTS, value[::-1], value + "x", 0])
            case tuple():
                return self._others(value)
            case None:
                return 0
            case _:
                payload = bytes(value)
                spot = rng.randrange(len(payload) + 1)
                flipped = payload[:spot] + bytes([rng.randrange(256)]) + payload[spot + 1 :]
                return rng.choice([payload[:spot], payload + b"x", payload * 2, b"", flipped, bytes(len(payload))])

    def _others(self, value: tuple[Any, ...]) -> Any:
        rng = self.rng
        some = value or (rng.choice(NUMBERS),)
        spot = rng.randrange(len(some))
        return rng.choice(
            [
                lambda: (),
                lambda: some[::-1],
                lambda: some[:spot],
                lambda: (*some, some[spot]),
                lambda: (*some, rng.choice(NUMBERS)),
                lambda: (*some[:spot], self._other(some[spot]), *some[spot + 1 :]),
                lambda: some * (4096 // len(some)),
                lambda: tuple(range(4096)),
                lambda: some[spot],
            ]
        )()

    def _flip(self, frame: bytes) -> bytes:
        spot = self.rng.randrange(len(frame))
        return frame[:spot] + bytes([frame[spot] ^ (1 << self.rng.randrange(8))]) + frame[spot + 1 :]

    def _set(self, frame: bytes) -> bytes:
        spot, count = self.rng.randrange(len(frame)), self.rng.randrange(1, 9)
        return frame[:spot] + self.rng.randbytes(count) + frame[spot + count :]

    def _cut(self, frame: bytes) -> bytes:
        return frame[: self.rng.randrange(len(frame))]

    def _repeat(self, frame: bytes) -> bytes:
        start, stop = sorted(self.rng.choices(range(len(frame) + 1), k=2))
        return frame[:stop] + frame[start:]

    def _insert(self, frame: bytes) -> bytes:
        spot = self.rng.randrange(len(frame) + 1)
        return frame[:spot] + self.rng.randbytes(self.rng.randrange(1, 64)) + frame[spot:]

    def _spell(self, frame: bytes) -> bytes:
        """The same record in another spelling; a piece whose place ends too soon."""
        body = frame[HEAD:]
        if frame[3]:
            return sealed(1, body[: self.rng.randrange(30)])
        other: Callable[[], bytes] = self.rng.choice(
            [
                lambda: body.replace(b",", b", ", 1),
                lambda: body + b" ",
                lambda: b" " + body,
                lambda: body.replace(b"a", b"\\u0061", 1),
                lambda: body.replace(b"0x1.", b"0X1.", 1),
                lambda: body.replace(b"p+", b"p", 1),
                lambda: body.replace(b"true", b"1", 1),
                lambda: body.replace(b"0", b"-0", 1),
                lambda: body.replace(b"1", b"1.0", 1),
                lambda: body.replace(b"1", b"1e0", 1),
                lambda: body.replace(b"1", b"NaN", 1),
                lambda: body.replace(b"]", b",null]", 1),
                lambda: body.replace(b"]", b"]]", 1),
                lambda: body.decode().encode(self.rng.choice(["utf-16", "utf-32", "utf-8-sig"])),
                lambda: b"[" * self.rng.choice([1, 100, 100_000]) + body,
                lambda: body.replace(b"1", b"1" * self.rng.choice([100, 5000]), 1),
                lambda: b'{"a":' + body + b"}",
                lambda: json.dumps(json.loads(body), indent=1).encode(),
                lambda: body[: self.rng.randrange(len(body))],
                lambda: body + b"\0",
            ]
        )
        return sealed(0, other())


def _another(made: bytes, frame: bytes) -> bool:
    """Whether the JSON of a frame says something else than that of another."""
    try:
        return json.loads(made[HEAD:]) != json.loads(frame[HEAD:])
    except (ValueError, RecursionError):
        return False


def forged(message: Any) -> bytes:
    """A frame of whatever is in a message's fields, under a right checksum."""
    if isinstance(message, Bulk):
        numbers = [*_list(message.key), 0, 0, 0][:3]
        head = [*numbers, message.phase, message.version, message.chunk]
        places = zip(head, (4, 8, 8, 1, 4, 4), strict=True)
        place = b"".join((_int(value) % (1 << 8 * wide)).to_bytes(wide, "little") for value, wide in places)
        owners = [_int(index) % (1 << 16) for index in _list(message.part)][:255]
        return sealed(1, place + struct.pack(f"<B{len(owners)}H", len(owners), *owners) + bytes(message.payload))
    values = [_plain(getattr(message, field.name)) for field in fields(message)]
    return sealed(0, json.dumps([type(message).__name__, *values], separators=(",", ":")).encode())


def sealed(kind: int, body: bytes) -> bytes:
    """With a head and its checksum."""
    head = struct.pack("<2sBB", b"At", messages.PROTOCOL, kind)
    return head + xxhash.xxh3_64_digest(head + body) + body


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 7


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Key):
        value = value[:3]
    return [_plain(each) for each in value] if isinstance(value, tuple) else value

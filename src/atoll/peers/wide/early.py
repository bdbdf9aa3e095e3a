"""Messages of exchanges that have not begun here yet, put by until they do."""

from atoll.peers.wide.messages import Message
from atoll.wire import Key

MESSAGES, CHARACTERS = 4096, 16 << 20
"""So many at most, and so many characters in all as they are written: a few short ones come of each exchange. The
oldest are dropped for more, and asked for again."""


class Early:
    """What came too early, by exchange."""

    def __init__(self) -> None:
        self._put_by: dict[Key, dict[tuple[int, Message], int]] = {}

    def put(self, sender: int, key: Key, message: Message) -> None:
        """Put a message by, once."""
        self._put_by.setdefault(key, {})[sender, message] = len(repr(message))
        while self._too_much():
            del self._put_by[next(iter(self._put_by))]

    def take(self, key: Key) -> list[tuple[int, Message]]:
        """What came of an exchange, in order, each with its sender."""
        return [*self._put_by.pop(key, {})]

    def _too_much(self) -> bool:
        sizes = [size for each in self._put_by.values() for size in each.values()]
        return len(sizes) > MESSAGES or sum(sizes) > CHARACTERS

"""How an island comes into a run that goes on: it fetches a state, goes along with what lands at the donors, and takes
part from the first boundary on at which the others know of it.

While it goes along it stands in a donor's place: its flow posts what that one posts, which goes nowhere, and is
answered what that one was answered. So anchors, outer state and round counts move as everywhere, whatever the method.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from atoll.errors import LeftBehind
from atoll.peers.wide.messages import Bulk, Fetch
from atoll.peers.wide.offers import KEPT, PIECE, PLACE, STANDS, manifest_key, outcome_of, state_key, tensors_of
from atoll.wire import Key, Landed, Lost, Snapshot, Source, Take

WINDOW_S, WINDOW = 0.5, 32
"""As many chunks are asked of a donor at a time as have come from it in so many seconds, and two more; at most 32. Of a
slow one few are left in the end, when the others have given theirs: one at a time, if it takes longer for each."""
AGAIN_S = 0.25
"""After so long what was not there yet is asked for again."""
LATE_S = 15.0
"""After so long without anything from anyone, what is missing is asked for again; whoever is silent for twice as long
counts as out of reach."""


class OutOfReach(LeftBehind):
    """Nobody is left to fetch from."""


@dataclass
class _Donor:
    """One island that is fetched from: what it was asked for, when it answered last, and until when it has nothing."""

    asked: set[int] = field(default_factory=set[int])
    heard: float = field(default_factory=time.monotonic)
    rests: float = 0.0
    _came: deque[float] = field(default_factory=lambda: deque[float](maxlen=WINDOW - 2))

    def gave(self, chunk: int) -> None:
        self.heard = time.monotonic()
        self._came.append(self.heard)
        self.asked.discard(chunk)

    def has_nothing(self, chunk: int, *, follows: bool) -> None:
        self.heard = time.monotonic()
        if not follows:
            self.rests = self.heard + AGAIN_S
            self.asked.discard(chunk)

    @property
    def gives(self) -> int:
        """Chunks that have come from it lately."""
        since = time.monotonic() - WINDOW_S
        return sum(came > since for came in self._came)

    @property
    def room(self) -> int:
        """Chunks that it may be asked for now."""
        # what a slow one owes is what all wait for in the end
        few = 2 if self.gives > 1 or not self._came else 1
        return max(few + self.gives - len(self.asked), 0) if self.rests <= time.monotonic() else 0


class Fetching:
    """Blobs that come in chunks from several donors.

    Args: send: asks one donor for one chunk. wait: waits until something has come, for so many seconds at most; raises
    if there is no use in waiting.
    """

    def __init__(self, send: Callable[[int, Fetch], None], wait: Callable[[float], None]) -> None:
        self._send, self._wait = send, wait
        self._arrived: dict[Key, dict[tuple[int, int], tuple[bytes | memoryview, int]]] = {}
        self._donors: dict[Key, frozenset[int]] = {}
        self._ahead: dict[Key, dict[int, _Donor]] = {}
        self.gone: set[int] = set()

    def arrived(self, sender: int, bulk: Bulk) -> None:
        """A chunk, if it was asked of the sender."""
        # another thread may be done with it at any moment
        chunks = self._arrived.get(bulk.key)
        if chunks is not None and sender in self._donors.get(bulk.key, ()):
            chunks[sender, bulk.chunk] = (bulk.payload, bulk.version)

    def ahead(self, key: Key, donors: Sequence[int], chunks: int = WINDOW) -> None:
        """Ask for the first chunks of a blob, so many at most, for which `whole` is called later."""
        self._arrived[key] = {}
        ways = self._ahead[key] = self._begin(key, donors)
        self._ask(key, ways, set(), min(chunks, sum(way.room for way in ways.values())))

    def _begin(self, key: Key, donors: Sequence[int]) -> dict[int, _Donor]:
        self._arrived.setdefault(key, {})
        self._donors[key] = frozenset(donors)
        return {donor: _Donor() for donor in donors}

    def whole(
        self, key: Key, donors: Sequence[int], sums: Sequence[str] | None = None, *, patient: bool = True
    ) -> bytearray | None:
        """All of a blob.

        Args: sums: sha256 of each chunk; what does not have it is fetched again from someone else. patient: wait until
        it is offered; else None if nobody offers it now.
        Raises: OutOfReach if nobody is left to fetch from.
        """
        ahead, here, blob = self._ahead.pop(key, {}), set[int](), bytearray()
        ways = self._begin(key, donors) | ahead
        chunks, began, silences = self._arrived[key], time.monotonic(), 0
        total = len(sums) if sums else None
        while total is None or len(here) < total:
            ways = {donor: way for donor, way in ways.items() if donor not in self.gone}
            if not ways:
                raise OutOfReach(f"workers {list(donors)}, to fetch a state from, are gone or not heard; come again")
            self._ask(key, ways, here, total)
            if not chunks:
                self._wait(AGAIN_S)
            for (sender, chunk), (payload, count) in list(chunks.items()):
                del chunks[sender, chunk]
                if not count and not patient and not here:
                    return None
                silences = 0
                if (way := ways.get(sender)) and count:
                    way.gave(chunk)
                elif way:
                    # what was asked for ahead was so on the suspicion that it is not there yet
                    way.has_nothing(chunk, follows=sender in ahead)
                total = total or count or None
                # not there yet; or no such chunk, for the first are asked for before it is known how many there are
                if not count or chunk in here or chunk >= min(total or 0, len(here) + WINDOW * len(donors)):
                    continue
                fits = len(payload) == PIECE or (chunk + 1 == total and len(payload) < PIECE)
                if not fits or (sums and sha256(payload).hexdigest() != sums[chunk]):
                    ways = {donor: way for donor, way in ways.items() if donor != sender} or ways
                    continue
                here.add(chunk)
                start = chunk * PIECE
                blob.extend(bytes(max(start - len(blob), 0)))
                blob[start : start + len(payload)] = payload
            # as long as anything comes, the rest is on its way: asking again would only make all of it later
            last = max([began, *(way.heard for way in ways.values())])
            ways = {donor: way for donor, way in ways.items() if last - way.heard <= 2 * LATE_S}
            if time.monotonic() - last > LATE_S:
                began, silences = time.monotonic(), silences + 1
                ways = ways if silences < 2 else {}
                for way in ways.values():
                    way.asked.clear()
        del self._donors[key], self._arrived[key]
        return blob

    def _ask(self, key: Key, ways: dict[int, _Donor], here: set[int], total: int | None) -> None:
        """Fill the windows; in the end whoever has been giving, and has nothing to do, gives the last of what another
        one alone owes, as far as that makes it earlier: the joiner's own link may be what they all wait for."""
        taken = Counter(chunk for way in ways.values() for chunk in way.asked)
        # one after another: a donor may say that there are any number of them
        open_ = (chunk for chunk in range(total or 1) if chunk not in here and chunk not in taken)
        for donor, way in ways.items():
            self._order(key, donor, way, islice(open_, way.room))
        for donor, way in ways.items():
            for other in [] if way.asked else ways.values():
                owed = sorted((chunk for chunk in other.asked - here if taken[chunk] == 1), reverse=True)
                # they would be done at the same time
                count = len(owed) * way.gives // (way.gives + other.gives or 1)
                if count >= other.gives:  # which saves half a second
                    self._order(key, donor, way, owed[: min(count, way.room)])
                    taken.update(way.asked)

    def _order(self, key: Key, donor: int, way: _Donor, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            way.asked.add(chunk)
            self._send(donor, Fetch(key, chunk))


class Entry:
    """A joiner's part: the state that it begins from, and the answers that it goes along with.

    Args: fetching. epoch: in which it joined. donors: whose state is to be had, all the same; the first is the one in
    whose place it stands. caught_up: is called when it has everything that has landed there.
    """

    def __init__(self, fetching: Fetching, epoch: int, donors: Sequence[int], caught_up: Callable[[], None]) -> None:
        self.epoch, self.donors = epoch, tuple(donors)
        self._fetching, self._caught_up = fetching, caught_up
        self._sources: dict[Key, Source] = {}
        self._whole = False

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is not a tensor, and the tensors. Nothing that is in flight: see `expect`."""
        # connections begin slowly; that of the first donor has the list of it to bring, which would come last
        self._fetching.ahead(state_key(self.epoch), self.donors[1:])
        manifest = self._manifest()
        state = self._fetching.whole(state_key(self.epoch), self.donors, manifest["sums"])
        assert state is not None
        self._whole = True
        return manifest["meta"], tensors_of(manifest, state)

    def _manifest(self) -> dict[str, Any]:
        """From the first donor that is within reach."""
        for donor in self.donors:
            with suppress(OutOfReach):
                text = self._fetching.whole(manifest_key(self.epoch), (donor,))
                assert text is not None
                return json.loads(text)
        raise OutOfReach(f"none of workers {list(self.donors)}, to fetch a state from, is within reach; come again")

    def looks(self) -> None:
        """Ask already where that one is that `stands` will tell of."""
        self._fetching.ahead(Key(STANDS, 0, self.epoch), self.donors[:1], 1)

    def stands(self) -> tuple[int, int]:
        """The step of the boundary that is next for the one in whose place this island stands, and the last it did."""
        said = self._fetching.whole(Key(STANDS, 0, self.epoch), self.donors[:1])
        assert said is not None
        if len(said) != PLACE.size:
            raise OutOfReach(f"worker {self.donors[0]} does not say where it is; come again")
        due, step = PLACE.unpack(said)
        return due, step

    def late(self, epoch: int) -> bool:
        """Whether the state is offered no more, when so many epochs have been agreed on."""
        return not self._whole and epoch >= self.epoch + KEPT

    @property
    def awaits(self) -> bool:
        """Whether answers are still to come."""
        return bool(self._sources)

    def expect(self, key: Key, source: Source) -> Key:
        """An exchange that is under way at the donors: its mean will be written here, if it is a snapshot."""
        self._sources[key] = source
        return key

    def expects(self, key: Key) -> bool:
        """Whether this exchange is one of a donor's."""
        return key in self._sources

    def take(self, take: Take) -> Landed | Lost:
        """What it came to at a donor."""
        blob = self._fetching.whole(take.ticket, self.donors, patient=False)
        if blob is None:
            self._caught_up()
            blob = self._fetching.whole(take.ticket, self.donors)
        assert blob is not None
        outcome, values = outcome_of(blob)
        source = self._sources.pop(take.ticket)
        if isinstance(outcome, Landed):
            mean = torch.frombuffer(values, dtype=source.layout.dtype)
            for start, stop in source.layout.chunks:
                if isinstance(source, Snapshot):
                    source.write(start, mean[start:stop])
                elif take.sink:
                    take.sink(outcome, start, mean[start:stop])
        return outcome

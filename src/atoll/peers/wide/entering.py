"""How an island comes into a run that goes on: it fetches a state, goes along with what lands at the donors, and takes
part from the first boundary on at which the others know of it.

While it goes along it stands in a donor's place: its flow posts what that one posts, which goes nowhere, and is
answered what that one was answered. So anchors, outer state and round counts move as everywhere, whatever the method.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from atoll.errors import LeftBehind
from atoll.peers.wide.messages import Bulk, Fetch
from atoll.peers.wide.offers import manifest_key, outcome_of, state_key, tensors_of
from atoll.wire import Key, Landed, Lost, Snapshot, Source, Take

WINDOW = 8
"""Chunks that are asked of one donor at a time, at most."""
AGAIN_S = 0.25
"""After so long what was not there yet is asked for again."""
LATE_S = 15.0
"""After so long without anything from a donor, what it was asked for is asked of another one."""


@dataclass
class _Donor:
    """One island that is fetched from: what it was asked for, and when it answered last."""

    asked: set[int] = field(default_factory=set[int])
    heard: float = field(default_factory=time.monotonic)
    window: int = 2


class Fetching:
    """Blobs that come in chunks from several donors.

    Args: send: asks one donor for one chunk. wait: waits until something has come, for so many seconds at most; raises
    if there is no use in waiting.
    """

    def __init__(self, send: Callable[[int, Fetch], None], wait: Callable[[float], None]) -> None:
        self._send, self._wait = send, wait
        self._arrived: dict[Key, dict[int, tuple[bytes, int, int]]] = {}
        self.gone: set[int] = set()
        self.fetched = 0

    def arrived(self, sender: int, bulk: Bulk) -> None:
        """A chunk, if it was asked for."""
        if bulk.key in self._arrived:
            self._arrived[bulk.key][bulk.chunk] = (bytes(bulk.payload), bulk.version, sender)

    def whole(
        self, key: Key, donors: Sequence[int], sums: Sequence[str] | None = None, *, patient: bool = True
    ) -> bytes | None:
        """All of a blob.

        Args: sums: sha256 of each chunk; what does not have it is fetched again from someone else. patient: wait until
        it is offered; else None if nobody offers it now.
        Raises: LeftBehind if nobody is left to fetch from.
        """
        chunks, here = self._arrived.setdefault(key, {}), dict[int, bytes]()
        ways = {donor: _Donor() for donor in donors}
        total = len(sums) if sums else None
        while total is None or len(here) < total:
            ways = {donor: way for donor, way in ways.items() if donor not in self.gone}
            if not ways:
                raise LeftBehind(f"nobody is left to fetch a state from: {list(donors)} are gone; come again")
            self._ask(key, ways, here, total)
            self._wait(AGAIN_S)
            for chunk, (payload, count, sender) in list(chunks.items()):
                del chunks[chunk]
                way = ways.get(sender)
                if way:
                    way.heard, way.window = time.monotonic(), min(WINDOW, way.window + 1)
                    way.asked.discard(chunk)
                if not count:
                    if not patient and not here:
                        return None
                    continue
                if sums and (chunk >= len(sums) or sha256(payload).hexdigest() != sums[chunk]):
                    ways = {donor: way for donor, way in ways.items() if donor != sender} or ways
                    continue
                total, here[chunk] = count if total is None else total, payload
                self.fetched += len(payload)
            for way in ways.values():
                if time.monotonic() - way.heard > (LATE_S if here else AGAIN_S):
                    way.asked.clear()
        del self._arrived[key]
        return b"".join(here[chunk] for chunk in sorted(here))

    def _ask(self, key: Key, ways: dict[int, _Donor], here: dict[int, bytes], total: int | None) -> None:
        """Fill the windows."""
        taken = {chunk for way in ways.values() for chunk in way.asked}
        open_ = [chunk for chunk in range(total or 1) if chunk not in here and chunk not in taken]
        for donor, way in ways.items():
            while open_ and len(way.asked) < way.window:
                chunk = open_.pop(0)
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

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is not a tensor, and the tensors. Nothing that is in flight: see `expect`."""
        text = self._fetching.whole(manifest_key(self.epoch), self.donors[:1])
        assert text is not None
        manifest = json.loads(text)
        state = self._fetching.whole(state_key(self.epoch), self.donors, manifest["sums"])
        assert state is not None
        return manifest["meta"], tensors_of(manifest, state[: manifest["bytes"]])

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
            mean = torch.frombuffer(bytearray(values), dtype=source.layout.dtype)
            for start, stop in source.layout.chunks:
                if isinstance(source, Snapshot):
                    source.write(start, mean[start:stop])
                elif take.sink:
                    take.sink(outcome, start, mean[start:stop])
        return outcome

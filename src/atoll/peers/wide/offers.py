"""What an island offers to one that joins: its state as it was at one boundary, and what has landed since.

    manifest    what is not a tensor, as JSON; names, dtypes and sizes of tensors; sha256 of each chunk of the state
    state       all tensors, one behind the other
    landings    of each exchange that has landed after that boundary: the outcome, and the mean

Everything is asked for and sent chunk by chunk, so that it can come from several islands at once, and whatever is lost
is asked for again.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from atoll.wire import Key, Landed, Lost

PIECE = 1 << 20
"""Bytes of a chunk."""
KEPT = 3
"""States that are offered at a time: who joined before the oldest of them begins anew."""
ASKED = 1024
"""What is asked for before it is there, at most; more is asked for again."""
MANIFEST, STATE_OF, ENTERED, SAMPLE, STANDS = -10, -11, -12, -13, -14
"""Rule numbers of what is no exchange's, in its key; the round is the number of the epoch."""
PLACE = Struct("<qq")
"""What is answered to `STANDS`: the step of the next boundary, and the last that is done."""


def manifest_key(epoch: int) -> Key:
    """What an epoch's manifest is asked for by."""
    return Key(MANIFEST, 0, epoch)


def state_key(epoch: int) -> Key:
    """What the tensors of an epoch's state are asked for by."""
    return Key(STATE_OF, 0, epoch)


def entered_key(epoch: int) -> Key:
    """What a joiner says by that it takes part since an epoch, and needs nothing any more."""
    return Key(ENTERED, 0, epoch)


def sample_key(number: int) -> Key:
    """What bytes are asked for by to measure the way; instead of a chunk the request says how many."""
    return Key(SAMPLE, 0, number)


class Offers:
    """What one island offers: the states of the last epochs in which somebody joined, and what has landed since the
    first of them.

    Args: follow: called, from any thread, with what is there now, and who has asked for which chunk of it in vain.
    Attributes: epochs: whose states there are, ascending; goers: who may still go along, and since which epoch.
    """

    def __init__(self, follow: Callable[[Key, Collection[tuple[int, int]]], None]) -> None:
        self._follow = follow
        self.epochs: list[int] = []
        self.goers: dict[int, int] = {}
        self._lock = threading.Lock()
        self._blobs: dict[Key, tuple[memoryview, int]] = {}
        self._asked: dict[Key, set[tuple[int, int]]] = {}

    def state(
        self, epoch: int, goers: Sequence[int], meta: Mapping[str, Any], tensors: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Offer the state of the boundary at which an epoch began to those who join in it. Tensors are copied, and what
        is copied is sent while the rest is."""
        with self._lock:
            self.goers |= dict.fromkeys(goers, epoch)
        self.epochs.append(epoch)
        if len(self.epochs) > KEPT:
            self._forget(self.epochs.pop(0))
        forms = [[name, str(tensor.dtype).removeprefix("torch."), tensor.numel()] for name, tensor in tensors]
        parts = [part for _, tensor in tensors for part in tensor.detach().reshape(-1).view(torch.uint8).split(PIECE)]
        flat = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
        state, copied, count = view(flat), 0, 1
        self._have(state_key(epoch), state, 0)
        while parts:
            # ever more at a time: each time Python's lock has to be waited for
            size = sum(map(len, parts[:count]))
            torch.cat([part.cpu() for part in parts[:count]], out=flat[copied : copied + size])
            parts, copied, count = parts[count:], copied + size, 2 * count
            self._have(state_key(epoch), state, copied)
        # beside training: an island does not wait for digests of what it gives away
        threading.Thread(target=self._offer, args=(epoch, dict(meta), forms, state), daemon=True).start()

    def only(self, there: Collection[int]) -> None:
        """All others have left the run."""
        for worker in self.goers.keys() - set(there):
            self.entered(worker, self.goers[worker])

    def entered(self, worker: int, epoch: int) -> None:
        """A joiner takes part since an epoch, and has all that it needs."""
        with self._lock:
            if self.goers.get(worker, epoch + 1) > epoch:
                return
            del self.goers[worker]
        if not self.goers:
            self.clear()

    def clear(self) -> None:
        """Offer nothing."""
        with self._lock:
            # the next to join may have asked already for what is offered at the next step
            last = self.epochs[-1] if self.epochs else -1
            self._asked = {key: to for key, to in self._asked.items() if key.rule < 0 and key.round > last}
            self.goers.clear()
            self.epochs.clear()
            self._blobs.clear()

    def _forget(self, epoch: int) -> None:
        with self._lock:
            for key in (state_key(epoch), manifest_key(epoch)):
                self._blobs.pop(key, None)

    def _offer(self, epoch: int, meta: dict[str, Any], forms: list[list[Any]], state: memoryview) -> None:
        sums = [sha256(piece).hexdigest() for piece in _pieces(state)]
        manifest = json.dumps({"meta": meta, "tensors": forms, "sums": sums}).encode()
        if epoch in self.epochs:
            self._have(manifest_key(epoch), memoryview(manifest))

    def landed(self, key: Key, outcome: Landed | Lost, mean: Tensor | None) -> None:
        """Keep what has landed; `mean` belongs to the offer from now on."""
        head = json.dumps({"landed": isinstance(outcome, Landed), "outcome": _plain(outcome)}).encode()
        values = b"" if mean is None else bytes(view(mean.view(torch.uint8)))
        self._have(key, memoryview(len(head).to_bytes(4, "little") + head + values))

    def _have(self, key: Key, blob: memoryview, size: int | None = None) -> None:
        """So many bytes of it are here, or all."""
        with self._lock:
            if not self.epochs:
                return  # nobody joins any more
            self._blobs[key] = blob, len(blob) if size is None else size
            all_asked = self._asked.pop(key, set[tuple[int, int]]())
            asked = {each for each in all_asked if self._held(key, each[1]) is not None}
            if asked != all_asked:
                self._asked[key] = all_asked - asked
        self._follow(key, asked)

    def _held(self, key: Key, chunk: int) -> memoryview | None:
        """What it is cut from, if a chunk is here."""
        blob, here = self._blobs.get(key, (memoryview(b""), -1))
        return blob if min((chunk + 1) * PIECE, len(blob)) <= here else None

    def piece(self, key: Key, chunk: int, sender: int) -> tuple[memoryview, int]:
        """One chunk for `sender`, and how many there are: none, if this is not offered yet."""
        with self._lock:
            blob = self._held(key, chunk)
            if blob is None:
                if sum(map(len, self._asked.values())) < ASKED:
                    self._asked.setdefault(key, set()).add((sender, chunk))
                return memoryview(b""), 0
        return blob[chunk * PIECE : (chunk + 1) * PIECE], max(1, -(-len(blob) // PIECE))


def outcome_of(blob: bytearray) -> tuple[Landed | Lost, bytearray]:
    """What `landed` kept: the outcome, and the bytes of the mean."""
    size = int.from_bytes(blob[:4], "little")
    record = json.loads(blob[4 : 4 + size])
    values: dict[str, Any] = record["outcome"]
    values["key"] = Key(*values["key"])
    if record["landed"]:
        values |= {name: tuple(values[name]) for name in ("peers", "norms", "weights", "refused", "dropped")}
    return (Landed if record["landed"] else Lost)(**values), blob[4 + size :]


def tensors_of(manifest: Mapping[str, Any], state: bytearray) -> dict[str, Tensor]:
    """The tensors of a state, by name: views of it, where they can be."""
    found, start = dict[str, Tensor](), 0
    for name, dtype, numel in manifest["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        size = numel * kind.itemsize
        aligned = start % kind.itemsize == 0
        held = state if aligned else state[start : start + size]
        found[name] = (
            torch.frombuffer(held, dtype=kind, count=numel, offset=start if aligned else 0)
            if size
            else torch.empty(0, dtype=kind)
        )
        start += size
    return found


def _pieces(blob: memoryview) -> Iterator[memoryview]:
    yield from (blob[start : start + PIECE] for start in range(0, max(1, len(blob)), PIECE))


def _plain(outcome: Landed | Lost) -> dict[str, Any]:
    """JSON-able; what a landing of two halves holds is made anew when it lands."""
    return {name: value for name, value in asdict(outcome).items() if name != "anchor"}


def view(flat: Tensor) -> memoryview:
    """The bytes of a tensor of uint8, where they are."""
    return memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]  # numpy's buffer protocol is not in its stubs

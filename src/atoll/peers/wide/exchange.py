"""One exchange on one island, without I/O: it is told what came, and says what to send.

    heads        from everyone to everyone: `rounds.admit` decides alike on every island
    bulk         Reduce: chunk by chunk to the owner of each part, who sums in worker order and tells everyone the mean
                 Keep: chunk by chunk to all who hear this one
    votes        whoever has all of it says so, with a digest; when all have said the same, the round counts

Everything that came, and what was sent, is kept until the round counts, so that any of it can be asked for again, and
so that survivors can go on without someone who is gone: the coordinator says who is out (`settle`), what those had to
sum is split among those left, their contributions are left out everywhere, and votes are cast anew. Nothing is used
before all who are left have it: what is used is the same everywhere, whatever happens in between.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor

from atoll.parts.codecs import exact
from atoll.peers.rounds import Header, accumulate, admit, encode, finish, header_of, heard
from atoll.peers.wide.messages import CONTRIBUTION, LONG, MEAN, Bulk, Have, Head, Report, Settle, Want
from atoll.peers.wide.segments import Part, Segments
from atoll.trees import CHUNK, cut
from atoll.wire import Codec, Fold, Keep, Landed, Lost, Post, Reduce, Snapshot, Sum, Take

Send = Callable[[int, Head | Bulk | Have | Want], None]
WHOLE: Part = ()
"""The part of everyone under `Keep`."""


def view(wire: Tensor) -> memoryview:
    """The bytes of a wire, where they are."""
    return memoryview(wire.numpy())  # pyright: ignore[reportArgumentType]  # numpy's buffer protocol is not in its stubs


class Exchange:
    """One worker's side of one meeting.

    Args: me: this worker. post: its contribution. take: as it will be taken, if it reads live tensors. send: hands a
    message to the link.
    Attributes: outcome: the answer, once it is there; error: why there cannot be one; version: how often the
    membership has shrunk; digest: of what everyone agreed on; held: it has been told the coordinator that something is
    missing here, so this worker votes on nothing before it has heard back.
    """

    def __init__(self, me: int, post: Post, take: Take | None, send: Send) -> None:
        self.me, self.post, self.version, self.digest = me, post, 0, ""
        self._take, self._send = take, send
        self.fold: Fold = Reduce(exact()) if isinstance(post.fold, Sum) else post.fold
        self._out: list[tuple[tuple[int, ...], bool]] = []
        self._heads: dict[int, Head] = {}
        self._segments = Segments.of(post.to, post.source.layout, post.codec, self._result)
        self._wires: list[Tensor] = []
        self._arrived: dict[tuple[Part, int], dict[int, Tensor]] = {}
        self._means: dict[Part, dict[int, Tensor]] = {}
        self._votes: dict[int, str] = {}
        self._verdict: Landed | Lost | None = None
        self._work: Iterator[None] | None = None
        self._told: set[tuple[Part, int]] = set()
        self._early: list[tuple[int, Bulk | Have]] = []
        self._lacking = 0
        self.held = False
        self.outcome: Landed | Lost | None = None
        self.error: str | None = None
        self.sent = 0

    # what a round is made of

    @property
    def left(self) -> tuple[int, ...]:
        """The members that are not gone."""
        gone = {worker for workers, _ in self._out for worker in workers}
        return tuple(worker for worker in self.post.to if worker not in gone)

    @property
    def overlapped(self) -> bool:
        """Whether training goes on meanwhile."""
        return self._take is None

    @property
    def waits(self) -> bool:
        """Whether all have come, so that whatever is missing is on its way, or lost."""
        return all(worker in self._heads for worker in self.left)

    @property
    def _result(self) -> Codec:
        return self.fold.result if isinstance(self.fold, Reduce) else exact()

    @property
    def _chunks(self) -> Sequence[tuple[int, int]]:
        return self.post.source.layout.chunks

    @property
    def _dtype(self) -> torch.dtype:
        return self.post.source.layout.dtype

    @property
    def form(self) -> str:
        """What all members' messages must have in common."""
        layout = self.post.source.layout
        return f"{layout.numel} elements of {layout.dtype}, {self.post.codec!r}, {self.post.fold!r}"

    def _hearers(self) -> tuple[int, ...]:
        """Who gets this worker's wire under `Keep`."""
        edges = self.post.edges
        return tuple(worker for worker in self.left if worker != self.me and (edges is None or worker in edges.tells))

    def _hears(self) -> tuple[int, ...]:
        """Whose contributions this worker needs."""
        assert isinstance(self._verdict, Landed)
        return heard(self._verdict, self.post.edges).peers

    # what happens

    def start(self) -> None:
        """Measure what is sent, and say so."""
        header = header_of(self.post)
        signals = tuple(sorted(header.signals.items()))
        mine = Head(self.post.key, self.post.to, header.weight, header.norm, signals, self.form)
        self._heads[self.me] = mine
        for worker in self.left:
            if worker != self.me:
                self._send(worker, mine)
        self._decide()

    def head(self, sender: int, head: Head) -> None:
        """A member's head; an error if it trains something else."""
        if head.to != self.post.to:
            return  # of another epoch, whose own members will be told
        if head.form != self.form:
            self.error = (
                f"worker {self.me} sends {self.form} for {self.post.key} but worker {sender} {head.form}; they must "
                "train the same model with the same method"
            )
        if tuple(name for name, _ in head.signals) != tuple(sorted(self.post.signals)):
            self.error = (
                f"worker {sender} has other signals than worker {self.me} in {self.post.key}; give all the same"
            )
        elif sender in self.left and sender not in self._heads:
            self._heads[sender] = head
            self._decide()

    def bulk(self, sender: int, bulk: Bulk) -> None:
        """Bytes; those that fit nowhere are dropped."""
        if self._later(sender, bulk) or bulk.chunk >= len(self._chunks) or sender not in self.left:
            return
        where = self._place(sender, bulk)
        if where is None or bulk.chunk in where or len(bulk.payload) != self._length(bulk):
            return
        wire = torch.empty(len(bulk.payload), dtype=torch.uint8)
        view(wire)[:] = bulk.payload
        where[bulk.chunk] = wire
        self._lacking -= bulk.phase == MEAN or (isinstance(self.fold, Keep) and self._counts(sender))
        if bulk.phase == CONTRIBUTION and isinstance(self.fold, Reduce):
            self._sum(bulk.part, bulk.chunk)
        self._finished()

    def _place(self, sender: int, bulk: Bulk) -> dict[int, Tensor] | None:
        """Where bytes belong that a member may send."""
        if sender == self.me:
            return None
        if bulk.phase == CONTRIBUTION:
            keeps, owner = isinstance(self.fold, Keep), self._segments.owners.get(bulk.part)
            mine = bulk.part == WHOLE if keeps else owner == self.me
            return self._arrived.setdefault((bulk.part, sender), {}) if mine else None
        if bulk.phase == MEAN and isinstance(self.fold, Reduce) and bulk.version == self.version:
            return self._means.setdefault(bulk.part, {}) if self._segments.owners.get(bulk.part) == sender else None
        return None

    def _length(self, bulk: Bulk) -> int:
        """Bytes that a message must have."""
        codec = self.post.codec if bulk.phase == CONTRIBUTION else self._result
        first, last = self._span(bulk.part, bulk.chunk)
        return self._nbytes(codec, bulk.chunk, last) - self._nbytes(codec, bulk.chunk, first)

    def _counts(self, sender: int) -> bool:
        """Whether a contribution is needed here, as far as is known."""
        return isinstance(self._verdict, Landed) and sender in heard(self._verdict, self.post.edges).peers

    def _later(self, sender: int, message: Bulk | Have) -> bool:
        """Whether a message is of a version that this worker has not been told of yet: it is put by."""
        if message.version > self.version and sender in self.left and len(self._early) < 4 * len(self._chunks) + LONG:
            self._early.append((sender, message))
            return True
        return False

    def have(self, sender: int, have: Have) -> None:
        """A vote; an error if members came to different bits."""
        if not self._later(sender, have) and have.version == self.version and sender in self.left:
            self._votes[sender] = have.digest
            self._count()

    def want(self, sender: int, want: Want) -> None:
        """Send again what did not come."""
        if want.phase == CONTRIBUTION and self._wires and sender in self.left:
            for chunk in want.chunks:
                if chunk < len(self._wires) and (self._segments.owners.get(want.part) == sender or want.part == WHOLE):
                    self._tell(sender, want.part, chunk)
        elif want.phase == MEAN and self._segments.owners.get(want.part) == self.me:
            held = self._means.get(want.part, {})
            for chunk in want.chunks:
                if chunk in held:
                    self._send(sender, self._mean(want.part, chunk, held[chunk]))

    def settle(self, settle: Settle) -> None:
        """The coordinator's word on who is out, from the first version on; what is known already changes nothing."""
        self.held = False
        for workers, counts in settle.out[len(self._out) :]:
            before = self.left
            self._out.append((workers, counts))
            if counts:
                continue
            self.version += 1
            if isinstance(self.fold, Reduce):
                self._segments.hand_over(workers, tuple(worker for worker in before if worker not in workers))
            self._means.clear()
            self._votes.clear()
            self._verdict = None
        if self.outcome is None:
            self._decide()
            early, self._early = self._early, []
            for sender, message in early:
                (self.bulk if isinstance(message, Bulk) else self.have)(sender, message)  # pyright: ignore[reportArgumentType]
            self._finished()
            self._count()

    def work(self) -> bool:
        """Encode and send one chunk; whether there is more to do."""
        if self._work is None:
            return False
        work = self._work
        if next(work, True) and self._work is work:
            self._work = None
            self._finished()
        return True

    def report(self) -> Report:
        """How things stand, for the coordinator: if not all is here, nothing is voted on before it has answered."""
        silent = {worker for worker in self.left if worker not in self._heads}
        if isinstance(self._verdict, Landed) and not silent:
            silent = {origin for origin, _, _, chunks in self._missing() if chunks}
        if not silent and self._complete():
            silent = {worker for worker in self.left if worker not in self._votes}
        complete = self.me in self._votes or self.outcome is not None
        self.held = not complete
        return Report(self.post.key, self.post.to, self.version, complete, tuple(sorted(silent)))

    def ask_again(self) -> None:
        """Ask for everything that is missing, and say again what others may have missed."""
        mine = self._heads.get(self.me)
        for worker in self.left:
            if worker != self.me and mine:
                self._send(worker, mine)
        for origin, phase, part, chunks in self._missing():
            for first in range(0, len(chunks), LONG):
                self._send(origin, Want(self.post.key, phase, self.version, part, tuple(chunks[first : first + LONG])))
        self._vote()

    # how it goes on

    def _decide(self) -> None:
        """Once all heads are there: whose contributions count; then the bulk leaves."""
        dropped = [worker for workers, counts in self._out if not counts for worker in workers]
        if self._verdict is not None or any(
            worker not in self._heads for worker in self.post.to if worker not in dropped
        ):
            return
        nothing = Header(0.0, 0.0, {})
        headers = [
            Header(head.weight, head.norm, dict(head.signals)) if (head := self._heads.get(worker)) else nothing
            for worker in self.post.to
        ]
        self._verdict = admit(self.post.key, self.post.to, headers, self.post.quorum, dropped)
        if isinstance(self._verdict, Landed):
            self._lacking = sum(len(chunks) for _, phase, _, chunks in self._missing() if phase == self._last)
            if isinstance(self.fold, Reduce):
                # one's own means are still to be formed
                mine = [part for part, owner in self._segments.owners.items() if owner == self.me]
                held = [chunk for part in mine for chunk in self._means.get(part, {})]
                self._lacking += sum(len(self._filled(part)) for part in mine) - len(held)
            self._work = self._bulk()
        else:
            self._finished()

    def _bulk(self) -> Iterator[None]:
        """Encode what counts, once, and send each chunk where it belongs at this version."""
        assert isinstance(self._verdict, Landed)
        scratch = torch.empty(min(CHUNK, self.post.source.layout.numel), dtype=self._dtype)
        counts, version = self.me in self._verdict.peers, self.version
        for chunk, (start, stop) in enumerate(self._chunks):
            if counts and chunk == len(self._wires):
                wire = encode(self.post, start, stop, scratch)
                inside = wire.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
                self._wires.append(wire.clone() if inside or not isinstance(self.post.source, Snapshot) else wire)
            if version != self.version:
                return
            self._distribute(chunk)
            yield

    def _distribute(self, chunk: int) -> None:
        """This worker's part in one chunk."""
        if isinstance(self.fold, Keep):
            if self._wires and (WHOLE, chunk) not in self._told:
                self._told.add((WHOLE, chunk))
                for worker in self._hearers():
                    self._tell(worker, WHOLE, chunk)
            return
        for part, owner in self._segments.owners.items():
            if owner == self.me:
                self._sum(part, chunk)
            elif self._wires and (part, chunk) not in self._told:
                self._told.add((part, chunk))
                self._tell(owner, part, chunk)

    def _tell(self, worker: int, part: Part, chunk: int) -> None:
        first, last = self._span(part, chunk)
        if first < last:
            piece = view(self._cut(self._wires[chunk], self.post.codec, chunk, first, last))
            self.sent += len(piece)
            self._send(worker, Bulk(self.post.key, CONTRIBUTION, self.version, part, chunk, piece))

    def _sum(self, part: Part, chunk: int) -> None:
        """If all contributions to a chunk are here: their mean, and everyone is told."""
        verdict, means = self._verdict, self._means.setdefault(part, {})
        if not isinstance(verdict, Landed):
            return  # heads are missing: summed when they are here
        first, last = self._span(part, chunk)
        others = [worker for worker in verdict.peers if worker != self.me]
        here = all(chunk in self._arrived.get((part, worker), {}) for worker in others)
        mine = self.me not in verdict.peers or chunk < len(self._wires)
        if first == last or chunk in means or not here or not mine:
            return
        out, total = torch.empty(last - first, dtype=self._dtype), None
        for worker, weight in zip(verdict.peers, verdict.weights, strict=True):
            wire = (
                self._cut(self._wires[chunk], self.post.codec, chunk, first, last)
                if worker == self.me
                else self._arrived[part, worker][chunk]
            )
            total = accumulate(total, self.post.codec, wire, weight, out)
        mean = finish(out, verdict.weights, self.fold)
        means[chunk] = mean
        self._lacking -= 1
        for worker in self.left:
            if worker != self.me:
                message = self._mean(part, chunk, means[chunk])
                self.sent += len(message.payload)
                self._send(worker, message)

    def _mean(self, part: Part, chunk: int, mean: Tensor) -> Bulk:
        return Bulk(self.post.key, MEAN, self.version, part, chunk, view(mean))

    def _missing(self) -> list[tuple[int, int, Part, list[int]]]:
        """(from whom, phase, part, chunks) of what has not come."""
        found: list[tuple[int, int, Part, list[int]]] = []
        if not isinstance(self._verdict, Landed):
            return found

        def add(origin: int, phase: int, part: Part, held: Mapping[int, Tensor]) -> None:
            if chunks := [chunk for chunk in self._filled(part) if chunk not in held]:
                found.append((origin, phase, part, chunks))

        keeps = isinstance(self.fold, Keep)
        for part, owner in {WHOLE: self.me}.items() if keeps else self._segments.owners.items():
            if owner != self.me:
                add(owner, MEAN, part, self._means.get(part, {}))
                continue
            for worker in self._hears():
                if worker != self.me:
                    add(worker, CONTRIBUTION, part, self._arrived.get((part, worker), {}))
        return found

    @property
    def _last(self) -> int:
        """The phase of what comes last: with all of it here, all is here."""
        return CONTRIBUTION if isinstance(self.fold, Keep) else MEAN

    def _filled(self, part: Part) -> list[int]:
        """The chunks of which a part holds any elements."""
        spans = ((chunk, self._span(part, chunk)) for chunk in range(len(self._chunks)))
        return [chunk for chunk, (first, last) in spans if first < last]

    def _complete(self) -> bool:
        """Whether all that the round comes to is here."""
        if isinstance(self._verdict, Lost):
            return True
        return self._verdict is not None and self._work is None and self._lacking == 0

    def _finished(self) -> None:
        """Vote, once all is here."""
        if self.outcome is None and not self.held and self.me not in self._votes and self._complete():
            self.digest = self._votes[self.me] = self._digest()
            self._vote()
            self._count()

    def _vote(self) -> None:
        for worker in self.left if self.me in self._votes else ():
            if worker != self.me:
                self._send(worker, Have(self.post.key, self.version, self._votes[self.me]))

    def _digest(self) -> str:
        """Of everything that the round comes to; of who counts only, where not all hear the same."""
        assert self._verdict is not None
        if isinstance(self._verdict, Lost):
            return "lost"
        hashed = sha256(repr((self._verdict.peers, self._verdict.weights)).encode())
        if self.post.edges is None:
            for chunk in range(len(self._chunks)):
                for wire in self._landing(chunk):
                    hashed.update(view(wire))
        return hashed.hexdigest()

    def _landing(self, chunk: int) -> list[Tensor]:
        """The bytes that the mean of a chunk is made of, in order."""
        if isinstance(self.fold, Reduce):
            return [self._means[part][chunk] for part, _, _ in self._segments.whole(chunk)]
        return [
            self._wires[chunk] if worker == self.me else self._arrived[WHOLE, worker][chunk] for worker in self._hears()
        ]

    def _count(self) -> None:
        """If all who are left have voted: the outcome, or an error if they came to different bits."""
        if self.outcome is not None or self.me not in self._votes or any(each not in self._votes for each in self.left):
            return
        if different := [worker for worker in self.left if self._votes[worker] != self._votes[self.me]]:
            self.error = (
                f"{self.post.key} came to {self._votes[self.me][:16]} on worker {self.me} but to "
                f"{self._votes[different[0]][:16]} on worker {different[0]}; they do not hold the same any more, so go "
                "on from the last checkpoint"
            )
            return
        assert self._verdict is not None
        self.outcome = self._verdict if isinstance(self._verdict, Lost) else self._deliver(self._verdict)
        if not (isinstance(self.outcome, Landed) and self.me in self.outcome.peers):
            self._take_back()

    def _take_back(self) -> None:
        """What was encoded and does not count: a codec with a memory puts it aside."""
        for (start, stop), wire in zip(self._chunks, self._wires, strict=False):
            self.post.codec.restore(wire, cut(self.post.codec_state, start, stop))

    def _deliver(self, verdict: Landed) -> Landed | Lost:
        """Hand out the mean, chunk by chunk."""
        landed = heard(verdict, self.post.edges)
        if not sum(landed.weights) > 0:
            return Lost(self.post.key, "; ".join([f"nothing that worker {self.me} hears counts", *landed.refused]))
        wide = torch.empty(min(CHUNK, self.post.source.layout.numel), dtype=self._dtype)
        squares = 0.0
        for chunk, (start, stop) in enumerate(self._chunks):
            out = wide[: stop - start]
            if isinstance(self.fold, Reduce):
                wire = torch.cat(self._landing(chunk))
                values = self._result.decode(wire, out)
                mean = values if values.dtype == out.dtype else out.copy_(values)
            else:
                total = None
                for wire, weight in zip(self._landing(chunk), landed.weights, strict=True):
                    total = accumulate(total, self.post.codec, wire, weight, out)
                mean = finish(out, landed.weights, Keep())
            norm = torch.linalg.vector_norm(mean).item()
            squares += norm * norm
            if isinstance(self.post.source, Snapshot):
                self.post.source.write(start, mean)
            elif self._take and self._take.sink:
                self._take.sink(landed, start, mean)
        return replace(landed, mean_norm=math.sqrt(squares), sent=self.sent)

    def _span(self, part: Part, chunk: int) -> tuple[int, int]:
        return self._chunks[chunk] if part == WHOLE else self._segments.span(part, chunk)

    def _nbytes(self, codec: Codec, chunk: int, element: int) -> int:
        return codec.nbytes(element - self._chunks[chunk][0], self._dtype.itemsize)

    def _cut(self, wire: Tensor, codec: Codec, chunk: int, first: int, last: int) -> Tensor:
        return wire[self._nbytes(codec, chunk, first) : self._nbytes(codec, chunk, last)]

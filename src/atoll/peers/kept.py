"""A keeper's desk: what workers hand in waits here until the keeper looks, and its answers until the workers do."""

from dataclasses import dataclass, field, replace

import torch

from atoll.peers.rounds import encode
from atoll.trees import CHUNK, Tree
from atoll.wire import Collect, Key, Landed, Lost, Post, Push, Reply, Snapshot, bytes_sent

Ticket = tuple[int, Key]


@dataclass
class Desk:
    """Pushes in order of arrival, open tickets, and answers."""

    _pushes: list[Push] = field(default_factory=list[Push])
    _open: dict[Ticket, Post] = field(default_factory=dict[Ticket, Post])
    _answers: dict[Ticket, Landed | Lost] = field(default_factory=dict[Ticket, Landed | Lost])

    def hand_in(self, worker: int, post: Post, *, lost: bool) -> None:
        """Take a contribution as the keeper will see it, after its wire. A ticket that is open stays as it is."""
        ticket = (worker, post.key)
        if ticket in self._open:
            return
        self._open[ticket] = post
        if lost:
            self._answers[ticket] = Lost(post.key, f"worker {worker} was not heard")
            return
        layout = post.source.layout
        values = Tree(layout)
        scratch = torch.empty(min(CHUNK, layout.numel), dtype=layout.dtype)
        for start, stop in layout.chunks:
            out = values.flat[start:stop]
            out.copy_(post.codec.decode(encode(post, start, stop, scratch), out))
        self._pushes.append(Push(post.key, worker, post.weight, torch.linalg.vector_norm(values.flat).item(), values))

    def knows(self, worker: int, key: Key) -> bool:
        """Whether this ticket is a keeper's."""
        return (worker, key) in self._open

    def answer(self, worker: int, key: Key) -> Landed | Lost | None:
        """The answer, once: the ticket is closed then."""
        answer = self._answers.pop((worker, key), None)
        if answer:
            del self._open[worker, key]
        return answer

    def collect(self, collect: Collect) -> list[Push]:
        """What has come for one fragment."""
        found, left = list[Push](), list[Push]()
        for push in self._pushes:
            wanted = (push.key.rule, push.key.fragment) == (collect.rule, collect.fragment)
            (found if wanted else left).append(push)
        self._pushes = left
        return found

    def reply(self, reply: Reply) -> None:
        """Write the anchor over what the worker handed in, and answer."""
        ticket = (reply.push.worker, reply.push.key)
        post = self._open[ticket]
        assert isinstance(post.source, Snapshot)
        for start, stop in post.source.layout.chunks:
            post.source.write(start, reply.values.flat[start:stop])
        sent = bytes_sent(post.fold, post.codec, post.source.layout, 2, 0)
        self._answers[ticket] = replace(reply.landed, key=post.key, sent=sent)

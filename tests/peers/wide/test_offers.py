"""What an island offers to one that joins, while its state is copied."""

from collections.abc import Collection

import pytest
import torch

from atoll.peers.wide import offers
from atoll.peers.wide.offers import Offers, state_key
from atoll.wire import Key

EPOCH, JOINER, ANOTHER = 3, 7, 8


@pytest.mark.parametrize("sizes", [(40, 0, 1, 23), (3,), (4,), ()])
def test_what_is_copied_is_sent_while_the_rest_is(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    monkeypatch.setattr(offers, "PIECE", 4)
    tensors = [(str(index), torch.arange(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    state = b"".join(bytes(tensor.tolist()) for _, tensor in tensors)
    count = max(1, -(-len(state) // 4))
    came, missing = list[int](), list[int]()

    def follow(key: Key, asked: Collection[tuple[int, int]]) -> None:
        if key != state_key(EPOCH):
            return
        for joiner, chunk in asked:
            payload, total = there.piece(key, chunk, joiner)
            assert (bytes(payload), total) == (state[4 * chunk :][:4], count)
            came.extend([chunk] * (joiner == JOINER))
        missing.append(sum(not there.piece(key, chunk, ANOTHER)[1] for chunk in range(count)))

    there = Offers(follow)
    for chunk in range(count):
        assert there.piece(state_key(EPOCH), chunk, JOINER) == (b"", 0), "not there, but it follows"
    there.state(EPOCH, [JOINER], {}, tensors)
    assert sorted(came) == list(range(count)), "each once"
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] == 0
    if count > 4:
        assert count > missing[1] > missing[2] > 0, "the first ones long before the last"

"""Islands over real links, with certificates that they enrolled for: the numbers of one process."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from atoll.cli.wide import free_port
from atoll.peers.wide.connect import connect
from atoll.peers.wide.enrol import enrol
from atoll.peers.wide.group import WideGroup
from atoll.peers.wide.home import Home
from atoll.recipes.diloco import diloco, streaming
from atoll.recipes.gossip import factored_gossip, local_m1_m2
from atoll.train import island as islands
from atoll.train.inner import AdamW
from atoll.train.island import Island
from atoll.train.run import Data, Method, Result, Run
from tests.train.reef import Reef, go

LEASE_S = 10.0
METHODS = [diloco(5), streaming(6, fragments=2, delay=2), factored_gossip(5), local_m1_m2(5)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(" ".join(Random(0).choices(["atoll", "reef", "lagoon", "islet", "tide"], k=8000)))
    return folder


@contextmanager
def harbour(folder: Path, run: Run) -> Generator[list[Island]]:
    """The islands of a run, each enrolled, and its coordinator."""
    home = Home.open(folder / "home", address="127.0.0.1", port=free_port(2))

    def moored(number: int, invitation: str) -> Island:
        credentials = folder / str(number)
        enrolled = enrol(invitation, credentials, worker=number)

        @contextmanager
        def way(told: str, step: int) -> Generator[WideGroup]:
            with connect(enrolled, credentials, [f"127.0.0.1:{free_port()}"], told, step, LEASE_S) as group:
                yield group

        return Island(run, number, way, quiet=True)

    with home.serve(run.workers, LEASE_S, lambda said: None):
        yield [moored(number, each.text()) for number, each in enumerate(home.invite(run.workers, 60.0))]


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_over_real_links_all_numbers_are_those_of_one_process(
    method: Method, workers: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(islands, "make_model", lambda *_: Reef())
    inner, data = AdamW(lr=1e-2), Data(f"text:{text}", batch=2, length=16)
    run = Run(
        Method(method.name, method.strategy, inner, method.period), data=data, workers=workers, steps=33, warmup=2
    )
    whole = go(run)
    with harbour(tmp_path, run) as crew, ThreadPoolExecutor(workers) as threads:
        results: list[Result] = list(threads.map(Island.train, crew))
    assert {result.digest for result in results} == {whole.digest}
    assert tuple(loss for result in results for loss in result.val_loss_workers) == whole.val_loss_workers
    for result in results:
        assert [(step, loss) for step, _, loss in result.curve] == [(step, loss) for step, _, loss in whole.curve]

"""Islands that train a toy in threads, each until a given step, and can be killed, frozen and started again."""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from atoll.errors import LeftBehind
from atoll.peers.wide.group import WideGroup
from atoll.sync.rule import Strategy
from atoll.sync.synchronizer import Synchronizer
from atoll.testing.islands import Loopback, Sea
from atoll.testing.toys import adamw, backward, move
from atoll.wire import Event


@dataclass
class Sailor:
    """One island's training, in a thread. `tokens`: of each inner step. `log`: (step, event) of everything; `error`:
    how it ended, if badly; `entered`: the steps that it came in at; `history`: (entry, step, digest) after each step.
    """

    sea: Sea
    worker: int
    module: nn.Module
    strategy: Strategy
    steps: int
    pause: Callable[[int], float] = lambda step: 0.0
    patience: float = 10.0
    tokens: int = 8
    log: list[tuple[int, Event]] = field(default_factory=list[tuple[int, Event]])
    error: BaseException | None = None
    sync: Synchronizer | None = None
    entered: list[int] = field(default_factory=list[int])
    digests: dict[int, str] = field(default_factory=dict[int, str])
    history: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])

    def __post_init__(self) -> None:
        self.killed = False
        self.port = Loopback(self.sea, self.worker)
        self.group: WideGroup | None = None
        self.thread = threading.Thread(target=self._sail, name=f"sailor-{self.worker}", daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """As if by SIGKILL: nothing is said any more, and nothing heard."""
        self.killed = True
        self.sea.sink(self.worker, self.port)
        if self.group:
            # perhaps this is the group's own thread
            threading.Thread(target=self.group.close, daemon=True).start()

    def join(self, timeout: float = 60.0) -> None:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), f"worker {self.worker} still waits"
        if self.error and not self.killed:
            raise self.error

    def _sail(self) -> None:
        torch.set_num_threads(1)
        try:
            group = self.group = WideGroup(self.port, "run", "1", patience=self.patience)
            try:
                self._train(group)
            finally:
                group.close()
        except BaseException as error:
            self.error = error

    def _train(self, group: WideGroup) -> None:
        replica = copy.deepcopy(self.module)
        sync = self.sync = Synchronizer(replica, self.strategy, group)
        optimizer, state = adamw(replica.parameters()), sync.state
        self.entered.append(state.step)
        while state.step < self.steps and not self.killed:
            step = state.step + 1
            try:
                time.sleep(self.pause(step))
                backward(replica, 0, self.worker, step)
                move([each for each in replica.parameters() if each.requires_grad], optimizer)
                self.log += [(step, event) for event in sync.after_step(tokens=self.tokens)]
                self.digests[step] = sync.state.digest()
                self.history.append((len(self.entered), step, self.digests[step]))
            except LeftBehind:
                if self.killed:
                    return
                sync.come_again()
                optimizer = adamw(replica.parameters())
                self.entered.append(state.step)
        if not self.killed:
            group.finish(5.0)

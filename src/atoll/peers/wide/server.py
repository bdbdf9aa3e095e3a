"""The coordinator at work: its decisions, on a link, in a thread."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.errors import AtollError, GroupError
from atoll.peers.wide.coordinator import Coordinator
from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.link import Link, Priority
from atoll.peers.wide.messages import BadMessage, Fetch, Message, read, write
from atoll.peers.wide.recovery import Recovery
from atoll.peers.wide.status import STATUS, answer

TICK_S = 0.5


@dataclass
class Server:
    """Serves one run until it is closed.

    Args: link: not started yet; the server closes it. ledger: of the run. say: tells a person. run, version, islands,
    lease: as of `Coordinator`. recovers: the ledger was lost, and is to be filled by the islands.
    Attributes: error: why it stopped, if it did. bad: messages that were none.
    """

    link: Link
    ledger: Ledger
    run: str
    version: str
    say: Callable[[str], None]
    islands: int = 1
    lease: float = 10.0
    recovers: bool = False
    error: AtollError | None = None
    bad: int = 0
    coordinator: Coordinator = field(init=False)

    def __post_init__(self) -> None:
        self.coordinator = self._begun()
        self._recovery = Recovery(self.ledger, self._send, self.say) if self.recovers else None
        self._jobs: queue.SimpleQueue[Callable[[float], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="atoll-coordinator", daemon=True)
        self.link.start(self._hears, self._sees)
        self._thread.start()

    def look(self, ask: Callable[[Coordinator], Mapping[str, object]], timeout: float = 5.0) -> Mapping[str, object]:
        """Ask the coordinator something, in its own thread."""
        answers: queue.SimpleQueue[Mapping[str, object]] = queue.SimpleQueue()
        self._jobs.put(lambda now: answers.put(ask(self.coordinator)))
        return answers.get(timeout=timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it stops; whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop. What was decided is in the ledger."""
        self._jobs.put(None)
        self._thread.join(5.0)
        self.link.close()
        self.ledger.close()

    def _begun(self) -> Coordinator:
        """A coordinator that knows what the ledger has."""
        return Coordinator(self.run, self.version, self.ledger, self._send, self.say, self.islands, self.lease)

    def _loop(self) -> None:
        ticked = time.monotonic()
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=TICK_S)
                    if job is None:
                        return
                    job(time.monotonic())
                except queue.Empty:
                    pass
                now = time.monotonic()
                if now - ticked >= TICK_S:
                    ticked = now
                    if self._recovery is None:
                        self.coordinator.tick(now)
        except AtollError as error:
            self.error = error
            self.say(str(error))
        except Exception as error:
            self.error = GroupError(
                f"the coordinator failed with {type(error).__name__}: {error}; start it again: what it has decided is "
                "in its ledger, and the islands train on meanwhile"
            )
            self.error.__cause__ = error
            self.say(str(self.error))

    def _send(self, to: int, message: Message) -> None:
        self.link.send(to, write(message), Priority.CONTROL)

    def _hears(self, sender: int, frame: bytes) -> None:
        self._jobs.put(lambda now: self._read(sender, frame, now))

    def _read(self, sender: int, frame: bytes, now: float) -> None:
        try:
            message = read(frame)
        except BadMessage:
            self.bad += 1
            return
        if isinstance(message, Fetch) and message.key == STATUS:
            self._send(sender, answer(self.coordinator))
        elif sender >= 0 and self._recovery is None:
            self.coordinator.heard(sender, message, now)
        elif sender >= 0 and self._recovery and self._recovery.heard(sender, message):
            self._recovery, self.coordinator = None, self._begun()

    def _sees(self, address: int, alive: bool) -> None:
        if self._recovery is None:
            self._jobs.put(lambda now: self.coordinator.seen(address, alive, now))

"""A coordinator whose machine is lost is built again from what the islands hold.

Each island knows the newest epoch that it was told of. Once more than half of the workers of the newest one have told
it, no later one can be in force: it would have needed the promises of all of them who are there. Everything else the
ledger fills with again: islands say how far they are, and report exchanges that cannot end. Numbers of islands that
were not there are not known, and neither is who had been invited.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.peers.wide.ledger import PLACES, Ledger
from atoll.peers.wide.messages import Beat, Epoch, Message, Tell


@dataclass
class Recovery:
    """Collects the newest epoch.

    Args: ledger: a new one, to be filled. send: hands a message to the link. say: tells a person.
    """

    ledger: Ledger
    send: Callable[[int, Message], None]
    say: Callable[[str], None]
    _told: dict[int, Epoch] = field(default_factory=dict[int, Epoch])

    def heard(self, sender: int, message: Message) -> bool:
        """A message of worker `sender`; whether enough have told."""
        match message:
            case Beat():
                self.send(sender, Tell())
            case Epoch():
                self._told[sender] = message
            case _:
                pass
        newest = max(self._told.values(), key=lambda epoch: epoch.number, default=None)
        voters = [worker for worker in self._told if newest and worker in newest.workers]
        if newest is None or 2 * len(voters) <= len(newest.workers):
            return False
        with self.ledger.together():
            self.ledger.govern(newest)
            self.ledger.note("trained", newest.step - 1)
            # their numbers are taken, and those below them may be
            self.ledger.note(PLACES, list(range(max({*newest.workers, *newest.joining}) + 1)))
        self.say(
            f"workers {sorted(voters)} tell of epoch {newest.number}, with workers {list(newest.workers)}: it goes on"
        )
        return True

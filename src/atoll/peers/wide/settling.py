"""What becomes of an exchange that somebody was to take part in who is gone, or does not reach the others.

Once all who are left have told how things stand: if all of them have everything, only the vote of who is gone is not
waited for; else who is gone is out, everywhere. Whoever reported that something was missing votes on nothing before it
is answered: so no exchange counts at one worker that is decided otherwise here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from atoll.peers.wide.ledger import Ledger
from atoll.peers.wide.messages import Committed, Message, Report, Settle
from atoll.wire import Key

Where = tuple[Key, tuple[int, ...]]
"""An exchange by its key and members: pairs of one round have a key in common."""


@dataclass
class Case:
    """An exchange that members have reported. `epoch`: in which it began; `reports`: those that are not answered yet;
    `silent`: whom each member said that it waits for, since when, and when last."""

    epoch: int
    reports: dict[int, Report] = field(default_factory=dict[int, Report])
    silent: dict[int, tuple[tuple[int, ...], float, float]] = field(
        default_factory=dict[int, tuple[tuple[int, ...], float, float]]
    )


@dataclass
class Settling:
    """Decides, and tells.

    Args: ledger: of what is decided. send, say, lease: as of the coordinator. gone: whether a worker has been gone
    since an epoch was agreed on.
    """

    ledger: Ledger
    send: Callable[[int, Message], None]
    say: Callable[[str], None]
    lease: float
    gone: Callable[[int, int], bool]
    _settled: dict[Where, Settle] = field(init=False)
    _cases: dict[Where, Case] = field(default_factory=dict[Where, Case])

    def __post_init__(self) -> None:
        self._settled = {(settle.key, settle.to): settle for settle in self.ledger.settled()}

    def forget(self) -> None:
        """The run begins again from an earlier state: what was decided of later rounds does not hold."""
        self.ledger.forget_rounds()
        self._settled.clear()
        self._cases.clear()

    def report(self, sender: int, report: Report, now: float) -> bool:
        """How an exchange stands at a worker. False if others went on without it."""
        where = (report.key, report.to)
        settled = self._settled.get(where, Settle(report.key, report.to, (), 0))
        if self.gone(sender, report.epoch) or any(sender in workers for workers, _ in settled.out):
            return False
        if report.version != _version(settled):
            self.send(sender, settled)
            return True
        case = self._cases.setdefault(where, Case(report.epoch))
        silent, since, last = case.silent.get(sender, (report.silent, now, now))
        goes_on = silent == report.silent and now - last <= 2 * self.lease
        case.reports[sender], case.silent[sender] = report, (report.silent, since if goes_on else now, now)
        self._decide(where)
        return True

    def committed(self, sender: int, told: Committed) -> None:
        """It counts, or is lost, at a worker, which has no reason to complain any more."""
        if different := self.ledger.commit(sender, told):
            self.say(f"{different}; they do not hold the same any more")
        where = (told.key, told.to)
        if case := self._cases.get(where):
            case.reports.pop(sender, None)
            case.silent.pop(sender, None)
            if case.silent:
                self._decide(where)
            else:
                del self._cases[where]

    def decide(self) -> None:
        """Somebody is gone: what that means for what was reported."""
        for where in list(self._cases):
            self._decide(where)

    def _decide(self, where: Where) -> None:
        key, to = where
        case, settled = self._cases[where], self._settled.get(where, Settle(key, to, (), 0))
        out = {worker for workers, _ in settled.out for worker in workers}
        gone = tuple(worker for worker in to if self.gone(worker, case.epoch) and worker not in out)
        left = [worker for worker in to if worker not in gone and worker not in out]
        if not gone:
            # whoever it waited for is there: let it go on, and hold what it said against nobody
            for worker, report in case.reports.items():
                self.send(worker, replace(settled, answers=report.number))
            case.reports.clear()
            return
        # where it counts already, all who were left had everything
        ended = self.ledger.committed(key, to)
        if any(worker not in case.reports and worker not in ended for worker in left):
            return
        counts = all(worker in ended or case.reports[worker].complete for worker in left)
        decided = Settle(key, to, (*settled.out, (gone, counts)), 0)
        self.ledger.settle(decided)
        self._settled[where] = decided
        del self._cases[where]
        for worker in to:
            self.send(worker, decided)
        self.say(f"{key} goes on without {list(gone)}" + (", whose contributions are in it" if counts and left else ""))

    def stalled(self, now: float) -> tuple[int, str] | None:
        """Who keeps others waiting though it is alive, and cannot be reached by them, is gone for them: which worker,
        and why."""
        for where, case in list(self._cases.items()):
            if all(now - last > 10 * self.lease for _, _, last in case.silent.values()):
                del self._cases[where]  # whoever still waits would have said so again
            elif (worst := self._worst(where, case)) is not None:
                del self._cases[where]
                return worst, f"{where[0]} waits for it, and it does not reach the others"
        return None

    def _worst(self, where: Where, case: Case) -> int | None:
        blamed: dict[int, int] = {}
        for worker, (silent, since, last) in case.silent.items():
            if last - since >= self.lease:
                for other in silent:
                    blamed[other] = blamed.get(other, 0) + 1
                    blamed[worker] = blamed.get(worker, 0)
        if not blamed or any(self.gone(worker, case.epoch) for worker in where[1]):
            return None
        return max(blamed, key=lambda worker: (blamed[worker], worker))


def _version(settled: Settle) -> int:
    return sum(not counts for _, counts in settled.out)

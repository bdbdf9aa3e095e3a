"""`atoll simulate`: real training of all workers in this process, on the virtual time of a network with faults."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.cli.options import Options, Simulating
from atoll.errors import CheckpointError, UsageError
from atoll.faults import Faults
from atoll.files import write_whole
from atoll.peers.faults import Dropping
from atoll.peers.memory import Hub
from atoll.sim.files import network_text, read_network
from atoll.sim.network import Between, Island, Network
from atoll.sim.numerics import Real
from atoll.sim.pace import Pace
from atoll.sim.run import Simulation, check
from atoll.sim.run import run as simulate
from atoll.sim.runner import Course
from atoll.sim.trace import Trace
from atoll.sim.trainee import Trainee
from atoll.train.dynamics import constant
from atoll.train.metrics import LOG_EVERY, Recorder
from atoll.train.run import Result, Run, Simulated
from atoll.train.team import trouble
from atoll.train.trainer import Trainer
from atoll.train.worker import Worker
from atoll.units import bits_per_second, seconds
from atoll.wire import Event, Key, Landed, Lost


@dataclass(frozen=True)
class Scene:
    """Where a run is simulated. Args: network; faults: what goes wrong, and when."""

    network: Network
    faults: Faults = Faults()


def scene(asked: Simulating, run: Run) -> Scene:
    """The network and faults that were asked for, for the workers of a run.

    Raises: UsageError if they do not fit.
    """
    if run.dynamics.pool != constant():
        raise UsageError(
            "--pool changes who takes part between rounds, but on virtual time a faults file says when; write deaths "
            "and rejoins into --faults"
        )
    network = _network(asked, run)
    check(run.method.strategy, network, run.faults)
    return Scene(network, run.faults)


def at_home(options: Options, asked: Simulating) -> Options:
    """The options with as many workers as the network file has islands, if nobody said how many."""
    if options.workers or not asked.network or not Path(asked.network).exists():
        return options
    return replace(options, workers=len(read_network(Path(asked.network)).islands))


def _network(asked: Simulating, run: Run) -> Network:
    if asked.network is None:
        raise UsageError("there is no network to simulate; give --network 100Mbit,50ms, or a file that describes one")
    path = Path(asked.network)
    if path.suffix == ".toml" or path.exists():
        given = {"--step-time": asked.step_time, "--jitter": asked.jitter, "--speeds": run.dynamics.speeds}
        if flag := next((flag for flag, value in given.items() if value), None):
            raise UsageError(f"{flag} was given, but the islands of {path} have their own; leave it out")
        network = read_network(path)
        if len(network.islands) < run.workers:
            raise UsageError(
                f"{path} has {len(network.islands)} islands, but the run has {run.workers} workers; give --workers "
                f"{len(network.islands)}, or describe more islands"
            )
        return network.first(run.workers)
    if asked.step_time is None:
        raise UsageError("--network was given without --step-time; give the seconds of an inner step, such as 0.1")
    bandwidth, _, latency = asked.network.partition(",")
    if latency.isdigit():
        raise UsageError(f"--network had the latency {latency!r}, which has no unit; write {bandwidth},{latency}ms")
    bits = bits_per_second("--network", bandwidth)
    islands = tuple(
        Island(f"site {worker}", bits, bits, asked.step_time / float(run.dynamics.pace(worker)), asked.jitter)
        for worker in range(run.workers)
    )
    return Network(islands, elsewhere=Between(latency=seconds("--network", latency) if latency else 0.0))


def as_trained(run: Run) -> Run:
    """The same for a trainer: faults are the simulator's, and workers at different steps are not compared."""
    return replace(run, probe=0, faults=Faults())


class _Trained(Trainee):
    """A worker as the simulator sees it.

    Args: tick_s: seconds of an inner step of the fastest island, where the learning rate goes by time: where a keeper
    lets everyone go on, so that the slower ones come to the end of its schedule with the others.
    """

    def __init__(
        self, worker: Worker, trainer: Trainer, record: Recorder, said: set[Key], tick_s: float | None
    ) -> None:
        super().__init__(worker.sync.state)
        self.worker, self._trainer, self._record, self._said = worker, trainer, record, said
        self._tick_s, self._tokens = tick_s, 0

    def train(self, steps: int, since: float, now: float) -> None:
        for done in range(steps):
            self.backward()
            self._update(self._ticks(since + (now - since) * done / steps))

    def backward(self) -> None:
        self._tokens = self.worker.backward()

    def update(self) -> None:
        self._update(self.state.step)

    def _ticks(self, now: float) -> int:
        if self._tick_s is None:
            return self.state.step
        return min(self._trainer.run.steps - 1, int(now / self._tick_s + 1e-6))

    def _update(self, done: int) -> None:
        self.worker.update(done)
        self.worker.sync.after(self._tokens)
        self._trainer.tokens += self._tokens

    def join(self, other: "_Trained") -> None:
        self.worker.join(other.worker)

    def told(self, now: float, events: Sequence[Event]) -> None:
        number, self._record.now = self.worker.number, now
        self._trainer.team.sent[number] += sum(event.sent for event in events if isinstance(event, Landed))
        shown = list(events) if number == 0 else []
        self._said.update(event.key for event in shown)
        missed = [
            replace(event, why=f"worker {number}: {event.why}") if isinstance(event, Lost) else event
            for event in trouble({number: events}, self._said)
        ]
        self._record.events(self.state.step, [*shown, *missed], None)


def keep_scene(out: Path, where: Scene) -> None:
    """Write network and faults into a run directory, or make sure that they are those it has.

    Raises: CheckpointError if they are not.
    """
    for name, text in (("network.toml", network_text(where.network)), ("faults.toml", where.faults.text())):
        path = out / name
        if path.exists() and path.read_text() != text:
            raise CheckpointError(
                f"{out} holds a run on virtual time with another {path.stem}; compare {path} with what you asked for, "
                "or give another --out"
            )
        if not path.exists():
            write_whole(path, lambda beside, text=text: beside.write_text(text))


def simulated(
    run: Run, where: Scene, *, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> tuple[Result, Trace]:
    """Train all workers of a run, each step when its island would take it.

    Args: where: the network, and what goes wrong. out: run directory; nothing is written without one. resume: begin
    again in one that holds the beginning of this run. quiet: show nothing.
    Returns: the result, with simulated seconds beside its curve, and the trace.
    Raises: as `atoll.train.trainer.train`; GroupError if the islands wait for what never comes.
    """
    run, loss = as_trained(run), where.faults.loss
    hub = Hub(run.workers, Dropping(loss, where.faults.seed) if loss else None)
    groups = [hub.group(worker) for worker in range(run.workers)]
    trainer = Trainer(run, groups, build=None, out=out, save_every=None)
    record = trainer.open(resume=resume, quiet=quiet)
    if out:
        keep_scene(out, where)
    keeper = groups[0].keeper() if trainer.team.keeping else None
    tick_s = min(island.step_s for island in where.network.islands) if keeper else None
    with record:
        watch, said = _Watch(trainer, record), set[Key]()
        trainees = [_Trained(worker, trainer, record, said, tick_s) for worker in trainer.workers]
        course = Course(run.steps, pace=Pace(run.seed), faults=where.faults, every=watch.every)
        ended = simulate(
            trainees, where.network, Real(groups, keeper), course, trainer.team.keeping, keeps=True, watch=watch
        )
        trace = ended.trace
        trainer.spent = time.monotonic() - watch.began
        watch.evaluate(trace.seconds, ended, run.steps)
        return trainer.finish(Simulated(trace.seconds, trace.utilisation, tuple(watch.times))), trace


class _Watch:
    """Evaluates when the last of those who are up to date has come so far, and shows how far they are.

    Attributes: every: inner steps between two looks. times: of the evaluations. began: real time, and what was spent on
    evaluations is no training time.
    """

    def __init__(self, trainer: Trainer, record: Recorder) -> None:
        self.every = math.gcd(LOG_EVERY, trainer.evaluate_every)
        self.times, self.began = list[float](), time.monotonic()
        self._trainer, self._record, self._seen = trainer, record, 0

    def __call__(self, now: float, simulation: Simulation) -> None:
        trainer = self._trainer
        current = [trainer.workers[number] for number in simulation.current]
        step = min(worker.sync.state.step for worker in current)
        if step // self.every > self._seen:
            self._seen, self._record.now = step // self.every, now
            speed = trainer.tokens / (time.monotonic() - self.began)
            self._record.step(step, [worker.loss.item() for worker in current], speed)
        if step < trainer.run.steps and step // trainer.evaluate_every > len(self.times):
            self.evaluate(now, simulation, step)

    def evaluate(self, now: float, simulation: Simulation, step: int) -> None:
        """The shared model of those who are up to date."""
        since = time.monotonic()
        self._trainer.team.active = [self._trainer.workers[number] for number in simulation.current]
        self._record.now = now
        self.times.append(now)
        self._trainer.evaluate(step, self._record)
        self.began += time.monotonic() - since

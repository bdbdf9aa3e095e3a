"""The process of one peer: it joins the network, connects by an engine, and exchanges whenever it is told to.

`python -m bench.engines.peer DESCRIPTOR`: of a socket, by which `bench.wide` sends a `Job`, two words for each
exchange, to make it ready and to begin, and one to leave; it is `Told` of each. If the socket ends, the peer does. It
is the first process of its namespace, so all that its engine has started ends with it.
"""

import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from bench import link
from bench.engines import Job, Told

WANTED = "bbr"


def main(bench: Connection) -> None:
    job: Job = bench.recv()
    words: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(bench, words), daemon=True).start()
    link.join(job.door, job.seat.rank)
    control = tuned()
    os.environ["GLOO_SOCKET_IFNAME"] = link.DEVICE

    # After the namespace has been entered, so that no thread is left outside.
    connect = importlib.import_module(f"bench.engines.{job.engine}").connect
    import torch

    torch.set_num_threads(1)
    mean, own = sum(job.seat.members) / len(job.seat.members), torch.empty(job.seat.elements)
    with connect(job.seat) as ready:
        bench.send(control)
        for _ in range(job.rounds):
            words.get()
            exchange = ready(own.fill_(job.seat.rank))
            bench.send("ready")
            words.get()
            before, began = cpu_s(), time.monotonic()
            result = exchange()
            ended, after = time.monotonic(), cpu_s()
            right = result is None or bool((result - mean).abs().max() < 1e-3)
            bench.send(Told(began, ended, after - before, right))
        words.get()  # an engine may need this peer for as long as another is at work


def _listen(bench: Connection, words: SimpleQueue[str]) -> None:
    """The thread: pass on what the bench says; end all with it."""
    try:
        while True:
            words.put(bench.recv())
    except (EOFError, OSError):
        os._exit(1)


def tuned() -> str:
    """Have new connections begin as between strangers, under BBR where the kernel has it; returns what they are under.

    The settings are those of the process's own namespace.
    """
    tcp = Path("/proc/sys/net/ipv4")
    (tcp / "tcp_no_metrics_save").write_text("1")
    control = tcp / "tcp_congestion_control"
    if WANTED in (tcp / "tcp_available_congestion_control").read_text().split():
        control.write_text(WANTED)
    return control.read_text().strip()


def cpu_s() -> float:
    """Seconds of CPU, of user and system, that all processes of this namespace have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            ticks += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))

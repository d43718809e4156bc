"""Real servers, workers under load and signals: where the faults of bench.crashes and the moves of bench.moves happen."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.crash_worker import TABLE, live
from bench.history_check import KEYS, LIVES, WIDTH, Life, check, failover, once, outlast
from echelon.errors import ServerError
from echelon.server import Client, Init, Rule, Servers, Table, connect
from echelon.server.protocol.hashing import shard_of

#: A stop longer than this is taken for a death (0.6 s without a sign of life), with a margin.
NOTICED = 0.75
#: Seconds after which a schedule that has not ended is taken not to end.
ENDLESS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to someone `after` so many seconds; a stop or a dead controller lasts `lasting`."""

    after: float
    what: str  # kill, stop, cut
    whom: str  # server, worker, controller
    which: int = 0
    lasting: float = 0.0

    def __str__(self) -> str:
        return f"{self.after:.2f}s {self.what} {self.whom} {self.which}" + (
            f" for {self.lasting:.2f}s" if self.lasting else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The faults of one run, and how long the load goes on."""

    number: int
    faults: tuple[Fault, ...]
    seconds: float


def cut(pid: int, dice: random.Random) -> int:
    """Shut down connections inside a process: all of them, or one. How many."""
    with contextlib.ExitStack() as stack:
        handle = os.pidfd_open(pid)
        stack.callback(os.close, handle)
        found = []
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    continue
                copy = ctypes.CDLL(None, use_errno=True).syscall(438, handle, int(entry), 0)  # pidfd_getfd
                if copy < 0:
                    continue
                connection = stack.enter_context(socket.socket(fileno=copy))
                connection.getpeername()
                found.append(connection)
        chosen = found if dice.random() < 0.5 else dice.sample(found, min(1, len(found)))
        for connection in chosen:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return len(chosen)


@dataclass(slots=True)
class Result:
    """What one schedule showed."""

    schedule: Schedule
    wrong: list[str] = field(default_factory=list)
    #: (what a server died of, seconds until pushes were acknowledged again; None: they never were)
    failovers: list[tuple[str, float | None]] = field(default_factory=list)
    pushes: int = 0
    reads: int = 0
    seconds: float = 0.0


class Yard:
    """Servers, a controller and a table that all schedules use; workers anew for each."""

    def __init__(self, folder: Path, *, servers: int, replicas: int, workers: int, staleness: int | None) -> None:
        self.folder, self.workers, self.replicas, self.count = folder, workers, replicas, servers
        self.servers = Servers(
            servers,
            replicas=replicas,
            staleness=staleness,
            folder=Path(tempfile.mkdtemp(prefix="servers-", dir=folder)),
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["bench.crash_worker"])
        try:
            self.client: Client = connect(self.servers.address, secret=self.servers.secret, worker="judge")
            zero = Init(kind="zeros")
            self.client.declare(Table(name=TABLE, dim=WIDTH, rule=Rule(kind="sgd", lr=1.0), init=zero))
            self.client.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        self.servers.close()

    def names(self) -> list[str]:
        """The servers that run, in a fixed order."""
        return sorted(name for name, process in self.servers.servers.items() if process.process.poll() is None)

    def whole(self) -> bool:
        """Bring back what is dead, and say whether every chain is complete again."""
        while len(self.names()) < self.count:
            self.servers.start()
        state = self.client.map
        seats = set(self.names()) <= set(state.servers)
        return seats and not any(state.learners) and all(len(chain) == self.replicas for chain in state.chains)

    def run(self, schedule: Schedule) -> Result:
        """One schedule: load, faults, peace, judgement."""
        began = time.monotonic()
        result = Result(schedule)
        with connect(self.servers.address, secret=self.servers.secret, worker="judge", timeout=ENDLESS) as client:
            self.client = client
            self.until(self.whole, "the chains to be complete before the schedule", result)
            # The judge does not train: it must not hold back the clocks of those who do.
            lives: list[tuple[Any, Any, Path, int]] = []
            current: dict[int, int] = {}

        def begin(slot: int) -> None:
            column = len(lives)
            path = self.folder / f"{schedule.number}-{column}.jsonl"
            here, there = self._context.Pipe()
            base = schedule.number * 10 * KEYS
            seed = schedule.number * LIVES + column
            who = (self.servers.address, self.servers.secret, f"worker{slot}")
            process = self._context.Process(target=live, args=(*who, base, column, seed, str(path), there), daemon=True)
            process.start()
            current[slot] = column
            lives.append((process, here, path, column))

        for slot in range(self.workers):
            begin(slot)
        self.until(
            lambda: all(path.exists() and path.stat().st_size for *_, path, _ in lives), "workers to begin", result
        )
        deaths = self._faults(schedule, lives, current, begin)
        records = {column: path for _, _, path, column in lives}
        if not outlast(
            records,
            [when for _, when in deaths],
            patience=ENDLESS,
            going=lambda: any(process.is_alive() for process, *_ in lives),
        ):
            result.wrong.append(
                f"no push was acknowledged after a server's death, for {ENDLESS:g} s or until the load ended"
            )
        self.stop(lives, result)
        histories = [Life.read(path, column) for column, path in records.items()]
        result.pushes = sum(len(life.pushes) for life in histories)
        result.reads = sum(len(life.reads) for life in histories)
        result.failovers = [(what, failover(histories, when)) for what, when in deaths]
        self.judge(schedule, histories, result)
        result.seconds = time.monotonic() - began
        return result

    def _faults(
        self,
        schedule: Schedule,
        lives: list[tuple[Any, Any, Path, int]],
        current: dict[int, int],
        begin: Callable[[int], None],
    ) -> list[tuple[str, float]]:
        """Let the faults happen at their times. When servers died or seemed to."""
        began, deaths = time.monotonic(), []
        dice = random.Random(schedule.number)
        names = self.names()
        later: list[tuple[float, Callable[[], None]]] = []
        todo: list[tuple[float, Callable[[], None]]] = []

        def strike(fault: Fault) -> None:
            process = self._target(fault, names, lives, current)
            if process is None:
                return
            if fault.what == "cut":
                with contextlib.suppress(OSError):
                    cut(process.pid, dice)
                return
            number = signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            if fault.whom == "server" and (fault.what == "kill" or fault.lasting > NOTICED):
                deaths.append((fault.what, time.monotonic()))
            if fault.what == "stop":
                later.append((began + fault.after + fault.lasting, lambda: _continue(process)))
            elif fault.whom == "worker":
                later.append((began + fault.after + 0.05, lambda: begin(fault.which)))
            elif fault.whom == "server":
                later.append((began + fault.after + 0.1, lambda: self.servers.start()))
            elif fault.whom == "controller":
                later.append((began + fault.after + fault.lasting, self.servers.restart_controller))

        todo = [(began + fault.after, lambda fault=fault: strike(fault)) for fault in schedule.faults]
        while todo or later or time.monotonic() < began + schedule.seconds:
            now = time.monotonic()
            for queue in (todo, later):
                for each in [each for each in queue if each[0] <= now]:
                    queue.remove(each)
                    each[1]()
            time.sleep(0.005)
        return deaths

    def _target(self, fault: Fault, names: list[str], lives: list[Any], current: dict[int, int]) -> Any:
        if fault.whom == "controller":
            return self.servers.controller
        if fault.whom == "worker":
            return lives[current[fault.which]][0] if len(lives) < LIVES else None
        return self.servers.servers[names[fault.which % len(names)]]

    def stop(self, lives: list[tuple[Any, Any, Path, int]], result: Result) -> None:
        """Peace: the load ends when its last push is acknowledged."""
        for process, pipe, _, _ in lives:
            if process.is_alive():
                with contextlib.suppress(OSError):
                    pipe.send("stop")
        deadline = time.monotonic() + ENDLESS
        for process, _, path, _ in lives:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                result.wrong.append(f"{path.name}: the worker did not end within {ENDLESS:g} s")
                process.kill()
                process.join()
            elif process.exitcode not in (0, -signal.SIGKILL):
                result.wrong.append(f"{path.name}: the worker failed with {process.exitcode}")

    def judge(self, schedule: Schedule, histories: Sequence[Life], result: Result) -> None:
        """Whether the histories can be, every chain is complete and all replicas are equal."""
        with connect(self.servers.address, secret=self.servers.secret, worker="judge", timeout=ENDLESS) as client:
            self.client = client
            ids = schedule.number * 10 * KEYS + np.arange(KEYS)
            final = once(client.pull({TABLE: ids})[TABLE])
            result.wrong += check(histories, final, shard_of(ids, client.map.num_shards))
            self.until(self.whole, "the chains to be complete again", result)
            digests: dict[int, dict[str, str]] = {}

            def equal() -> bool:
                # Log entries that no worker waits for (who has left) may still be under way.
                nonlocal digests
                digests = client.digests()
                return all(len(set(those.values())) == 1 for those in digests.values())

            self.until(equal, "replicas to be equal", result, patience=5.0)
            unequal = {shard: those for shard, those in digests.items() if len(set(those.values())) != 1}
            if unequal:
                result.wrong.append(f"replicas of {len(unequal)} shards differ, e.g. {next(iter(unequal.items()))}")
            if any(len(those) != self.replicas for those in digests.values()):
                result.wrong.append("some replicas gave no digest")

    def until(self, ready: Callable[[], bool], what: str, result: Result, *, patience: float = ENDLESS) -> None:
        """Wait for something; it is wrong if it does not come to be in time."""
        deadline = time.monotonic() + patience
        while not ready():
            if time.monotonic() > deadline:
                result.wrong.append(f"waited {patience:g} s for {what}")
                return
            with contextlib.suppress(ServerError):  # the judge is away while workers train
                self.client.last_acknowledged()  # takes in news
            time.sleep(0.01)


def _continue(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)

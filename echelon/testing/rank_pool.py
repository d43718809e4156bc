"""Ranks for tests: processes started once and reused, because four cold ranks cost half a minute.

    with Pool() as pool:
        losses = pool.run(4, "my_tests:train", "dp=4 zero=3")     # train(world, "dp=4 zero=3") on each of four ranks

Each run has a process group of its own (gloo, met through a file), so nothing leaks from one into the next. When a rank fails
the run ends at once: the rank that failed first is blamed, with its traceback and its output, and ranks that hang are replaced.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from echelon.errors import LaunchError
from echelon.launchers.environment import child_environment
from echelon.testing.pool_worker import STACKS, Answer, Task
from echelon.world import World

#: Seconds that the other ranks get to notice a failure by themselves before they are replaced.
GRACE = 2.0
#: Seconds that a cold rank may take to import torch, on a loaded machine.
COLD = 120.0

#: What gloo reports of another rank that left.
_CLOSED = "Connection closed by peer"


class RankError(LaunchError):
    """The first rank that failed: `rank`, its `error` (None if it died without one), `outputs` of all ranks."""

    def __init__(
        self,
        rank: int,
        reason: str,
        error: BaseException | None,
        outputs: Sequence[str],
        involved: Sequence[int] = (),
    ) -> None:
        """`involved`: other ranks whose output may show why."""
        shown = [each for each in (rank, *involved) if outputs[each].strip()]
        said = "".join(f"\nrank {each} printed:\n{outputs[each]}" for each in shown)
        super().__init__(f"rank {rank} of {len(outputs)} {reason}{said}")
        self.rank, self.error, self.outputs = rank, error, tuple(outputs)


class _Worker:
    """A process of the pool and the parent's end of its pipe."""

    def __init__(self, log: Path) -> None:
        self.pipe, theirs = Pipe()
        self.log = log
        paths = os.pathsep.join(part or os.getcwd() for part in sys.path)
        environment = child_environment(threads=1) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from echelon.testing.pool_worker import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a group of its own: it and whatever it starts are killed together
            )
        theirs.close()
        self.ready = False

    def receive(self) -> Any:
        return pickle.loads(self.pipe.recv_bytes())

    def await_ready(self) -> None:
        """Block until the process has imported torch and listens."""
        if not self.ready:
            if not self.pipe.poll(COLD):
                raise LaunchError(f"a rank did not start within {COLD:.0f} s; it printed:\n{self.log.read_text()}")
            try:
                self.receive()
            except EOFError:
                raise LaunchError(f"a rank died while starting; it printed:\n{self.log.read_text()}") from None
            self.ready = True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


class Pool:
    """Rank processes that are started on first need and reused by every `run` until `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-ranks-"))
        self._workers: list[_Worker] = []
        self._runs = 0
        self._started = 0
        #: What each rank of the last run printed.
        self.outputs: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        ranks: int,
        target: str | Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `target(world, *args, **kwargs)` on each of `ranks` processes; the results in rank order.

        `target` is "package.module:function" or a module's function. `group=False` leaves the process group to the callee; a
        world of one never has one, as outside of tests. Raises RankError for the first rank that fails or outlasts `timeout`.
        """
        if not isinstance(target, str):
            target = _name(target)
        self._grow(ranks)
        self._runs += 1
        meeting = self._folder / f"run-{self._runs}"
        meeting.mkdir()
        team = self._workers[:ranks]
        marks = [worker.log.stat().st_size for worker in team]
        for rank, worker in enumerate(team):
            world = World(
                rank=rank,
                size=ranks,
                local_rank=rank,
                local_size=ranks,
                launched=True,
                address=f"file://{meeting}/world" if ranks > 1 else "",
            )
            task = Task(
                number=self._runs,
                world=world,
                target=target,
                args=args,
                kwargs=kwargs,
                path=tuple(sys.path),
                folder=os.getcwd(),
                group=f"file://{meeting}/group" if group and ranks > 1 else None,
                timeout=timeout,
            )
            worker.pipe.send_bytes(pickle.dumps(task))
        answers, busy, late = _collect(team, timeout)
        if late:
            _print_stacks([team[rank] for rank in busy])
        self.outputs = [_read_from(worker.log, mark) for worker, mark in zip(team, marks, strict=True)]
        codes = [worker.process.poll() for worker in team]
        self._replace(team, busy)
        shutil.rmtree(meeting, ignore_errors=True)
        self._blame(answers, codes, late, timeout)
        return [answer.result for answer in answers if answer is not None]

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, ranks: int) -> None:
        while len(self._workers) < ranks:
            self._workers.append(self._start())
        for worker in self._workers[:ranks]:
            worker.await_ready()

    def _start(self) -> _Worker:
        self._started += 1
        return _Worker(self._folder / f"worker-{self._started}.log")

    def _replace(self, team: Sequence[_Worker], busy: Sequence[int]) -> None:
        """New processes for ranks that died or hang; they start while the caller goes on."""
        for rank, worker in enumerate(team):
            if rank in busy or worker.process.poll() is not None:
                worker.kill()
                self._workers[rank] = self._start()

    def _blame(self, answers: Sequence[Answer | None], codes: Sequence[int | None], late: bool, timeout: float) -> None:
        # A rank that died comes first: the others' errors are lost connections to it.
        for rank, code in enumerate(codes):
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                raise RankError(rank, how, None, self.outputs)
        failures = [(answer.raised, rank, answer) for rank, answer in enumerate(answers) if answer and answer.traceback]
        if failures:
            # A rank that fails closes its connections before its error arrives here.
            _, rank, answer = min(failures, key=lambda each: (_CLOSED in each[2].traceback, *each[:2]))
            raise RankError(rank, f"failed:\n{answer.traceback}", answer.error, self.outputs) from answer.error
        if late:
            stuck = [rank for rank, answer in enumerate(answers) if answer is None]
            names = ", ".join(map(str, stuck))
            reason = f"did not finish within {timeout:g} s (ranks still busy: {names})"
            raise RankError(stuck[0], reason, None, self.outputs, stuck[1:])


def _collect(team: Sequence[_Worker], timeout: float) -> tuple[list[Answer | None], list[int], bool]:
    """Each rank's answer (None where it died or hangs), the ranks that are still busy, and whether the time ran out before any failed."""
    answers: list[Answer | None] = [None] * len(team)
    pending: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(team)}
    deadline, failed = time.monotonic() + timeout, False
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            return answers, list(pending.values()), not failed and not all(answers)
        for pipe in ready:
            rank = pending[pipe]
            try:
                message = team[rank].receive()
            except (EOFError, OSError):
                message = None
                team[rank].process.wait()
            if isinstance(message, Answer):
                answers[rank] = message
            else:  # tidied up, or gone
                del pending[pipe]
            if not failed and (message is None or (isinstance(message, Answer) and message.traceback)):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE)
            if all(answers):
                deadline = time.monotonic() + GRACE  # only tidying is left, and that must not cost the answers
    return answers, [], False


def _print_stacks(workers: Sequence[_Worker]) -> None:
    """Have ranks that hang print where they are, into their output."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(STACKS)
    time.sleep(0.5)  # until they are in the output, which is read next


def _name(function: Callable[..., Any]) -> str:
    """How another process finds a function. Under `python -m package.module` that module goes by "__main__" here only."""
    module = function.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is None:
            raise LaunchError(
                f"{function.__qualname__} is in the script itself: put it into a module, where ranks can import it"
            )
        module = spec.name
    return f"{module}:{function.__qualname__}"


def _read_from(log: Path, mark: int) -> str:
    with log.open("rb") as stream:
        stream.seek(mark)
        return stream.read().decode(errors="replace")

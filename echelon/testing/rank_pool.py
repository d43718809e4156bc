"""Ranks for tests: processes started once and reused, because four cold ranks cost half a minute.

    with Pool() as pool:
        losses = pool.run(4, "my_tests:train", "dp=4 zero=3")     # train(world, "dp=4 zero=3") on each of four ranks

Each run has its own gloo group, which meets at a file, so nothing leaks from one into the next. When a rank fails, the run ends at
once with the traceback and the output of the rank that failed first, and ranks that hang are replaced.
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
from typing import Any, Self

from echelon.errors import LaunchError
from echelon.launchers.environment import child_environment
from echelon.testing.pool_worker import STACK_DUMP_SIGNAL, Task, TaskResult
from echelon.world import World

#: Seconds in which the other ranks may notice a failure by themselves before they are replaced.
FAILURE_GRACE_SECONDS = 2.0
#: Seconds that a cold rank may take to import torch, on a loaded machine.
STARTUP_TIMEOUT = 120.0

#: What gloo reports of another rank that left.
_PEER_CLOSED_MESSAGE = "Connection closed by peer"


class RankError(LaunchError):
    """The first rank that failed: `rank`, its `error` (None if it died without one), `outputs` of all ranks."""

    def __init__(
        self, rank: int, reason: str, error: BaseException | None, outputs: Sequence[str], others: Sequence[int] = ()
    ) -> None:
        """`others`: ranks whose output may show why."""
        shown_ranks = [shown for shown in (rank, *others) if outputs[shown].strip()]
        output_text = "".join(f"\nrank {shown} printed:\n{outputs[shown]}" for shown in shown_ranks)
        super().__init__(f"rank {rank} of {len(outputs)} {reason}{output_text}")
        self.rank, self.error, self.outputs = rank, error, tuple(outputs)


class _Worker:
    """A process of the pool and the parent's end of its pipe."""

    def __init__(self, log: Path) -> None:
        self.log, (self.pipe, worker_end) = log, Pipe()
        code = f"from echelon.testing.pool_worker import main; main({worker_end.fileno()})"
        paths = os.pathsep.join(directory or os.getcwd() for directory in sys.path)
        environment = child_environment(threads=1) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        with log.open("ab") as output:
            # A process group of its own, killed with everything it starts.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[worker_end.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True,
            )  # fmt: skip
        worker_end.close()
        self.ready = False

    def receive(self) -> Any:
        return pickle.loads(self.pipe.recv_bytes())

    def await_ready(self) -> None:
        """Block until the process has imported torch and listens."""
        if self.ready:
            return
        problem = f"did not start within {STARTUP_TIMEOUT:.0f} s"
        with contextlib.suppress(EOFError):
            if self.pipe.poll(STARTUP_TIMEOUT):
                problem = "died while starting"
                self.receive()
                self.ready = True
        if not self.ready:
            raise LaunchError(f"a rank {problem}; it printed:\n{self.log.read_text()}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


class RankPool:
    """Rank processes that are started on first need and reused by every `run` until `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-ranks-"))
        self._workers: list[_Worker] = []
        self._run_count = self._started_count = 0
        #: What each rank of the last run printed.
        self.outputs: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        ranks: int,
        target: str | Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        init_process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `target(world, *args, **kwargs)` on each of `ranks` processes; the results in rank order.

        `target` is "package.module:function" or a module's function. `init_process_group=False` leaves that to the callee; a
        world of one never has a group. Raises RankError for the first rank that fails or outlasts `timeout`.
        """
        if not isinstance(target, str):
            target = _target_name(target)
        self._ensure_workers(ranks)
        self._run_count += 1
        rendezvous = self._folder / f"run-{self._run_count}"
        rendezvous.mkdir()
        workers = self._workers[:ranks]
        log_offsets = [worker.log.stat().st_size for worker in workers]
        for rank, worker in enumerate(workers):
            address = f"file://{rendezvous}/world" if ranks > 1 else ""
            world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, launched=True, address=address)
            init_method = f"file://{rendezvous}/group" if init_process_group and ranks > 1 else None
            task = Task(
                run_number=self._run_count, world=world, target=target, args=args, kwargs=kwargs, sys_path=tuple(sys.path),
                working_directory=os.getcwd(), init_method=init_method, timeout=timeout,
            )  # fmt: skip
            worker.pipe.send_bytes(pickle.dumps(task))
        task_results, busy_ranks, timed_out = _collect_results(workers, timeout)
        if timed_out:
            _print_stacks([workers[rank] for rank in busy_ranks])
        self.outputs = [_read_log_from(worker.log, offset) for worker, offset in zip(workers, log_offsets, strict=True)]
        exit_codes = [worker.process.poll() for worker in workers]
        self._replace_workers(workers, busy_ranks)
        shutil.rmtree(rendezvous, ignore_errors=True)
        self._raise_first_failure(task_results, exit_codes, timed_out, timeout)
        return [task_result.result for task_result in task_results if task_result is not None]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ensure_workers(self, ranks: int) -> None:
        while len(self._workers) < ranks:
            self._workers.append(self._start_worker())
        for worker in self._workers[:ranks]:
            worker.await_ready()

    def _start_worker(self) -> _Worker:
        self._started_count += 1
        return _Worker(self._folder / f"worker-{self._started_count}.log")

    def _replace_workers(self, workers: Sequence[_Worker], busy_ranks: Sequence[int]) -> None:
        """New processes for ranks that died or hang; they start while the caller goes on."""
        for rank, worker in enumerate(workers):
            if rank in busy_ranks or worker.process.poll() is not None:
                worker.kill()
                self._workers[rank] = self._start_worker()

    def _raise_first_failure(
        self, results: Sequence[TaskResult | None], exit_codes: Sequence[int | None], timed_out: bool, timeout: float
    ) -> None:
        # A rank that died comes first: the others' errors are lost connections to it.
        for rank, code in enumerate(exit_codes):
            if code is not None:
                cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                raise RankError(rank, cause, None, self.outputs)
        failures = [(result, rank) for rank, result in enumerate(results) if result and result.traceback]
        if failures:
            # A rank that fails closes its connections before its error arrives here.
            result, rank = min(failures, key=lambda f: (_PEER_CLOSED_MESSAGE in f[0].traceback, f[0].raised_at, f[1]))
            raise RankError(rank, f"failed:\n{result.traceback}", result.error, self.outputs) from result.error
        if timed_out:
            hung = [rank for rank, result in enumerate(results) if result is None]
            reason = f"did not finish within {timeout:g} s (ranks still busy: {', '.join(map(str, hung))})"
            raise RankError(hung[0], reason, None, self.outputs, hung[1:])


def _collect_results(workers: Sequence[_Worker], timeout: float) -> tuple[list[TaskResult | None], list[int], bool]:
    """Each rank's result (None where it died or hangs), the ranks that are still busy, and whether the time ran out before any failed."""
    results: list[TaskResult | None] = [None] * len(workers)
    rank_by_pipe: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline, has_failed = time.monotonic() + timeout, False
    while rank_by_pipe:
        ready_pipes = wait(list(rank_by_pipe), max(0.0, deadline - time.monotonic()))
        if not ready_pipes:
            return results, list(rank_by_pipe.values()), not has_failed and not all(results)
        for pipe in ready_pipes:
            rank = rank_by_pipe[pipe]
            try:
                message = workers[rank].receive()
            except (EOFError, OSError):
                message = None
                workers[rank].process.wait()
            if isinstance(message, TaskResult):
                results[rank] = message
            else:  # tidied up, or gone
                del rank_by_pipe[pipe]
            if not has_failed and (message is None or (isinstance(message, TaskResult) and message.traceback)):
                has_failed, deadline = True, min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
            if all(results):  # only cleaning up is left, which must not cost the results
                deadline = time.monotonic() + FAILURE_GRACE_SECONDS
    return results, [], False


def _print_stacks(workers: Sequence[_Worker]) -> None:
    """Make ranks that hang print their stacks into their output."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(STACK_DUMP_SIGNAL)
    time.sleep(0.5)  # until they are in the output, which is read next


def _target_name(function: Callable[..., Any]) -> str:
    """How another process finds a function. Under `python -m package.module` that module goes by "__main__" here only."""
    module = function.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is None:
            name = function.__qualname__
            raise LaunchError(f"{name} is in the script itself: put it into a module, where ranks can import it")
        module = spec.name
    return f"{module}:{function.__qualname__}"


def _read_log_from(log: Path, offset: int) -> str:
    with log.open("rb") as stream:
        stream.seek(offset)
        return stream.read().decode(errors="replace")

"""Runs tasks that several processes share, of one command or of independent ones, each once.

A process locks a task while it works on it. Locks end with their process: another one redoes what a killed process left unfinished.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from echelon.errors import DataError
from echelon.files import acquire_lock, describe_holders

#: Seconds of waiting for another process's task before a warning.
_WARN_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Makes the file `target`; `is_done`: whether it exists. `run` yields the progress since it last did."""

    target: Path
    is_done: Callable[[], bool]
    run: Callable[[], Iterator[int]]

    @property
    def lock(self) -> Path:
        return self.target.with_name(f".{self.target.stem}.lock")


def run_tasks(tasks: Sequence[Task], processes: int) -> Iterator[int]:
    """Do what no other process does, until everything is done; yields progress."""
    processes = min(processes, len(tasks))
    return _run_tasks_in_processes(tasks, processes) if processes > 1 else _run_tasks_here(tasks)


def _run_tasks_here(tasks: Sequence[Task]) -> Iterator[int]:
    last_progress, has_warned = time.monotonic(), False
    remaining = list(tasks)
    while remaining:
        locked_elsewhere = []
        for task in remaining:
            try:
                lock = acquire_lock(task.lock)
            except TimeoutError:
                locked_elsewhere.append(task)
                continue
            with lock:
                if not task.is_done():
                    yield from task.run()
        if len(locked_elsewhere) < len(remaining):
            last_progress = time.monotonic()
        elif not has_warned and time.monotonic() > last_progress + _WARN_AFTER_SECONDS:
            has_warned = True
            target, holders = locked_elsewhere[0].target, describe_holders(locked_elsewhere[0].lock)
            warnings.warn(f"{target.parent}: still waiting for {holders}, which makes {target.stem}", stacklevel=2)
        else:
            time.sleep(0.05)
        remaining = locked_elsewhere


def _run_tasks_in_processes(tasks: Sequence[Task], processes: int) -> Iterator[int]:
    """Fork processes that each start with another task."""
    context = multiprocessing.get_context("fork")  # tasks hold functions that cannot be pickled
    workers: dict[Any, Any] = {}
    try:
        for worker_index in range(processes):
            receive, send = context.Pipe(duplex=False)
            first = worker_index * len(tasks) // processes
            arguments = [*tasks[first:], *tasks[:first]], send, os.getpid()
            workers[receive] = context.Process(target=_worker_main, args=arguments, daemon=True)
            workers[receive].start()
            send.close()
        open_pipes = dict(workers)
        while open_pipes:
            for pipe in wait(list(open_pipes)):
                try:
                    message = cast("Connection[Any, Any]", pipe).recv()
                except EOFError:
                    worker = open_pipes.pop(pipe)
                    worker.join()
                    if worker.exitcode:
                        remedy = "run the same command again, which continues where this one stopped"
                        problem = f"a packing process died (exit code {worker.exitcode})"
                        raise DataError(f"{problem}; {remedy}, with --processes 1 if memory ran out") from None
                    continue
                if isinstance(message, str):
                    raise DataError(message)
                yield message
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()


def _worker_main(tasks: Sequence[Task], pipe: Any, parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, however it ends
    if os.getppid() != parent_pid:
        os._exit(1)
    if "torch" in sys.modules:  # its threads are not in a forked process
        sys.modules["torch"].set_num_threads(1)
    try:
        for progress in _run_tasks_here(tasks):
            pipe.send(progress)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}")


def lock_file(
    path: Path, *, timeout: float = 60.0, heartbeat: Callable[[], object] | None = None
) -> AbstractContextManager[object]:
    """Lock `path` for a short change; an error after `timeout` seconds in which `heartbeat()` has not changed.

    Without `heartbeat`, another holder counts as one, and so does a file that appears in or vanishes from the lock's folder.
    """
    heartbeat = heartbeat or (lambda: (describe_holders(path), path.parent.stat().st_mtime_ns))
    try:
        return acquire_lock(path, timeout=timeout, heartbeat=heartbeat)
    except TimeoutError as error:
        problem = f"{error}, which made no progress for {timeout:g} s"
        raise DataError(f"{problem}: resume it if it is stopped, or end it") from None

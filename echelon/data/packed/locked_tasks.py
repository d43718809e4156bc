"""Tasks that several processes share, of one command or of many that know nothing of each other: each is done once.

Whoever holds a task's lock does it, and a lock goes with its process: what one that was killed has not finished, another makes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from echelon.data.packed.parent_death import exit_with_parent
from echelon.errors import DataError
from echelon.files import acquire_lock, describe_holders

#: Seconds after which one who waits for another's task says so.
_WARN_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What `target` a file; `is_done`: whether it is there. `run` gives, now and then, how much more is done."""

    target: Path
    is_done: Callable[[], bool]
    run: Callable[[], Iterator[int]]

    @property
    def lock(self) -> Path:
        """Held by who makes it."""
        return self.target.with_name(f".{self.target.stem}.lock")


def run_tasks(tasks: Sequence[Task], processes: int) -> Iterator[int]:
    """Do what is not done and nobody else does, by `processes`, until all is done; gives how much more is done."""
    return (
        _run_tasks_in_processes(tasks, min(processes, len(tasks)))
        if processes > 1 and len(tasks) > 1
        else _run_tasks_here(tasks)
    )


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
            first_locked = locked_elsewhere[0]
            warnings.warn(
                f"{first_locked.target.parent}: still waiting for {describe_holders(first_locked.lock)}, which makes {first_locked.target.stem}",
                stacklevel=2,
            )
        else:
            time.sleep(0.05)
        remaining = locked_elsewhere


def _run_tasks_in_processes(tasks: Sequence[Task], processes: int) -> Iterator[int]:
    """By several processes, each of which begins at another task."""
    context = multiprocessing.get_context("fork")  # the tasks need not be told to them: they are born with them
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
                        raise DataError(
                            f"a packing process died (exit code {worker.exitcode}); run the same command again, which goes on where "
                            "this one stopped, with --processes 1 if it is for want of memory"
                        ) from None
                    continue
                if isinstance(message, str):
                    raise DataError(message)
                yield message
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()


def _worker_main(tasks: Sequence[Task], pipe: Any, parent: int) -> None:
    exit_with_parent(parent)
    try:
        for progress in _run_tasks_here(tasks):
            pipe.send(progress)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}")

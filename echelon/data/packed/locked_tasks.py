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

from echelon.data.packed.file_locks import holders, taken, unlock
from echelon.data.packed.parent_death import born_to
from echelon.errors import DataError

#: Seconds after which one who waits for another's task says so.
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What `makes` a file; `done`: whether it is there. `make` gives, now and then, how much more is done."""

    makes: Path
    done: Callable[[], bool]
    make: Callable[[], Iterator[int]]

    @property
    def lock(self) -> Path:
        """Held by who makes it."""
        return self.makes.with_name(f".{self.makes.stem}.lock")


def share(tasks: Sequence[Task], processes: int) -> Iterator[int]:
    """Do what is not done and nobody else does, by `processes`, until all is done; gives how much more is done."""
    return _together(tasks, min(processes, len(tasks))) if processes > 1 and len(tasks) > 1 else _each(tasks)


def _each(tasks: Sequence[Task]) -> Iterator[int]:
    moved, told = time.monotonic(), False
    missing = list(tasks)
    while missing:
        left = []
        for task in missing:
            lock = os.open(task.lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if not taken(lock):
                    left.append(task)
                elif not task.done():
                    yield from task.make()
            finally:
                unlock(lock)
        if len(left) < len(missing):
            moved = time.monotonic()
        elif not told and time.monotonic() > moved + _PATIENCE:
            told = True
            first = left[0]
            warnings.warn(
                f"{first.makes.parent}: still waiting for {holders(first.lock)}, which makes {first.makes.stem}",
                stacklevel=2,
            )
        else:
            time.sleep(0.05)
        missing = left


def _together(tasks: Sequence[Task], processes: int) -> Iterator[int]:
    """By several processes, each of which begins at another task."""
    context = multiprocessing.get_context("fork")  # the tasks need not be told to them: they are born with them
    workers: dict[Any, Any] = {}
    try:
        for turn in range(processes):
            receive, send = context.Pipe(duplex=False)
            first = turn * len(tasks) // processes
            given = [*tasks[first:], *tasks[:first]], send, os.getpid()
            workers[receive] = context.Process(target=_work, args=given, daemon=True)
            workers[receive].start()
            send.close()
        talking = dict(workers)
        while talking:
            for pipe in wait(list(talking)):
                try:
                    message = cast("Connection[Any, Any]", pipe).recv()
                except EOFError:
                    worker = talking.pop(pipe)
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


def _work(tasks: Sequence[Task], told: Any, parent: int) -> None:
    born_to(parent)
    try:
        for more in _each(tasks):
            told.send(more)
    except Exception as error:
        told.send(str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}")

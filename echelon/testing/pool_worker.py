"""One rank of the pool: a process that runs what `echelon.testing.rank_pool.Pool` sends it, one task after another.

When the parent is gone, the pipe closes: a thread sees that and ends the process at once, even out of a collective that hangs.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from echelon.world import STORE_VARIABLE, World

#: Makes a rank print the stacks of its threads.
STACK_DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one rank is to run: `target` is "package.module:function", called as `function(world, *args, **kwargs)`."""

    run_number: int
    world: World
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The parent's: ranks import the tests' own modules.
    sys_path: tuple[str, ...]
    working_directory: str
    #: The file at which the process group meets; None: no process group.
    init_method: str | None
    #: Seconds after which a collective gives up.
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What a task returned, or its error with the traceback and the time at which it was raised."""

    run_number: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    raised_at: float = 0.0


def main(fd: int) -> None:
    """Serve the tasks that come through file descriptor `fd` until it closes."""
    pipe = Connection(fd)
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(pipe, inbox), daemon=True).start()
    pipe.send_bytes(pickle.dumps("ready"))
    frozen_counts = (0, 0)
    while True:
        pipe.send_bytes(_run_task(inbox.get()))
        # The result first: neighbours of a rank that failed lose the connection to it only now.
        frozen_counts = _clean_up(frozen_counts)
        pipe.send_bytes(pickle.dumps("tidy"))


def _receive_tasks(pipe: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def _run_task(message: bytes) -> bytes:
    task: Task | None = None
    try:
        task = pickle.loads(message)
        assert isinstance(task, Task)
        _reset_process(task)
        result = _resolve_target(task.target)(task.world, *task.args, **task.kwargs)
        return pickle.dumps(TaskResult(run_number=task.run_number, result=result))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raised_at, number = time.monotonic(), task.run_number if task else -1
        failure, trace = _picklable_error(error), traceback.format_exc()
        return pickle.dumps(TaskResult(run_number=number, error=failure, traceback=trace, raised_at=raised_at))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _reset_process(task: Task) -> None:
    """Put this process into the state of a fresh rank of the task's world."""
    sys.path[:] = task.sys_path
    os.chdir(task.working_directory)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    world = task.world
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    os.environ[STORE_VARIABLE] = world.address.removeprefix("file://")
    os.environ |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
    if task.init_method is not None:
        rank, size, timeout = world.rank, world.size, timedelta(seconds=task.timeout)
        dist.init_process_group("gloo", init_method=task.init_method, rank=rank, world_size=size, timeout=timeout)
        # A rank that ends at once would close connections that others are still making, and group names would get out of step.
        dist.barrier()


def _clean_up(frozen_counts: tuple[int, int]) -> tuple[int, int]:
    """Drop what the task left, and freeze what was imported: collecting garbage in all of torch takes longer than many tasks.

    Takes and returns the numbers of modules and of objects that are frozen.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    module_count, object_count = frozen_counts
    # A task's data workers freeze whatever exists when they start, the task included.
    if len(sys.modules) > module_count or gc.get_freeze_count() > object_count:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return len(sys.modules), gc.get_freeze_count()
    gc.collect()
    return frozen_counts


def _resolve_target(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    resolved: Any = importlib.import_module(module)
    for part in name.split("."):
        resolved = getattr(resolved, part)
    return resolved


def _picklable_error(error: BaseException) -> BaseException | None:
    """The error itself if it can be pickled; the traceback goes as text in any case."""
    try:
        restored = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an exception class does in its constructor
        return None
    return restored if isinstance(restored, BaseException) else None

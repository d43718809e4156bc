"""One rank of the pool: a process that runs what `echelon.testing.rank_pool.Pool` sends it, one task after another.

The pipe's end is the process's end: when the parent is gone, however it went, a thread sees it and the process leaves at once,
even out of a collective that hangs.
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

#: Has a rank print the stacks of its threads.
STACK_DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one rank is to run: `target` is "package.module:function", called as `function(world, *args, **kwargs)`."""

    run_number: int
    world: World
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The parent's, so that the tests' own modules can be found.
    sys_path: tuple[str, ...]
    working_directory: str
    #: Address of the file where the group meets; None: no process group is made.
    init_method: str | None
    #: Seconds after which a collective gives up.
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What came of a task. Either a result, or the error with its traceback and the time at which it was raised."""

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
        # Between answer and tidying: a rank that failed reports first, and only then its neighbours lose the connection to it.
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
        return pickle.dumps(
            TaskResult(
                run_number=task.run_number, result=_resolve_target(task.target)(task.world, *task.args, **task.kwargs)
            )
        )
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raised_at = time.monotonic()
        result = TaskResult(
            run_number=task.run_number if task else -1,
            error=_picklable_error(error),
            traceback=traceback.format_exc(),
            raised_at=raised_at,
        )
        return pickle.dumps(result)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _reset_process(task: Task) -> None:
    """Make this process what a fresh rank of the task's world would be."""
    sys.path[:] = task.sys_path
    os.chdir(task.working_directory)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    world = task.world
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        STORE_VARIABLE: world.address.removeprefix("file://"),
    }
    if task.init_method is not None:
        dist.init_process_group(
            "gloo",
            init_method=task.init_method,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=task.timeout),
        )
        # A rank that ends at once would close connections that others still make; their next group would then have another name than its own.
        dist.barrier()


def _clean_up(frozen_counts: tuple[int, int]) -> tuple[int, int]:
    """Drop what the task left, and set apart what was imported: a search for garbage among all of torch takes longer than many tasks.

    `frozen_counts`: how many modules and objects were set apart by the last; as it is now is returned.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    module_count, object_count = frozen_counts
    # A task's data workers freeze what there is at their start: the task itself, too.
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
    assert callable(resolved)
    return resolved


def _picklable_error(error: BaseException) -> BaseException | None:
    """The error itself if it survives the pipe; the traceback goes as text in any case."""
    try:
        restored = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an exception class does in its constructor
        return None
    return restored if isinstance(restored, BaseException) else None

"""Actors on Ray: servers and the controller, which `on_ray.py` places and watches, and workers.

The secret is passed in a call to the actor, which Ray sends to that process alone: Ray keeps the arguments of an actor's creation in its
tables, and other users can read a process's arguments and environment.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from echelon.errors import EchelonError, LaunchError, ServerError
from echelon.server.client.client import Client, connect
from echelon.server.controller_process import ControllerProcess
from echelon.server.log import log_event
from echelon.server.process_main import create_process
from echelon.server.server_process import ServerProcess

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The worker that a function runs as. `attempt` counts its restarts."""

    number: int
    count: int
    attempt: int
    node: str


WorkerFunction = Callable[[Client, Worker], Result]


class ServerActor:
    """A server or the controller, in its own thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._end_reason = ""

    def locate(self) -> tuple[str, str, int]:
        """The node, its address as Ray knows it, and the process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def start(self, role: str, config: dict[str, Any], secret: bytes) -> str:
        _raise_priority()
        node, ip, _ = self.locate()
        config.setdefault("bind", f"[{ip}]:0" if ":" in ip else f"{ip}:0")
        if role == "server":
            config["host"] = node
        process = create_process(role, secret, config)
        threading.Thread(target=self._run, args=(process,), name="echelon-server", daemon=True).start()
        return process.address

    def _run(self, process: ControllerProcess | ServerProcess) -> None:
        try:
            process.run()
            self._end_reason = "it ended"
        except EchelonError as error:
            self._end_reason = str(error)
        except BaseException:
            self._end_reason = traceback.format_exc()
        self._ended.set()

    def wait_until_ended(self) -> str:
        """Why it ended, once it has. If the process or its node dies, Ray answers."""
        self._ended.wait()
        return self._end_reason


class WorkerActor:
    def run(self, function: WorkerFunction[Result], worker: Worker, options: Mapping[str, Any]) -> Result:
        """Run the function with a connected client; its pushes are acknowledged when this returns."""
        import ray

        _raise_priority()
        node = ray.get_runtime_context().get_node_id()
        with connect(worker=str(worker.number), host=node, **options) as client:
            return function(client, replace(worker, node=node))


def _raise_priority() -> None:
    """Take the priority of the node's own process: Ray's workers run at nice 15, and a starved server loses its lease."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))


def run_workers(
    ray: Any,
    function: WorkerFunction[Result],
    count: int,
    *,
    options: Mapping[str, Any],
    cpus: float,
    gpus: float,
    max_attempts: int,
    check_servers: Callable[[], None],
) -> list[Result]:
    """Run `function(client, worker)` in `count` processes, restarted if they are lost. Returns the results in order.

    `options`: for `connect`. `check_servers` raises if the servers failed.
    """
    if count < 1 or max_attempts < 1:
        raise ServerError(f"count={count}, max_attempts={max_attempts}; both must be at least 1")
    actor_class = ray.remote(max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(WorkerActor)
    running: dict[Any, tuple[Worker, Any]] = {}
    results: dict[int, Result] = {}

    def start_worker(number: int, attempt: int) -> None:
        actor = actor_class.options(num_cpus=cpus, num_gpus=gpus).remote()
        worker = Worker(number=number, count=count, attempt=attempt, node="")
        running[actor.run.remote(function, worker, options)] = worker, actor

    try:
        for number in range(count):
            start_worker(number, 0)
        while running:
            check_servers()
            done, _ = ray.wait(list(running), timeout=0.5)
            for ref in done:
                worker, actor = running[ref]
                try:
                    results[worker.number] = ray.get(ref)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError as error:
                    reason = summarize_error(error)
                    log_event("worker lost", {"worker": worker.number, "life": worker.attempt, "why": reason})
                    if worker.attempt + 1 >= max_attempts:
                        message = f"worker {worker.number} was lost {max_attempts} times, most recently: {reason}"
                        raise LaunchError(f"{message}; see Ray's logs of that node") from None
                    start_worker(worker.number, worker.attempt + 1)
                del running[ref]
                ray.kill(actor)  # one that is lost may only be unreachable
    finally:
        for _, actor in running.values():
            if ray.is_initialized():  # otherwise the call would connect again
                ray.kill(actor)
    return [results[number] for number in range(count)]


def summarize_error(error: Exception) -> str:
    """An error of Ray in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (f"{type(error).__name__}: " + (" ... ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)))[:600]

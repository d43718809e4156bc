"""Workers on a Ray cluster: a function in several processes, restarted where they are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from echelon.errors import LaunchError, ServerError
from echelon.server.client.client import Client
from echelon.server.log import log_event
from echelon.server.ray_actors import Result, Worker, WorkerActor


def run_workers(
    ray: Any,
    function: Callable[[Client, Worker], Result],
    count: int,
    *,
    address: str,
    secret: bytes,
    cpus: float,
    gpus: float,
    max_attempts: int,
    options: Mapping[str, Any],
    check_servers: Callable[[], None],
) -> list[Result]:
    """The results of `function(client, worker)` in `count` processes, in order. `check_servers` raises if the servers failed."""
    if count < 1 or max_attempts < 1:
        raise ServerError(f"count={count}, max_attempts={max_attempts}; both must be at least 1")
    actor_class = ray.remote(max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(WorkerActor)
    running: dict[Any, tuple[int, int, Any]] = {}
    results: dict[int, Result] = {}

    def start_worker(number: int, attempt: int) -> None:
        actor = actor_class.options(num_cpus=cpus, num_gpus=gpus).remote()
        ref = actor.run.remote(function, (number, count, attempt), address, secret, options)
        running[ref] = (number, attempt, actor)

    try:
        for number in range(count):
            start_worker(number, 0)
        while running:
            check_servers()
            done, _ = ray.wait(list(running), timeout=0.5)
            for ref in done:
                number, attempt, actor = running[ref]
                try:
                    results[number] = ray.get(ref)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError as error:
                    reason = summarize_error(error)
                    log_event("worker lost", {"worker": number, "life": attempt, "why": reason})
                    if attempt + 1 >= max_attempts:
                        message = f"worker {number} was lost {max_attempts} times, most recently: {reason}"
                        raise LaunchError(f"{message}; see Ray's logs of that node") from None
                    ray.kill(actor)  # it may only be unreachable
                    start_worker(number, attempt + 1)
                del running[ref]
                ray.kill(actor)
    finally:
        for _, _, actor in running.values():
            if ray.is_initialized():  # else the call would connect again
                ray.kill(actor)
    return [results[number] for number in range(count)]


def summarize_error(error: Exception) -> str:
    """An error of Ray's in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (f"{type(error).__name__}: " + (" ... ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)))[:600]

"""What Ray's actors run: a server, the controller, a worker. `on_ray.py` and `ray_workers.py` place and watch them.

The secret is passed by a call to the actor, which Ray sends to that process alone: it would keep the arguments of the actor's creation in its
own tables, and other users can read a process's arguments and environment.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from echelon.errors import EchelonError
from echelon.server.client.client import Client, connect
from echelon.server.controller_process import ControllerProcess
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


class ServerActor:
    """A server or the controller, in a thread of its own."""

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
    def run(
        self,
        function: Callable[[Client, Worker], Result],
        worker_number: tuple[int, int, int],
        address: str,
        secret: bytes,
        options: Mapping[str, Any],
    ) -> Result:
        """Run the function with a connected client; its pushes are acknowledged when this returns."""
        import ray

        _raise_priority()
        node = ray.get_runtime_context().get_node_id()
        worker = Worker(number=worker_number[0], count=worker_number[1], attempt=worker_number[2], node=node)
        with connect(address, secret=secret, worker=str(worker.number), host=node, **options) as client:
            return function(client, worker)


def _raise_priority() -> None:
    """Take the priority of the node's own process: Ray's workers run at nice 15, and a starved server loses its lease."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))

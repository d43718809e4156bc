"""What Ray's actors run: a server, the controller, a worker. `on_ray.py` places and watches them.

The secret comes by a call to the actor, which Ray sends to that process alone: the arguments of its creation would be kept in Ray's own
tables, and those of a process, or its environment, can be read by others.
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
from echelon.server.server_process import ServerProcess

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Which of the workers a function runs as. `attempt` counts how often it was started anew after it was lost."""

    number: int
    count: int
    attempt: int
    node: str


class ServerActor:
    """What an actor runs: a server or the controller, in a thread beside Ray's own."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._end_reason = ""

    def locate(self) -> tuple[str, str, int]:
        """Node, its address as Ray knows it, process."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def start(self, role: str, config: dict[str, Any], secret: bytes) -> str:
        """Start; the address. The secret comes by this call, which Ray sends to this process alone and keeps nowhere."""
        _raise_priority()
        node, ip, _ = self.locate()
        config.setdefault("bind", f"[{ip}]:0" if ":" in ip else f"{ip}:0")
        process: ControllerProcess | ServerProcess
        if role == "controller":
            process = ControllerProcess(secret=secret, **config)
        else:
            process = ServerProcess(secret=secret, host=node, **config)
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
        """Answers when it ends, with why; Ray answers when the process or its node dies."""
        self._ended.wait()
        return self._end_reason


class WorkerActor:
    """What a worker's actor runs."""

    def run(
        self,
        function: Callable[[Client, Worker], Result],
        worker_number: tuple[int, int, int],
        address: str,
        secret: bytes,
        options: Mapping[str, Any],
    ) -> Result:
        """The function, with a client that is connected; its pushes are acknowledged when this returns."""
        import ray

        _raise_priority()
        node = ray.get_runtime_context().get_node_id()
        worker = Worker(number=worker_number[0], count=worker_number[1], attempt=worker_number[2], node=node)
        with connect(address, secret=secret, worker=str(worker.number), host=node, **options) as client:
            return function(client, worker)


def _raise_priority() -> None:
    """As high a priority as the node's own process: Ray's workers run at nice 15, and whoever starves there loses its lease."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))

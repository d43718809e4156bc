"""Servers, controller and workers on a Ray cluster: Ray places, starts and watches them; rows go by our own connections.

    with RayServers(4, replicas=2) as servers:
        results = servers.run(train, 8)              # train(client, worker) in 8 processes over the nodes

Ray is never asked to restart or to retry: an actor that came back would be empty, and a call that is made again might be a push that is
applied twice. One that dies is replaced by a new server with another name, which joins and is given its shards by their heads. That a
server is dead is decided by our controller's leases, long before Ray knows; Ray only tells where to start the next one.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, LaunchError, ServerError
from echelon.server.client.client import Client
from echelon.server.controller.state import SERVER_LEASE
from echelon.server.local_servers import check_server_options
from echelon.server.log import log_event
from echelon.server.node_placement import NodeResources, choose_node, find_crowded_node
from echelon.server.protocol import wire
from echelon.server.protocol.auth import make_secret
from echelon.server.ray_actors import Result, ServerActor, Worker, WorkerActor
from echelon.server.status import fetch_status, send_request

#: Seconds until all servers must be in the map: cold nodes compile first.
START_TIMEOUT = 300.0
#: Seconds that an actor may wait for the node that was chosen for it; then it may go to any.
PLACEMENT_TIMEOUT = 60.0
#: Seconds between looks at the servers' spread over nodes and at those that hang.
HEALTH_CHECK_INTERVAL = 2.0
#: A server that the controller has not heard for so long is replaced, even if Ray says that it lives (a stopped process).
SILENT_SERVER_TIMEOUT = 15.0
#: Starts in a row that fail until no more are tried.
MAX_START_FAILURES = 5


class ServerHandle:
    """An actor of ours, from when it is asked for."""

    def __init__(self, name: str, actor: Any, node: str | None) -> None:
        self.name, self.actor, self.node = name, actor, node
        self.location_ref = actor.locate.remote()
        self.address_ref: Any = None
        self.end_ref = actor.wait_until_ended.remote()
        self.requested_at = self.last_heard = time.monotonic()
        self.pid: int | None = None
        self.address: str | None = None
        self.has_joined = self.is_leaving = self.is_unreachable = False


class RayServers:
    """`n` servers, spread over the nodes, and a controller on this node; they end with this process, or with `close`.

    The same face as `embedded.Servers`. `cpus` and `memory` of each server are reserved at Ray. `cluster`: the address of a Ray cluster
    if this process is in none yet; None: as `ray.init()` finds or starts one. `echelon[server]` must be installed on every node (or be
    in Ray's `runtime_env`).
    """

    def __init__(
        self,
        n: int = 1,
        *,
        replicas: int = 2,
        shards: int = 256,
        staleness: int | None = None,
        aggregate: bool = False,
        lease: float = SERVER_LEASE,
        memory: int | None = None,
        spill: Path | None = None,
        restore: Path | str | None = None,
        folder: Path | None = None,
        secret: bytes | None = None,
        cpus: float = 1.0,
        cluster: str | None = None,
        timeout: float = START_TIMEOUT,
    ) -> None:
        check_server_options(n, replicas, staleness=staleness, aggregate=aggregate, memory=memory)
        self._ray = ray = _require_ray()
        if ray.util.client.ray.is_connected():
            raise ServerError(
                "ray:// leads into the cluster from outside, where servers cannot be called; run this on a node (`ray job submit`)"
            )
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(address=cluster)
        self.secret = secret or make_secret()
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="echelon-servers-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._target_servers, self._cpus, self._memory, self._spill, self._start_timeout = (
            n,
            cpus,
            memory,
            spill,
            timeout,
        )
        self.servers: dict[str, ServerHandle] = {}
        self._start_count = self._failed_starts = 0
        self._fatal_error: EchelonError | None = None
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._drain_thread: threading.Thread | None = None
        self._actor_class = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=4)(ServerActor)
        self._config: dict[str, Any] = {
            "folder": self.folder.resolve(),
            "shards": shards,
            "replicas": replicas,
            "expect": n,
            "settings": {"staleness": staleness, "aggregate": aggregate},
            "lease": lease,
            "restore": None if restore is None else Path(restore).resolve(),
        }
        self._supervisor = threading.Thread(target=self._supervise, name="echelon-ray", daemon=True)
        try:
            self.controller = self._start_controller({})
            self.address = str(self.controller.address)
            for _ in range(n):
                self._start_server()
            self._supervisor.start()
            self.wait_until_ready(timeout)
        except BaseException:
            self.close()
            raise

    # What people call

    def status(self) -> dict[str, Any]:
        """The controller's report, and of each server of ours its node and process."""
        self._raise_if_failed()
        report = fetch_status(self.address, self.secret)
        with self._lock:
            for name, entry in report["servers"].items():
                handle = self.servers.get(name)
                if handle is not None:
                    entry |= {"node": handle.node, "pid": handle.pid}
        return report

    def start(self) -> str:
        """One more server; it joins by itself. Its name."""
        with self._lock:
            self._target_servers += 1
            return self._start_server().name

    def stop(self, name: str) -> None:
        """One server fewer: its shards move to the others, then it ends."""
        with self._lock:
            if name not in self.servers or self.servers[name].is_leaving:
                names = ", ".join(sorted(self.servers)) or "none"
                raise ServerError(f"{name}: no server of that name is here; there are {names}")
            self._target_servers -= 1
            handle = self.servers[name]
            handle.is_leaving = True
        try:
            self._drain_and_kill(handle)
        except BaseException:
            with self._lock:
                self._target_servers += 1
                handle.is_leaving = False
            raise

    def run(
        self,
        function: Callable[[Client, Worker], Result],
        count: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        max_attempts: int = 4,
        **options: Any,
    ) -> list[Result]:
        """Run `function(client, worker)` in `count` processes over the nodes; what they return, in order.

        A worker whose process or node dies is started anew elsewhere, at most `max_attempts` times in all, under a new incarnation: each push is
        applied once, but the function begins again; `client.step` says where the others are. An error of the function ends all of them
        and is raised here. `options` go to `connect` (window, timeout).
        """
        if count < 1 or max_attempts < 1:
            raise ServerError(f"count={count}, max_attempts={max_attempts}; both must be at least 1")
        ray = self._ray
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(WorkerActor)
        running: dict[Any, tuple[int, int, Any]] = {}
        results: dict[int, Result] = {}

        def start_worker(number: int, attempt: int) -> None:
            actor = actor_class.options(num_cpus=cpus, num_gpus=gpus).remote()
            running[actor.run.remote(function, (number, count, attempt), self.address, self.secret, options)] = (
                number,
                attempt,
                actor,
            )

        try:
            for number in range(count):
                start_worker(number, 0)
            while running:
                self._raise_if_failed()
                done, _ = ray.wait(list(running), timeout=0.5)
                for ref in done:
                    number, attempt, actor = running[ref]
                    try:
                        results[number] = ray.get(ref)
                    except ray.exceptions.RayTaskError:
                        raise
                    except ray.exceptions.RayError as error:
                        log_event("worker lost", {"worker": number, "life": attempt, "why": _summarize_error(error)})
                        if attempt + 1 >= max_attempts:
                            raise LaunchError(
                                f"worker {number} was lost {max_attempts} times, the last time so: {_summarize_error(error)}; see Ray's logs of that node"
                            ) from None
                        ray.kill(actor)  # it may only be out of reach
                        start_worker(number, attempt + 1)
                    del running[ref]
                    ray.kill(actor)
        finally:
            for _, _, actor in running.values():
                if ray.is_initialized():  # else the call would connect again
                    ray.kill(actor)
        return [results[number] for number in range(count)]

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Until every server is in the map and every shard has a head."""
        deadline = time.monotonic() + timeout
        status: dict[str, Any] = {}
        while True:
            self._raise_if_failed()
            with contextlib.suppress(ServerError):
                status = fetch_status(self.address, self.secret)
            with self._lock:
                joined_servers = sum(name in status.get("servers", ()) for name in self.servers)
            if status and joined_servers >= self._target_servers and not status["unplaced"]:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{joined_servers} of {self._target_servers} servers came up within {timeout:g} s; each asks for {self._server_resources()}; see `ray status`"
                )
            time.sleep(0.05)

    def serve_forever(self) -> None:
        """Until they cannot be kept running, and why; for who has nothing else to do."""
        while True:
            self._raise_if_failed()
            time.sleep(0.2)

    def close(self) -> None:
        """End all of them."""
        self._closing.set()
        for thread in (self._supervisor, self._drain_thread):
            if thread is not None and thread.is_alive():
                thread.join(timeout=10.0)
        if self._ray.is_initialized():
            with self._lock:
                for handle in (*self.servers.values(), *([self.controller] if hasattr(self, "controller") else ())):
                    self._kill(handle)
            if self._owns_ray:
                self._ray.shutdown()
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RayServers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Placing

    def _start_controller(self, overrides: Mapping[str, Any]) -> ServerHandle:
        """On this node, where its folder is: if the node is lost, so is whoever would go on."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        handle = ServerHandle(
            "the controller", self._actor_class.options(num_cpus=0, scheduling_strategy=strategy).remote(), node
        )
        handle.address_ref = handle.actor.start.remote("controller", {**self._config, **overrides}, self.secret)
        try:
            handle.address = self._ray.get(handle.address_ref, timeout=self._start_timeout)
        except self._ray.exceptions.RayError as error:
            self._kill(handle)
            raise LaunchError(f"the controller could not be started: {_summarize_error(error)}") from None
        return handle

    def _alive_nodes(self) -> list[NodeResources]:
        return [
            NodeResources(
                id=node["NodeID"], cpus=node["Resources"].get("CPU", 0.0), memory=node["Resources"].get("memory", 0.0)
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _count_servers_per_node(self) -> Counter[str]:
        return Counter(
            handle.node for handle in self.servers.values() if handle.node is not None and not handle.is_leaving
        )

    def _server_resources(self) -> dict[str, float]:
        return {"cpus": self._cpus, "memory": float(self._memory or 0)}

    def _start_server(self, *, anywhere: bool = False, avoid: str | None = None) -> ServerHandle:
        """A new, empty server. Where none has room, or the chosen node none free, Ray finds a place or grows the cluster."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            self._start_count += 1
            name = f"s{self._start_count}"
            node = (
                None
                if anywhere
                else choose_node(
                    self._alive_nodes(), self._count_servers_per_node(), avoid=avoid, **self._server_resources()
                )
            )
            strategy: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
            options = {"num_cpus": self._cpus, "scheduling_strategy": strategy}
            if self._memory:
                options["memory"] = self._memory
            handle = self.servers[name] = ServerHandle(name, self._actor_class.options(**options).remote(), node)
            config = {
                "controller": self.address,
                "name": name,
                "memory": self._memory,
                "spill": None if self._spill is None else self._spill / name,
            }
            handle.address_ref = handle.actor.start.remote("server", config, self.secret)
            return handle

    def _kill(self, handle: ServerHandle) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(handle.actor)

    # Watching

    def _raise_if_failed(self) -> None:
        if self._fatal_error is not None:
            raise self._fatal_error
        if self._closing.is_set():
            raise ServerError("the servers are closed; what runs with them must end before")

    def _supervise(self) -> None:
        """Until closed: what died is replaced, what is crowded is spread."""
        last_check = time.monotonic()
        while not self._closing.is_set():
            try:
                with self._lock:
                    handles = [self.controller, *self.servers.values()]
                done, _ = self._ray.wait([candidate.end_ref for candidate in handles], timeout=0.25)
                for handle in handles:
                    if handle.end_ref in done:
                        self._replace_lost(handle, self._end_reason(handle))
                self._update_placements(
                    [
                        candidate
                        for candidate in handles
                        if candidate is self.controller or candidate.name in self.servers
                    ]
                )
                if time.monotonic() - last_check >= HEALTH_CHECK_INTERVAL:
                    self._check_health()
                    last_check = time.monotonic()
            except Exception as error:
                if not self._closing.is_set():
                    self._fatal_error = LaunchError(
                        f"the servers on Ray are not watched any more: {_summarize_error(error)}"
                    )
                return

    def _end_reason(self, handle: ServerHandle) -> str:
        try:
            return str(self._ray.get(handle.end_ref))
        except self._ray.exceptions.RayError as error:
            handle.is_unreachable = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            return _summarize_error(error)

    def _update_placements(self, handles: Sequence[ServerHandle]) -> None:
        """Take note of who has a place now, and who waits for one in vain."""
        unplaced = [candidate for candidate in handles if candidate.pid is None]
        ready_refs = (
            set(
                self._ray.wait(
                    [candidate.location_ref for candidate in unplaced], num_returns=len(unplaced), timeout=0
                )[0]
            )
            if unplaced
            else set()
        )
        for handle in unplaced:
            if handle.location_ref in ready_refs:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    handle.node, _, handle.pid = self._ray.get(handle.location_ref)
                    handle.last_heard = time.monotonic()
            elif handle.node is not None and time.monotonic() - handle.requested_at > PLACEMENT_TIMEOUT:
                log_event("no room", {"server": handle.name, "node": handle.node})
                with self._lock:
                    if self.servers.pop(handle.name, None) is not None:
                        self._kill(handle)
                        self._start_server(anywhere=True)
        starting = [candidate for candidate in handles if candidate.address is None and candidate.pid is not None]
        ready_refs = (
            set(
                self._ray.wait([candidate.address_ref for candidate in starting], num_returns=len(starting), timeout=0)[
                    0
                ]
            )
            if starting
            else set()
        )
        for handle in starting:
            if handle.address_ref in ready_refs:
                try:
                    handle.address = self._ray.get(handle.address_ref)
                except self._ray.exceptions.RayError as error:
                    self._replace_lost(handle, _summarize_error(error))

    def _replace_lost(self, handle: ServerHandle, reason: str) -> None:
        if self._closing.is_set() or (handle is not self.controller and handle.name not in self.servers):
            return
        log_event("lost", {"server": handle.name, "node": handle.node, "why": reason})
        self._kill(handle)
        if handle is self.controller:
            self._restart_controller()
            return
        with self._lock:
            if self.servers.pop(handle.name, None) is None:
                return
            self._failed_starts = 0 if handle.has_joined else self._failed_starts + 1
            if self._failed_starts >= MAX_START_FAILURES:
                raise LaunchError(
                    f"{self._failed_starts} servers in a row could not be started; the last one: {reason}"
                )
            if sum(not candidate.is_leaving for candidate in self.servers.values()) < self._target_servers:
                # Where a process died the next may live; a node that does not answer Ray may take long to be given up.
                self._start_server(avoid=handle.node if handle.is_unreachable else None)

    def _restart_controller(self) -> None:
        """The controller, from its file, at the same address: everyone else calls there until it answers."""
        for attempts_left in reversed(range(MAX_START_FAILURES)):
            try:
                self.controller = self._start_controller({"bind": self.address, "is_restart": True})
                return
            except LaunchError:
                if not attempts_left or self._closing.wait(1.0):
                    raise

    def _check_health(self) -> None:
        """Servers that hang, and nodes that have too many while others have none."""
        try:
            report = fetch_status(self.address, self.secret)
        except ServerError:
            return
        now, silent_handles = time.monotonic(), []
        with self._lock:
            for name, handle in self.servers.items():
                if report["servers"].get(name, {}).get("here"):
                    handle.last_heard, handle.has_joined = now, True
                elif handle.has_joined and not handle.is_leaving and now - handle.last_heard > SILENT_SERVER_TIMEOUT:
                    silent_handles.append(handle)
        for handle in silent_handles:
            self._replace_lost(handle, f"the controller has not heard it for {SILENT_SERVER_TIMEOUT:g} s")
        if not (report["unplaced"] or report["owed"] or report["learning"] or report["lost"]):
            self._rebalance_nodes()

    def _rebalance_nodes(self) -> None:
        """A server of a crowded node gives way to a new one elsewhere: that joins first, then there is one too many, and it is drained."""
        with self._lock:
            remaining = [handle for handle in self.servers.values() if not handle.is_leaving]
            if len(remaining) < len(self.servers) or not all(handle.has_joined for handle in remaining):
                return
            servers_per_node = self._count_servers_per_node()
            if len(remaining) > self._target_servers:
                leaving_handle = max(remaining, key=lambda handle: servers_per_node[handle.node or ""])
                leaving_handle.is_leaving = True
                self._drain_thread = threading.Thread(
                    target=self._drain_in_background, args=(leaving_handle,), name="echelon-drain", daemon=True
                )
                self._drain_thread.start()
            elif find_crowded_node(self._alive_nodes(), servers_per_node, **self._server_resources()):
                log_event("spreading", {"servers": dict(servers_per_node), "to": self._start_server().node})

    def _drain_in_background(self, handle: ServerHandle) -> None:
        try:
            self._drain_and_kill(handle)
        except ServerError as error:
            handle.is_leaving = False
            log_event("not drained", {"server": handle.name, "why": str(error)})

    def _drain_and_kill(self, handle: ServerHandle) -> None:
        send_request(self.address, self.secret, wire.DRAIN, {"server": handle.name}, timeout=3600.0)
        with self._lock:
            self.servers.pop(handle.name, None)
            self._kill(handle)


def _summarize_error(error: Exception) -> str:
    """What Ray says, without its pages."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (f"{type(error).__name__}: " + (" ... ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)))[:600]


def _require_ray() -> Any:
    try:
        import ray
        import ray.util.client
    except ImportError as error:
        raise ServerError(
            f"servers on a cluster need Ray, which is not installed ({error}); pip install 'echelon[ray]'"
        ) from None
    return ray


__all__ = ["RayServers", "Worker"]

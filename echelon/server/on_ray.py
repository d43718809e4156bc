"""Servers, controller and workers on a Ray cluster: Ray places, starts and watches them; rows use our own connections.

    with RayServers(4, replicas=2) as servers:
        results = servers.run(train, 8)              # train(client, worker) in 8 processes over the nodes

Ray never restarts or retries: a restarted actor would be empty, and a repeated call might apply a push twice. A server that dies is replaced
by a new one with another name, which joins and receives its shards from their heads. The controller's leases decide that a server is dead,
long before Ray does; Ray only says where the next one can start.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, LaunchError, ServerError
from echelon.server.controller.state import SERVER_LEASE
from echelon.server.local_servers import controller_config
from echelon.server.log import log_event
from echelon.server.node_placement import NodeResources, choose_node, find_crowded_node
from echelon.server.protocol import wire
from echelon.server.protocol.auth import make_secret
from echelon.server.ray_actors import Result, ServerActor, Worker, WorkerFunction, run_workers, summarize_error
from echelon.server.status import fetch_status, send_request

#: Seconds until all servers must have joined: cold nodes compile first.
START_TIMEOUT = 300.0
#: Seconds that an actor may wait for its node before any node will do.
PLACEMENT_TIMEOUT = 60.0
#: Seconds between checks for servers that hang and for crowded nodes.
HEALTH_CHECK_INTERVAL = 2.0
#: Seconds without a heartbeat before a server is replaced, even if Ray considers it alive (a stopped process).
SILENT_SERVER_TIMEOUT = 15.0
#: Consecutive failures to start a server before giving up.
MAX_START_FAILURES = 5


class ServerHandle:
    """A server or controller actor, which may not be placed yet."""

    def __init__(self, name: str, actor: Any, node: str | None) -> None:
        self.name, self.actor, self.node = name, actor, node
        self.location_ref, self.end_ref = actor.locate.remote(), actor.wait_until_ended.remote()
        self.address_ref: Any = None
        self.requested_at = self.last_heard = time.monotonic()
        self.pid: int | None = None
        self.address: str | None = None
        self.has_joined = self.is_leaving = self.is_unreachable = False


class RayServers:
    """`n` servers over the nodes, and a controller on this node; they end with this process, or with `close`.

    The options are those of `local_servers.Servers`. `cpus` and `memory` of each server are reserved in Ray. `cluster`: the address of a Ray
    cluster if this process is not connected to one; None: the one that `ray.init()` finds or starts. `echelon[server]` must be installed on
    every node (or be in Ray's `runtime_env`).
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
        self._ray = ray = _require_ray()
        if ray.util.client.ray.is_connected():
            raise ServerError("ray:// connects from outside the cluster; run this on a node (`ray job submit`)")
        self._config = controller_config(
            n, folder=folder, replicas=replicas, shards=shards, staleness=staleness, aggregate=aggregate, lease=lease,
            memory=memory, restore=restore,
        )  # fmt: skip
        self.folder, self._owns_folder = Path(self._config["folder"]), folder is None
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(address=cluster)
        self.secret = secret or make_secret()
        self._target_servers, self._start_timeout = n, timeout
        self._cpus, self._memory, self._spill = cpus, memory, spill
        self.servers: dict[str, ServerHandle] = {}
        self._start_count = self._failed_starts = 0
        self._fatal_error: EchelonError | None = None
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._drain_thread: threading.Thread | None = None
        self._actor_class = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=4)(ServerActor)
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

    def status(self) -> dict[str, Any]:
        """The controller's report, with the node and process of each server."""
        self._raise_if_failed()
        report = fetch_status(self.address, self.secret)
        with self._lock:
            for name in report["servers"].keys() & self.servers.keys():
                report["servers"][name] |= {"node": self.servers[name].node, "pid": self.servers[name].pid}
        return report

    def start(self) -> str:
        """Start one more server, which joins by itself; its name."""
        with self._lock:
            self._target_servers += 1
            return self._start_server().name

    def stop(self, name: str) -> None:
        """Stop one server, after its shards moved to the others."""
        with self._lock:
            if name not in self.servers or self.servers[name].is_leaving:
                names = ", ".join(sorted(self.servers)) or "none"
                raise ServerError(f"{name}: no server of that name; there are {names}")
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
        function: WorkerFunction[Result],
        count: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        max_attempts: int = 4,
        **options: Any,
    ) -> list[Result]:
        """Run `function(client, worker)` in `count` processes over the nodes; their results, in order.

        A worker whose process or node dies is restarted elsewhere, at most `max_attempts` starts in total, as a new incarnation: each push
        is applied once, but the function begins again; `client.step` is where the others are. An error in the function ends all workers and
        is raised here. `options` are passed to `connect` (window, timeout).
        """
        options |= {"address": self.address, "secret": self.secret}
        return run_workers(
            self._ray, function, count, options=options, cpus=cpus, gpus=gpus, max_attempts=max_attempts,
            check_servers=self._raise_if_failed,
        )  # fmt: skip

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until every server is in the map and every shard has a head."""
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
                counts = f"{joined_servers} of {self._target_servers} servers came up within {timeout:g} s"
                raise LaunchError(f"{counts}; each asks for {self._server_resources()}; see `ray status`")
            time.sleep(0.05)

    def serve_forever(self) -> None:
        """Wait until the servers cannot be kept running, and raise why."""
        while True:
            self._raise_if_failed()
            time.sleep(0.2)

    def close(self) -> None:
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

    # Placement

    def _start_actor(
        self, role: str, name: str, config: Mapping[str, Any], *, node: str | None, soft: bool, **options: Any
    ) -> ServerHandle:
        """Start an actor on a node, or if `soft` elsewhere if that is not free; without a node Ray finds a place or grows the cluster."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=soft)
        handle = ServerHandle(name, self._actor_class.options(scheduling_strategy=strategy, **options).remote(), node)
        handle.address_ref = handle.actor.start.remote(role, config, self.secret)
        return handle

    def _start_controller(self, overrides: Mapping[str, Any]) -> ServerHandle:
        """Start the controller on this node, where its folder is."""
        node, config = self._ray.get_runtime_context().get_node_id(), {**self._config, **overrides}
        handle = self._start_actor("controller", "the controller", config, node=node, soft=False, num_cpus=0)
        try:
            handle.address = self._ray.get(handle.address_ref, timeout=self._start_timeout)
        except self._ray.exceptions.RayError as error:
            self._kill(handle)
            raise LaunchError(f"the controller could not be started: {summarize_error(error)}") from None
        return handle

    def _alive_nodes(self) -> list[NodeResources]:
        alive = [(node["NodeID"], node["Resources"]) for node in self._ray.nodes() if node["Alive"]]
        return [NodeResources(id=name, cpus=has.get("CPU", 0.0), memory=has.get("memory", 0.0)) for name, has in alive]

    def _count_servers_per_node(self) -> Counter[str]:
        return Counter(handle.node for handle in self.servers.values() if handle.node and not handle.is_leaving)

    def _server_resources(self) -> dict[str, float]:
        return {"cpus": self._cpus, "memory": float(self._memory or 0)}

    def _start_server(self, *, anywhere: bool = False, avoid: str | None = None) -> ServerHandle:
        """Start a new, empty server."""
        with self._lock:
            self._start_count += 1
            name, node = f"s{self._start_count}", None
            if not anywhere:
                counts = self._count_servers_per_node()
                node = choose_node(self._alive_nodes(), counts, avoid=avoid, **self._server_resources())
            spill = None if self._spill is None else str(self._spill / name)
            config = {"controller": self.address, "name": name, "memory": self._memory, "spill": spill}
            options = {"num_cpus": self._cpus} | ({"memory": self._memory} if self._memory else {})
            self.servers[name] = self._start_actor("server", name, config, node=node, soft=True, **options)
            return self.servers[name]

    def _kill(self, handle: ServerHandle) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(handle.actor)

    # Supervision

    def _raise_if_failed(self) -> None:
        if self._fatal_error is not None:
            raise self._fatal_error
        if self._closing.is_set():
            raise ServerError("the servers are closed; end what uses them first")

    def _supervise(self) -> None:
        """Replace servers that die, and spread crowded ones, until closed."""
        last_check = time.monotonic()
        while not self._closing.is_set():
            try:
                with self._lock:
                    handles = [self.controller, *self.servers.values()]
                done, _ = self._ray.wait([handle.end_ref for handle in handles], timeout=0.25)
                for handle in handles:
                    if handle.end_ref in done:
                        self._replace_lost(handle, self._end_reason(handle))
                self._update_placements([one for one in handles if one is self.controller or one.name in self.servers])
                if time.monotonic() - last_check >= HEALTH_CHECK_INTERVAL:
                    self._check_health()
                    last_check = time.monotonic()
            except Exception as error:
                if not self._closing.is_set():
                    self._fatal_error = LaunchError(f"the servers on Ray have no supervisor: {summarize_error(error)}")
                return

    def _end_reason(self, handle: ServerHandle) -> str:
        try:
            return str(self._ray.get(handle.end_ref))
        except self._ray.exceptions.RayError as error:
            handle.is_unreachable = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            return summarize_error(error)

    def _poll(self, ref: Any) -> Any:
        """The result of a call if it is ready, else None."""
        return self._ray.get(ref) if self._ray.wait([ref], timeout=0)[0] else None

    def _update_placements(self, handles: Sequence[ServerHandle]) -> None:
        """Record which actors are placed and started; start those that wait too long for their node on any."""
        for handle in handles:
            try:
                if handle.pid is None and (location := self._poll(handle.location_ref)):
                    handle.node, _, handle.pid = location
                    handle.last_heard = time.monotonic()
                if handle.pid is not None and handle.address is None:
                    handle.address = self._poll(handle.address_ref)
            except self._ray.exceptions.RayError as error:
                if handle.pid is not None:
                    self._replace_lost(handle, summarize_error(error))
                continue
            waited = time.monotonic() - handle.requested_at
            if handle.pid is None and handle.node is not None and waited > PLACEMENT_TIMEOUT:
                log_event("no room", {"server": handle.name, "node": handle.node})
                with self._lock:
                    if self.servers.pop(handle.name, None) is not None:
                        self._kill(handle)
                        self._start_server(anywhere=True)

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
                raise LaunchError(f"{self._failed_starts} servers in a row could not be started; the last: {reason}")
            if sum(not other.is_leaving for other in self.servers.values()) < self._target_servers:
                # A node whose process died may be fine; Ray may take long to give up one that does not answer.
                self._start_server(avoid=handle.node if handle.is_unreachable else None)

    def _restart_controller(self) -> None:
        """Restart the controller from its document, at the same address."""
        for attempts_left in reversed(range(MAX_START_FAILURES)):
            try:
                self.controller = self._start_controller({"bind": self.address, "is_restart": True})
                return
            except LaunchError:
                if not attempts_left or self._closing.wait(1.0):
                    raise

    def _check_health(self) -> None:
        """Replace servers that hang; spread servers from crowded nodes to empty ones."""
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
        """Replace a server of a crowded node by one elsewhere: the new one joins first, then the old one is drained."""
        with self._lock:
            remaining = [handle for handle in self.servers.values() if not handle.is_leaving]
            if len(remaining) < len(self.servers) or not all(handle.has_joined for handle in remaining):
                return
            servers_per_node = self._count_servers_per_node()
            if len(remaining) > self._target_servers:
                leaving = max(remaining, key=lambda handle: servers_per_node[handle.node or ""])
                leaving.is_leaving = True
                self._drain_thread = threading.Thread(target=self._try_drain, args=(leaving,), daemon=True)
                self._drain_thread.start()
            elif find_crowded_node(self._alive_nodes(), servers_per_node, **self._server_resources()):
                log_event("spreading", {"servers": dict(servers_per_node), "to": self._start_server().node})

    def _try_drain(self, handle: ServerHandle) -> None:
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


def _require_ray() -> Any:
    try:
        import ray
        import ray.util.client
    except ImportError as error:
        raise ServerError(f"servers on a cluster need Ray ({error}); pip install 'echelon[ray]'") from None
    return ray


__all__ = ["RayServers", "Worker"]

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
from echelon.server.controller import SERVER_LEASE
from echelon.server.local_servers import require_sense
from echelon.server.log import say
from echelon.server.node_placement import Node, choose, crowded
from echelon.server.protocol import wire
from echelon.server.protocol.auth import make_secret
from echelon.server.ray_actors import Result, Seat, Work, Worker
from echelon.server.status import ask, request

#: Seconds until all servers must be in the map: cold nodes compile first.
PATIENCE = 300.0
#: Seconds that an actor may wait for the node that was chosen for it; then it may go to any.
PLACE = 60.0
#: Seconds between looks at the servers' spread over nodes and at those that hang.
LOOK = 2.0
#: A server that the controller has not heard for so long is replaced, even if Ray says that it lives (a stopped process).
SILENT = 15.0
#: Starts in a row that fail until no more are tried.
FAILURES = 5


class Member:
    """An actor of ours, from when it is asked for."""

    def __init__(self, name: str, actor: Any, node: str | None) -> None:
        self.name, self.actor, self.node = name, actor, node
        self.seated = actor.where.remote()
        self.began: Any = None
        self.stays = actor.stay.remote()
        self.asked = self.heard = time.monotonic()
        self.pid: int | None = None
        self.address: str | None = None
        self.joined = self.leaving = self.unreachable = False


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
        patience: float = PATIENCE,
    ) -> None:
        require_sense(n, replicas, staleness=staleness, aggregate=aggregate, memory=memory)
        self._ray = ray = _require_ray()
        if ray.util.client.ray.is_connected():
            raise ServerError(
                "ray:// leads into the cluster from outside, where servers cannot be called; run this on a node (`ray job submit`)"
            )
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            ray.init(address=cluster)
        self.secret = secret or make_secret()
        self._own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="echelon-servers-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self._wanted, self._cpus, self._memory, self._spill, self._patience = n, cpus, memory, spill, patience
        self.servers: dict[str, Member] = {}
        self._started = self._failures = 0
        self._failure: EchelonError | None = None
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._drains: threading.Thread | None = None
        self._seat = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=4)(Seat)
        self._config: dict[str, Any] = {
            "folder": self.folder.resolve(),
            "shards": shards,
            "replicas": replicas,
            "expect": n,
            "settings": {"staleness": staleness, "aggregate": aggregate},
            "lease": lease,
            "restore": None if restore is None else Path(restore).resolve(),
        }
        self._watch = threading.Thread(target=self._tend, name="echelon-ray", daemon=True)
        try:
            self.controller = self._place_controller({})
            self.address = str(self.controller.address)
            for _ in range(n):
                self._launch()
            self._watch.start()
            self.wait(patience)
        except BaseException:
            self.close()
            raise

    # What people call

    def status(self) -> dict[str, Any]:
        """The controller's report, and of each server of ours its node and process."""
        self._check()
        report = ask(self.address, self.secret)
        with self._lock:
            for name, entry in report["servers"].items():
                member = self.servers.get(name)
                if member is not None:
                    entry |= {"node": member.node, "pid": member.pid}
        return report

    def start(self) -> str:
        """One more server; it joins by itself. Its name."""
        with self._lock:
            self._wanted += 1
            return self._launch().name

    def stop(self, name: str) -> None:
        """One server fewer: its shards move to the others, then it ends."""
        with self._lock:
            if name not in self.servers or self.servers[name].leaving:
                names = ", ".join(sorted(self.servers)) or "none"
                raise ServerError(f"{name}: no server of that name is here; there are {names}")
            self._wanted -= 1
            member = self.servers[name]
            member.leaving = True
        try:
            self._drain(member)
        except BaseException:
            with self._lock:
                self._wanted += 1
                member.leaving = False
            raise

    def run(
        self,
        function: Callable[[Client, Worker], Result],
        count: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        lives: int = 4,
        **options: Any,
    ) -> list[Result]:
        """Run `function(client, worker)` in `count` processes over the nodes; what they return, in order.

        A worker whose process or node dies is started anew elsewhere, at most `lives` times in all, under a new incarnation: each push is
        applied once, but the function begins again; `client.step` says where the others are. An error of the function ends all of them
        and is raised here. `options` go to `connect` (window, patience).
        """
        if count < 1 or lives < 1:
            raise ServerError(f"count={count}, lives={lives}; at least one worker with one life is needed")
        ray = self._ray
        make = ray.remote(max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(Work)
        under_way: dict[Any, tuple[int, int, Any]] = {}
        results: dict[int, Result] = {}

        def begin(number: int, life: int) -> None:
            actor = make.options(num_cpus=cpus, num_gpus=gpus).remote()
            under_way[actor.run.remote(function, (number, count, life), self.address, self.secret, options)] = (
                number,
                life,
                actor,
            )

        try:
            for number in range(count):
                begin(number, 0)
            while under_way:
                self._check()
                done, _ = ray.wait(list(under_way), timeout=0.5)
                for each in done:
                    number, life, actor = under_way[each]
                    try:
                        results[number] = ray.get(each)
                    except ray.exceptions.RayTaskError:
                        raise
                    except ray.exceptions.RayError as error:
                        say("worker lost", {"worker": number, "life": life, "why": _brief(error)})
                        if life + 1 >= lives:
                            raise LaunchError(
                                f"worker {number} was lost {lives} times, the last time so: {_brief(error)}; see Ray's logs of that node"
                            ) from None
                        ray.kill(actor)  # it may only be out of reach
                        begin(number, life + 1)
                    del under_way[each]
                    ray.kill(actor)
        finally:
            for _, _, actor in under_way.values():
                if ray.is_initialized():  # else the call would connect again
                    ray.kill(actor)
        return [results[number] for number in range(count)]

    def wait(self, patience: float = PATIENCE) -> None:
        """Until every server is in the map and every shard has a head."""
        deadline = time.monotonic() + patience
        found: dict[str, Any] = {}
        while True:
            self._check()
            with contextlib.suppress(ServerError):
                found = ask(self.address, self.secret)
            with self._lock:
                up = sum(name in found.get("servers", ()) for name in self.servers)
            if found and up >= self._wanted and not found["unplaced"]:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{up} of {self._wanted} servers came up within {patience:g} s; each asks for {self._needs()}; see `ray status`"
                )
            time.sleep(0.05)

    def stay(self) -> None:
        """Until they cannot be kept running, and why; for who has nothing else to do."""
        while True:
            self._check()
            time.sleep(0.2)

    def close(self) -> None:
        """End all of them."""
        self._closing.set()
        for thread in (self._watch, self._drains):
            if thread is not None and thread.is_alive():
                thread.join(timeout=10.0)
        if self._ray.is_initialized():
            with self._lock:
                for member in (*self.servers.values(), *([self.controller] if hasattr(self, "controller") else ())):
                    self._kill(member)
            if self._own_ray:
                self._ray.shutdown()
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RayServers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Placing

    def _place_controller(self, more: Mapping[str, Any]) -> Member:
        """On this node, where its folder is: if the node is lost, so is whoever would go on."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = self._ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(here, soft=False)
        member = Member("the controller", self._seat.options(num_cpus=0, scheduling_strategy=strategy).remote(), here)
        member.began = member.actor.begin.remote("controller", {**self._config, **more}, self.secret)
        try:
            member.address = self._ray.get(member.began, timeout=self._patience)
        except self._ray.exceptions.RayError as error:
            self._kill(member)
            raise LaunchError(f"the controller could not be started: {_brief(error)}") from None
        return member

    def _nodes(self) -> list[Node]:
        return [
            Node(id=each["NodeID"], cpus=each["Resources"].get("CPU", 0.0), memory=each["Resources"].get("memory", 0.0))
            for each in self._ray.nodes()
            if each["Alive"]
        ]

    def _taken(self) -> Counter[str]:
        return Counter(each.node for each in self.servers.values() if each.node is not None and not each.leaving)

    def _needs(self) -> dict[str, float]:
        return {"cpus": self._cpus, "memory": float(self._memory or 0)}

    def _launch(self, *, anywhere: bool = False, avoid: str | None = None) -> Member:
        """A new, empty server. Where none has room, or the chosen node none free, Ray finds a place or grows the cluster."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            self._started += 1
            name = f"s{self._started}"
            node = None if anywhere else choose(self._nodes(), self._taken(), avoid=avoid, **self._needs())
            strategy: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
            options = {"num_cpus": self._cpus, "scheduling_strategy": strategy}
            if self._memory:
                options["memory"] = self._memory
            member = self.servers[name] = Member(name, self._seat.options(**options).remote(), node)
            config = {
                "controller": self.address,
                "name": name,
                "memory": self._memory,
                "spill": None if self._spill is None else self._spill / name,
            }
            member.began = member.actor.begin.remote("server", config, self.secret)
            return member

    def _kill(self, member: Member) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(member.actor)

    # Watching

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing.is_set():
            raise ServerError("the servers are closed; what runs with them must end before")

    def _tend(self) -> None:
        """Until closed: what died is replaced, what is crowded is spread."""
        looked = time.monotonic()
        while not self._closing.is_set():
            try:
                with self._lock:
                    members = [self.controller, *self.servers.values()]
                done, _ = self._ray.wait([each.stays for each in members], timeout=0.25)
                for member in members:
                    if member.stays in done:
                        self._lost(member, self._why(member))
                self._settle([each for each in members if each is self.controller or each.name in self.servers])
                if time.monotonic() - looked >= LOOK:
                    self._look()
                    looked = time.monotonic()
            except Exception as error:
                if not self._closing.is_set():
                    self._failure = LaunchError(f"the servers on Ray are not watched any more: {_brief(error)}")
                return

    def _why(self, member: Member) -> str:
        try:
            return str(self._ray.get(member.stays))
        except self._ray.exceptions.RayError as error:
            member.unreachable = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            return _brief(error)

    def _settle(self, members: Sequence[Member]) -> None:
        """Take note of who has a place now, and who waits for one in vain."""
        new = [each for each in members if each.pid is None]
        done = set(self._ray.wait([each.seated for each in new], num_returns=len(new), timeout=0)[0]) if new else set()
        for member in new:
            if member.seated in done:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    member.node, _, member.pid = self._ray.get(member.seated)
                    member.heard = time.monotonic()
            elif member.node is not None and time.monotonic() - member.asked > PLACE:
                say("no room", {"server": member.name, "node": member.node})
                with self._lock:
                    if self.servers.pop(member.name, None) is not None:
                        self._kill(member)
                        self._launch(anywhere=True)
        begun = [each for each in members if each.address is None and each.pid is not None]
        done = (
            set(self._ray.wait([each.began for each in begun], num_returns=len(begun), timeout=0)[0])
            if begun
            else set()
        )
        for member in begun:
            if member.began in done:
                try:
                    member.address = self._ray.get(member.began)
                except self._ray.exceptions.RayError as error:
                    self._lost(member, _brief(error))

    def _lost(self, member: Member, why: str) -> None:
        if self._closing.is_set() or (member is not self.controller and member.name not in self.servers):
            return
        say("lost", {"server": member.name, "node": member.node, "why": why})
        self._kill(member)
        if member is self.controller:
            self._again()
            return
        with self._lock:
            if self.servers.pop(member.name, None) is None:
                return
            self._failures = 0 if member.joined else self._failures + 1
            if self._failures >= FAILURES:
                raise LaunchError(f"{self._failures} servers in a row could not be started; the last one: {why}")
            if sum(not each.leaving for each in self.servers.values()) < self._wanted:
                # Where a process died the next may live; a node that does not answer Ray may take long to be given up.
                self._launch(avoid=member.node if member.unreachable else None)

    def _again(self) -> None:
        """The controller, from its file, at the same address: everyone else calls there until it answers."""
        for left in reversed(range(FAILURES)):
            try:
                self.controller = self._place_controller({"bind": self.address, "again": True})
                return
            except LaunchError:
                if not left or self._closing.wait(1.0):
                    raise

    def _look(self) -> None:
        """Servers that hang, and nodes that have too many while others have none."""
        try:
            report = ask(self.address, self.secret)
        except ServerError:
            return
        now, silent = time.monotonic(), []
        with self._lock:
            for name, member in self.servers.items():
                if report["servers"].get(name, {}).get("here"):
                    member.heard, member.joined = now, True
                elif member.joined and not member.leaving and now - member.heard > SILENT:
                    silent.append(member)
        for member in silent:
            self._lost(member, f"the controller has not heard it for {SILENT:g} s")
        if not (report["unplaced"] or report["owed"] or report["learning"] or report["lost"]):
            self._spread()

    def _spread(self) -> None:
        """A server of a crowded node gives way to a new one elsewhere: that joins first, then there is one too many, and it is drained."""
        with self._lock:
            staying = [each for each in self.servers.values() if not each.leaving]
            if len(staying) < len(self.servers) or not all(each.joined for each in staying):
                return
            taken = self._taken()
            if len(staying) > self._wanted:
                old = max(staying, key=lambda each: taken[each.node or ""])
                old.leaving = True
                self._drains = threading.Thread(target=self._leave, args=(old,), name="echelon-drain", daemon=True)
                self._drains.start()
            elif crowded(self._nodes(), taken, **self._needs()):
                say("spreading", {"servers": dict(taken), "to": self._launch().node})

    def _leave(self, member: Member) -> None:
        try:
            self._drain(member)
        except ServerError as error:
            member.leaving = False
            say("not drained", {"server": member.name, "why": str(error)})

    def _drain(self, member: Member) -> None:
        request(self.address, self.secret, wire.DRAIN, {"server": member.name}, patience=3600.0)
        with self._lock:
            self.servers.pop(member.name, None)
            self._kill(member)


def _brief(error: Exception) -> str:
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

"""A server's process: one replica, its store, its sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ServerError
from echelon.server.log import COMPILING_EVENT, EventLogger, log_event
from echelon.server.protocol import wire
from echelon.server.protocol.actions import CONTROL, LINK, PEER, Action, perform
from echelon.server.protocol.auth import SERVER, HandshakeAborted, SecretError, authenticate
from echelon.server.protocol.connection import parse_address
from echelon.server.protocol.event_loop import Connection, EventLoop
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.specs import spec_from_plain
from echelon.server.replica import events
from echelon.server.replica.shard_state import ShardState
from echelon.server.replica.state import ReplicaState
from echelon.server.store import SnapshotPart
from echelon.server.store.shard_checkpoint import CheckpointWriter, load_shard

HEARTBEAT_INTERVAL = 0.15
REPORT_INTERVAL = 1.0
RETRY_INTERVAL = 0.05
COMPILE_LOG_INTERVAL = 0.2
#: Seconds after which a loop that made no progress sends no more heartbeats.
MAX_LOOP_STALL = 10.0
#: Requests of workers and administrators.
_WORKER_REQUESTS = {wire.PUSH, wire.PULL, wire.CHANGED, wire.CLOCK, wire.DIGEST}


class ServerProcess:
    """A server: joins the controller, holds the shards that the map gives it, starts over if it was declared dead."""

    def __init__(
        self,
        *,
        secret: bytes,
        controller: str,
        bind: str = "127.0.0.1:0",
        advertise: str | None = None,
        host: str | None = None,
        name: str | None = None,
        memory: int | None = None,
        spill: Path | None = None,
        log: EventLogger = log_event,
    ) -> None:
        from echelon.server.jit_warmup import warm_up

        self._secret, self._controller_address, self._log_event = secret, controller, log
        self.name, self.incarnation = name, 0
        self._memory, self._spill = memory, spill
        self.loop = EventLoop(self, secret, allow_shm=True)
        # Bound to all interfaces, a server has no address that others could connect to without `advertise`.
        self.address = self.loop.listen(bind, advertise=advertise)
        self.host = host or socket.gethostname()
        self.replica: ReplicaState | None = None
        self._store: Any = None
        #: Connections to other servers by name.
        self._link_connections: dict[str, Connection] = {}
        self._retry_at: dict[str, float] = {}
        self._controller_connection: Connection | None = None
        self._has_joined = False
        self._authentication_error: SecretError | None = None
        self._last_heartbeat = self._last_report = self._last_compile_log = 0.0
        self._last_counters: tuple[float, dict[str, int]] = (time.monotonic(), {})
        self._last_progress = time.monotonic()
        self._checkpoint_writer: CheckpointWriter | None = None
        warm_up(self._log_compile_progress)

    def run(self) -> None:
        """Serve until the loop is stopped, or until this replica cannot continue."""
        threading.Thread(target=self._send_heartbeats, name="echelon-beats", daemon=True).start()
        self.loop.run()

    def _log_compile_progress(self, share: float) -> None:
        if time.monotonic() - self._last_compile_log >= COMPILE_LOG_INTERVAL:
            self._last_compile_log = time.monotonic()
            self._log_event(COMPILING_EVENT, {"share": round(share, 3)})

    def _mark_alive(self) -> None:
        self._last_progress = time.monotonic()

    def _send_heartbeats(self) -> None:
        """Heartbeats from a thread: a server that copies a large snapshot is alive. A stopped process stops this thread too."""
        while True:
            try:
                with socket.create_connection(parse_address(self._controller_address), timeout=2.0) as connection:
                    authenticate(connection, self._secret, SERVER)
                    self._authentication_error = None
                    while True:
                        time.sleep(HEARTBEAT_INTERVAL)
                        if self._has_joined and time.monotonic() - self._last_progress < MAX_LOOP_STALL:
                            meta = {"server": self.name, "incarnation": self.incarnation}
                            wire.send(connection, wire.encode(wire.HEARTBEAT, 0, meta))
            except (OSError, EchelonError) as error:
                if isinstance(error, SecretError) and not isinstance(error, HandshakeAborted):
                    self._authentication_error = error
                time.sleep(RETRY_INTERVAL)

    # Called by the loop

    def on_open(self, connection: Connection) -> None:
        if connection is self._controller_connection:
            meta = {"role": "server", "id": self.name, "incarnation": self.incarnation or None}
            meta |= {"address": self.address, "host": self.host}
            self.loop.send(connection, wire.encode(wire.JOIN, 1, meta))
        elif isinstance(connection.tag, str) and self.replica is not None:
            self._perform(events.on_link_up(self.replica, time.monotonic(), connection.tag))

    def on_frame(self, connection: Connection, frame: wire.Frame) -> None:
        now = time.monotonic()
        if connection is self._controller_connection:
            self._on_controller_frame(now, frame)
        elif self.replica is None:
            self.loop.close(connection)
        elif isinstance(connection.tag, str):
            self._perform(events.on_link_frame(self.replica, now, connection.tag, frame))
        elif connection.role == SERVER or frame.kind in _WORKER_REQUESTS:
            self._perform(events.on_frame(self.replica, now, connection.tag, frame))
        else:
            self.loop.close(connection)

    def on_close(self, connection: Connection) -> None:
        now, tag = time.monotonic(), connection.tag
        if connection is self._controller_connection:
            self._controller_connection = None
            self._has_joined = False
        elif isinstance(tag, str):
            if self._link_connections.get(tag) is connection:
                del self._link_connections[tag]
                if self.replica is not None:
                    self._perform(events.on_link_lost(self.replica, now, tag))
        elif tag is not None and self.replica is not None:
            self._perform(events.on_peer_lost(self.replica, now, tag))

    def on_tick(self, now: float) -> None:
        self._last_progress = now
        if self._authentication_error is not None and self.replica is None:
            raise SecretError(f"controller {self._controller_address}: {self._authentication_error}")
        if self._controller_connection is None and self._retry_at.get("", 0.0) <= now:
            self._retry_at[""] = now + RETRY_INTERVAL
            self._controller_connection = self.loop.connect(self._controller_address, SERVER, None)
        if self.replica is None:
            return
        self._perform(events.on_tick(self.replica, now))
        self._connect_links(now, self.replica)
        while self.replica.shards_to_load and time.monotonic() - now < 0.2:
            self._perform(events.load_next_shard(self.replica, now))
        if self._has_joined and now - self._last_heartbeat >= HEARTBEAT_INTERVAL:
            self._last_heartbeat = now
            meta: dict[str, Any] = {"version": self.replica.map.version}
            if unreachable := events.unreachable_replicas(self.replica, now):
                meta["cut"] = unreachable
            if now - self._last_report >= REPORT_INTERVAL:
                self._last_report = now
                meta["report"] = self._make_report(self.replica, now)
            self._send_to_controller(wire.HEARTBEAT, meta)

    # The controller

    def _send_to_controller(self, kind: int, meta: dict[str, Any]) -> None:
        if self._controller_connection is not None:
            self.loop.send(self._controller_connection, wire.encode(kind, 0, meta))

    def _on_controller_frame(self, now: float, frame: wire.Frame) -> None:
        meta, kind = frame.meta, frame.kind
        if self.replica is not None and self._has_joined:
            self.replica.controller_heard_at = now
        if kind == wire.MAP:
            self._on_joined(now, meta)
        elif kind == wire.REFUSED and not self._has_joined:
            if meta["error"] != "Out":
                raise ServerError(f"the controller refuses this server: {meta['message']}")
            self._rejoin_as_new()
        elif self.replica is None:
            return
        elif kind == wire.MAP_UPDATE and self._has_joined:
            new_map = ShardMap.from_document(meta["map"])
            entry = new_map.servers.get(self.name or "")
            if entry is None or entry.incarnation != self.incarnation:
                self._rejoin_as_new()
            else:
                self._perform(events.on_map(self.replica, now, new_map, meta["specs"]))
        elif kind == wire.CHECKPOINT:
            self._write_checkpoint(meta)
        elif kind == wire.DECLARE:
            self._send_to_controller(wire.DONE, {"of": meta["of"], "error": self._declaration_error(meta["spec"])})
        else:
            self._perform(events.on_controller_frame(self.replica, now, frame))

    def _on_joined(self, now: float, meta: dict[str, Any]) -> None:
        self.name, self.incarnation = str(meta["id"]), int(meta["incarnation"])
        new_map = ShardMap.from_document(meta["map"])
        replica = self.replica or self._create_replica(self.name, new_map.num_shards)
        self.replica, self._has_joined = replica, True
        replica.target_replicas, replica.controller_heard_at = int(meta["settings"]["replicas"]), now
        self._perform(events.on_map(replica, now, new_map, meta["specs"]))
        self._perform(events.on_controller_connected(replica, now))

    def _create_replica(self, name: str, num_shards: int) -> ReplicaState:
        self._store = store = self._create_store(num_shards)
        return ReplicaState(
            name=name,
            incarnation=self.incarnation,
            shards=ShardState(store, num_shards),
            load_shard=lambda folder, shard: load_shard(Path(folder), shard),
            declare_spec=lambda spec: self._declare(store, spec_from_plain(spec)),
        )

    def _create_store(self, num_shards: int) -> Any:
        from echelon.server.store.store import ParameterStore  # needs numba

        options: dict[str, Any] = {"memory": self._memory, "spill": self._spill, "keep_alive": self._mark_alive}
        return ParameterStore(num_shards=num_shards, **options)

    def _declare(self, store: Any, spec: Any) -> None:
        from echelon.server.jit_warmup import warm_up_table
        from echelon.server.kernels.jit_cache import watch_compilation

        with watch_compilation(self._mark_alive):
            warm_up_table(spec.dtype, spec.rule.every)
        store.declare(spec)

    def _declaration_error(self, spec: dict[str, Any]) -> str | None:
        """Why this server cannot hold a table or dense parameter, if so."""
        try:
            trial = self._create_store(self._store.num_shards)
            self._declare(trial, spec_from_plain(spec))
            trial.close()
        except (EchelonError, OSError, MemoryError, ValueError, OverflowError) as error:
            return str(error) or type(error).__name__
        return None

    def _rejoin_as_new(self) -> None:
        """This server was declared dead: its data is of no use any more."""
        self._log_event("out", {"server": self.name, "incarnation": self.incarnation})
        self.replica, self.incarnation, self._has_joined = None, 0, False
        for connection in [*self.loop.peers.values(), *self._link_connections.values()]:
            self.loop.close(connection)
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._controller_connection is not None:
            self.loop.close(self._controller_connection)

    def _write_checkpoint(self, meta: dict[str, Any]) -> None:
        if self._checkpoint_writer is None:
            self._checkpoint_writer = CheckpointWriter(
                self.loop,
                lambda shard: snapshot_if_ready(self.replica, shard) if self.replica is not None else None,
                lambda details: self._send_to_controller(wire.CHECKPOINT_WRITTEN, details),
            )
        self._checkpoint_writer.write(int(meta["id"]), Path(meta["path"]), [int(shard) for shard in meta["shards"]])

    # Actions

    def _perform(self, actions: Sequence[Action]) -> None:
        perform(actions, self.loop, self._connection_to, self._log_event)

    def _connection_to(self, channel: str, peer: Any) -> Connection | None:
        if channel == PEER:
            return self.loop.peers.get(peer)
        if channel == LINK:
            return self._link_connections.get(peer)
        assert channel == CONTROL
        return self._controller_connection if self._has_joined else None

    def _connect_links(self, now: float, replica: ReplicaState) -> None:
        """Connect to the other replicas of this head's shards."""
        for server in replica.links:
            if server not in self._link_connections and self._retry_at.get(server, 0.0) <= now:
                self._retry_at[server] = now + RETRY_INTERVAL
                connection = self.loop.connect(replica.map.servers[server].address, SERVER, server, allow_shm=True)
                if connection is not None:
                    self._link_connections[server] = connection

    def _make_report(self, replica: ReplicaState, now: float) -> dict[str, Any]:
        last_time, last_counters = self._last_counters
        counters = replica.counters | {"sent": self.loop.bytes_sent, "received": self.loop.bytes_received}
        self._last_counters, seconds = (now, counters), max(now - last_time, 1e-3)
        # A server that rejoined counts from zero.
        increases = {key: max(0, value - last_counters.get(key, 0)) for key, value in counters.items()}
        rates = {key: round(increase / seconds, 1) for key, increase in increases.items()}
        return events.make_report(replica) | {"rates": rates}


def snapshot_if_ready(replica: ReplicaState, shard: int) -> list[SnapshotPart] | None:
    """A shard for a checkpoint, if this head serves it: one that is still being restored is empty here."""
    return replica.shards.snapshot(shard) if replica.is_ready[shard] else None

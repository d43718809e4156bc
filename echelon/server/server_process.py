"""A server's process: one replica, its store, its sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ServerError
from echelon.server.log import COMPILING, Say, say
from echelon.server.protocol import wire
from echelon.server.protocol.actions import CONTROL, LINK, PEER, Action, Close, Note, Send
from echelon.server.protocol.auth import SERVER, SecretError, Unproved, greet
from echelon.server.protocol.event_loop import Connection, Loop, here, split
from echelon.server.protocol.shard_map import Map
from echelon.server.replica import Replica
from echelon.server.replica.dedup import FAR
from echelon.server.replica.shard_state import Part

BEAT = 0.15
REPORT = 1.0
RETRY = 0.05
#: Signs of life of whoever compiles, at most so often.
SIGN = 0.2
#: A loop that has not turned for so long is not alive, whatever its threads say.
STUCK = 10.0


class ServerProcess:
    """A server: joins at the controller, holds what the map gives it, starts anew if it was taken for dead."""

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
        say: Say = say,
    ) -> None:
        from echelon.server.kernels.jit_warmup import warm

        self._secret, self._controller, self._say = secret, controller, say
        self.name, self.incarnation = name, 0
        self._memory, self._spill = memory, spill
        self.loop = Loop(self, secret, sharing=True)
        address = self.loop.listen(*split(bind))
        # Bound to all interfaces: others need a name to call.
        self.address = f"{advertise}:{split(address)[1]}" if advertise else address
        self.host = host or here()
        self.replica: Replica | None = None
        self._store: Any = None
        self._peers: dict[Any, Connection] = {}
        self._links: dict[str, Connection] = {}
        self._retry: dict[str, float] = {}
        self._control: Connection | None = None
        self._joined = False
        #: Why the controller is not ours to join.
        self._barred: SecretError | None = None
        self._next = 0
        self._beat = self._reported = 0.0
        self._last: tuple[float, dict[str, int], int, int] = (time.monotonic(), {}, 0, 0)
        self._turned = time.monotonic()
        self._writer: Any = None
        self._told = 0.0
        warm(self._compiling)

    def run(self) -> None:
        """Until told to end, or until this replica cannot go on as one."""
        threading.Thread(target=self._beats, name="echelon-beats", daemon=True).start()
        self.loop.run()

    def _compiling(self, share: float) -> None:
        """A sign of life of whoever compiles: whoever waits for this server reads it."""
        if time.monotonic() - self._told >= SIGN:
            self._told = time.monotonic()
            self._say(COMPILING, {"share": round(share, 3)})

    def _alive(self) -> None:
        """Busy, not stuck."""
        self._turned = time.monotonic()

    def _beats(self) -> None:
        """Signs of life from a thread: a long snapshot or a large frame is no death. A stopped process stops this too."""
        import socket

        while True:
            try:
                with socket.create_connection(split(self._controller), timeout=2.0) as connection:
                    greet(connection, self._secret, SERVER)
                    self._barred = None
                    while True:
                        time.sleep(BEAT)
                        if self._joined and time.monotonic() - self._turned < STUCK:
                            meta = {"server": self.name, "incarnation": self.incarnation}
                            wire.send(connection, wire.encode(wire.BEAT, 0, meta))
            except Unproved:
                time.sleep(RETRY)
            except SecretError as error:
                self._barred = error
                time.sleep(RETRY)
            except (OSError, EchelonError):
                time.sleep(RETRY)

    # The loop calls

    def opened(self, connection: Connection) -> None:
        now = time.monotonic()
        if connection is self._control:
            life = self.incarnation or None
            meta = {"role": "server", "id": self.name, "incarnation": life, "address": self.address, "host": self.host}
            self.loop.send(connection, wire.encode(wire.JOIN, 1, meta))
        elif isinstance(connection.tag, str):
            if self.replica is not None:
                self._do(self.replica.on_link(now, connection.tag))
        else:
            self._next += 1
            connection.tag = self._next
            self._peers[self._next] = connection

    def received(self, connection: Connection, frame: wire.Frame) -> None:
        now = time.monotonic()
        if connection is self._control:
            self._heard(now, frame)
        elif self.replica is None:
            self.loop.close(connection)
        elif isinstance(connection.tag, str):
            self._do(self.replica.on_answer(now, connection.tag, frame))
        elif connection.role == SERVER or frame.kind in _DATA:
            self._do(self.replica.on_frame(now, connection.tag, frame))
        else:
            self.loop.close(connection)

    def closed(self, connection: Connection) -> None:
        now, tag = time.monotonic(), connection.tag
        if connection is self._control:
            self._control = None
            self._joined = False
        elif isinstance(tag, str):
            if self._links.get(tag) is connection:
                del self._links[tag]
                if self.replica is not None:
                    self._do(self.replica.on_link_lost(now, tag))
        elif tag is not None:
            self._peers.pop(tag, None)
            if self.replica is not None:
                self._do(self.replica.on_peer_lost(now, tag))

    def tick(self, now: float) -> None:
        self._turned = now
        if self._barred is not None and self.replica is None:
            raise SecretError(f"controller {self._controller}: {self._barred}")
        if self._control is None and self._retry.get("", 0.0) <= now:
            self._retry[""] = now + RETRY
            self._control = self.loop.connect(self._controller, SERVER, None)
        if self.replica is not None:
            self._do(self.replica.on_tick(now))
            self._call(now)
            while self.replica is not None and self.replica.loading and time.monotonic() - now < 0.2:
                self._do(self.replica.on_load(now))
        if self._joined and self._control is not None and now - self._beat >= BEAT and self.replica is not None:
            self._beat = now
            meta: dict[str, Any] = {"version": self.replica.map.version}
            cut = self.replica.cut_off(now)
            if cut:
                meta["cut"] = cut
            if now - self._reported >= REPORT:
                self._reported = now
                meta["report"] = self._report(now)
            self.loop.send(self._control, wire.encode(wire.BEAT, 0, meta))

    # The controller

    def _heard(self, now: float, frame: wire.Frame) -> None:
        meta = frame.meta
        if self.replica is not None and self._joined:
            self.replica.confirmed = now
        if frame.kind == wire.MAP:
            self.name, self.incarnation = str(meta["id"]), int(meta["incarnation"])
            new = Map.from_document(meta["map"])
            if self.replica is None:
                self._begin(new.shards)
            assert self.replica is not None
            self._joined = True
            self.replica.wished, self.replica.confirmed = int(meta["settings"]["replicas"]), now
            self._do(self.replica.on_map(now, new, meta["specs"]))
            self._do(self.replica.on_controller(now))
        elif frame.kind == wire.REFUSED and not self._joined:
            if meta["error"] != "Out":
                raise ServerError(f"the controller refuses this server: {meta['message']}")
            self._anew()
        elif frame.kind == wire.GRANT and self.replica is not None and self._joined:
            new = Map.from_document(meta["map"])
            seat = new.servers.get(self.name or "")
            if seat is None or seat.incarnation != self.incarnation:
                self._anew()
            else:
                self._do(self.replica.on_map(now, new, meta["specs"]))
        elif frame.kind == wire.CHECKPOINT and self.replica is not None:
            self._write(meta)
        elif frame.kind == wire.DECLARE and self._control is not None and self.replica is not None:
            answer = {"of": meta["of"], "error": self._unable(meta["spec"])}
            self.loop.send(self._control, wire.encode(wire.DONE, 0, answer))
        elif self.replica is not None:
            self._do(self.replica.on_control(now, frame))

    def _begin(self, shards: int) -> None:
        from echelon.server.protocol.specs import spec_from_plain
        from echelon.server.store import shard_checkpoint
        from echelon.server.store.store import Store

        self._store = store = Store(shards=shards, memory=self._memory, spill=self._spill, alive=self._alive)
        self.replica = Replica(
            name=self.name or "",
            incarnation=self.incarnation,
            store=store,
            shards=shards,
            load=lambda folder, shard: shard_checkpoint.load(Path(folder), shard),
            declare=lambda spec: self._declare(store, spec_from_plain(spec)),
        )

    def _declare(self, store: Any, spec: Any) -> None:
        from echelon.server.kernels.jit_cache import watching
        from echelon.server.kernels.jit_warmup import ready

        with watching(self._alive):
            ready(spec.dtype, spec.rule.every)
        store.declare(spec)

    def _unable(self, spec: dict[str, Any]) -> str | None:
        """Why this server could not hold what is to be declared, beside all that it holds."""
        from echelon.server.protocol.specs import spec_from_plain
        from echelon.server.store.store import Store

        try:
            trial = Store(shards=self._store.shards, memory=self._memory, spill=self._spill)
            self._declare(trial, spec_from_plain(spec))
            trial.close()
        except (EchelonError, OSError, MemoryError, ValueError, OverflowError) as error:
            return str(error) or type(error).__name__
        return None

    def _anew(self) -> None:
        """We were taken for dead: what we hold is worth nothing any more. Join as a new server."""
        self._say("out", {"server": self.name, "incarnation": self.incarnation})
        self.replica, self.incarnation, self._joined = None, 0, False
        for connection in [*self._peers.values(), *self._links.values()]:
            self.loop.close(connection)
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._control is not None:
            self.loop.close(self._control)

    def _write(self, meta: dict[str, Any]) -> None:
        from echelon.server.store.shard_checkpoint import Writer

        if self._writer is None:
            self._writer = Writer(self.loop)
        replica = self.replica
        assert replica is not None

        def written(details: dict[str, Any]) -> None:
            if self._control is not None:
                self.loop.send(self._control, wire.encode(wire.WRITTEN, 0, details))

        self._writer.write(
            int(meta["id"]),
            Path(meta["path"]),
            [int(shard) for shard in meta["shards"]],
            lambda shard: copied(replica, shard) if replica is self.replica else None,
            written,
        )

    # Doing

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                connection = self._whom(action.to, action.whom)
                if connection is not None:
                    self.loop.send(connection, wire.encode(action.kind, action.request, action.meta, action.arrays))
            elif isinstance(action, Close):
                connection = self._whom(action.to, action.whom)
                if connection is not None:
                    self.loop.close(connection)
            elif isinstance(action, Note):
                self._say(action.event, action.details)

    def _whom(self, to: str, whom: Any) -> Connection | None:
        if to == PEER:
            return self._peers.get(whom)
        if to == LINK:
            return self._links.get(whom)
        assert to == CONTROL
        return self._control if self._joined else None

    def _call(self, now: float) -> None:
        """Connections to the replicas of what we head."""
        assert self.replica is not None
        for server in self.replica.links:
            if server not in self._links and self._retry.get(server, 0.0) <= now:
                self._retry[server] = now + RETRY
                address = self.replica.map.servers[server].address
                connection = self.loop.connect(address, SERVER, server, sharing=True)
                if connection is not None:
                    self._links[server] = connection

    def _report(self, now: float) -> dict[str, Any]:
        """What `echelon server status` shows of this server."""
        replica = self.replica
        assert replica is not None
        stats = replica.state.store.stats()
        before, counts, sent, got = self._last
        span = max(now - before, 1e-3)
        # One that joined anew counts from zero.
        rates = {key: round(max(0, value - counts.get(key, 0)) / span, 1) for key, value in replica.counts.items()}
        self._last = (now, dict(replica.counts), self.loop.sent, self.loop.got)
        floor = replica.floor()[replica.headed]
        floor = floor[floor != FAR]
        live = replica._live
        most = int(replica.state.windows.clock[live].max()) if live else 0
        return {
            "rows": int(stats["rows"].sum()),
            "bytes": int(stats["bytes"]),
            "memory": int(stats["memory"]),
            "tables": {
                name: {"rows": int(each["rows"]), "bytes": int(each["bytes"])} for name, each in stats["tables"].items()
            },
            "lsn": int(replica.state.lsn.max()),
            "clock": [int(floor.min()) if len(floor) else 0, max(most, 0)],
            "lag": {
                server: {
                    "entries": link.made - link.got,
                    "shards": int(((link.backup | link.required) & ~link.synced).sum()) + len(link.todo),
                    "up": link.up,
                }
                for server, link in replica.links.items()
            },
            "waiting": {"pushes": len(replica._pushes), "pulls": len(replica._pulls)},
            "rates": rates
            | {"sent": round((self.loop.sent - sent) / span), "received": round((self.loop.got - got) / span)},
        }


def copied(replica: Replica, shard: int) -> list[Part] | None:
    """A shard for a checkpoint, where this head serves it: one that is still to be read out of an older checkpoint is empty here."""
    return replica.state.snapshot(shard) if replica.ready[shard] else None


#: What a worker or an administrator may ask of a server.
_DATA = {wire.PUSH, wire.PULL, wire.CHANGED, wire.CLOCK, wire.DIGEST}

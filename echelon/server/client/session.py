"""A worker's life in a job: maps come, servers go, and whatever is under way finds its way again. `client.py` is the face of it."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from echelon.errors import ServerError, ShardsLost
from echelon.server.client.connection_pool import Courier, Request
from echelon.server.client.controller_client import Herald
from echelon.server.client.outbox import Outbox, Route, Section
from echelon.server.client.requests import NOWHERE, Parcel, Part, Pull, Roads, shards_of_blocks
from echelon.server.protocol import wire
from echelon.server.protocol.shard_map import Map
from echelon.server.protocol.specs import Dense, Table, spec_from_plain

#: Seconds that lost shards are given to come back: their server may, or another restores them out of a checkpoint.
RESTORED = 6.0


class Session:
    """Connections, the newest map, unacknowledged pushes and unanswered pulls of one worker."""

    def __init__(self, address: str, *, secret: bytes, worker: str, patience: float, host: str | None) -> None:
        self.worker, self.closed = worker, False
        self._process = os.getpid()
        self.patience = patience
        self.specs: dict[str, Table | Dense] = {}
        #: Per dense parameter the shard of each block.
        self.blocks: dict[str, np.ndarray] = {}
        self.map: Map | None = None
        self.outbox: Outbox[Parcel]
        self.roads: Roads
        self._error: Exception | None = None
        self._lost_since = 0.0
        #: Shards that went back to a checkpoint while workers went on: its folder, and the map's version that ordered it.
        self.restored: dict[int, tuple[str, int]] = {}
        self._notice: str | None = None
        self._stranded: list[Part] = []
        self._asked: set[Request] = set()
        join = {
            "role": "worker",
            "id": worker,
            "incarnation": None,
            "address": "",
            "host": host or socket.gethostname(),
        }
        self.herald = Herald(address, secret, join)
        self.courier = Courier(secret, regained=self._regained, lost=self._lost)
        self.courier.listen(self.herald.bell, self._rung)
        try:
            self.wait(self._is_seated, "all shards to have a server")
        except BaseException:
            self.close()
            raise

    @property
    def incarnation(self) -> int:
        """Which life of this worker's name it is."""
        return self.herald.incarnation

    def close(self) -> None:
        """Leave the job."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._process:
            return  # the connections are the parent's, who goes on
        self.herald.close()
        self.courier.close()

    def require_open(self) -> None:
        """Nothing goes by a connection that was closed, or is another process's."""
        if self.closed:
            raise ServerError(f"worker {self.worker}: this client was closed; connect() again")
        if os.getpid() != self._process:
            raise ServerError(
                f"worker {self.worker}: this client is of process {self._process}, which was forked; connect() in this one, as another worker"
            )

    def learn(self, spec: Table | Dense) -> None:
        """A table or dense parameter that is declared."""
        self.specs[spec.name] = spec
        if isinstance(spec, Dense):
            self.blocks[spec.name] = shards_of_blocks(spec, self.roads.shards)

    # ------------------------------------------------------------------------------------------------------------- pushing

    def send(self, parcel: Parcel, *, window: int) -> int:
        """Number a push and send it, once fewer than `window` are unacknowledged."""
        self.wait(lambda: len(self.outbox) < window, "room for another push")
        parcel.meta |= {"worker": self.worker, "incarnation": self.incarnation}
        for section in self.outbox.push(parcel):
            self._post(section)
        return self.outbox.last

    def _post(self, section: Section[Parcel]) -> None:
        parcel = section.payload
        ops, arrays = parcel.part(section.route, section.cover)
        meta = {"version": section.version, "seq": section.seq, "ops": ops, **parcel.meta}
        self.courier.ask(section.head, Request(wire.PUSH, meta, arrays, self._acknowledged, item=section))

    def _acknowledged(self, request: Request, frame: wire.Frame) -> None:
        section: Section[Parcel] = request.item
        if frame.kind == wire.ACK:
            self.outbox.acknowledge(section)
        elif frame.kind == wire.STALE:
            pass  # sent again already, or with the map that is to come
        else:
            self.outbox.refuse(section)
            self._error = self._error or self._refusal(request, frame, f"push {section.seq}")

    # ------------------------------------------------------------------------------------------------------------- pulling

    def start(self, pull: Pull) -> None:
        """Ask for everything that a pull wants."""
        self.require_open()
        for route, part in pull.parts(self.roads):
            pull.open += 1
            self._fetch(route, part)

    def finish(self, pull: Pull) -> None:
        """Wait until all of it is here."""
        self.wait(lambda: pull.open == 0, "rows", bounded=pull.bound is not None)
        if pull.error is not None:
            raise pull.error

    def _fetch(self, route: Route | None, part: Part) -> None:
        if route is None or not self.courier.up(route.head):
            self._stranded.append(part)
            return
        ops, arrays = part.frame()
        meta = {
            "version": self.outbox.version,
            "worker": self.worker,
            "incarnation": self.incarnation,
            "step": part.pull.step,
            "bound": part.pull.bound,
            "ops": ops,
        }
        request = Request(wire.PULL, meta, arrays, self._arrived, part.places, item=part)
        self._asked.add(request)
        self.courier.ask(route.head, request)

    def _arrived(self, request: Request, frame: wire.Frame) -> None:
        part: Part = request.item
        self._asked.discard(request)
        if frame.kind == wire.ROWS:
            part.take(frame.arrays)
            part.pull.open -= 1
        elif frame.kind == wire.STALE:
            self._stranded.append(part)
            if int(frame.meta["version"]) <= self.outbox.version:
                self._restart()
        else:
            part.pull.open -= 1
            names = [each.table.name for each, _ in part.tables] + [each.spec.name for each, _ in part.dense]
            part.pull.error = self._refusal(request, frame, f"pull of {', '.join(names)}")

    def _restart(self) -> None:
        """Ask again, by the present map, for what has lost its way."""
        parts, self._stranded = self._stranded, []
        for part in parts:
            again = list(part.pull.again(part, self.roads))
            part.pull.open += len(again) - 1
            for route, each in again:
                self._fetch(route, each)

    # ------------------------------------------------------------------------------------------- everything to every route

    def everywhere(
        self,
        kind: int,
        ask: Callable[[np.ndarray], tuple[dict[str, Any], list[np.ndarray]]],
        take: Callable[[np.ndarray, wire.Frame], None],
    ) -> None:
        """Ask the head of every shard once, whatever moves meanwhile."""
        missing = np.ones(self.roads.shards, bool)
        #: The version that a shard's server spoke of when it refused: until that map is here, asking again is in vain.
        stale = np.zeros(self.roads.shards, np.int64)
        under_way: dict[str, Request] = {}

        def done(request: Request, frame: wire.Frame) -> None:
            under_way.pop(request.server, None)
            if frame.kind == wire.STALE:
                stale[request.item] = int(frame.meta["version"])
            elif frame.kind == wire.REFUSED:
                self._error = self._error or self._refusal(request, frame, wire.NAMES[kind])
            elif missing[request.item].all():
                missing[request.item] = False
                take(request.item, frame)

        def complete() -> bool:
            if not missing.any():
                return True
            for server in [server for server in under_way if not self.courier.up(server)]:
                self.courier.abandon(under_way.pop(server))
            for route in self.roads.routes:
                cover = route.shards[missing[route.shards] & (stale[route.shards] <= self.outbox.version)]
                if len(cover) and route.head not in under_way and self.courier.up(route.head):
                    meta, arrays = ask(cover)
                    meta |= {"version": self.outbox.version, "worker": self.worker, "incarnation": self.incarnation}
                    under_way[route.head] = request = Request(kind, meta, arrays, done, item=cover)
                    self.courier.ask(route.head, request)
            return False

        try:
            self.wait(complete, f"answers to {wire.NAMES[kind]}")
        finally:
            for request in under_way.values():  # or what one call was refused would be told to the next
                self.courier.abandon(request)

    # ------------------------------------------------------------------------------------------------------- maps and links

    def _rung(self) -> None:
        new = self.herald.news()
        if new is None or not new.servers:
            return
        if self.map is None:
            self.outbox = Outbox(new)
        self.courier.seat({name: seat.address for name, seat in new.servers.items()})
        for server in new.servers:
            if not self.courier.up(server):
                self.outbox.lose(server)
        if new.lost and not (self.map is not None and self.map.lost):
            self._lost_since = time.monotonic()
        restored = {shard: new.sources[shard] for shard in sorted(new.revived) if shard in new.sources}
        back = [shard for shard, source in restored.items() if self.restored.get(shard) != source]
        if self.map is not None and back:
            named = ", ".join(map(str, back[:8])) + (", ..." if len(back) > 8 else "")
            self._notice = (
                f"controller {self.herald.address}: shards {named} ({len(back)} of {new.shards}) had lost all replicas and went back to "
                f"the checkpoint {restored[back[0]][0]}: what was pushed to them since is lost"
            )
        self.restored = restored
        self.map = new
        sections = self.outbox.install(new)
        self.roads = Roads.of_map(self.outbox.routes, new.shards)
        for plain in self.herald.specs:
            spec = spec_from_plain(plain)
            if spec.name not in self.specs:
                self.learn(spec)
        for section in sections:
            self._post(section)
        heads = new.heads
        for request in list(self._asked):
            if any(heads[shard] != request.server for shard in request.item.cover):
                self.courier.abandon(request)
                self._asked.discard(request)
                self._stranded.append(request.item)
        self._restart()

    def _regained(self, server: str) -> None:
        for section in self.outbox.regain(server):
            self._post(section)
        self._restart()

    def _lost(self, server: str, requests: Iterable[Request]) -> None:
        self.outbox.lose(server)
        for request in requests:
            self._asked.discard(request)
            if isinstance(request.item, Part):
                self._stranded.append(request.item)

    def _is_seated(self) -> bool:
        return self.map is not None and bool(self.outbox.routes) and not (self.roads.of == NOWHERE).any()

    def wait(self, ready: Callable[[], bool], what: str, *, bounded: bool = False) -> None:
        """Turn until `ready`. Gives up after `patience` without a way on; a pull that waits for other workers may last."""
        self.require_open()
        if ready() and self._error is None:
            return
        began = moved = time.monotonic()
        before = self.courier.moved
        while True:
            self.check()
            if ready():
                return
            self.courier.turn(0.25)
            now = time.monotonic()
            if (bounded and not self._unreachable()) or self.courier.moved != before:
                before, moved = self.courier.moved, now
            if now - moved > self.patience:
                raise ServerError(self._stuck(what, now - began))

    def check(self) -> None:
        """What a server refused, and shards that nobody has."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._notice is not None:
            notice, self._notice = self._notice, None
            warnings.warn(notice, stacklevel=3)
        lost_for = time.monotonic() - self._lost_since
        if self.map is not None and self.map.lost and lost_for > min(RESTORED, self.patience):
            lost = sorted(self.map.lost)
            named = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
            had = sorted({server for chain in self.map.lost.values() for server in chain})
            raise ShardsLost(
                f"controller {self.herald.address}: shards {named} ({len(lost)} of {self.map.shards}) have lost all replicas "
                f"(servers {', '.join(had)}); restore the job from its last checkpoint, and use more replicas or hosts",
                lost,
            )

    def _unreachable(self) -> list[str]:
        heads = {route.head for route in self.outbox.routes} if self.map is not None else set()
        return sorted(head for head in heads if not self.courier.up(head))

    def _stuck(self, what: str, seconds: float) -> str:
        where = f"controller {self.herald.address}"
        if self.map is None:
            return f"{where}: no answer for {seconds:.0f} s ({self.herald.why}); is it running there, and is the address right?"
        reasons = [
            f"server {each} at {self.map.servers[each].address}: {self.courier.why.get(each, 'no connection')}"
            for each in self._unreachable()
        ]
        if not self.herald.connected:
            reasons.append(f"the controller is down ({self.herald.why}), so nothing replaces a lost server")
        if not self._is_seated():
            reasons.append("shards have no server")
        return f"{where}: waited {seconds:.0f} s for {what}; {'; '.join(reasons) or 'the servers do not answer'}; see `echelon server status`"

    def _refusal(self, request: Request, frame: wire.Frame, what: str) -> ServerError:
        if frame.kind != wire.REFUSED:
            return ServerError(
                f"server {request.server}: {what} was answered with {frame!r}; are both ends of one version?"
            )
        return ServerError(f"server {request.server}: {what} was refused: {frame.meta.get('message', frame.meta)}")

    def control(self, kind: int, meta: dict[str, Any], *, patience: float | None = None) -> wire.Frame:
        """Ask the controller, serving the data path meanwhile."""
        self.require_open()
        answer, name = self.herald.ask(kind, meta), wire.NAMES[kind]
        deadline = time.monotonic() + (patience or self.patience)
        while not answer.done():
            if self._error is not None:
                self.check()
            self.courier.turn(0.25)
            if time.monotonic() > deadline:
                self.herald.forget(answer)
                raise ServerError(
                    f"controller {self.herald.address}: no answer to {name} ({self.herald.why}); start it again, it goes on where it was"
                )
        frame = answer.result()
        if frame.kind == wire.REFUSED:
            raise ServerError(
                f"controller {self.herald.address}: {name} was refused: {frame.meta.get('message', frame.meta)}"
            )
        return frame

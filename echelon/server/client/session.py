"""A worker's life in a job: maps come, servers go, and whatever is under way finds its way again. `client.py` is the face of it."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from echelon.errors import ServerError, ShardsLostError
from echelon.server.client.connection_pool import ConnectionPool, Request
from echelon.server.client.controller_client import ControllerClient
from echelon.server.client.outbox import Outbox, Route, Section
from echelon.server.client.requests import NO_ROUTE, Pull, PullPart, Push, RoutingTable, shards_of_blocks
from echelon.server.protocol import wire
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.specs import Dense, Table, spec_from_plain

#: Seconds that lost shards are given to come back: their server may, or another restores them out of a checkpoint.
RESTORE_TIMEOUT = 6.0


class Session:
    """Connections, the newest map, unacknowledged pushes and unanswered pulls of one worker."""

    def __init__(self, address: str, *, secret: bytes, worker: str, timeout: float, host: str | None) -> None:
        self.worker, self.closed = worker, False
        self._pid = os.getpid()
        self.timeout = timeout
        self.specs: dict[str, Table | Dense] = {}
        #: Per dense parameter the shard of each block.
        self.block_shards: dict[str, np.ndarray] = {}
        self.map: ShardMap | None = None
        self.outbox: Outbox[Push]
        self.routing_table: RoutingTable
        self._error: Exception | None = None
        self._shards_lost_since = 0.0
        #: Shards that went back to a checkpoint while workers went on: its folder, and the map's version that ordered it.
        self.rolled_back_shards: dict[int, tuple[str, int]] = {}
        self._pending_warning: str | None = None
        self._unroutable_parts: list[PullPart] = []
        self._pending_pulls: set[Request] = set()
        join_meta = {
            "role": "worker",
            "id": worker,
            "incarnation": None,
            "address": "",
            "host": host or socket.gethostname(),
        }
        self.controller = ControllerClient(address, secret, join_meta)
        self.connections = ConnectionPool(secret, on_ready=self._on_connection_ready, on_lost=self._on_connection_lost)
        self.connections.watch(self.controller.notify_fd, self._install_new_map)
        try:
            self.wait_until(self._all_shards_served, "all shards to have a server")
        except BaseException:
            self.close()
            raise

    @property
    def incarnation(self) -> int:
        """Which life of this worker's name it is."""
        return self.controller.incarnation

    def close(self) -> None:
        """Leave the job."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:
            return  # the connections are the parent's, who goes on
        self.controller.close()
        self.connections.close()

    def require_open(self) -> None:
        """Nothing goes by a connection that was closed, or is another process's."""
        if self.closed:
            raise ServerError(f"worker {self.worker}: this client was closed; connect() again")
        if os.getpid() != self._pid:
            raise ServerError(
                f"worker {self.worker}: this client is of process {self._pid}, which was forked; connect() in this one, as another worker"
            )

    def add_spec(self, spec: Table | Dense) -> None:
        """A table or dense parameter that is declared."""
        self.specs[spec.name] = spec
        if isinstance(spec, Dense):
            self.block_shards[spec.name] = shards_of_blocks(spec, self.routing_table.num_shards)

    # ------------------------------------------------------------------------------------------------------------- pushing

    def send_push(self, push: Push, *, window: int) -> int:
        """Number a push and send it, once fewer than `window` are unacknowledged."""
        self.wait_until(lambda: len(self.outbox) < window, "room for another push")
        push.meta |= {"worker": self.worker, "incarnation": self.incarnation}
        for section in self.outbox.push(push):
            self._send_section(section)
        return self.outbox.last_seq

    def _send_section(self, section: Section[Push]) -> None:
        push = section.payload
        ops, arrays = push.build_frame(section.route, section.shards)
        meta = {"version": section.map_version, "seq": section.seq, "ops": ops, **push.meta}
        self.connections.send_request(
            section.head, Request(wire.PUSH, meta, arrays, self._on_push_reply, context=section)
        )

    def _on_push_reply(self, request: Request, frame: wire.Frame) -> None:
        section: Section[Push] = request.context
        if frame.kind == wire.ACK:
            self.outbox.acknowledge(section)
        elif frame.kind == wire.STALE_MAP:
            pass  # sent again already, or with the map that is to come
        else:
            self.outbox.refuse(section)
            self._error = self._error or self._refused_error(request, frame, f"push {section.seq}")

    # ------------------------------------------------------------------------------------------------------------- pulling

    def send_pull(self, pull: Pull) -> None:
        """Ask for everything that a pull wants."""
        self.require_open()
        for route, part in pull.split_by_route(self.routing_table):
            pull.pending_parts += 1
            self._send_part(route, part)

    def wait_for_pull(self, pull: Pull) -> None:
        """Wait until all of it is here."""
        self.wait_until(lambda: pull.pending_parts == 0, "rows", waits_for_workers=pull.staleness is not None)
        if pull.error is not None:
            raise pull.error

    def _send_part(self, route: Route | None, part: PullPart) -> None:
        if route is None or not self.connections.is_ready(route.head):
            self._unroutable_parts.append(part)
            return
        ops, arrays = part.build_frame()
        meta = {
            "version": self.outbox.map_version,
            "worker": self.worker,
            "incarnation": self.incarnation,
            "step": part.pull.step,
            "bound": part.pull.staleness,
            "ops": ops,
        }
        request = Request(wire.PULL, meta, arrays, self._on_pull_reply, part.choose_destinations, context=part)
        self._pending_pulls.add(request)
        self.connections.send_request(route.head, request)

    def _on_pull_reply(self, request: Request, frame: wire.Frame) -> None:
        part: PullPart = request.context
        self._pending_pulls.discard(request)
        if frame.kind == wire.ROWS:
            part.store_reply(frame.arrays)
            part.pull.pending_parts -= 1
        elif frame.kind == wire.STALE_MAP:
            self._unroutable_parts.append(part)
            if int(frame.meta["version"]) <= self.outbox.map_version:
                self._resend_parts()
        else:
            part.pull.pending_parts -= 1
            names = [pulled.spec.name for pulled, _ in part.tables] + [pulled.spec.name for pulled, _ in part.dense]
            part.pull.error = self._refused_error(request, frame, f"pull of {', '.join(names)}")

    def _resend_parts(self) -> None:
        """Ask again, by the present map, for what has lost its way."""
        parts, self._unroutable_parts = self._unroutable_parts, []
        for part in parts:
            new_parts = list(part.pull.reroute_part(part, self.routing_table))
            part.pull.pending_parts += len(new_parts) - 1
            for route, new_part in new_parts:
                self._send_part(route, new_part)

    # ------------------------------------------------------------------------------------------- everything to every route

    def ask_every_shard(
        self,
        kind: int,
        build_request: Callable[[np.ndarray], tuple[dict[str, Any], list[np.ndarray]]],
        on_reply: Callable[[np.ndarray, wire.Frame], None],
    ) -> None:
        """Ask the head of every shard once, whatever moves meanwhile."""
        unanswered = np.ones(self.routing_table.num_shards, bool)
        #: The version that a shard's server spoke of when it refused: until that map is here, asking again is in vain.
        required_versions = np.zeros(self.routing_table.num_shards, np.int64)
        in_flight: dict[str, Request] = {}

        def handle_reply(request: Request, frame: wire.Frame) -> None:
            in_flight.pop(request.server, None)
            if frame.kind == wire.STALE_MAP:
                required_versions[request.context] = int(frame.meta["version"])
            elif frame.kind == wire.REFUSED:
                self._error = self._error or self._refused_error(request, frame, wire.KIND_NAMES[kind])
            elif unanswered[request.context].all():
                unanswered[request.context] = False
                on_reply(request.context, frame)

        def send_and_check() -> bool:
            if not unanswered.any():
                return True
            for server in [server for server in in_flight if not self.connections.is_ready(server)]:
                self.connections.abandon(in_flight.pop(server))
            for route in self.routing_table.routes:
                shards = route.shards[
                    unanswered[route.shards] & (required_versions[route.shards] <= self.outbox.map_version)
                ]
                if len(shards) and route.head not in in_flight and self.connections.is_ready(route.head):
                    meta, arrays = build_request(shards)
                    meta |= {"version": self.outbox.map_version, "worker": self.worker, "incarnation": self.incarnation}
                    in_flight[route.head] = request = Request(kind, meta, arrays, handle_reply, context=shards)
                    self.connections.send_request(route.head, request)
            return False

        try:
            self.wait_until(send_and_check, f"answers to {wire.KIND_NAMES[kind]}")
        finally:
            for request in in_flight.values():  # or what one call was refused would be told to the next
                self.connections.abandon(request)

    # ------------------------------------------------------------------------------------------------------- maps and links

    def _install_new_map(self) -> None:
        new_map = self.controller.take_new_map()
        if new_map is None or not new_map.servers:
            return
        if self.map is None:
            self.outbox = Outbox(new_map)
        self.connections.set_addresses({name: entry.address for name, entry in new_map.servers.items()})
        for server in new_map.servers:
            if not self.connections.is_ready(server):
                self.outbox.mark_unreachable(server)
        if new_map.lost_shards and not (self.map is not None and self.map.lost_shards):
            self._shards_lost_since = time.monotonic()
        rolled_back = {
            shard: new_map.restored_from[shard]
            for shard in sorted(new_map.rolled_back_shards)
            if shard in new_map.restored_from
        }
        newly_rolled_back = [
            shard for shard, source in rolled_back.items() if self.rolled_back_shards.get(shard) != source
        ]
        if self.map is not None and newly_rolled_back:
            shard_list = ", ".join(map(str, newly_rolled_back[:8])) + (", ..." if len(newly_rolled_back) > 8 else "")
            self._pending_warning = (
                f"controller {self.controller.address}: shards {shard_list} ({len(newly_rolled_back)} of {new_map.num_shards}) had lost all replicas and went back to "
                f"the checkpoint {rolled_back[newly_rolled_back[0]][0]}: what was pushed to them since is lost"
            )
        self.rolled_back_shards = rolled_back
        self.map = new_map
        sections = self.outbox.install_map(new_map)
        self.routing_table = RoutingTable.from_routes(self.outbox.routes, new_map.num_shards)
        for plain in self.controller.specs:
            spec = spec_from_plain(plain)
            if spec.name not in self.specs:
                self.add_spec(spec)
        for section in sections:
            self._send_section(section)
        heads = new_map.heads
        for request in list(self._pending_pulls):
            if any(heads[shard] != request.server for shard in request.context.shards):
                self.connections.abandon(request)
                self._pending_pulls.discard(request)
                self._unroutable_parts.append(request.context)
        self._resend_parts()

    def _on_connection_ready(self, server: str) -> None:
        for section in self.outbox.mark_reachable(server):
            self._send_section(section)
        self._resend_parts()

    def _on_connection_lost(self, server: str, requests: Iterable[Request]) -> None:
        self.outbox.mark_unreachable(server)
        for request in requests:
            self._pending_pulls.discard(request)
            if isinstance(request.context, PullPart):
                self._unroutable_parts.append(request.context)

    def _all_shards_served(self) -> bool:
        return (
            self.map is not None
            and bool(self.outbox.routes)
            and not (self.routing_table.route_of_shard == NO_ROUTE).any()
        )

    def wait_until(self, is_done: Callable[[], bool], what: str, *, waits_for_workers: bool = False) -> None:
        """Turn until `is_done`. Gives up after `timeout` without a way on; a pull that waits for other workers may last."""
        self.require_open()
        if is_done() and self._error is None:
            return
        start = last_progress = time.monotonic()
        chunks_seen = self.connections.chunks_received
        while True:
            self.raise_pending()
            if is_done():
                return
            self.connections.poll(0.25)
            now = time.monotonic()
            if (waits_for_workers and not self._unreachable_heads()) or self.connections.chunks_received != chunks_seen:
                chunks_seen, last_progress = self.connections.chunks_received, now
            if now - last_progress > self.timeout:
                raise ServerError(self._timeout_message(what, now - start))

    def raise_pending(self) -> None:
        """What a server refused, and shards that nobody has."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._pending_warning is not None:
            message, self._pending_warning = self._pending_warning, None
            warnings.warn(message, stacklevel=3)
        lost_seconds = time.monotonic() - self._shards_lost_since
        if self.map is not None and self.map.lost_shards and lost_seconds > min(RESTORE_TIMEOUT, self.timeout):
            lost_shards = sorted(self.map.lost_shards)
            shard_list = ", ".join(map(str, lost_shards[:8])) + (", ..." if len(lost_shards) > 8 else "")
            last_servers = sorted({server for chain in self.map.lost_shards.values() for server in chain})
            raise ShardsLostError(
                f"controller {self.controller.address}: shards {shard_list} ({len(lost_shards)} of {self.map.num_shards}) have lost all replicas "
                f"(servers {', '.join(last_servers)}); restore the job from its last checkpoint, and use more replicas or hosts",
                lost_shards,
            )

    def _unreachable_heads(self) -> list[str]:
        heads = {route.head for route in self.outbox.routes} if self.map is not None else set()
        return sorted(head for head in heads if not self.connections.is_ready(head))

    def _timeout_message(self, what: str, seconds: float) -> str:
        prefix = f"controller {self.controller.address}"
        if self.map is None:
            return f"{prefix}: no answer for {seconds:.0f} s ({self.controller.last_error}); is it running there, and is the address right?"
        reasons = [
            f"server {server} at {self.map.servers[server].address}: {self.connections.last_errors.get(server, 'no connection')}"
            for server in self._unreachable_heads()
        ]
        if not self.controller.connected:
            reasons.append(f"the controller is down ({self.controller.last_error}), so nothing replaces a lost server")
        if not self._all_shards_served():
            reasons.append("shards have no server")
        return f"{prefix}: waited {seconds:.0f} s for {what}; {'; '.join(reasons) or 'the servers do not answer'}; see `echelon server status`"

    def _refused_error(self, request: Request, frame: wire.Frame, what: str) -> ServerError:
        if frame.kind != wire.REFUSED:
            return ServerError(
                f"server {request.server}: {what} was answered with {frame!r}; are both ends of one version?"
            )
        return ServerError(f"server {request.server}: {what} was refused: {frame.meta.get('message', frame.meta)}")

    def ask_controller(self, kind: int, meta: dict[str, Any], *, timeout: float | None = None) -> wire.Frame:
        """Ask the controller, serving the data path meanwhile."""
        self.require_open()
        reply, kind_name = self.controller.send_request(kind, meta), wire.KIND_NAMES[kind]
        deadline = time.monotonic() + (timeout or self.timeout)
        while not reply.done():
            if self._error is not None:
                self.raise_pending()
            self.connections.poll(0.25)
            if time.monotonic() > deadline:
                self.controller.cancel_request(reply)
                raise ServerError(
                    f"controller {self.controller.address}: no answer to {kind_name} ({self.controller.last_error}); start it again, it goes on where it was"
                )
        frame = reply.result()
        if frame.kind == wire.REFUSED:
            raise ServerError(
                f"controller {self.controller.address}: {kind_name} was refused: {frame.meta.get('message', frame.meta)}"
            )
        return frame

"""A worker's membership of a job: tracks the shard map, and retries pushes and pulls when servers fail or shards move."""

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
from echelon.server.client.outbox import Outbox, Section
from echelon.server.client.requests import Pull, PullPart, Push
from echelon.server.client.routing import NO_ROUTE, Route, RoutingTable
from echelon.server.protocol import wire
from echelon.server.protocol.hashing import block_shards
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.specs import Dense, Table, spec_from_plain

#: Seconds in which lost shards may come back: with their server, or restored from a checkpoint by another.
RESTORE_TIMEOUT = 6.0


class Session:
    """Connections, the newest map, unacknowledged pushes and unanswered pulls of one worker."""

    def __init__(self, address: str, *, secret: bytes, worker: str, timeout: float, host: str | None) -> None:
        self.worker, self.timeout, self.closed = worker, timeout, False
        self._pid = os.getpid()
        self.specs: dict[str, Table | Dense] = {}
        #: The shard of each block of each dense parameter.
        self.block_shards: dict[str, np.ndarray] = {}
        self.map: ShardMap | None = None
        self.outbox: Outbox[Push]
        self.routing_table: RoutingTable
        self._error: Exception | None = None
        self._shards_lost_since = 0.0
        #: Shards that went back to a checkpoint while workers continued: its folder, and the map version that ordered it.
        self.rolled_back_shards: dict[int, tuple[str, int]] = {}
        self._pending_warning: str | None = None
        self._unroutable_parts: list[PullPart] = []
        self._pending_pulls: set[Request] = set()
        host = host or socket.gethostname()
        join_meta = {"role": "worker", "id": worker, "incarnation": None, "address": "", "host": host}
        self.controller = ControllerClient(address, secret, join_meta)
        self.connections = ConnectionPool(secret, on_ready=self._on_connection_ready, on_lost=self._on_connection_lost)
        self.connections.watch(self.controller.notify_fd, self._install_new_map)
        try:
            self.wait_until(self._all_shards_served, "all shards to have a server")
        except BaseException:
            self.close()
            raise

    def request_meta(self) -> dict[str, Any]:
        """What every request to a head carries."""
        incarnation = self.controller.incarnation
        return {"version": self.outbox.map_version, "worker": self.worker, "incarnation": incarnation}

    def close(self) -> None:
        """Leave the job."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:
            return  # the connections are the parent's
        self.controller.close()
        self.connections.close()

    def require_open(self) -> None:
        """Raise if the client was closed, or belongs to the process that forked this one."""
        if self.closed:
            raise ServerError(f"worker {self.worker}: this client was closed; connect() again")
        if os.getpid() != self._pid:
            message = f"worker {self.worker}: this client belongs to process {self._pid}, which was forked"
            raise ServerError(f"{message}; connect() in this process, as another worker")

    def add_spec(self, spec: Table | Dense) -> None:
        self.specs[spec.name] = spec
        if isinstance(spec, Dense):
            self.block_shards[spec.name] = block_shards(spec, self.routing_table.num_shards)

    def send_push(self, push: Push, *, window: int) -> int:
        """Number a push and send it, once fewer than `window` are unacknowledged."""
        self.wait_until(lambda: len(self.outbox) < window, "room for another push")
        push.meta |= self.request_meta()
        for section in self.outbox.push(push):
            self._send_section(section)
        return self.outbox.last_seq

    def _send_section(self, section: Section[Push]) -> None:
        push = section.payload
        ops, arrays = push.build_frame(section.route, section.shards)
        meta = {**push.meta, "version": section.map_version, "seq": section.seq, "ops": ops}
        request = Request(wire.PUSH, meta, arrays, self._on_push_reply, context=section)
        self.connections.send_request(section.head, request)

    def _on_push_reply(self, request: Request, frame: wire.Frame) -> None:
        section: Section[Push] = request.context
        if frame.kind == wire.ACK:
            self.outbox.acknowledge(section)
        elif frame.kind != wire.STALE_MAP:  # which is sent again with the new map
            self.outbox.refuse(section)
            self.fail(request, frame, f"push {section.seq}")

    def send_pull(self, pull: Pull) -> None:
        self.require_open()
        for route, part in pull.split_by_route(self.routing_table):
            pull.pending_parts += 1
            self._send_part(route, part)

    def wait_for_pull(self, pull: Pull) -> None:
        self.wait_until(lambda: pull.pending_parts == 0, "rows", waits_for_workers=pull.staleness is not None)
        if pull.error is not None:
            raise pull.error

    def _send_part(self, route: Route | None, part: PullPart) -> None:
        if route is None or not self.connections.is_ready(route.head):
            self._unroutable_parts.append(part)
            return
        ops, arrays = part.build_frame()
        meta = self.request_meta() | {"step": part.pull.step, "bound": part.pull.staleness, "ops": ops}
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
            names = [table.spec.name for table, _ in part.tables] + [dense.spec.name for dense, _ in part.dense]
            part.pull.error = _refused_error(f"server {request.server}", frame, f"pull of {', '.join(names)}")

    def _resend_parts(self) -> None:
        """Send the parts without a route again, by the present map."""
        parts, self._unroutable_parts = self._unroutable_parts, []
        for part in parts:
            new_parts = list(part.pull.reroute_part(part, self.routing_table))
            part.pull.pending_parts += len(new_parts) - 1
            for route, new_part in new_parts:
                self._send_part(route, new_part)

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
        sources = new_map.restored_from
        rolled_back = {shard: sources[shard] for shard in sorted(new_map.rolled_back_shards) if shard in sources}
        known = self.rolled_back_shards
        newly_rolled_back = [shard for shard, source in rolled_back.items() if known.get(shard) != source]
        if self.map is not None and newly_rolled_back:
            self._pending_warning = (
                f"controller {self.controller.address}: {_describe_shards(newly_rolled_back, new_map)} had lost all replicas and went back "
                f"to the checkpoint {rolled_back[newly_rolled_back[0]][0]}: what was pushed to them since is lost"
            )
        self.rolled_back_shards = rolled_back
        self.map = new_map
        sections = self.outbox.install_map(new_map)
        self.routing_table = self.outbox.routing_table
        for spec in map(spec_from_plain, self.controller.specs):
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
        return self.map is not None and not (self.routing_table.route_of_shard == NO_ROUTE).any()

    def wait_until(self, is_done: Callable[[], bool], what: str, *, waits_for_workers: bool = False) -> None:
        """Poll until `is_done`. Gives up after `timeout` without progress; a pull may wait longer for other workers."""
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
        """Raise what a server refused, or that shards are lost; warn of shards that were rolled back."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._pending_warning is not None:
            message, self._pending_warning = self._pending_warning, None
            warnings.warn(message, stacklevel=3)
        lost_seconds = time.monotonic() - self._shards_lost_since
        if self.map is not None and self.map.lost_shards and lost_seconds > min(RESTORE_TIMEOUT, self.timeout):
            last_servers = sorted({server for chain in self.map.lost_shards.values() for server in chain})
            raise ShardsLostError(
                f"controller {self.controller.address}: {_describe_shards(sorted(self.map.lost_shards), self.map)} have lost all replicas "
                f"(servers {', '.join(last_servers)}); restore the job from its last checkpoint, and use more replicas or hosts",
                sorted(self.map.lost_shards),
            )

    def _unreachable_heads(self) -> list[str]:
        heads = {route.head for route in self.routing_table.routes} if self.map is not None else set()
        return sorted(head for head in heads if not self.connections.is_ready(head))

    def _timeout_message(self, what: str, seconds: float) -> str:
        controller = self.controller
        prefix = f"controller {controller.address}"
        if self.map is None:
            return f"{prefix}: no answer for {seconds:.0f} s ({controller.last_error}); is it running there, and is the address right?"
        reasons, errors = [], self.connections.last_errors
        for server in self._unreachable_heads():
            address = self.map.servers[server].address
            reasons.append(f"server {server} at {address}: {errors.get(server, 'no connection')}")
        if not controller.connected:
            reasons.append(f"the controller is down ({controller.last_error}), so nothing replaces a lost server")
        if not self._all_shards_served():
            reasons.append("shards have no server")
        explanation = "; ".join(reasons) or "the servers do not answer"
        return f"{prefix}: waited {seconds:.0f} s for {what}; {explanation}; see `echelon server status`"

    def fail(self, request: Request, frame: wire.Frame, what: str) -> None:
        """Let the next wait raise that a server refused a request."""
        self._error = self._error or _refused_error(f"server {request.server}", frame, what)

    def ask_controller(self, kind: int, meta: dict[str, Any], *, timeout: float | None = None) -> wire.Frame:
        """Send a request to the controller, and serve the data path until the reply is here."""
        self.require_open()
        reply, kind_name = self.controller.send_request(kind, meta), wire.KIND_NAMES[kind]
        prefix = f"controller {self.controller.address}"
        deadline = time.monotonic() + (timeout or self.timeout)
        while not reply.done():
            if self._error is not None:
                self.raise_pending()
            self.connections.poll(0.25)
            if time.monotonic() > deadline:
                self.controller.cancel_request(reply)
                reason = f"no answer to {kind_name} ({self.controller.last_error})"
                raise ServerError(f"{prefix}: {reason}; start it again, the job continues")
        frame = reply.result()
        if frame.kind == wire.REFUSED:
            raise _refused_error(prefix, frame, kind_name)
        return frame


def _refused_error(peer: str, frame: wire.Frame, what: str) -> ServerError:
    if frame.kind == wire.REFUSED:
        return ServerError(f"{peer}: {what} was refused: {frame.meta.get('message', frame.meta)}")
    return ServerError(f"{peer}: {what} was answered with {frame!r}; are both ends of one version?")


def _describe_shards(shards: list[int], map: ShardMap) -> str:
    names = ", ".join(str(shard) for shard in shards[:8]) + (", ..." if len(shards) > 8 else "")
    return f"shards {names} ({len(shards)} of {map.num_shards})"

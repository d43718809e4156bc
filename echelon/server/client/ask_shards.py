"""Requests to the servers of all shards, outside of pushes and pulls: clocks, changed rows, digests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.server.client.connection_pool import Request
from echelon.server.client.requests import MAX_ROWS_BYTES
from echelon.server.client.session import Session
from echelon.server.protocol import wire
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.protocol.specs import DTYPE_BYTES, Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangeCursor:
    """How far a worker has read a table's changes: a log number per shard. For `Client.pull_changes`."""

    table: str
    lsns: np.ndarray
    #: Per shard the headship under which its number was read: another head may have counted other entries.
    generations: tuple[tuple[int, int], ...]


#: Ids, rows, and the new cursor.
Changes = tuple[np.ndarray, np.ndarray, ChangeCursor]


def ask_every_shard(
    session: Session,
    kind: int,
    build_request: Callable[[np.ndarray], tuple[dict[str, Any], list[np.ndarray]]],
    on_reply: Callable[[np.ndarray, wire.Frame], None],
) -> None:
    """Ask the head of every shard once, even if shards move meanwhile."""
    num_shards, kind_name = session.routing_table.num_shards, wire.KIND_NAMES[kind]
    unanswered = np.ones(num_shards, bool)
    #: The map version with which a shard's server refused: until that map is here, asking again is in vain.
    required_versions = np.zeros(num_shards, np.int64)
    in_flight: dict[str, Request] = {}

    def handle_reply(request: Request, frame: wire.Frame) -> None:
        in_flight.pop(request.server, None)
        if frame.kind == wire.STALE_MAP:
            required_versions[request.context] = int(frame.meta["version"])
        elif frame.kind == wire.REFUSED:
            session.fail(request, frame, kind_name)
        elif unanswered[request.context].all():
            unanswered[request.context] = False
            on_reply(request.context, frame)

    def send_and_check() -> bool:
        if not unanswered.any():
            return True
        for server in [server for server in in_flight if not session.connections.is_ready(server)]:
            session.connections.abandon(in_flight.pop(server))
        may_ask = unanswered & (required_versions <= session.outbox.map_version)
        for route in session.routing_table.routes:
            shards = route.shards[may_ask[route.shards]]
            if len(shards) and route.head not in in_flight and session.connections.is_ready(route.head):
                meta, arrays = build_request(shards)
                meta |= session.request_meta()
                in_flight[route.head] = request = Request(kind, meta, arrays, handle_reply, context=shards)
                session.connections.send_request(route.head, request)
        return False

    try:
        session.wait_until(send_and_check, f"answers to {kind_name}")
    finally:
        for request in in_flight.values():  # or the next call would raise what this one was refused
            session.connections.abandon(request)


def fetch_clocks(session: Session) -> list[dict[str, Any]]:
    """The clocks of all heads: min, max, furthest, pending."""
    replies: list[dict[str, Any]] = []
    ask_every_shard(session, wire.CLOCK, lambda shards: ({}, [shards]), lambda _, frame: replies.append(frame.meta))
    return replies


def fetch_changes(session: Session, spec: Table, since: ChangeCursor | None, limit: int) -> Changes:
    """Ids and rows that changed since a cursor, about `limit` per server, and the new cursor."""
    limit = max(1, min(limit, MAX_ROWS_BYTES // (spec.dim * DTYPE_BYTES[spec.dtype] + 8)))
    generations = _shard_generations(session.map)
    lsns = np.zeros(len(generations), np.int64)
    if since is not None:
        is_unchanged = [now == before for now, before in zip(generations, since.generations, strict=True)]
        lsns = np.where(is_unchanged, since.lsns, 0)
    changes: list[tuple[np.ndarray, np.ndarray]] = []

    def build_request(shards: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
        current = _shard_generations(session.map)
        for shard in shards:
            if current[shard] != generations[shard]:
                generations[shard], lsns[shard] = current[shard], 0
        return {"table": spec.name, "wire": spec.dtype, "limit": limit}, [shards, lsns[shards]]

    def on_reply(shards: np.ndarray, frame: wire.Frame) -> None:
        ids, rows, lsns[shards] = frame.arrays
        changes.append((ids, rows))

    ask_every_shard(session, wire.CHANGED, build_request, on_reply)
    ids, rows = (np.concatenate(arrays) for arrays in zip(*changes, strict=True))
    return ids, rows, ChangeCursor(table=spec.name, lsns=lsns, generations=tuple(generations))


def _shard_generations(map: ShardMap | None) -> list[tuple[int, int]]:
    """Per shard the map version that made its head head, and the one that restored its data from a checkpoint."""
    assert map is not None
    return [(epoch, map.restored_from.get(shard, ("", 0))[1]) for shard, epoch in enumerate(map.epochs)]


def fetch_digests(session: Session) -> dict[int, dict[str, str]]:
    """Per shard a digest of each replica, all under one map."""
    while (digests := _try_digests(session)) is None:
        pass
    return digests


def _try_digests(session: Session) -> dict[int, dict[str, str]] | None:
    """The digests under the present map; None if it changes or a connection is lost meanwhile."""
    table, connections = session.routing_table, session.connections
    digests: dict[int, dict[str, str]] = {shard: {} for shard in range(table.num_shards)}
    unanswered = {server for route in table.routes for server in route.chain}
    servers = sorted(unanswered)

    def map_changed() -> bool:
        return session.routing_table is not table

    def all_reachable() -> bool:
        return all(map(connections.is_ready, servers))

    def on_reply(request: Request, frame: wire.Frame) -> None:
        unanswered.discard(request.server)
        if frame.kind == wire.DIGEST_REPLY:
            for shard, digest in zip(request.context.tolist(), frame.arrays[0], strict=True):
                digests[shard][request.server] = digest.tobytes().hex()

    session.wait_until(lambda: all_reachable() or map_changed(), "every replica to be reachable")
    if map_changed():
        return None
    requests = []
    for server in servers:
        shards = np.sort(np.concatenate([route.shards for route in table.routes if server in route.chain]))
        meta = {"version": session.outbox.map_version}
        requests.append(Request(wire.DIGEST, meta, [shards], on_reply, context=shards))
        connections.send_request(server, requests[-1])
    session.wait_until(lambda: not unanswered or not all_reachable() or map_changed(), "digests")
    if not unanswered:
        return digests
    for request in requests:
        connections.abandon(request)
    return None

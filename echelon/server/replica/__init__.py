"""One server's part in the protocol, without sockets and without a clock: frames and the time go in, actions come out.

As **head** of a shard it orders pushes, applies them, forwards each frame's bytes to the other replicas, and answers the worker when
all of them have it. As **backup** (or learner) it takes what the head that its map names sends, in order. What makes this safe:

- A replica refuses entries of anyone but the head in its own map, and entries that head sent under a map older than its headship. So a
  head that was replaced, and does not know it yet, never gets the answers that it needs to acknowledge anything.
- (stamp, lsn) names a shard's state: the map's version under which the last entry was ordered, and how many there were. A new head
  compares it with each replica before it takes pushes; where it differs the replica gets a snapshot. lsn alone would not do: after a
  failover two replicas may have as many entries and not the same.
- Frames of a map that is newer than one's own wait until that map is here (the sender is asked for it).
- Every push of a worker covers every shard, so a shard takes push n + 1 only after n; one that is ahead waits.
- Reads are answered while every backup (and learner that counts) has answered something sent within the last LEASE under a map that is
  not newer than this head's; a new head waits until LEASE has passed since its own last answer to the old one.

Frames of workers (meta; arrays): PULL {version, worker, incarnation, step, bound, ops: [{table, wire} | {dense}]}; cover u16, then ids or
blocks per op -> ROWS {counts}; per op rows (and scales), or the blocks end to end. PUSH {version, worker, incarnation, seq, step, tick,
aggregate, lr, ops: [{table} | {table, assign} | {dense} | {set}]}; cover, then per op ids (each once) and values (n, dim), or blocks and one array per
block -> ACK {seq}. Either may be answered STALE {version}: nothing was done, ask again under a map at least that new; or REFUSED {error,
message}.

Its rooms, each of which knows only those before it: `ground` (what all share), `entries` (the log on its way to the other replicas, and who
waits for that), `clocks` (who counts from which step on, commits), `reads`, `pushes`, `teaching` (as head: bringing replicas to where we
are, handing over), `following` (as backup), `maps` (what a new map changes), and here what comes in and goes where.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from echelon.errors import DocumentError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import Action
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.replica.map_change import MapInstaller
from echelon.server.replica.state import LEASE, MALFORMED_ERRORS

#: What workers ask and that changes nothing; what heads send to those that follow them.
_READ_KINDS = frozenset((wire.PULL, wire.CHANGED, wire.CLOCK, wire.DIGEST))
_HEAD_KINDS = frozenset((wire.LOG_ENTRY, wire.SNAPSHOT, wire.LOG_STATE, wire.HEARTBEAT))


class Replica(MapInstaller):
    """The state machine. `load(folder, shard)` reads a shard out of a checkpoint; `declare(spec document)` makes a table known."""

    def on_frame(self, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
        """A frame over a connection that was accepted: of a worker, or of another server as head."""
        try:
            if peer in self._frames_awaiting_map and frame.kind not in (wire.MAP_UPDATE, wire.MAP_REQUEST):
                self._frames_awaiting_map[peer].append(frame)
            else:
                self._dispatch(now, peer, frame)
        except (wire.WireError, DocumentError, *MALFORMED_ERRORS) as error:
            self._reject_malformed(peer, frame, error)
        return self._take_actions()

    def on_link_frame(self, now: float, server: str, frame: wire.Frame) -> list[Action]:
        """A frame over our own connection to another server."""
        link = self.links.get(server)
        if link is not None and frame.kind == wire.MAP_UPDATE:
            self._install_map(now, ShardMap.from_document(frame.meta["map"]), frame.meta["specs"])
        elif link is not None:
            self._handle_link_frame(now, link, frame)
        return self._take_actions()

    def on_link_up(self, now: float, server: str) -> list[Action]:
        """Our connection to another server is there."""
        link = self.links.get(server)
        if link is not None:
            meta = {
                "head": self.name,
                "incarnation": self.incarnation,
                "member": link.incarnation,
                "link": link.link_id,
                "v": self.map.version,
            }
            self._send_to_replica(server, wire.HELLO, meta)
        return self._take_actions()

    def on_link_lost(self, now: float, server: str) -> list[Action]:
        """Our connection to another server is gone."""
        if server in self.links:
            self.links[server].on_disconnect()
            self.links[server].down_since = min(now, self.links[server].down_since)
        return self._take_actions()

    def on_peer_lost(self, now: float, peer: Hashable) -> list[Action]:
        """A connection that was accepted is gone: nobody waits for its answers."""
        self._waiting_pushes = [request for request in self._waiting_pushes if request[0] != peer]
        self._waiting_reads = [request for request in self._waiting_reads if request[0] != peer]
        self._head_of_peer.pop(peer, None)
        self._frames_awaiting_map.pop(peer, None)
        return self._take_actions()

    def on_map(self, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> list[Action]:
        """The controller's word, from itself or passed on."""
        self._install_map(now, new_map, specs)
        return self._take_actions()

    def on_controller_frame(self, now: float, frame: wire.Frame) -> list[Action]:
        """A frame of the controller, other than a map."""
        if frame.kind == wire.HANDOVER:
            shards = np.array([shard for shard in frame.meta["shards"] if self.is_head[shard]], np.int64)
            self._begin_handover(now, shards)
        elif frame.kind == wire.EXPIRE:
            self._expire_rows(now, frame)
        return self._take_actions()

    def on_controller_connected(self, now: float) -> list[Action]:
        """The connection to the controller is there (again): what it may not have heard is said again."""
        self._send_to_controller(wire.MAP_INSTALLED, {"version": self.map.version})
        for link in self.links.values():
            catching_up = {shard for shard, _ in link.catching_up}
            for shard in np.flatnonzero(link.is_required & ~link.has_refused).tolist():
                if shard not in catching_up:
                    self._report_caught_up(link, shard)
        return self._take_actions()

    def unreachable_replicas(self, now: float, min_seconds: float = 1.0) -> list[str]:
        """Replicas without whose answer nothing goes on, and that cannot be reached for so long."""
        return [
            server
            for server, link in self.links.items()
            if now - link.down_since > min_seconds and (link.is_backup.any() or link.is_required.any())
        ]

    def on_tick(self, now: float) -> list[Action]:
        """Time passes: call it every 50 ms or so."""
        for link in self.links.values():
            if link.is_up and now - link.last_heartbeat >= self.lease / 3:
                link.last_heartbeat = now
                heartbeat_number = link.unanswered_heartbeats[-1][0] + 1 if link.unanswered_heartbeats else 1
                link.unanswered_heartbeats.append((heartbeat_number, now))
                self._send_to_replica(link.server, wire.HEARTBEAT, {"n": heartbeat_number, "v": self.map.version})
            self._start_transfer(now, link)
        for link in [
            candidate for candidate in self.links.values() if now - candidate.down_since > 1.0 and candidate.unacked
        ]:
            if not link.is_backup.any() and not link.is_required.any():
                # A learner that is away: what is kept for it would grow without end. It begins anew when it is back.
                is_learner = link.is_learner
                self._remove_link(link.server)
                self._add_link(now, link.server, link.incarnation)
                self.links[link.server].is_learner = is_learner
        for handover in [candidate for candidate in self._handovers if candidate[0] <= now]:
            self._handovers.remove(handover)
            self.is_draining[handover[1]] = False
            self._update_ready()
            self._add_workers(now)
            self._commit_steps(now)
        if now - self._log_state_requested_at > 0.5:
            # Replicas do not answer for shards that they are still loading.
            self._log_state_requested_at = now
            for link in self.links.values():
                link.log_state_requested[:] = False
                self._request_log_state(link)
            self._forget_workers(now)
        self._retry_waiting(now)
        expiries, self._waiting_expiries = self._waiting_expiries, []
        for frame in expiries:
            self._expire_rows(now, frame)
        return self._take_actions()

    def _dispatch(self, now: float, peer: Hashable, frame: wire.Frame) -> None:
        kind = frame.kind
        if kind == wire.PUSH:
            shard_set = self._check_push(frame)
            if not self._try_push(now, peer, frame, shard_set):
                self._waiting_pushes.append((peer, frame, shard_set))
            elif self._waiting_pushes:
                self._retry_waiting(now)
        elif kind in _READ_KINDS:
            shard_set = self._parse_shard_set(frame)
            if not self._try_read(now, peer, frame, shard_set):
                self._waiting_reads.append((peer, frame, shard_set))
        elif kind in _HEAD_KINDS and peer in self._head_of_peer:
            if frame.meta["v"] > self.map.version:
                self._frames_awaiting_map[peer] = [frame]
                self._send_to_peer(peer, wire.MAP_REQUEST, 0, {"version": self.map.version})
            else:
                self._on_head_frame(now, peer, frame)
        elif kind == wire.HELLO:
            self._on_hello(peer, frame)
        elif kind == wire.MAP_UPDATE:
            self._install_map(now, ShardMap.from_document(frame.meta["map"]), frame.meta["specs"])
        elif kind == wire.MAP_REQUEST:
            self._send_to_peer(peer, wire.MAP_UPDATE, 0, {"map": self.map.to_document(), "specs": self.specs})
        else:
            raise wire.WireError(f"no {wire.KIND_NAMES.get(kind, kind)} is taken here")

    def _install_map(self, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> None:
        if not self._adopt_map(now, new_map, specs):
            return
        awaiting_map, self._frames_awaiting_map = self._frames_awaiting_map, {}
        for peer, frames in awaiting_map.items():
            for frame in frames:
                if peer in self._frames_awaiting_map:
                    self._frames_awaiting_map[peer].append(frame)
                    continue
                try:
                    self._dispatch(now, peer, frame)
                except (wire.WireError, *MALFORMED_ERRORS) as error:
                    self._reject_malformed(peer, frame, error)
        self._add_workers(now)
        self._commit_steps(now)
        self._retry_waiting(now)


__all__ = ["LEASE", "MALFORMED_ERRORS", "Replica"]

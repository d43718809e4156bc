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
from echelon.server.protocol.shard_map import Map
from echelon.server.replica.map_change import Maps
from echelon.server.replica.state import LEASE, MALFORMED

#: What workers ask and that changes nothing; what heads send to those that follow them.
_READS = frozenset((wire.PULL, wire.CHANGED, wire.CLOCK, wire.DIGEST))
_FROM_HEADS = frozenset((wire.ENTRY, wire.SNAPSHOT, wire.SYNC, wire.BEAT))


class Replica(Maps):
    """The state machine. `load(folder, shard)` reads a shard out of a checkpoint; `declare(spec document)` makes a table known."""

    def on_frame(self, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
        """A frame over a connection that was accepted: of a worker, or of another server as head."""
        try:
            if peer in self._stalled and frame.kind not in (wire.GRANT, wire.BEHIND):
                self._stalled[peer].append(frame)
            else:
                self._receive(now, peer, frame)
        except (wire.WireError, DocumentError, *MALFORMED) as error:
            self._garbage(peer, frame, error)
        return self._actions()

    def on_answer(self, now: float, server: str, frame: wire.Frame) -> list[Action]:
        """A frame over our own connection to another server."""
        link = self.links.get(server)
        if link is not None and frame.kind == wire.GRANT:
            self._install(now, Map.from_document(frame.meta["map"]), frame.meta["specs"])
        elif link is not None:
            self._answer(now, link, frame)
        return self._actions()

    def on_link(self, now: float, server: str) -> list[Action]:
        """Our connection to another server is there."""
        link = self.links.get(server)
        if link is not None:
            meta = {
                "head": self.name,
                "incarnation": self.incarnation,
                "member": link.incarnation,
                "link": link.number,
                "v": self.map.version,
            }
            self._link(server, wire.HAIL, meta)
        return self._actions()

    def on_link_lost(self, now: float, server: str) -> list[Action]:
        """Our connection to another server is gone."""
        if server in self.links:
            self.links[server].lost()
            self.links[server].down = min(now, self.links[server].down)
        return self._actions()

    def on_peer_lost(self, now: float, peer: Hashable) -> list[Action]:
        """A connection that was accepted is gone: nobody waits for its answers."""
        self._pushes = [each for each in self._pushes if each[0] != peer]
        self._pulls = [each for each in self._pulls if each[0] != peer]
        self._heads.pop(peer, None)
        self._stalled.pop(peer, None)
        return self._actions()

    def on_map(self, now: float, new: Map, specs: Sequence[dict[str, Any]]) -> list[Action]:
        """The controller's word, from itself or passed on."""
        self._install(now, new, specs)
        return self._actions()

    def on_control(self, now: float, frame: wire.Frame) -> list[Action]:
        """A frame of the controller, other than a map."""
        if frame.kind == wire.HANDOVER:
            shards = np.array([shard for shard in frame.meta["shards"] if self.headed[shard]], np.int64)
            self._hand_over(now, shards)
        elif frame.kind == wire.EXPIRE:
            self._expire(now, frame)
        return self._actions()

    def on_controller(self, now: float) -> list[Action]:
        """The connection to the controller is there (again): what it may not have heard is said again."""
        self._tell(wire.INSTALLED, {"version": self.map.version})
        for link in self.links.values():
            catching = {shard for shard, _ in link.catching}
            for shard in np.flatnonzero(link.required & ~link.refused).tolist():
                if shard not in catching:
                    self._caughtup(link, shard)
        return self._actions()

    def cut_off(self, now: float, longer: float = 1.0) -> list[str]:
        """Replicas without whose answer nothing goes on, and that cannot be reached for so long."""
        return [
            server
            for server, link in self.links.items()
            if now - link.down > longer and (link.backup.any() or link.required.any())
        ]

    def on_tick(self, now: float) -> list[Action]:
        """Time passes: call it every 50 ms or so."""
        for link in self.links.values():
            if link.up and now - link.beat >= self.lease / 3:
                link.beat = now
                number = link.beats[-1][0] + 1 if link.beats else 1
                link.beats.append((number, now))
                self._link(link.server, wire.BEAT, {"n": number, "v": self.map.version})
            self._pump(now, link)
        for link in [each for each in self.links.values() if now - each.down > 1.0 and each.sent]:
            if not link.backup.any() and not link.required.any():
                # A learner that is away: what is kept for it would grow without end. It begins anew when it is back.
                learner = link.learner
                self._drop_link(link.server)
                self._fresh_link(now, link.server, link.incarnation)
                self.links[link.server].learner = learner
        for entry in [each for each in self._drains if each[0] <= now]:
            self._drains.remove(entry)
            self.draining[entry[1]] = False
            self._readiness()
            self._enrol(now)
            self._commit(now)
        if now - self._asked_at > 0.5:
            # Replicas do not answer for shards that they are still loading.
            self._asked_at = now
            for link in self.links.values():
                link.asked[:] = False
                self._ask(link)
            self._forget(now)
        self._again(now)
        expiring, self._expiring = self._expiring, []
        for frame in expiring:
            self._expire(now, frame)
        return self._actions()

    def _receive(self, now: float, peer: Hashable, frame: wire.Frame) -> None:
        kind = frame.kind
        if kind == wire.PUSH:
            cover = self._checked_push(frame)
            if not self._push(now, peer, frame, cover):
                self._pushes.append((peer, frame, cover))
            elif self._pushes:
                self._again(now)
        elif kind in _READS:
            cover = self._checked(frame)
            if not self._pull(now, peer, frame, cover):
                self._pulls.append((peer, frame, cover))
        elif kind in _FROM_HEADS and peer in self._heads:
            if frame.meta["v"] > self.map.version:
                self._stalled[peer] = [frame]
                self._send(peer, wire.BEHIND, 0, {"version": self.map.version})
            else:
                self._follow(now, peer, frame)
        elif kind == wire.HAIL:
            self._hail(peer, frame)
        elif kind == wire.GRANT:
            self._install(now, Map.from_document(frame.meta["map"]), frame.meta["specs"])
        elif kind == wire.BEHIND:
            self._send(peer, wire.GRANT, 0, {"map": self.map.document(), "specs": self.specs})
        else:
            raise wire.WireError(f"no {wire.NAMES.get(kind, kind)} is taken here")

    def _install(self, now: float, new: Map, specs: Sequence[dict[str, Any]]) -> None:
        if not self._adopt(now, new, specs):
            return
        stalled, self._stalled = self._stalled, {}
        for peer, frames in stalled.items():
            for frame in frames:
                if peer in self._stalled:
                    self._stalled[peer].append(frame)
                    continue
                try:
                    self._receive(now, peer, frame)
                except (wire.WireError, *MALFORMED) as error:
                    self._garbage(peer, frame, error)
        self._enrol(now)
        self._commit(now)
        self._again(now)


__all__ = ["LEASE", "MALFORMED", "Replica"]

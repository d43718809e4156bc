"""The controller, without sockets and without a clock: it alone writes the map, and writes it to the disk before anyone sees it.

It notices deaths, shortens chains, gives shards new replicas and moves them to where they are wished, counts workers in and out, keeps
what is declared. Everything durable is in one document; everything else is learnt again after a restart. While it is down nothing
changes and nothing stops.

What it must not do: make a shard's chain of anyone who may lack something acknowledged. Chains only lose members (the rest have
everything), or gain a learner of which the head said, after everything it had been sent was answered, that it has caught up. A change
that nobody's death forces waits until every server has the present map, so that none of them ever misses one that matters to it.

Its rooms, each of which knows only those before it: `ground` (what all share), `checkpoints`, `specs` (what is declared), `moving` (changes that can
wait), `members` (who is here, and what a death changes at once), and here what comes in and goes where.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from echelon.errors import EchelonError
from echelon.server.controller.members import REBALANCE_DELAY, Membership
from echelon.server.controller.state import REJOIN_GRACE, SERVER_LEASE, MemberSession
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Action, Close, LogEvent
from echelon.server.replica import MALFORMED_ERRORS

#: A connection that ended may be made again; a process that was killed does not come back.
SERVER_RECONNECT_GRACE = 0.2
WORKER_LEASE = 2.0
WORKER_RECONNECT_GRACE = 1.0
#: A controller that did not get round to its ticks for so long judges nobody by what it did not hear.
TICK_GAP_LIMIT = 0.3


class Controller(Membership):
    """The state machine. `document` is what a former life persisted, or None."""

    def on_frame(self, now: float, peer: Hashable, frame: wire.Frame) -> list[Action]:
        """A frame of a server, a worker or an administrator."""
        session = self.sessions.get(peer)
        if session is not None:
            session.last_heard = now
        try:
            self._dispatch(now, peer, session, frame)
        except EchelonError as error:
            self._refuse(peer, frame.request_id, type(error).__name__, str(error))
        except MALFORMED_ERRORS as error:
            reason = f"{wire.KIND_NAMES.get(frame.kind, frame.kind)}: {type(error).__name__}: {error}"
            self._queued_actions += [LogEvent("garbage", {"why": reason}), Close(PEER, peer)]
        return self._take_actions()

    def on_peer_lost(self, now: float, peer: Hashable) -> list[Action]:
        """A connection is gone."""
        session = self.sessions.pop(peer, None)
        self._watchers = [watcher for watcher in self._watchers if watcher[0] != peer]
        if session is not None:
            grace = SERVER_RECONNECT_GRACE if session.role == "server" else WORKER_RECONNECT_GRACE
            self.disconnect_deadlines[session.role, session.name] = now + grace
        return self._take_actions()

    def on_tick(self, now: float) -> list[Action]:
        """Time passes: call it every 50 ms or so."""
        if now - self._last_tick > TICK_GAP_LIMIT:
            # We were away ourselves (stopped, or starved of time): what the others said meanwhile is still to be read.
            for session in self.sessions.values():
                session.last_heard = now
            self.disconnect_deadlines = {
                key: max(deadline, now + SERVER_RECONNECT_GRACE) for key, deadline in self.disconnect_deadlines.items()
            }
        self._last_tick = now
        for peer, session in list(self.sessions.items()):
            lease = self._lease if session.role == "server" else WORKER_LEASE
            if now - session.last_heard > lease and session.role != "admin":
                del self.sessions[peer]
                self._queued_actions.append(Close(PEER, peer))
                self.disconnect_deadlines[session.role, session.name] = now
        expired = [key for key, deadline in self.disconnect_deadlines.items() if deadline <= now]
        if expired:
            self._remove_dead(now, expired)
        self._roll_back_lost_shards(now)
        if self._is_map_installed():
            self._rebalance(now)
        self._request_shard_files(now)
        self._request_declarations(now)
        self._send_expiry_requests()
        return self._take_actions()

    def _dispatch(self, now: float, peer: Hashable, session: MemberSession | None, frame: wire.Frame) -> None:
        kind, meta, request_id = frame.kind, frame.meta, frame.request_id
        if kind == wire.JOIN:
            self._join(now, peer, request_id, meta)
        elif kind == wire.WATCH:
            if self.map.version > int(meta["after"]):
                self._send(peer, wire.MAP, request_id, self._map_answer())
            else:
                self._watchers.append((peer, request_id, int(meta["after"])))
        elif kind == wire.DECLARE:
            self._declare(now, peer, request_id, meta["spec"])
        elif kind == wire.STATUS:
            self._send(peer, wire.STATUS_REPLY, request_id, self.status(now))
        elif kind == wire.DRAIN:
            self._begin_drain(now, peer, request_id, str(meta["server"]))
        elif kind == wire.CHECKPOINT:
            self._begin_checkpoint(now, peer, request_id, str(meta["path"]))
        elif kind == wire.EXPIRE:
            self._begin_expiry(peer, request_id, meta)
        elif kind == wire.HEARTBEAT and session is None:
            if "server" not in meta:
                return  # a worker's that crossed our answer to its leaving
            server_session = self.sessions.get(self._find_peer("server", str(meta["server"])))
            if server_session is not None and server_session.incarnation == meta["incarnation"]:
                server_session.last_heard = now
        elif session is None:
            raise wire.WireError(f"{wire.KIND_NAMES.get(kind, kind)} of someone who has not joined")
        elif kind == wire.HEARTBEAT:
            if session.role == "server":
                self._send(peer, wire.HEARTBEAT, 0, {})
                if meta.get("cut"):
                    self._on_unreachable_replicas(now, session.name, [str(server) for server in meta["cut"]])
                if "report" in meta:
                    self.reports[session.name] = meta["report"]
                if int(meta["version"]) < self.map.version:
                    self._send_map_update(peer)
                self._on_map_installed(session, int(meta["version"]))
        elif kind == wire.MAP_INSTALLED:
            self._on_map_installed(session, int(meta["version"]))
        elif kind == wire.CAUGHT_UP:
            shard = int(meta["shard"])
            learner, incarnation = str(meta["learner"]), int(meta["incarnation"])
            entry = self.map.servers.get(learner)
            if (
                self._is_head(session, shard)
                and int(meta["version"]) >= self.map.epochs[shard]
                and learner in self.map.learners[shard]
                and entry is not None
                and entry.incarnation == incarnation
            ):
                self._caught_up.setdefault((shard, learner), now)
        elif kind == wire.DRAINED:
            if session.name in self._handovers and int(meta["version"]) == self.map.version:
                self._drained_shards |= {shard for shard in meta["shards"] if self._is_head(session, int(shard))}
        elif kind == wire.LEAVE:
            self._on_leave(now, peer, request_id, session)
        elif kind == wire.RESTORE_FAILED:
            self._on_restore_failed(session, int(meta["shard"]), str(meta["why"]), int(meta["version"]))
        elif kind == wire.CHECKPOINT_WRITTEN:
            self._on_checkpoint_written(meta)
        elif kind == wire.DONE:
            if int(meta["of"]) in self._declarations:
                self._on_declaration_answer(now, session, int(meta["of"]), meta.get("error"))
            else:
                self._on_expired(session, int(meta["of"]))
        else:
            raise wire.WireError(f"no {wire.KIND_NAMES.get(kind, kind)} is taken here")

    def status(self, now: float) -> dict[str, Any]:
        """What people want to know."""
        shard_map = self.map
        head_counts = {name: sum(head == name for head in shard_map.heads) for name in shard_map.servers}
        chain_lengths = [len(chain) for chain in shard_map.chains]
        replica_counts = {name: sum(name in chain for chain in shard_map.chains) for name in shard_map.servers}
        return {
            "version": shard_map.version,
            "shards": shard_map.num_shards,
            "replicas": self.replicas,
            "unplaced": sum(
                not chain for shard, chain in enumerate(shard_map.chains) if shard not in shard_map.lost_shards
            ),
            "short": sum(0 < len(chain) < self.replicas for chain in shard_map.chains),
            # Of those, the ones that the servers there are could hold.
            "owed": sum(
                0 < len(chain) < min(self.replicas, max(1, len(set(shard_map.servers) - self.leaving)))
                for chain in shard_map.chains
            ),
            "shards_by_replicas": {str(count): chain_lengths.count(count) for count in sorted(set(chain_lengths))},
            "unreadable": self.checkpoint_error,
            "learning": sum(bool(learners) for learners in shard_map.learners),
            "lost": {str(shard): list(chain) for shard, chain in shard_map.lost_shards.items()},
            "restored": {str(shard): list(source) for shard, source in shard_map.restored_from.items()},
            "revived": sorted(shard_map.rolled_back_shards),
            "checkpoint": self.last_checkpoint,
            "settings": self.settings,
            "specs": self.specs,
            "workers": {
                name: {"incarnation": incarnation, "here": self._find_peer("worker", name) is not None}
                for name, incarnation in shard_map.workers.items()
            },
            "servers": {
                name: {
                    "address": entry.address,
                    "host": entry.host,
                    "incarnation": entry.incarnation,
                    "heads": head_counts[name],
                    "replicas": replica_counts[name],
                    "leaving": name in self.leaving,
                    "here": self._find_peer("server", name) is not None,
                    "version": self._installed_version(name),
                    **self.reports.get(name, {}),
                }
                for name, entry in shard_map.servers.items()
            },
        }


__all__ = ["REBALANCE_DELAY", "REJOIN_GRACE", "SERVER_RECONNECT_GRACE", "SERVER_LEASE", "WORKER_LEASE", "Controller"]

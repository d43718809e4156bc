"""Who is here: servers and workers that join, leave, die, come back; and what becomes of a dead server's shards, at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from echelon.server.controller.rebalance import Rebalancing
from echelon.server.controller.shard_placement import build_chain, interleave_hosts
from echelon.server.controller.state import REJOIN_GRACE, MemberSession
from echelon.server.protocol import wire
from echelon.server.protocol.actions import PEER, Close, LogEvent
from echelon.server.protocol.shard_map import ServerEntry

#: Membership is left to settle before shards are moved for it.
REBALANCE_DELAY = 0.3
#: A head and a replica that cannot reach each other are not paired again for so long.
AVOID_PAIR_TIME = 10.0


class Membership(Rebalancing):
    """Membership."""

    def _join(self, now: float, peer: Hashable, request_id: int, meta: dict[str, Any]) -> None:
        role, name, incarnation = meta["role"], meta.get("id"), meta.get("incarnation")
        if (
            role not in ("server", "worker")
            or not isinstance(name, str | None)
            or not isinstance(incarnation, int | None)
        ):
            raise wire.WireError(f"JOIN of {role!r} {name!r} {incarnation!r}")
        if role == "server":
            self._join_server(now, peer, request_id, name, incarnation, str(meta["address"]), str(meta["host"]))
        else:
            self._join_worker(now, peer, request_id, name, incarnation)

    def _open_session(self, now: float, peer: Hashable, role: str, name: str, incarnation: int) -> None:
        old_peer = self._find_peer(role, name)
        if old_peer is not None:
            del self.sessions[old_peer]
            self._queued_actions.append(Close(PEER, old_peer))
        self.sessions[peer] = MemberSession(role=role, name=name, incarnation=incarnation, last_heard=now)
        self.disconnect_deadlines.pop((role, name), None)

    def _join_server(
        self,
        now: float,
        peer: Hashable,
        request_id: int,
        name: str | None,
        incarnation: int | None,
        address: str,
        host: str,
    ) -> None:
        entry = self.map.servers.get(name) if name is not None else None
        if incarnation is not None:
            if entry is None and name is not None and self.dead_servers.get(name) == incarnation:
                self._readmit_server(now, name, ServerEntry(address=address, host=host, incarnation=incarnation))
                entry = self.map.servers[name]
            if name is None or entry is None or entry.incarnation != incarnation:
                self._refuse(
                    peer, request_id, "Out", f"{name} in life {incarnation} is not in the map any more; join as new"
                )
                return
            self._open_session(now, peer, "server", name, incarnation)
            self._send(peer, wire.MAP, request_id, self._map_answer() | {"id": name, "incarnation": incarnation})
            return
        if name is not None and entry is not None:
            if self._find_peer("server", name) is not None:
                self._refuse(peer, request_id, "Taken", f"a server {name} is here already; give this one another name")
                return
            self._remove_dead(now, [("server", name)])
        self.last_incarnation += 1
        name = name or f"s{self.last_incarnation}"
        self.dead_servers.pop(name, None)
        self._open_session(now, peer, "server", name, self.last_incarnation)
        entry = ServerEntry(address=address, host=host, incarnation=self.last_incarnation)
        self._rebalance_after = now + REBALANCE_DELAY
        self._publish_map(servers={**self.map.servers, name: entry})
        self._place_unassigned_shards()
        self._send(peer, wire.MAP, request_id, self._map_answer() | {"id": name, "incarnation": self.last_incarnation})

    def _place_unassigned_shards(self) -> None:
        """Give shards that nobody ever had their first chains."""
        unassigned = [
            shard for shard, chain in enumerate(self.map.chains) if not chain and shard not in self.map.lost_shards
        ]
        if not unassigned or len(self.map.servers) < self.expect:
            return
        server_order = interleave_hosts(self.map.servers)
        head_servers = server_order[: self.settings.get("heads")]
        chains = list(self.map.chains)
        restored_from = dict(self.map.restored_from)
        for index, shard in enumerate(unassigned):
            chains[shard] = build_chain(
                head_servers[index % len(head_servers)], server_order, self.map.servers, self.replicas
            )
            if self._restore_folder is not None:
                restored_from[shard] = (self._restore_folder, self.map.version + 1)
        self._restore_folder = None
        self._publish_map(chains=tuple(chains), restored_from=restored_from)

    def _readmit_server(self, now: float, name: str, entry: ServerEntry) -> None:
        """A server that was taken for dead, and has shards of which no other replica lives."""
        shards = [shard for shard, chain in self.map.lost_shards.items() if name in chain]
        chains = list(self.map.chains)
        for shard in shards:
            chains[shard] = (name,)
        del self.dead_servers[name]
        self._rebalance_after = now + REBALANCE_DELAY
        self._queued_actions.append(LogEvent("returned", {"server": name, "shards": shards}))
        self._publish_map(
            servers={**self.map.servers, name: entry},
            chains=tuple(chains),
            lost_shards={shard: chain for shard, chain in self.map.lost_shards.items() if shard not in shards},
        )

    def _join_worker(
        self, now: float, peer: Hashable, request_id: int, name: str | None, incarnation: int | None
    ) -> None:
        if incarnation is None:
            self.last_incarnation += 1
            incarnation = self.last_incarnation
            name = name or f"w{incarnation}"
        elif name is None or not 0 < incarnation < 1 << 62:
            raise wire.WireError(
                f"JOIN of worker {name!r} in life {incarnation}: a name and a positive number are expected"
            )
        known_incarnation = self.map.workers.get(name, 0)
        if incarnation > self.last_incarnation:
            message = f"worker {name} in life {incarnation}: this controller has given {self.last_incarnation} lives only, it began anew; start the worker anew"
            self._refuse(peer, request_id, "Superseded", message)
            return
        if self.map.is_expired(incarnation):
            message = f"worker {name} was away for so long that it was given up; start it anew"
            self._refuse(peer, request_id, "Superseded", message)
            return
        if known_incarnation > incarnation:
            self._refuse(
                peer,
                request_id,
                "Superseded",
                f"worker {name} was started again since, or another has its name; this one is its former life. Give each worker a name of its own (worker=)",
            )
            return
        self._open_session(now, peer, "worker", name, incarnation)
        self._departed_at.pop(incarnation, None)
        if 0 < known_incarnation < incarnation:
            self._departed_at[known_incarnation] = now
        if known_incarnation < incarnation:
            self._publish_map(workers={**self.map.workers, name: incarnation})
        self._answer_once_installed(peer, request_id, wire.MAP, {"id": name, "incarnation": incarnation})

    def _on_leave(self, now: float, peer: Hashable, request_id: int, session: MemberSession) -> None:
        if session.role == "server":
            self._begin_drain(now, peer, request_id, session.name)
            return
        del self.sessions[peer]
        if session.name in self.map.workers:
            self._departed_at[self.map.workers[session.name]] = now
            self._publish_map(
                workers={name: incarnation for name, incarnation in self.map.workers.items() if name != session.name}
            )
        self._send(peer, wire.DONE, request_id, {})

    def _remove_dead(self, now: float, dead: Sequence[tuple[str, str]]) -> None:
        """Members that are gone: chains without them, at once."""
        for key in dead:
            self.disconnect_deadlines.pop(key, None)
        servers = {name for role, name in dead if role == "server" and name in self.map.servers}
        workers = {name for role, name in dead if role == "worker" and name in self.map.workers}
        if not servers and not workers:
            return
        chains, learners, lost_shards = list(self.map.chains), list(self.map.learners), dict(self.map.lost_shards)
        for shard, chain in enumerate(chains):
            if servers & {*chain, *learners[shard]}:
                chains[shard] = tuple(name for name in chain if name not in servers)
                learners[shard] = tuple(name for name in learners[shard] if name not in servers)
                # The last replica's learner that caught up lacks nothing that was acknowledged.
                connected_learners = (name for name in learners[shard] if self._find_peer("server", name) is not None)
                successor = next((name for name in connected_learners if (shard, name) in self._caught_up), None)
                if chain and not chains[shard] and successor is not None:
                    chains[shard] = (successor,)
                    learners[shard] = tuple(name for name in learners[shard] if name != successor)
                elif chain and not chains[shard]:
                    lost_shards[shard], learners[shard] = chain, ()
        newly_lost = sorted(set(lost_shards) - set(self.map.lost_shards))
        for name in servers:
            if any(name in lost_shards[shard] for shard in newly_lost):
                self.dead_servers[name] = self.map.servers[name].incarnation
            self.reports.pop(name, None)
            self._handovers.pop(name, None)
        self.leaving -= servers
        if servers:
            self._rebalance_after = now + REBALANCE_DELAY
            self._queued_actions.append(LogEvent("died", {"servers": sorted(servers), "lost": newly_lost}))
        if workers:
            self._departed_at |= {self.map.workers[name]: now for name in workers}
            self._queued_actions.append(LogEvent("left", {"workers": sorted(workers)}))
        self._publish_map(
            servers={name: entry for name, entry in self.map.servers.items() if name not in servers},
            chains=tuple(chains),
            learners=tuple(learners),
            lost_shards=lost_shards,
            workers={name: incarnation for name, incarnation in self.map.workers.items() if name not in workers},
        )
        if newly_lost:
            self._lost_since = now
            self._abort_for_lost_shards(newly_lost)
        self._send_due_answers()

    def _roll_back_lost_shards(self, now: float) -> None:
        """Shards that stayed lost: back to the last checkpoint, loudly."""
        if (
            not self.map.lost_shards
            or self.last_checkpoint is None
            or not self.map.servers
            or now < self._lost_since + REJOIN_GRACE
        ):
            return
        server_order = interleave_hosts(
            {name: entry for name, entry in self.map.servers.items() if name not in self.leaving} or self.map.servers
        )
        current_heads = [name for name in server_order if name in self.map.heads]
        head_servers = [*current_heads, *(name for name in server_order if name not in current_heads)][
            : self.settings.get("heads")
        ]
        chains, restored_from = list(self.map.chains), dict(self.map.restored_from)
        for index, shard in enumerate(sorted(self.map.lost_shards)):
            chains[shard] = build_chain(
                head_servers[index % len(head_servers)], server_order, self.map.servers, self.replicas
            )
            restored_from[shard] = (self.last_checkpoint, self.map.version + 1)
        self._queued_actions.append(
            LogEvent("restored", {"shards": sorted(self.map.lost_shards), "checkpoint": self.last_checkpoint})
        )
        self.dead_servers.clear()
        rolled_back = self.map.rolled_back_shards | set(self.map.lost_shards)
        self._publish_map(
            chains=tuple(chains), restored_from=restored_from, lost_shards={}, rolled_back_shards=rolled_back
        )

    def _on_restore_failed(self, session: MemberSession, shard: int, reason: str, version: int) -> None:
        """A shard could not be read out of its checkpoint: it is lost, and that checkpoint is not tried again."""
        if not self._is_head(session, shard) or version < self.map.epochs[shard]:
            return
        self._queued_actions.append(
            LogEvent("unreadable", {"shard": shard, "checkpoint": self.last_checkpoint, "why": reason})
        )
        self.last_checkpoint, self.checkpoint_error = None, reason
        chains, learners = list(self.map.chains), list(self.map.learners)
        lost_shards = {**self.map.lost_shards, shard: chains[shard]}
        chains[shard] = learners[shard] = ()
        restored_from = {
            other_shard: source for other_shard, source in self.map.restored_from.items() if other_shard != shard
        }
        self._publish_map(
            chains=tuple(chains), learners=tuple(learners), lost_shards=lost_shards, restored_from=restored_from
        )
        self._abort_for_lost_shards([shard])

    def _on_unreachable_replicas(self, now: float, head: str, servers: Sequence[str]) -> None:
        """A head cannot reach replicas that we can: its chains go on without them, and that pair is not tried again for a while."""
        chains, learners = list(self.map.chains), list(self.map.learners)
        for server in servers:
            if self._find_peer("server", server) is None:
                continue  # its death is seen to otherwise
            self._avoided_until[head, server] = now + AVOID_PAIR_TIME
            for shard, chain in enumerate(chains):
                if chain[:1] == (head,):
                    chains[shard] = tuple(name for name in chain if name != server)
                    learners[shard] = tuple(name for name in learners[shard] if name != server)
        if chains != list(self.map.chains) or learners != list(self.map.learners):
            self._queued_actions.append(LogEvent("cut off", {"head": head, "from": list(servers)}))
            self._publish_map(chains=tuple(chains), learners=tuple(learners))

"""A new map: what we hold, head and follow from now on, to whom we need links, who waits for whom, what comes out of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Action, Close, LogEvent
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.replica.backup import BackupRole
from echelon.server.replica.replica_link import PendingAck, ReplicaLink
from echelon.server.replica.state import MALFORMED_ERRORS


class MapInstaller(BackupRole):
    """Changes of the map."""

    def _adopt_map(self, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> bool:
        """Be what a newer map makes of us; False: it does not concern us."""
        old_map = self.map
        if new_map.version <= old_map.version:
            return False
        entry = new_map.servers.get(self.name)
        if entry is None or entry.incarnation != self.incarnation:
            # Taken for dead. Whether what we hold is worth anything the controller says, not whoever passes its map on: a later
            # version may have us back, with shards that nobody else has.
            return False
        if new_map.num_shards != old_map.num_shards:
            raise wire.WireError(f"a map of {new_map.num_shards} shards where there are {old_map.num_shards}")
        for spec in specs[len(self.specs) :]:
            if self._declare_spec is not None:
                self._declare_spec(spec)
        self.map, self.specs = new_map, list(specs)
        self._acceptance_cache, self._epochs = {}, np.array(new_map.epochs, np.int64)
        is_held = new_map.replica_mask(self.name)
        was_held = old_map.replica_mask(self.name)
        for shard in np.flatnonzero(was_held & ~is_held):
            self.state.drop(int(shard))
            self._incoming_snapshots.pop(int(shard), None)
        self._find_shards_to_load(is_held)
        self.is_head = new_map.head_mask(self.name)
        has_other_servers = len(new_map.servers) > 1
        self._is_sole_replica = np.fromiter(
            (has_other_servers and len(chain) == 1 for chain in new_map.chains), bool, new_map.num_shards
        )
        head_changed = np.fromiter((epoch > old_map.version for epoch in new_map.epochs), bool, new_map.num_shards)
        for shard in np.flatnonzero(head_changed & self.is_head):
            former_head = old_map.heads[shard]
            last_answer = (
                self._last_answered.get(former_head, -np.inf)
                if former_head is not None and former_head != self.name
                else -np.inf
            )
            self._reads_allowed_from[shard] = last_answer + self.lease
        self._all_reads_allowed_from = float(self._reads_allowed_from.max())
        self.is_draining &= self.is_head & ~head_changed
        self._handovers = [handover for handover in self._handovers if self.is_draining[handover[1]].all()]
        self._update_links(now, new_map, head_changed)
        self._live_slots = [
            self.state.dedup.get_slot(worker, incarnation) for worker, incarnation in new_map.workers.items()
        ]
        self._min_clock = None
        self._update_ready()
        self._recheck_pending_acks()
        self._send_to_controller(wire.MAP_INSTALLED, {"version": new_map.version})
        for link in self.links.values():
            self._request_log_state(link)
        return True

    def _update_links(self, now: float, new_map: ShardMap, head_changed: np.ndarray) -> None:
        roles_by_server: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for shard in np.flatnonzero(self.is_head):
            for role, servers in enumerate((new_map.chains[shard][1:], new_map.learners[shard])):
                for server in servers:
                    if server not in roles_by_server:
                        roles_by_server[server] = (
                            np.zeros(new_map.num_shards, bool),
                            np.zeros(new_map.num_shards, bool),
                        )
                    roles_by_server[server][role][shard] = True
        for server in [name for name in self.links if name not in roles_by_server]:
            self._remove_link(server)
        for server, (is_backup, is_learner) in roles_by_server.items():
            incarnation = new_map.servers[server].incarnation
            if server in self.links and self.links[server].incarnation != incarnation:
                self._remove_link(server)
            if server not in self.links:
                self._add_link(now, server, incarnation)
            link = self.links[server]
            needs_resync = link.has_refused & (is_backup | is_learner)
            link.reset_shards(head_changed | needs_resync | ~(is_backup | is_learner))
            link.is_backup, link.is_learner = is_backup, is_learner
            link.is_required &= is_learner
            link.log_state_requested[:] = False

    def _add_link(self, now: float, server: str, incarnation: int) -> None:
        self._links_created += 1
        self.links[server] = ReplicaLink(server, incarnation, self.map.num_shards, self._links_created)
        self.links[server].down_since = now

    def _remove_link(self, server: str) -> None:
        link = self.links.pop(server)
        for _, ack in link.pending_acks:
            ack.awaited_numbers.pop(server, None)
            if not ack.awaited_numbers and ack not in self._blocked_acks:
                self._blocked_acks.append(ack)
        self._queued_actions.append(Close(LINK, server))

    def _recheck_pending_acks(self) -> None:
        """Who waits for whom, under a new map."""
        acks_by_id: dict[int, PendingAck] = {id(ack): ack for ack in self._blocked_acks}
        for link in self.links.values():
            acks_by_id |= {id(ack): ack for _, ack in link.pending_acks}
        stale_ids = set()
        for key, ack in acks_by_id.items():
            if not self.is_head[ack.shard_set.index].all():
                stale_ids.add(key)
                if ack.peer is not None:
                    self._send_to_peer(ack.peer, wire.STALE_MAP, ack.request_id, {"version": self.map.version})
                continue
            for server in list(ack.awaited_numbers):
                if not self.links[server].must_ack(ack.shard_set):
                    del ack.awaited_numbers[server]
        for link in self.links.values():
            link.pending_acks = type(link.pending_acks)(
                entry
                for entry in link.pending_acks
                if id(entry[1]) not in stale_ids and link.server in entry[1].awaited_numbers
            )
        self._blocked_acks = []
        for key, ack in acks_by_id.items():
            if key not in stale_ids and not ack.awaited_numbers:
                self._send_ack(ack)

    def _find_shards_to_load(self, is_held: np.ndarray) -> None:
        """Which shards the map orders out of a checkpoint, and we do not have from it yet."""
        self.shards_to_load = {
            shard: (folder, version)
            for shard, (folder, version) in self.map.restored_from.items()
            if is_held[shard] and self.name in self.map.chains[shard] and self.state.entry_version[shard] < version
        }
        self._acceptance_cache.clear()
        self._is_unloaded[:] = False
        self._is_unloaded[list(self.shards_to_load)] = True

    def load_next_shard(self, now: float) -> list[Action]:
        """Read the next shard that is to come out of a checkpoint (`shards_to_load`); one at a time, as each may take a while."""
        if not self.shards_to_load:
            return []
        shard, (folder, version) = next(iter(self.shards_to_load.items()))
        del self.shards_to_load[shard]
        self._acceptance_cache.clear()
        self._is_unloaded[shard] = False
        try:
            if self._load_shard is None:
                raise ServerError("nothing here can read checkpoints")
            self.state.install(shard, self._load_shard(folder, shard))
            self.state.entry_version[shard] = version
            if shard in self.map.rolled_back_shards:
                self.state.dedup.mark_rolled_back(shard)
        except (EchelonError, OSError, *MALFORMED_ERRORS) as error:
            # A backup gets it from its head; without the head's the shard stays lost. The others here are as good as before.
            self.state.drop(shard)
            self._queued_actions.append(LogEvent("unreadable", {"shard": shard, "folder": folder, "why": str(error)}))
            if self.is_head[shard]:
                self._is_unloaded[shard] = True
                self._send_to_controller(
                    wire.RESTORE_FAILED, {"shard": shard, "why": str(error), "version": self.map.version}
                )
        self._min_clock = None
        self._update_ready()
        for link in self.links.values():
            self._request_log_state(link)
        self._add_workers(now)
        self._commit_steps(now)
        self._retry_waiting(now)
        return self._take_actions()

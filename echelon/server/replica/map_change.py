"""Both roles: what a new map changes: shards held and headed, links, acknowledgements, shards to load from a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from echelon.errors import EchelonError, ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.actions import LINK, Close, LogEvent
from echelon.server.protocol.shard_map import ShardMap
from echelon.server.replica import catch_up, push, replication
from echelon.server.replica.replica_link import ReplicaLink
from echelon.server.replica.state import MALFORMED_ERRORS, ReplicaState


def adopt_map(replica: ReplicaState, now: float, new_map: ShardMap, specs: Sequence[dict[str, Any]]) -> bool:
    """Take the role that a newer map gives us; False if it gives us none."""
    old_map = replica.map
    if new_map.version <= old_map.version:
        return False
    entry = new_map.servers.get(replica.name)
    if entry is None or entry.incarnation != replica.incarnation:
        # Declared dead. Only a map from the controller itself decides whether our data is still of use: a later version may
        # readmit us with shards that no other server has.
        return False
    if new_map.num_shards != old_map.num_shards:
        raise wire.WireError(f"a map of {new_map.num_shards} shards, but this job has {old_map.num_shards}")
    if replica.declare_spec is not None:
        for spec in specs[len(replica.specs) :]:
            replica.declare_spec(spec)
    replica.map, replica.specs = new_map, list(specs)
    is_dropped = old_map.replica_mask(replica.name) & ~new_map.replica_mask(replica.name)
    for shard in np.flatnonzero(is_dropped).tolist():
        replica.shards.drop(shard)
        replica.incoming_snapshots.pop(shard, None)
    # Restored from a checkpoint by the map, and not here yet.
    replica.shards_to_load = {
        shard: (folder, version)
        for shard, (folder, version) in new_map.restored_from.items()
        if replica.name in new_map.chains[shard] and replica.shards.entry_version[shard] < version
    }
    replica.acceptance_cache.clear()
    replica.is_unloaded[:] = False
    replica.is_unloaded[list(replica.shards_to_load)] = True
    head_changed = np.array(new_map.epochs) > old_map.version
    _change_heads(replica, old_map, head_changed)
    _update_links(replica, now, head_changed)
    replica.live_slots = [replica.shards.dedup.get_slot(*worker) for worker in new_map.workers.items()]
    replica.min_clock_cache = None
    replica.update_ready()
    _recheck_pending_acks(replica)
    replica.send_to_controller(wire.MAP_INSTALLED, {"version": new_map.version})
    for link in replica.links.values():
        catch_up.request_log_state(replica, link)
    return True


def _change_heads(replica: ReplicaState, old_map: ShardMap, head_changed: np.ndarray) -> None:
    new_map = replica.map
    replica.is_head = new_map.head_mask(replica.name)
    replica.is_sole_replica = np.array([len(chain) == 1 < len(new_map.servers) for chain in new_map.chains])
    for shard in np.flatnonzero(head_changed & replica.is_head).tolist():
        # The former head may serve reads for as long as our last answer leases them.
        last_answered = replica.last_answered.get(old_map.heads[shard] or "", -np.inf)
        replica.reads_allowed_from[shard] = last_answered + replica.lease
    replica.all_reads_allowed_from = float(replica.reads_allowed_from.max())
    replica.is_draining &= replica.is_head & ~head_changed
    replica.handovers = [handover for handover in replica.handovers if replica.is_draining[handover[1]].all()]


def _update_links(replica: ReplicaState, now: float, head_changed: np.ndarray) -> None:
    new_map = replica.map
    roles_by_server: dict[str, np.ndarray] = {}
    for shard in np.flatnonzero(replica.is_head).tolist():
        for role, servers in enumerate((new_map.chains[shard][1:], new_map.learners[shard])):
            for server in servers:
                roles_by_server.setdefault(server, np.zeros((2, new_map.num_shards), bool))[role, shard] = True
    for server in [name for name in replica.links if name not in roles_by_server]:
        _remove_link(replica, server)
    for server, (is_backup, is_learner) in roles_by_server.items():
        incarnation = new_map.servers[server].incarnation
        if server in replica.links and replica.links[server].incarnation != incarnation:
            _remove_link(replica, server)
        if server not in replica.links:
            _add_link(replica, now, server, incarnation)
        link, follows = replica.links[server], is_backup | is_learner
        link.reset_shards(head_changed | (link.has_refused & follows) | ~follows)
        link.is_backup, link.is_learner = is_backup, is_learner
        link.is_required &= is_learner
        link.log_state_requested[:] = False


def _add_link(replica: ReplicaState, now: float, server: str, incarnation: int) -> ReplicaLink:
    replica.links_created += 1
    link = replica.links[server] = ReplicaLink(server, incarnation, replica.map.num_shards, replica.links_created)
    link.down_since = now
    return link


def _remove_link(replica: ReplicaState, server: str) -> None:
    link = replica.links.pop(server)
    for _, ack in link.pending_acks:
        ack.awaited_numbers.pop(server, None)
        if not ack.awaited_numbers and ack not in replica.blocked_acks:
            replica.blocked_acks.append(ack)
    replica.actions.append(Close(LINK, server))


def reset_absent_learners(replica: ReplicaState, now: float) -> None:
    """Drop what is kept for disconnected learners, which would grow without bound; they start over when they return."""
    for link in list(replica.links.values()):
        if now - link.down_since > 1.0 and link.unacked and not link.is_needed():
            _remove_link(replica, link.server)
            _add_link(replica, now, link.server, link.incarnation).is_learner = link.is_learner


def _recheck_pending_acks(replica: ReplicaState) -> None:
    """Under a new map, other replicas may be awaited, or another server may have to answer."""
    links, acks = replica.links, {id(ack): ack for ack in replica.blocked_acks}
    for link in links.values():
        acks |= {id(ack): ack for _, ack in link.pending_acks}
    replica.blocked_acks = []
    for ack in acks.values():
        for server in list(ack.awaited_numbers):
            if not links[server].must_ack(ack.shard_set):
                del ack.awaited_numbers[server]
        if not replica.is_head[ack.shard_set.index].all():
            ack.awaited_numbers.clear()
            replica.send_to_peer(ack.peer, wire.STALE_MAP, ack.request_id, {"version": replica.map.version})
        elif not ack.awaited_numbers:
            replication.send_ack(replica, ack)
    for link in links.values():
        link.pending_acks = deque(entry for entry in link.pending_acks if link.server in entry[1].awaited_numbers)


def load_next_shard(replica: ReplicaState, now: float) -> None:
    """Read the next of `shards_to_load`; one at a time, as each may take a while."""
    if not replica.shards_to_load:
        return
    shard = next(iter(replica.shards_to_load))
    folder, version = replica.shards_to_load.pop(shard)
    replica.acceptance_cache.clear()
    replica.is_unloaded[shard] = False
    try:
        if replica.load_shard is None:
            raise ServerError("this replica cannot read checkpoints")
        replica.shards.install(shard, replica.load_shard(folder, shard))
        replica.shards.entry_version[shard] = version
        if shard in replica.map.rolled_back_shards:
            replica.shards.dedup.is_rolled_back[shard] = True
            replica.shards.dedup.pushed_since_rollback[:, shard] = False
    except (EchelonError, OSError, *MALFORMED_ERRORS) as error:
        # A backup gets the shard from its head; if the head cannot read it, the shard stays lost. The others are not affected.
        replica.shards.drop(shard)
        failure = {"shard": shard, "why": str(error)}
        replica.actions.append(LogEvent("unreadable", failure | {"folder": folder}))
        if replica.is_head[shard]:
            replica.is_unloaded[shard] = True
            replica.send_to_controller(wire.RESTORE_FAILED, failure | {"version": replica.map.version})
    replica.min_clock_cache = None
    for link in replica.links.values():
        catch_up.request_log_state(replica, link)
    push.resume_waiting(replica, now)

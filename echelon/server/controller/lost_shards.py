"""Shards without a living replica: first placement, a server that returns with the last copy, rollback to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from echelon.server.controller import checkpoints
from echelon.server.controller.shard_placement import build_chain, interleave_hosts, without
from echelon.server.controller.state import REJOIN_GRACE, ControllerState, Session
from echelon.server.protocol import wire
from echelon.server.protocol.shard_map import ServerEntry


def place_unassigned_shards(controller: ControllerState) -> None:
    """Give shards that no server ever had their first chains, once the expected servers are here."""
    shard_map = controller.map
    shards = [shard for shard, chain in enumerate(shard_map.chains) if not chain and shard not in shard_map.lost_shards]
    if shards and len(shard_map.servers) >= controller.expect:
        folder, controller.restore_folder = controller.restore_folder, None
        _place(controller, shards, folder)


def roll_back_lost_shards(controller: ControllerState, now: float) -> None:
    """Take shards that stayed lost back to the last checkpoint."""
    shard_map, checkpoint = controller.map, controller.last_checkpoint
    can_roll_back = shard_map.lost_shards and checkpoint is not None and shard_map.servers
    if not can_roll_back or now < controller.lost_since + REJOIN_GRACE:
        return
    shards = sorted(shard_map.lost_shards)
    controller.log("restored", shards=shards, checkpoint=checkpoint)
    controller.dead_servers.clear()
    rolled_back = shard_map.rolled_back_shards | set(shards)
    _place(controller, shards, checkpoint, lost_shards={}, rolled_back_shards=rolled_back)


def _place(controller: ControllerState, shards: Sequence[int], folder: str | None, **changes: Any) -> None:
    """Publish chains for these shards, from the checkpoint in `folder` if any; servers that are heads already come first."""
    shard_map = controller.map
    servers = without(shard_map.servers, controller.leaving) or shard_map.servers
    order = interleave_hosts(servers)
    heads = sorted(order, key=lambda name: name not in shard_map.heads)[: controller.settings.get("heads")]
    chains, restored_from = list(shard_map.chains), dict(shard_map.restored_from)
    for shard, head in zip(shards, cycle(heads)):
        chains[shard] = build_chain(head, order, servers, controller.replicas)
        if folder is not None:
            restored_from[shard] = (folder, shard_map.version + 1)
    controller.publish_map(chains=chains, restored_from=restored_from, **changes)


def readmit_server(controller: ControllerState, name: str, entry: ServerEntry) -> None:
    """A server that was declared dead returns with shards that no other replica has."""
    shard_map = controller.map
    shards = [shard for shard, chain in shard_map.lost_shards.items() if name in chain]
    del controller.dead_servers[name]
    controller.log("returned", server=name, shards=shards)
    controller.publish_map(
        servers={**shard_map.servers, name: entry},
        chains=[(name,) if shard in shards else chain for shard, chain in enumerate(shard_map.chains)],
        lost_shards={shard: chain for shard, chain in shard_map.lost_shards.items() if shard not in shards},
    )


def on_restore_failed(controller: ControllerState, now: float, session: Session, frame: wire.Frame) -> None:
    """RESTORE_FAILED: a shard cannot be read from its checkpoint. It is lost, and that checkpoint is not tried again."""
    shard, reason, version = int(frame.meta["shard"]), str(frame.meta["why"]), int(frame.meta["version"])
    shard_map = controller.map
    if not controller.is_head(session, shard) or version < shard_map.epochs[shard]:
        return
    controller.log("unreadable", shard=shard, checkpoint=controller.last_checkpoint, why=reason)
    controller.last_checkpoint, controller.checkpoint_error = None, reason
    chains, learners = list(shard_map.chains), list(shard_map.learners)
    lost_shards = {**shard_map.lost_shards, shard: chains[shard]}
    chains[shard] = learners[shard] = ()
    restored_from = {other: source for other, source in shard_map.restored_from.items() if other != shard}
    controller.publish_map(chains=chains, learners=learners, lost_shards=lost_shards, restored_from=restored_from)
    checkpoints.abort_for_lost_shards(controller, [shard])

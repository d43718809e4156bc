"""The report that STATUS answers with."""

from __future__ import annotations

from typing import Any

from echelon.server.controller.state import ControllerState


def make_report(controller: ControllerState) -> dict[str, Any]:
    """Shards, servers and workers, as `echelon server status` shows them."""
    shard_map, replicas = controller.map, controller.replicas
    lengths = [len(chain) for chain in shard_map.chains]
    possible = min(replicas, max(1, len(set(shard_map.servers) - controller.leaving)))
    return {
        "version": shard_map.version,
        "shards": shard_map.num_shards,
        "replicas": replicas,
        "unplaced": sum(not n and shard not in shard_map.lost_shards for shard, n in enumerate(lengths)),
        "short": sum(0 < length < replicas for length in lengths),
        # Of those, the ones that the present servers could hold.
        "owed": sum(0 < length < possible for length in lengths),
        "shards_by_replicas": {str(count): lengths.count(count) for count in sorted(set(lengths))},
        "unreadable": controller.checkpoint_error,
        "learning": sum(bool(learners) for learners in shard_map.learners),
        "lost": {str(shard): list(chain) for shard, chain in shard_map.lost_shards.items()},
        "restored": {str(shard): list(source) for shard, source in shard_map.restored_from.items()},
        "revived": sorted(shard_map.rolled_back_shards),
        "checkpoint": controller.last_checkpoint,
        "settings": controller.settings,
        "specs": controller.specs,
        "workers": {
            name: {"incarnation": incarnation, "here": controller.find_peer("worker", name) is not None}
            for name, incarnation in shard_map.workers.items()
        },
        "servers": {
            name: {
                "address": entry.address,
                "host": entry.host,
                "incarnation": entry.incarnation,
                "heads": shard_map.heads.count(name),
                "replicas": sum(name in chain for chain in shard_map.chains),
                "leaving": name in controller.leaving,
                "here": controller.find_peer("server", name) is not None,
                "version": controller.installed_version(name),
                **controller.reports.get(name, {}),
            }
            for name, entry in shard_map.servers.items()
        },
    }

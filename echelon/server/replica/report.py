"""The report of a replica that `echelon server status` shows."""

from __future__ import annotations

from typing import Any

from echelon.server.replica import clocks
from echelon.server.replica.dedup import INFINITE_CLOCK
from echelon.server.replica.state import ReplicaState


def make_report(replica: ReplicaState) -> dict[str, Any]:
    """Rows and memory, progress, lag of the other replicas, waiting requests."""
    stats, live_slots = replica.shards.store.stats(), replica.live_slots
    min_clocks = clocks.min_clock(replica)[replica.is_head]
    min_clocks = min_clocks[min_clocks != INFINITE_CLOCK]
    max_clock = int(replica.shards.dedup.clocks[live_slots].max()) if live_slots else 0
    lag = {}
    for server, link in replica.links.items():
        unsynced = ((link.is_backup | link.is_required) & ~link.is_synced).sum()
        entries, shards = link.last_number - link.last_acked, int(unsynced) + len(link.snapshot_queue)
        lag[server] = {"entries": entries, "shards": shards, "up": link.is_up}
    return {
        "rows": int(stats["rows"].sum()),
        "bytes": int(stats["bytes"]),
        "memory": int(stats["memory"]),
        "tables": {
            name: {key: int(table[key]) for key in ("rows", "bytes")} for name, table in stats["tables"].items()
        },
        "lsn": int(replica.shards.lsn.max()),
        "clock": [int(min_clocks.min()) if len(min_clocks) else 0, max(max_clock, 0)],
        "lag": lag,
        "waiting": {"pushes": len(replica.waiting_pushes), "pulls": len(replica.waiting_reads)},
    }

"""Plans with a parameter server, where they are worth a look: tables that no device holds, or devices that are not alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from echelon.plan.cluster import Cluster
from echelon.plan.parameter_server import choose_served_tables
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile

#: Servers of one machine: more than this many share its cores and its memory's bandwidth without being faster.
_MAX_SERVERS = 4
#: The bounds that are offered: exact, and one that hides what a rank waits for and trains about the same (docs/server.md).
_STALENESS_OPTIONS = (0, 4)


def should_offer_servers(profile: Profile, cluster: Cluster) -> bool:
    """Whether a search offers servers beside plans that fit without: devices are unequal, or the tables alone fill one."""
    tables = choose_served_tables(Plan(exchange="server"), profile)
    if not tables:
        return False
    devices = [device for node in cluster.nodes for device in node.devices]
    table_bytes = sum(
        table.bytes for table in profile.tables if any(served_table.path == table.path for served_table in tables)
    )
    has_unequal_devices = len({device.name for device in devices}) > 1
    return has_unequal_devices or table_bytes > min(device.memory for device in devices)


def served_plans(profile: Profile, cluster: Cluster, plans: Iterable[Plan]) -> Iterator[Plan]:
    """Those of `plans` that replicate the model, with its tables on servers."""
    tables = choose_served_tables(Plan(exchange="server"), profile)
    if not tables:
        return
    cores = max(node.cores for node in cluster.nodes)
    server_counts = [1, *(count for count in (2, _MAX_SERVERS) if count <= min(cores, _MAX_SERVERS))]
    for plan in plans:
        if plan.zero or plan.ranks != plan.mesh.dp or plan.recompute != "none" or plan.compile:
            continue
        for staleness, servers in product(_STALENESS_OPTIONS, server_counts):
            yield plan.replace(exchange="server", staleness=staleness, servers=servers, tables=tables)

"""Data-parallel plans that a search adds: uneven batch shares for unequal devices, and tables on a parameter server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product

from echelon.plan.batch_split import local_batch_sizes
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.parameter_server import choose_served_tables
from echelon.plan.plan import Plan, Recompute
from echelon.plan.profile import Profile
from echelon.planner.goal import Objective
from echelon.planner.plan_space import PlanSpace, micro_batch_sizes
from echelon.simulator.device_kinds import distinct_devices, rank_devices

#: Batch shares are multiples of the smallest share over this.
_SHARE_RESOLUTION = 8
#: Servers per machine: more would share its cores and memory bandwidth without being faster.
_MAX_SERVERS = 4
#: Staleness bounds that are tried: exact, and one that hides waiting and converges about as well (docs/server.md).
_STALENESS_OPTIONS = (0, 4)


def uneven_share_forecasts(space: PlanSpace, objective: Objective) -> list[Forecast]:
    """Plans over all devices of a heterogeneous cluster, with batch shares in proportion to the devices' speed."""
    profile, max_ranks = space.profile, space.max_ranks
    if space.simulator.is_measured or space.ranks not in (None, max_ranks) or profile.batch < max_ranks:
        return []
    devices = rank_devices(space.cluster)
    kinds = distinct_devices(devices)
    if len(kinds) < 2:
        return []
    forecasts = []
    recompute_options: tuple[Recompute, ...] = ("none", "selective", "block") if profile.fsdp_units else ("none",)
    for micro, zero, recompute in product(micro_batch_sizes(profile.batch), (0, 1, 2, 3), recompute_options):
        plan = Plan(mesh=Mesh(dp=max_ranks), micro=micro, zero=zero, recompute=recompute, model=profile.model)
        layers = space.simulator.model.layers
        speeds = [1 / (before + block * layers + after) for before, block, after in space.simulator.part_seconds(plan)]
        plan = plan.replace(batch_shares=_integer_ratio([speeds[kinds.index(device)] for device in devices]))
        if micro <= max(local_batch_sizes(profile.batch, max_ranks, plan.data.batch_shares)) and not space.errors(plan):
            forecasts.append(space.simulator.forecast(plan))
    return [forecast for forecast in forecasts if objective.accepts(forecast)]


def server_forecasts(space: PlanSpace, objective: Objective) -> list[Forecast]:
    """Plans with embedding tables on servers."""
    profile, cluster = space.profile, space.cluster
    if space.simulator.is_measured:
        plans = list(space.data_parallel_plans())
    else:
        ranks = space.ranks or space.max_ranks
        shares = {forecast.plan.data.batch_shares for forecast in uneven_share_forecasts(space, objective)} or {()}
        sizes = micro_batch_sizes(-(-profile.batch // ranks)) if profile.batch >= ranks else []
        plans = [
            Plan(mesh=Mesh(dp=ranks), micro=micro, model=profile.model).replace(batch_shares=each)
            for micro, each in product(sizes, shares)
        ]
    executable = (plan for plan in served_plans(profile, cluster, plans) if not space.errors(plan))
    return [forecast for forecast in map(space.simulator.forecast, executable) if objective.accepts(forecast)]


def should_offer_servers(profile: Profile, cluster: Cluster) -> bool:
    """Whether to try servers although other plans exist: devices are unequal, or the tables alone fill one."""
    paths = {table.path for table in choose_served_tables(Plan(exchange="server"), profile)}
    if not paths:
        return False
    devices = [device for node in cluster.nodes for device in node.devices]
    table_bytes = sum(table.bytes for table in profile.tables if table.path in paths)
    return len({device.name for device in devices}) > 1 or table_bytes > min(device.memory for device in devices)


def served_plans(profile: Profile, cluster: Cluster, plans: Iterable[Plan]) -> Iterator[Plan]:
    """The plans among `plans` that replicate the model, with its tables on servers."""
    tables = choose_served_tables(Plan(exchange="server"), profile)
    cores = max(node.cores for node in cluster.nodes)
    server_counts = [1, *(count for count in (2, _MAX_SERVERS) if count <= cores)]
    for plan in plans:
        if tables and not plan.zero and plan.ranks == plan.mesh.dp and plan.recompute == "none" and not plan.compile:
            for staleness, servers in product(_STALENESS_OPTIONS, server_counts):
                yield plan.replace(exchange="server", staleness=staleness, servers=servers, tables=tables)


def _integer_ratio(speeds: list[float]) -> tuple[int, ...]:
    """Small integers in approximate proportion to `speeds`."""
    slowest = min(speeds)
    parts = [max(round(_SHARE_RESOLUTION * speed / slowest), 1) for speed in speeds]
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)

"""Forecasts of plans with a parameter server.

Such a plan is forecast as the data-parallel plan of the model without the served tables, plus the traffic of rows to and from the servers.
Copies and the loopback are priced at the cluster's measured rates where it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.plan.batch_split import local_batch_sizes
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.format_units import format_bytes, format_seconds
from echelon.plan.parameter_server import choose_served_tables
from echelon.plan.plan import Plan, ServerPlan
from echelon.plan.profile import Amount, MemorySnapshot, Operator, OptimizerProfile, Profile, TableProfile, fold_path

#: CPU seconds of a server for one row of 64 floats: read, and trained by Adagrad (a table of 10 million rows, one core; docs/server.md).
_READ_SECONDS_PER_ROW, _WRITE_SECONDS_PER_ROW = 0.10e-6, 0.25e-6
#: CPU seconds of both ends per byte on an unmeasured loopback: 93 ms for 256 MB.
_LOOPBACK_SECONDS_PER_BYTE = 0.35e-9
#: Overhead of one request and its reply: two system calls at each end, the server's event loop, Python around them.
_FRAME_SECONDS = 0.3e-3
#: Overhead bytes per row: its id in the index (twice, as the index is half full), its number and its log number.
_INDEX_BYTES_PER_ROW = 40
#: Bytes of a server process without rows.
_SERVER_PROCESS_BYTES = 150e6
#: Bytes of optimizer state per element of a table whose optimizer is not in the profile: Adam's.
_DEFAULT_STATE_BYTES = 8.0
#: Relative error of the servers' part of a step: it was not fitted to runs.
_RELATIVE_ERROR = 0.5


def fill_served_tables(plan: Plan, profile: Profile) -> Plan:
    """`plan` with the tables that its servers hold, if it does not name them."""
    is_open = plan.uses_servers and not plan.server.tables
    return plan.replace(tables=choose_served_tables(plan, profile)) if is_open else plan


def without_servers(plan: Plan) -> Plan:
    """The plan without its servers."""
    return replace(plan, exchange="allreduce", server=ServerPlan())


def without_served_tables(profile: Profile, plan: Plan) -> Profile:
    """The profile of the ranks' own work: a table becomes the rows that a micro-batch reads."""
    tables = served_tables(profile, plan)
    served_names = {each.parameter_name for each in tables}
    tables_by_path = {fold_path(each.path): each for each in tables}
    served_bytes = sum(each.bytes for each in tables)
    shrunk_units = [
        (path, unit_size - sum(each.bytes for each in tables if each.path == path or each.path.startswith(f"{path}.")))
        for path, unit_size in zip(profile.fsdp_units, profile.fsdp_unit_bytes, strict=True)
    ]
    remaining_units = [(path, unit_size) for path, unit_size in shrunk_units if unit_size > 0]
    return replace(
        profile,
        parameters=tuple(each for each in profile.parameters if each.name not in served_names),
        operators=tuple(_without_table_traffic(each, tables_by_path) for each in profile.operators),
        moments=tuple(
            _without_table_memory(each, tables_by_path, profile.gradient_bytes - served_bytes)
            for each in profile.moments
        ),
        optimizers=tuple(_without_table_state(each, tables) for each in profile.optimizers),
        fsdp_units=tuple(path for path, _ in remaining_units),
        fsdp_unit_bytes=tuple(unit_size for _, unit_size in remaining_units),
        tables=tuple(each for each in profile.tables if each.parameter_name not in served_names),
    )


def served_tables(profile: Profile, plan: Plan) -> tuple[TableProfile, ...]:
    """The tables of the profile that the plan's servers hold."""
    paths = {table.path for table in plan.server.tables}
    return tuple(table for table in profile.tables if table.path in paths)


def _without_table_traffic(operator: Operator, tables_by_path: dict[str, TableProfile]) -> Operator:
    """A lookup moves rows instead of the table, and so does its backward."""
    if operator.module not in tables_by_path:
        return operator
    return replace(operator, moved=Amount(0.0, operator.moved.per_sample))


def _without_table_memory(
    snapshot: MemorySnapshot, tables: dict[str, TableProfile], max_gradients: float
) -> MemorySnapshot:
    path, _, operator = snapshot.module.partition(" ")
    table = tables.get(path)
    if table is None or not operator.endswith("backward"):
        return replace(snapshot, gradients=min(snapshot.gradients, max_gradients))
    rows = table.lookups * table.row_bytes
    alive_bytes = Amount(max(snapshot.alive.fixed - table.bytes, 0.0), snapshot.alive.per_sample) + rows
    return replace(
        snapshot,
        alive=alive_bytes,
        gradients=min(snapshot.gradients, max_gradients),
        blocks=max(snapshot.blocks - 1, 0),
        moved=rows * 2,
    )


def _without_table_state(optimizer: OptimizerProfile, tables: tuple[TableProfile, ...]) -> OptimizerProfile:
    served_elements = sum(table.rows * table.dim for table in tables if table.optimizer == optimizer.name)
    remaining_fraction = max(1 - served_elements / max(optimizer.trainable_elements, 1), 0.0)
    return replace(
        optimizer,
        state_bytes=int(optimizer.state_bytes * remaining_fraction),
        temporary_bytes=int(optimizer.temporary_bytes * remaining_fraction),
        trainable_elements=max(optimizer.trainable_elements - served_elements, 0),
    )


@dataclass(frozen=True, slots=True)
class ServerTraffic:
    """Traffic between one rank and the servers in a step."""

    rows: float  #: read, and written back
    transfer_bytes: float  #: in each direction
    server_seconds: float  #: CPU seconds of the servers, on all replicas
    transfer_seconds: float  #: both directions


def server_traffic(
    profile: Profile, plan: Plan, samples: int, loopback: Callable[[float], float] | None = None
) -> ServerTraffic:
    """The traffic of a rank with `samples` samples. `loopback`: bytes -> measured seconds."""
    rows = table_bytes_read = table_elements = 0.0
    for table in served_tables(profile, plan):
        rows_read = table.distinct_rows(samples)
        rows += rows_read
        table_bytes_read += rows_read * (table.row_bytes + 8)
        table_elements += rows_read * table.dim
    ranks_profile = without_served_tables(profile, plan)
    dense_bytes = float(ranks_profile.gradient_bytes) if plan.server.dense == "server" else 0.0
    trained_elements = table_elements + dense_bytes / 4
    frame_seconds = 2 * plan.server.servers * _FRAME_SECONDS
    transfer_time = loopback or (lambda size: _LOOPBACK_SECONDS_PER_BYTE * size)
    transfer_bytes, replicas = table_bytes_read + dense_bytes, plan.server.replicas
    read_seconds = table_elements / 64 * _READ_SECONDS_PER_ROW + _LOOPBACK_SECONDS_PER_BYTE * dense_bytes / 4
    write_seconds = trained_elements / 64 * _WRITE_SECONDS_PER_ROW * replicas
    write_seconds += (replicas - 1) * _LOOPBACK_SECONDS_PER_BYTE * transfer_bytes
    return ServerTraffic(
        rows=rows,
        transfer_bytes=transfer_bytes,
        server_seconds=read_seconds + write_seconds,
        transfer_seconds=transfer_time(2 * transfer_bytes) + frame_seconds,
    )


def server_memory_bytes(profile: Profile, plan: Plan) -> float:
    """Bytes on all servers: every row with its state on each replica. A table that starts empty has the rows that the data reads, if its
    number of samples is known."""
    starts_full = {each.path: each.initialized_by == "model" or not profile.samples for each in plan.server.tables}
    # As measured: whether SGD has momentum is the user's choice.
    state_bytes_by_optimizer = {
        each.name: each.state_bytes / each.trainable_elements
        for each in profile.optimizers
        if each.trainable_elements and not each.untested_reason
    }
    table_bytes = sum(
        (each.rows if starts_full[each.path] else each.distinct_rows(profile.samples))
        * (
            each.row_bytes
            + each.dim * state_bytes_by_optimizer.get(each.optimizer, _DEFAULT_STATE_BYTES)
            + _INDEX_BYTES_PER_ROW
        )
        for each in served_tables(profile, plan)
    )
    dense_bytes = 0.0
    if plan.server.dense == "server":
        ranks_profile = without_served_tables(profile, plan)
        dense_bytes = float(ranks_profile.gradient_bytes + ranks_profile.state_bytes)
    return plan.server.replicas * (table_bytes + dense_bytes) + plan.server.servers * _SERVER_PROCESS_BYTES


def add_server_costs(
    base: Forecast, profile: Profile, cluster: Cluster, plan: Plan, loopback: Callable[[float], float] | None = None
) -> Forecast:
    """Add the servers to `base`, the forecast of `without_servers(plan)` for the `without_served_tables` profile."""
    node, dp = cluster.nodes[0], plan.mesh.dp
    largest_batch = max(local_batch_sizes(profile.batch, dp, plan.data.batch_shares))
    traffic = server_traffic(profile, plan, largest_batch, loopback)
    time = base.time
    if plan.server.dense == "server":  # the ranks neither exchange gradients nor step an optimizer
        time = replace(time, exchange=0.0, hidden=0.0, optimizer=0.0)
    # All ranks ask at about the same time: each server serves its share of all their rows.
    busy_servers = min(plan.server.servers, max(node.cores, 1))
    server_seconds = traffic.transfer_seconds + dp * traffic.server_seconds / busy_servers
    overlappable = time.optimizer + time.input + time.exchange  # the next rows are requested when the last are pushed
    if plan.server.staleness != 0:
        overlappable += time.forward + time.backward
    cpu = cluster.device_kind == "cpu"
    threads = plan.threads or max(node.cores // plan.ranks, 1)
    # If the ranks use all cores, work hidden behind theirs still takes cores from them.
    idle_core_fraction = max(1 - plan.ranks * threads / max(node.cores, 1), 0.0) if cpu else 1.0
    cpu_seconds = dp * (traffic.server_seconds + traffic.transfer_seconds) / max(node.cores, 1) if cpu else 0.0
    hidden = min(server_seconds, overlappable)
    exposed = server_seconds - hidden + (1 - idle_core_fraction) * min(cpu_seconds, hidden)
    time = replace(time, exchange=time.exchange + exposed, hidden=time.hidden + server_seconds - exposed)
    error_bound = _RELATIVE_ERROR * exposed
    low, high = min(base.time.low, time.step) - error_bound, max(base.time.high + exposed, time.step) + error_bound
    required_memory, host_memory = server_memory_bytes(profile, plan), node.memory * 0.95 * len(cluster.nodes)
    capacity, peak_location = base.capacity, base.peak_at
    if cpu:
        capacity = max(base.capacity - required_memory / plan.ranks, 0.0)
    elif required_memory > host_memory:
        capacity, peak_location = 0.0, "the servers' tables, in host memory"
    return replace(
        base,
        plan=plan,
        time=replace(time, low=max(low, 0.0), high=high),
        capacity=capacity,
        peak_at=peak_location,
        notes=(*base.notes, *_notes(profile, plan, traffic, required_memory, server_seconds, server_seconds - exposed)),
    )


def _notes(
    profile: Profile, plan: Plan, traffic: ServerTraffic, required_memory: float, seconds: float, hidden: float
) -> list[str]:
    tables = served_tables(profile, plan)
    table_bytes = sum(table.bytes for table in tables)
    holding = f"{len(tables)} table{'s' * (len(tables) != 1)} of {format_bytes(table_bytes)}"
    holding += " and all other parameters" if plan.server.dense == "server" else ""
    notes = [
        f"{plan.server.servers} server{'s hold' if plan.server.servers > 1 else ' holds'} {holding}: {format_bytes(required_memory)} of host memory with state and {plan.server.replicas} "
        f"replica{'s' * (plan.server.replicas > 1)}",
        f"a rank reads and writes up to {traffic.rows:,.0f} rows a step ({format_bytes(2 * traffic.transfer_bytes)}): {format_seconds(seconds)}, "
        f"{format_seconds(hidden)} of it hidden; server rates are those of a benchmark, not of this machine",
    ]
    if plan.server.staleness != 0:
        bound = "no bound" if plan.server.staleness is None else f"{plan.server.staleness} steps"
        notes.append(f"rows may be stale (bound: {bound}), so results differ from those of one device")
    return notes

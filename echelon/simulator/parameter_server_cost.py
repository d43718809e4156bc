"""What a parameter server changes in a forecast: what the ranks no longer hold and do, and what the way to the servers costs.

A plan with servers is forecast as the plan of the data axis that is left when the servers' tables are taken out of the model, plus the rows
that go to and fro. Rates of copies and of the loopback are the cluster's where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.plan.batch_split import local_batch_sizes
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast, TimeForecast
from echelon.plan.format_units import format_bytes, format_seconds
from echelon.plan.parameter_server import choose_served_tables
from echelon.plan.plan import Plan, ServerPlan
from echelon.plan.profile import Amount, MemorySnapshot, Operator, OptimizerProfile, Profile, TableProfile, fold_path

#: CPU seconds of a server for one row of 64 floats: read, and trained by Adagrad (a table of 10 million rows, one core; docs/server.md).
_READ_SECONDS_PER_ROW, _WRITE_SECONDS_PER_ROW = 0.10e-6, 0.25e-6
#: CPU seconds of both ends for one byte on a loopback, where no link was measured: 93 ms for 256 MB.
_LOOPBACK_SECONDS_PER_BYTE = 0.35e-9
#: What one frame there and back costs besides: two system calls at each end, the loop of the server, Python around them.
_FRAME_SECONDS = 0.3e-3
#: Bytes of a row besides its numbers: its id in the index, twice because that is half full, its number and its log number.
_INDEX_BYTES_PER_ROW = 40
#: Bytes of a server process without a row.
_SERVER_PROCESS_BYTES = 150e6
#: Bytes of state for each number of a table whose rule the profile does not have: Adam's.
_DEFAULT_STATE_BYTES = 8.0
#: How far the server's part of a step may lie from this: nothing of it was fitted to runs.
_RELATIVE_ERROR = 0.5


def fill_served_tables(plan: Plan, profile: Profile) -> Plan:
    """`plan` with the tables that its servers hold, where it leaves them open."""
    return (
        plan.replace(tables=choose_served_tables(plan, profile))
        if plan.uses_servers and not plan.server.tables
        else plan
    )


def without_servers(plan: Plan) -> Plan:
    """What is left of a plan when its servers are taken away."""
    return replace(plan, exchange="allreduce", server=ServerPlan())


def without_served_tables(profile: Profile, plan: Plan) -> Profile:
    """The profile of what the ranks still hold and compute. Rows come in place of tables: as many as a micro-batch reads."""
    tables = served_tables(profile, plan)
    served_names, tables_by_path = (
        {each.parameter_name for each in tables},
        {fold_path(each.path): each for each in tables},
    )
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
    """A lookup moves rows and not the table; its backward writes as many."""
    if operator.module not in tables_by_path:
        return operator
    return replace(operator, moved=Amount(0.0, operator.moved.per_sample))


def _without_table_memory(
    snapshot: MemorySnapshot, tables_by_path: dict[str, TableProfile], max_gradient_bytes: float
) -> MemorySnapshot:
    path, _, operator = snapshot.module.partition(" ")
    table = tables_by_path.get(path)
    if table is None or not operator.endswith("backward"):
        return replace(snapshot, gradients=min(snapshot.gradients, max_gradient_bytes))
    rows = table.lookups * table.row_bytes
    alive_bytes = Amount(max(snapshot.alive.fixed - table.bytes, 0.0), snapshot.alive.per_sample) + rows
    return replace(
        snapshot,
        alive=alive_bytes,
        gradients=min(snapshot.gradients, max_gradient_bytes),
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
    """What one rank has to do with the servers in one step."""

    rows: float  #: read, and written again
    bytes_read: float  #: bytes
    bytes_written: float  #: bytes
    server_read_seconds: float  #: CPU seconds of servers
    server_write_seconds: float  #: CPU seconds of servers, on all replicas together
    transfer_seconds: float  #: seconds of the way, both directions


def server_traffic(
    profile: Profile, plan: Plan, samples: int, loopback: Callable[[float], float] | None = None
) -> ServerTraffic:
    """For a rank of so many samples. `loopback`: seconds of so many bytes, measured."""
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
    return ServerTraffic(
        rows=rows,
        bytes_read=table_bytes_read + dense_bytes,
        bytes_written=table_bytes_read + dense_bytes,
        server_read_seconds=table_elements / 64 * _READ_SECONDS_PER_ROW + _LOOPBACK_SECONDS_PER_BYTE * dense_bytes / 4,
        server_write_seconds=trained_elements / 64 * _WRITE_SECONDS_PER_ROW * plan.server.replicas
        + (plan.server.replicas - 1) * _LOOPBACK_SECONDS_PER_BYTE * (table_bytes_read + dense_bytes),
        transfer_seconds=transfer_time(2 * (table_bytes_read + dense_bytes)) + frame_seconds,
    )


def server_memory_bytes(profile: Profile, plan: Plan) -> float:
    """Bytes of all servers together: every row with its state, on each of its replicas. Of a table that begins on servers there are the rows
    that the data reads, where its size is known."""
    starts_full = {each.path: each.initialized_by == "model" or not profile.samples for each in plan.server.tables}
    # As the optimizer was seen to keep it: momentum is SGD's by choice.
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
    """`base` is the forecast of `without_servers(plan)` for the `without_served_tables` profile; what the servers add to it."""
    node, dp = cluster.nodes[0], plan.mesh.dp
    largest_batch = max(local_batch_sizes(profile.batch, dp, plan.data.batch_shares))
    server_load = server_traffic(profile, plan, largest_batch, loopback)
    time = base.time
    if plan.server.dense == "server":  # nothing is summed over the ranks, and no rank steps an optimizer
        time = replace(time, exchange=0.0, hidden=0.0, optimizer=0.0)
    # All ranks ask at about the same time: each server has its part of all their rows.
    busy_servers = min(plan.server.servers, max(node.cores, 1))
    server_seconds = (
        server_load.transfer_seconds
        + dp * (server_load.server_read_seconds + server_load.server_write_seconds) / busy_servers
    )
    overlappable = time.optimizer + time.input + time.exchange  # the next rows are asked for when the last are pushed
    if plan.server.staleness != 0:
        overlappable += time.forward + time.backward
    cpu = cluster.device_kind == "cpu"
    threads = plan.threads or max(node.cores // plan.ranks, 1)
    # Where ranks use all cores what hides behind their work takes cores from it all the same.
    idle_core_fraction = max(1 - plan.ranks * threads / max(node.cores, 1), 0.0) if cpu else 1.0
    cpu_seconds = (
        (
            dp
            * (server_load.server_read_seconds + server_load.server_write_seconds + server_load.transfer_seconds)
            / max(node.cores, 1)
        )
        if cpu
        else 0.0
    )
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
        capacity, peak_location = 0.0, "the servers' tables, in the hosts' memory"
    return replace(
        base,
        plan=plan,
        time=_with_bounds(time, low, high),
        capacity=capacity,
        peak_at=peak_location,
        notes=(
            *base.notes,
            *_notes(profile, plan, server_load, required_memory, server_seconds, server_seconds - exposed),
        ),
    )


def _with_bounds(time: TimeForecast, low: float, high: float) -> TimeForecast:
    return replace(time, low=max(low, 0.0), high=high)


def _notes(
    profile: Profile,
    plan: Plan,
    server_load: ServerTraffic,
    required_memory: float,
    server_seconds: float,
    hidden: float,
) -> list[str]:
    tables = served_tables(profile, plan)
    table_bytes = sum(table.bytes for table in tables)
    held_description = f"{len(tables)} table{'s' * (len(tables) != 1)} of {format_bytes(table_bytes)}"
    held_description += " and all other parameters" if plan.server.dense == "server" else ""
    notes = [
        f"{plan.server.servers} server{'s hold' if plan.server.servers > 1 else ' holds'} {held_description}: {format_bytes(required_memory)} of the hosts' memory with state and {plan.server.replicas} "
        f"replica{'s' * (plan.server.replicas > 1)}",
        f"a rank reads and writes up to {server_load.rows:,.0f} rows a step ({format_bytes(server_load.bytes_read + server_load.bytes_written)}), {format_seconds(server_seconds)} of which "
        f"{format_seconds(hidden)} hide; rates of servers are those of a bench, not of this machine",
    ]
    if plan.server.staleness != 0:
        bound = "no bound" if plan.server.staleness is None else f"{plan.server.staleness} steps"
        notes.append(
            f"rows may lack what others pushed meanwhile (bound: {bound}): other numbers than one device gives"
        )
    return notes

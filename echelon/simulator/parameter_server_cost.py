"""What a parameter server changes in a forecast: what the ranks no longer hold and do, and what the way to the servers costs.

A plan with servers is forecast as the plan of the data axis that is left when the servers' tables are taken out of the model, plus the rows
that go to and fro. Rates of copies and of the loopback are the cluster's where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.plan.batch_split import sizes
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast, Time
from echelon.plan.format_units import seconds, size
from echelon.plan.parameter_server import choose
from echelon.plan.plan import Plan
from echelon.plan.profile import Amount, Moment, Operator, Profile, Rule, Table, fold_path

#: CPU seconds of a server for one row of 64 floats: read, and trained by Adagrad (a table of 10 million rows, one core; docs/server.md).
_READ, _WRITE = 0.10e-6, 0.25e-6
#: CPU seconds of both ends for one byte on a loopback, where no link was measured: 93 ms for 256 MB.
_WIRE = 0.35e-9
#: What one frame there and back costs besides: two system calls at each end, the loop of the server, Python around them.
_FRAME = 0.3e-3
#: Bytes of a row besides its numbers: its id in the index, twice because that is half full, its number and its log number.
_INDEX = 40
#: Bytes of a server process without a row.
_PROCESS = 150e6
#: Bytes of state for each number of a table whose rule the profile does not have: Adam's.
_STATE = 8.0
#: How far the server's part of a step may lie from this: nothing of it was fitted to runs.
_SPREAD = 0.5


def with_tables(plan: Plan, profile: Profile) -> Plan:
    """`plan` with the tables that its servers hold, where it leaves them open."""
    return replace(plan, tables=choose(plan, profile)) if plan.served and not plan.tables else plan


def of_ranks(plan: Plan) -> Plan:
    """What is left of a plan when its servers are taken away."""
    plain = Plan()
    names = ("exchange", "dense", "staleness", "servers", "replicas", "rows", "tables")
    return replace(plan, **{name: getattr(plain, name) for name in names})


def lean(profile: Profile, plan: Plan) -> Profile:
    """The profile of what the ranks still hold and compute. Rows come in place of tables: as many as a micro-batch reads."""
    tables = served(profile, plan)
    names, folded = {each.name for each in tables}, {fold_path(each.path): each for each in tables}
    gone = sum(each.bytes for each in tables)
    units = [
        (path, held - sum(each.bytes for each in tables if each.path == path or each.path.startswith(f"{path}.")))
        for path, held in zip(profile.units, profile.unit_bytes, strict=True)
    ]
    left = [(path, held) for path, held in units if held > 0]
    return replace(
        profile,
        parameters=tuple(each for each in profile.parameters if each.name not in names),
        operators=tuple(_operator(each, folded) for each in profile.operators),
        moments=tuple(_moment(each, folded, profile.gradient_bytes - gone) for each in profile.moments),
        optimizers=tuple(_rule(each, tables) for each in profile.optimizers),
        units=tuple(path for path, _ in left),
        unit_bytes=tuple(held for _, held in left),
        tables=tuple(each for each in profile.tables if each.name not in names),
    )


def served(profile: Profile, plan: Plan) -> tuple[Table, ...]:
    """The tables of the profile that the plan's servers hold."""
    paths = {each.path for each in plan.tables}
    return tuple(each for each in profile.tables if each.path in paths)


def _operator(operator: Operator, folded: dict[str, Table]) -> Operator:
    """A lookup moves rows and not the table; its backward writes as many."""
    if operator.module not in folded:
        return operator
    return replace(operator, moved=Amount(0.0, operator.moved.per_sample))


def _moment(moment: Moment, folded: dict[str, Table], gradients: float) -> Moment:
    path, _, operator = moment.where.partition(" ")
    table = folded.get(path)
    if table is None or not operator.endswith("backward"):
        return replace(moment, gradients=min(moment.gradients, gradients))
    rows = table.lookups * table.row_bytes
    alive = Amount(max(moment.alive.fixed - table.bytes, 0.0), moment.alive.per_sample) + rows
    return replace(
        moment,
        alive=alive,
        gradients=min(moment.gradients, gradients),
        blocks=max(moment.blocks - 1, 0),
        moved=rows * 2,
    )


def _rule(rule: Rule, tables: tuple[Table, ...]) -> Rule:
    gone = sum(each.rows * each.dim for each in tables if each.rule == rule.name)
    share = max(1 - gone / max(rule.elements, 1), 0.0)
    return replace(
        rule,
        state=int(rule.state * share),
        temporary=int(rule.temporary * share),
        elements=max(rule.elements - gone, 0),
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank has to do with the servers in one step."""

    rows: float  #: read, and written again
    read: float  #: bytes
    written: float  #: bytes
    reading: float  #: CPU seconds of servers
    writing: float  #: CPU seconds of servers, on all replicas together
    wire: float  #: seconds of the way, both directions


def traffic(profile: Profile, plan: Plan, samples: int, loopback: Callable[[float], float] | None = None) -> Traffic:
    """For a rank of so many samples. `loopback`: seconds of so many bytes, measured."""
    rows = read = numbers = 0.0
    for table in served(profile, plan):
        touched = table.touched(samples)
        rows += touched
        read += touched * (table.row_bytes + 8)
        numbers += touched * table.dim
    rest = lean(profile, plan)
    dense = float(rest.gradient_bytes) if plan.dense == "server" else 0.0
    trained = numbers + dense / 4
    frames = 2 * plan.servers * _FRAME
    way = loopback or (lambda each: _WIRE * each)
    return Traffic(
        rows=rows,
        read=read + dense,
        written=read + dense,
        reading=numbers / 64 * _READ + _WIRE * dense / 4,
        writing=trained / 64 * _WRITE * plan.replicas + (plan.replicas - 1) * _WIRE * (read + dense),
        wire=way(2 * (read + dense)) + frames,
    )


def held(profile: Profile, plan: Plan) -> float:
    """Bytes of all servers together: every row with its state, on each of its replicas. Of a table that begins on servers there are the rows
    that the data reads, where its size is known."""
    made = {each.path: each.start == "model" or not profile.samples for each in plan.tables}
    # As the optimizer was seen to keep it: momentum is SGD's by choice.
    state = {each.name: each.state / each.elements for each in profile.optimizers if each.elements and not each.untried}
    tables = sum(
        (each.rows if made[each.path] else each.touched(profile.samples))
        * (each.row_bytes + each.dim * state.get(each.rule, _STATE) + _INDEX)
        for each in served(profile, plan)
    )
    dense = 0.0
    if plan.dense == "server":
        rest = lean(profile, plan)
        dense = float(rest.gradient_bytes + rest.state_bytes)
    return plan.replicas * (tables + dense) + plan.servers * _PROCESS


def with_servers(
    base: Forecast, profile: Profile, cluster: Cluster, plan: Plan, loopback: Callable[[float], float] | None = None
) -> Forecast:
    """`base` is the forecast of `of_ranks(plan)` for the `lean` profile; what the servers add to it."""
    node, dp = cluster.nodes[0], plan.mesh.dp
    most = max(sizes(profile.batch, dp, plan.shares))
    told = traffic(profile, plan, most, loopback)
    time = base.time
    if plan.dense == "server":  # nothing is summed over the ranks, and no rank steps an optimizer
        time = replace(time, exchange=0.0, hidden=0.0, optimizer=0.0)
    # All ranks ask at about the same time: each server has its part of all their rows.
    at_work = min(plan.servers, max(node.cores, 1))
    waits = told.wire + dp * (told.reading + told.writing) / at_work
    behind = time.optimizer + time.input + time.exchange  # the next rows are asked for when the last are pushed
    if plan.staleness != 0:
        behind += time.forward + time.backward
    cpu = cluster.kind == "cpu"
    threads = plan.threads or max(node.cores // plan.ranks, 1)
    # Where ranks use all cores what hides behind their work takes cores from it all the same.
    free = max(1 - plan.ranks * threads / max(node.cores, 1), 0.0) if cpu else 1.0
    work = (dp * (told.reading + told.writing + told.wire) / max(node.cores, 1)) if cpu else 0.0
    hidden = min(waits, behind)
    shown = waits - hidden + (1 - free) * min(work, hidden)
    time = replace(time, exchange=time.exchange + shown, hidden=time.hidden + waits - shown)
    spread = _SPREAD * shown
    low, high = min(base.time.low, time.step) - spread, max(base.time.high + shown, time.step) + spread
    need, room = held(profile, plan), node.memory * 0.95 * len(cluster.nodes)
    capacity, where = base.capacity, base.peak_at
    if cpu:
        capacity = max(base.capacity - need / plan.ranks, 0.0)
    elif need > room:
        capacity, where = 0.0, "the servers' tables, in the hosts' memory"
    return replace(
        base,
        plan=plan,
        time=_bounded(time, low, high),
        capacity=capacity,
        peak_at=where,
        notes=(*base.notes, *_notes(profile, plan, told, need, waits, waits - shown)),
    )


def _bounded(time: Time, low: float, high: float) -> Time:
    return replace(time, low=max(low, 0.0), high=high)


def _notes(profile: Profile, plan: Plan, told: Traffic, need: float, waits: float, hidden: float) -> list[str]:
    tables = served(profile, plan)
    whole = sum(each.bytes for each in tables)
    what = f"{len(tables)} table{'s' * (len(tables) != 1)} of {size(whole)}"
    what += " and all other parameters" if plan.dense == "server" else ""
    notes = [
        f"{plan.servers} server{'s hold' if plan.servers > 1 else ' holds'} {what}: {size(need)} of the hosts' memory with state and {plan.replicas} "
        f"replica{'s' * (plan.replicas > 1)}",
        f"a rank reads and writes up to {told.rows:,.0f} rows a step ({size(told.read + told.written)}), {seconds(waits)} of which "
        f"{seconds(hidden)} hide; rates of servers are those of a bench, not of this machine",
    ]
    if plan.staleness != 0:
        bound = "no bound" if plan.staleness is None else f"{plan.staleness} steps"
        notes.append(
            f"rows may lack what others pushed meanwhile (bound: {bound}): other numbers than one device gives"
        )
    return notes

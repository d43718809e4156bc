"""The forecast of one step: every operator priced by the cluster's curves, the exchange, the optimizer, the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster, Device, Sheet
from echelon.plan.forecast import Forecast, Time
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Operator, Phase, Profile
from echelon.plan.split import sizes
from echelon.simulator.again import computed_again
from echelon.simulator.cost import operator_seconds, optimizer_seconds, stream_seconds
from echelon.simulator.exchange import pipeline_seconds, talk, tensor_seconds
from echelon.simulator.fitted import Fitted, fitted
from echelon.simulator.sheet_memory import memory as held_memory
from echelon.simulator.load import Load, load_of, require_one_kind
from echelon.simulator.memory import memory
from echelon.simulator.part import parts
from echelon.simulator.schedule import bubble
from echelon.simulator.shares import Shares
from echelon.simulator.stack import Stack
from echelon.simulator.sheet_step import Layout, lay_out
from echelon.simulator.sheet_step import time as sheet_time
from echelon.simulator.work import Work, distil

#: How far a step may lie from the forecast (the bound that bench/forecast holds it to).
_SPREAD = 0.25
#: Reading and collating one sample costs about so many operators' overhead.
_SAMPLE = 1


def simulate(profile: Profile, cluster: Cluster, plan: Plan, *, stack: Stack | None = None) -> Forecast:
    """What a step of `plan` takes and holds on `cluster`; `stack`: how others than echelon's engine execute it.

    A device that was measured is priced by its curves, one that was not by its data sheet.
    """
    if by_sheet(cluster):
        alike = slowest(cluster)
        if plan.shares and alike is not cluster and plan.ranks == plan.mesh.dp:
            return _shared(distil(profile), profile.batch, cluster, alike, plan, stack or Stack())
        return forecast_of(lay_out(distil(profile), profile.batch, alike, plan, stack or Stack()), alike, fitted())
    require_one_kind(cluster)
    return price(profile, cluster, plan)


def by_sheet(cluster: Cluster) -> bool:
    """Whether its devices were never measured and have data sheets instead."""
    device = cluster.nodes[0].devices[0]
    return device.sheet is not None and not device.curves


def slowest(cluster: Cluster) -> Cluster:
    """A cluster whose devices are all as slow, and as small, as the worst of this one: ranks with the same work wait for it."""
    devices = {id(device): device for node in cluster.nodes for device in node.devices}
    first = next(iter(devices.values()))
    if all(device == first for device in devices.values()):
        return cluster
    sheets = [device.sheet for device in devices.values() if device.sheet is not None]
    if len(sheets) < len(devices):
        bare = next(device.name for device in devices.values() if device.sheet is None)
        raise PlanError(
            f"{cluster.name}: {bare} has no data sheet and others have; describe it in the cluster's file too"
        )
    names = {name for sheet in sheets for name in sheet.peaks}
    sheet = Sheet(
        peaks={name: min(each.peak(name) for each in sheets) for name in sorted(names)},
        vector=min(each.vector for each in sheets),
        bandwidth=min(each.bandwidth for each in sheets),
        units=min(each.units for each in sheets),
        power=min(each.power for each in sheets),
        legacy=min(each.legacy for each in sheets),
    )
    kinds = sorted({device.name for device in devices.values()})
    worst = replace(first, name=" and ".join(kinds), memory=min(each.memory for each in devices.values()), sheet=sheet)
    wires = [node.wire for node in cluster.nodes if node.wire is not None]
    wire = min(wires, key=lambda each: each.rate) if wires else None
    fewest = min(len(node.devices) for node in cluster.nodes)
    whole = [replace(node, devices=(worst,) * fewest, wire=wire) for node in cluster.nodes]
    note = f"{' and '.join(kinds)}: every rank has the same work, so that all wait for the slowest and hold what the smallest can"
    left = sum(len(node.devices) for node in cluster.nodes) - fewest * len(whole)
    return replace(
        cluster,
        nodes=tuple(whole),
        notes=(*cluster.notes, note, *([f"{left} devices of larger nodes are not used"] if left else [])),
    )


def _shared(work: Work, batch: int, cluster: Cluster, alike: Cluster, plan: Plan, stack: Stack) -> Forecast:
    """A step in which each device has its own share of the batch: the device that takes longest decides the time, the one with the least
    room left the memory."""
    devices = [device for node in cluster.nodes for device in node.devices[: len(alike.nodes[0].devices)]]
    largest: dict[str, tuple[Device, int]] = {}
    for device, size in zip(devices, sizes(batch, plan.mesh.dp, plan.shares), strict=False):
        known = largest.get(device.name, (device, 0))
        largest[device.name] = (device, max(size, known[1]))
    made = []
    for device, size in largest.values():
        nodes = tuple(replace(node, devices=(device,) * len(node.devices)) for node in alike.nodes)
        mine = replace(alike, nodes=nodes, notes=cluster.notes)
        layout = lay_out(work, batch, mine, plan, stack)
        made.append(forecast_of(replace(layout, micro=-(-size // layout.count)), mine, fitted()))
    longest = max(made, key=lambda each: each.time.step)
    tightest = max(made, key=lambda each: (each.memory.high + each.memory.framework) / each.capacity)
    notes = [note for each in made for note in each.notes]
    return replace(
        longest,
        memory=tightest.memory,
        capacity=tightest.capacity,
        peak_at=tightest.peak_at,
        notes=tuple(dict.fromkeys(notes)),
    )


def forecast_of(layout: Layout, cluster: Cluster, constants: Fitted) -> Forecast:
    """The forecast of a plan that was laid out on a cluster by its data sheets."""
    held, where = held_memory(layout, constants)
    return Forecast(
        plan=layout.plan,
        batch=layout.batch,
        time=sheet_time(layout, cluster, constants),
        memory=held,
        capacity=layout.capacity,
        peak_at=where,
        notes=(*cluster.notes, *_sheet_notes(cluster)),
    )


def _sheet_notes(cluster: Cluster) -> list[str]:
    return [f"priced by the data sheet of {cluster.nodes[0].devices[0].name}: nothing was measured there"]


def price(profile: Profile, cluster: Cluster, plan: Plan) -> Forecast:
    """`simulate` on a cluster that passed `require_one_kind`: a search asks that once for hundreds of plans."""
    for axis in ("cp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            raise PlanError(f"{axis}={getattr(plan.mesh, axis)}: this axis is not forecast; use {axis}=1")
    if plan.open:
        raise PlanError(
            f'"{plan}" leaves open how the model is cut, and a forecast needs to know: `echelon simulate FILE --plan ...` finds it'
        )
    if profile.batch < plan.mesh.dp:
        raise PlanError(
            f"dp={plan.mesh.dp}: a batch of {profile.batch} cannot feed so many ranks; use dp={profile.batch} or less"
        )
    load = load_of(profile, cluster, plan)
    ranks = parts(profile, plan, load.micros)
    held, where = max(
        (memory(part.profile, plan, load, part.waiting, part.freed) for part in ranks), key=lambda each: each[0].peak
    )
    return Forecast(
        plan=plan,
        batch=profile.batch,
        time=max(rank_times(profile, cluster, plan), key=lambda each: each.step),
        memory=held,
        capacity=load.capacity,
        peak_at=where,
        notes=_notes(profile, cluster, plan, load),
    )


def rank_times(profile: Profile, cluster: Cluster, plan: Plan) -> list[Time]:
    """The step as each rank of pp spends it, by measured curves."""
    load = load_of(profile, cluster, plan)
    ranks = parts(profile, plan, load.micros)
    return [_time(profile, part.profile, rank, plan, load) for rank, part in enumerate(ranks)]


def _time(whole: Profile, profile: Profile, rank: int, plan: Plan, load: Load) -> Time:
    """The step as the rank `rank` of pp spends it; `profile` is its part of the `whole`."""
    shares = Shares(whole, plan)
    forward, backward, calls, within = 0.0, 0.0, 0, 0.0
    for samples in sorted(set(load.micros)):
        times = load.micros.count(samples)
        forward += times * _compute(profile, plan, load, samples, "forward")
        backward += times * _compute(profile, plan, load, samples, "backward")
        calls += times * sum(operator.count for operator in profile.operators)
        within += times * tensor_seconds(whole, plan, load, shares, rank, samples)
        again = computed_again(whole, profile, plan)
        backward += times * _priced(again, plan.precision or profile.precision, load, samples)
        calls += times * sum(operator.count for operator in again)
        within += times * pipeline_seconds(whole, plan, load, rank, samples)
    if len(load.micros) > 1:
        backward += (len(load.micros) - 1) * stream_seconds(load, "add_", 3 * profile.gradient_bytes)
    host = calls * load.device.overhead * load.crowding
    reading = load.samples * (
        stream_seconds(load, "copy_", 2 * profile.input_bytes) + _SAMPLE * load.device.overhead * load.crowding
    )
    if load.device.kind == "cuda":
        # The host runs ahead of the device: its work shows only where the device waits for it.
        host, reading = max(host + reading - forward - backward, 0.0), 0.0
    words = talk(profile, plan, load)
    hidden = min(words.hideable * _overlap(load), backward / len(load.micros))
    share = 1 / plan.mesh.dp if plan.zero else 1.0
    optimizer = sum(
        optimizer_seconds(rule, load, fused=plan.fused and rule.fuses(sharded=plan.sharded), share=share)
        for rule in profile.optimizers
    )
    if profile.clip:
        optimizer += stream_seconds(load, "mul", 3 * share * profile.gradient_bytes)
    causes = {
        "forward": forward,
        "backward": backward,
        "bubble": (forward + backward + within + host) * bubble(plan, len(load.micros)),
        "exchange": words.total - hidden + within,
        "optimizer": optimizer,
        "input": reading,
        "overhead": host,
    }
    step = sum(causes.values())
    return Time(**causes, hidden=hidden, low=step * (1 - _SPREAD), high=step * (1 + _SPREAD))


def _compute(profile: Profile, plan: Plan, load: Load, samples: int, phase: Phase) -> float:
    operators = [operator for operator in profile.operators if operator.phase == phase]
    seconds = _priced(operators, plan.precision or profile.precision, load, samples)
    if load.device.fault:
        # What a step keeps was given back after the last one: the system hands it out anew. So are gradients of one rank alone.
        fresh = profile.kept(samples) if phase == "forward" else profile.gradient_bytes * (plan.mesh.dp == 1)
        seconds += load.device.fault * fresh * load.crowding
    return seconds


def _priced(operators: Sequence[Operator], precision: Precision, load: Load, samples: int) -> float:
    return sum(o.count * operator_seconds(o, samples, load, precision) for o in operators)


def _overlap(load: Load) -> float:
    link = load.node.link("all_reduce", load.ranks)
    return link.overlap if link is not None else 0.0


def _notes(profile: Profile, cluster: Cluster, plan: Plan, load: Load) -> tuple[str, ...]:
    notes = [*profile.notes, *cluster.notes]
    if plan.compile:
        notes.append(
            "torch.compile is not forecast: the time is that of the uncompiled model, the compiled one is faster"
        )
    if load.crowding > 1:
        notes.append(
            f"{load.ranks} ranks x {load.threads} threads on {load.node.cores} cores: everything takes {load.crowding:.1f} x as long"
        )
    if plan.precision not in (None, profile.precision):
        notes.append(f"profiled in {profile.precision}, planned in {plan.precision}: the memory is a rough guess")
    if profile.device != cluster.kind:
        notes.append(f"traced for {profile.device}, forecast for {cluster.kind}: operators may differ")
    return tuple(notes)

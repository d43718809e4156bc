"""The forecast of one step: every operator priced by the cluster's curves, the exchange, the optimizer, the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.batch_split import sizes
from echelon.plan.cluster import Cluster, Device
from echelon.plan.forecast import Forecast, Time
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Operator, Phase, Profile
from echelon.simulator.calibration import Fitted, digest, fitted
from echelon.simulator.collectives import pipeline_seconds, talk, tensor_seconds
from echelon.simulator.cost.curves import message_seconds, operator_seconds, optimizer_seconds, stream_seconds
from echelon.simulator.launch_bound import Stretch, adding_up, held_up, issuing, updating
from echelon.simulator.memory import memory
from echelon.simulator.node_load import Load, load_of, require_one_kind
from echelon.simulator.parameter_server_cost import lean, of_ranks, with_servers, with_tables
from echelon.simulator.pipeline_schedule import waiting
from echelon.simulator.plan_layout import lay_out
from echelon.simulator.rank_profile import Part, parts
from echelon.simulator.rank_shares import Shares
from echelon.simulator.recomputation import computed_again
from echelon.simulator.sheet_memory import fullest
from echelon.simulator.sheet_step import Placed, step_time
from echelon.simulator.summarize_profile import distil
from echelon.simulator.training_stack import Stack
from echelon.simulator.whole_tensor_cost import MESSAGES, owned, trained_share

#: How far a step may lie from the forecast (the bound that bench/forecast holds it to).
_SPREAD = 0.25
#: Of a step, what a device may wait for its host before a note says so.
_WAITS = 0.05
#: Reading and collating one sample costs about so many operators' overhead.
_SAMPLE = 1


def simulate(profile: Profile, cluster: Cluster, plan: Plan, *, stack: Stack | None = None) -> Forecast:
    """What a step of `plan` takes and holds on `cluster`; `stack`: how others than echelon's engine execute it.

    A device that was measured is priced by its curves, one that was not by its data sheet. On devices that are not alike every rank waits
    for the one that takes longest.
    """
    if not by_sheet(cluster):
        require_one_kind(cluster)
        return price(profile, cluster, plan)
    if plan.served:
        full = with_tables(plan, profile)
        base = simulate(lean(profile, full), cluster, of_ranks(full), stack=stack)
        return with_servers(base, profile, cluster, full)
    constants = fitted()
    return forecast_of(laid_out(profile, cluster, plan, stack), constants)


def laid_out(profile: Profile, cluster: Cluster, plan: Plan, stack: Stack | None = None) -> list[Placed]:
    """The plan on each kind of device of the cluster that ranks are on."""
    work, alike = distil(profile, plan), kinds(cluster, plan.ranks)
    shares = shares_of_kinds(profile.batch, plan, kinds_of_ranks(cluster), len(alike))
    return [
        Placed(lay_out(work, profile.batch, each, plan, stack or Stack(), largest=largest, here=here), each)
        for each, (largest, here) in zip(alike, shares, strict=True)
        if here
    ]


def kinds_of_ranks(cluster: Cluster) -> list[int]:
    """For each rank that the cluster can have, in order, which of its kinds of device it is on."""
    ranks = on_ranks(cluster)
    each = distinct(device for node in cluster.nodes for device in node.devices)
    known = {id(device): each.index(device) for device in {id(one): one for one in ranks}.values()}
    return [known[id(device)] for device in ranks]


def shares_of_kinds(batch: int, plan: Plan, on: Sequence[int], number: int) -> list[tuple[int | None, tuple[int, ...]]]:
    """For each of so many kinds of device the most samples that a rank on one has (None: as many as any), and the ranks of pp that are on such.

    Without a pipeline all ranks do the same, on whatever device they are: what is unequal then are shares of the batch.
    """
    mesh = plan.mesh
    if mesh.pp > 1 and number == 1:
        return [(None, tuple(range(mesh.pp)))]
    if mesh.pp > 1:
        each = plan.ranks // mesh.pp
        stages = [set(on[rank * each : (rank + 1) * each]) for rank in range(mesh.pp)]
        return [(None, tuple(rank for rank in range(mesh.pp) if kind in stages[rank])) for kind in range(number)]
    if not plan.shares or plan.ranks != mesh.dp or batch < mesh.dp:
        reached = set(on[: plan.ranks])
        return [(None, (0,) if kind in reached else ()) for kind in range(number)]
    placed = list(zip(on, sizes(batch, mesh.dp, plan.shares), strict=False))
    most = [max((size for at, size in placed if at == kind), default=0) for kind in range(number)]
    return [(size, (0,) if size else ()) for size in most]


def by_sheet(cluster: Cluster) -> bool:
    """Whether its devices were never measured and have data sheets instead."""
    device = cluster.nodes[0].devices[0]
    return device.sheet is not None and not device.curves


def kinds(cluster: Cluster, ranks: int | None = None) -> list[Cluster]:
    """For each kind of device the cluster as it would be with that kind alone, as many in each node as all nodes have, over the slowest
    link of the nodes that the first `ranks` ranks are on."""
    devices = distinct(device for node in cluster.nodes for device in node.devices)
    if len(devices) == 1:
        return [cluster]
    bare = next((device.name for device in devices if device.sheet is None), None)
    if bare is not None:
        raise PlanError(
            f"{cluster.name}: {bare} has no data sheet and others have; describe it in the cluster's file too"
        )
    fewest = min(len(node.devices) for node in cluster.nodes)
    reached = cluster.nodes if ranks is None else cluster.nodes[: -(-ranks // fewest)]
    wires = [node.wire for node in reached if node.wire is not None]
    wire = min(wires, key=lambda each: each.rate) if wires else None
    names = " and ".join(sorted({device.name for device in devices}))
    notes = [f"{names}: what has the same work waits for the slowest, and a plan must fit wherever it is"]
    left = sum(len(node.devices) for node in cluster.nodes) - fewest * len(cluster.nodes)
    notes += [f"{left} devices of larger nodes are not used"] if left else []
    return [
        replace(
            cluster,
            nodes=tuple(replace(node, devices=(device,) * fewest, wire=wire) for node in cluster.nodes),
            notes=(*cluster.notes, *notes),
        )
        for device in devices
    ]


def on_ranks(cluster: Cluster) -> list[Device]:
    """The devices that ranks are on, in their order: as many of each node as all nodes have."""
    fewest = min(len(node.devices) for node in cluster.nodes)
    return [device for node in cluster.nodes for device in node.devices[:fewest]]


def distinct(devices: Iterable[Device]) -> list[Device]:
    """Each device once of those that are alike in everything."""
    found: list[Device] = []
    for device in {id(each): each for each in devices}.values():
        if device not in found:
            found.append(device)
    return found


def worst(made: Sequence[Forecast]) -> Forecast:
    """The device that takes longest decides the time, the one with the least room left the memory."""
    longest = max(made, key=lambda each: each.time.step)
    tightest = max(made, key=lambda each: (each.memory.high + each.memory.framework) / each.capacity)
    return replace(
        longest,
        memory=tightest.memory,
        capacity=tightest.capacity,
        peak_at=tightest.peak_at,
        notes=tuple(dict.fromkeys(note for each in made for note in each.notes)),
    )


def forecast_of(placed: Sequence[Placed], constants: Fitted) -> Forecast:
    """The forecast of a plan that was laid out on a cluster by its data sheets.

    Without a pipeline every rank has all of the model: the kind of device that takes longest decides. With one each stage is on its own.
    """
    if placed[0].layout.plan.mesh.pp == 1:
        return worst([_forecast(each, step_time([each], constants), constants) for each in placed])
    time = step_time(placed, constants)
    return worst([_forecast(each, time, constants) for each in placed])


def _forecast(placed: Placed, time: Time, constants: Fitted) -> Forecast:
    layout, cluster = placed.layout, placed.cluster
    held, where = fullest(layout, constants)
    return Forecast(
        plan=layout.plan,
        batch=layout.batch,
        time=time,
        memory=held,
        capacity=layout.capacity,
        peak_at=where,
        notes=(*cluster.notes, *_sheet_notes(cluster)),
    )


def _sheet_notes(cluster: Cluster) -> list[str]:
    name = cluster.nodes[0].devices[0].name
    return [f"priced by the data sheet of {name} and constants {digest()}: nothing was measured there"]


def price(profile: Profile, cluster: Cluster, plan: Plan) -> Forecast:
    """`simulate` on a cluster that passed `require_one_kind`: a search asks that once for hundreds of plans."""
    if plan.served:
        return _served(profile, cluster, with_tables(plan, profile))
    if plan.precision == "fp8":
        raise PlanError("precision=fp8: it is forecast by data sheets only; use bf16, or give a cluster by name")
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
        (memory(part.profile, plan, load, part.waiting, part.freed, whole=profile) for part in ranks),
        key=lambda each: each[0].peak,
    )
    time = max(_rank_times(profile, plan, load, ranks), key=lambda each: each.step)
    return Forecast(
        plan=plan,
        batch=profile.batch,
        time=time,
        memory=held,
        capacity=load.capacity,
        peak_at=where,
        notes=(*_notes(profile, cluster, plan, load), *_slow_host(cluster, time)),
    )


def _slow_host(cluster: Cluster, time: Time) -> list[str]:
    if cluster.kind != "cuda" or time.overhead < _WAITS * time.step:
        return []
    return [
        f"the device waits {time.overhead / time.step:.0%} of the step for its host, which issues operators more slowly than they run: larger "
        "micro-batches help, and how long it takes depends on what else the host does"
    ]


def _served(profile: Profile, cluster: Cluster, plan: Plan) -> Forecast:
    """With a parameter server; a link between two processes is what gathering over two ranks was measured at."""
    rest, plain = lean(profile, plan), of_ranks(plan)
    load = load_of(rest, cluster, plain)
    return with_servers(
        price(rest, cluster, plain),
        profile,
        cluster,
        plan,
        lambda size: message_seconds(load, "all_gather", 2 * size, 2),
    )


def rank_times(profile: Profile, cluster: Cluster, plan: Plan) -> list[Time]:
    """The step as each rank of pp spends it, by measured curves."""
    load = load_of(profile, cluster, plan)
    return _rank_times(profile, plan, load, parts(profile, plan, load.micros))


def _rank_times(profile: Profile, plan: Plan, load: Load, ranks: Sequence[Part]) -> list[Time]:
    found = [_time(profile, part.profile, rank, plan, load) for rank, part in enumerate(ranks)]
    waits = waiting(plan, len(load.micros), [busy for _, busy in found])
    return [_bounded(replace(time, bubble=wait)) for (time, _), wait in zip(found, waits, strict=True)]


def _bounded(time: Time) -> Time:
    return replace(time, low=time.step * (1 - _SPREAD), high=time.step * (1 + _SPREAD))


def _time(whole: Profile, profile: Profile, rank: int, plan: Plan, load: Load) -> tuple[Time, float]:
    """The step as the rank `rank` of pp spends it, waiting for others aside, and how much of it is in the pipeline; `profile` is its part
    of the `whole`."""
    shares = Shares(whole, plan)
    forward, backward, calls, within = 0.0, 0.0, 0, 0.0
    passes: dict[int, tuple[float, float]] = {}
    again = computed_again(whole, profile, plan)
    for samples in sorted(set(load.micros)):
        times = load.micros.count(samples)
        passes[samples] = (
            _compute(profile, plan, load, samples, "forward"),
            _compute(profile, plan, load, samples, "backward")
            + _priced(again, plan.precision or profile.precision, load, samples),
        )
        forward += times * passes[samples][0]
        backward += times * passes[samples][1]
        calls += times * sum(operator.count for operator in (*profile.operators, *again))
        within += times * tensor_seconds(whole, plan, load, shares, rank, samples)
        within += times * pipeline_seconds(whole, plan, load, rank, samples)
    adding = stream_seconds(load, "add_", 3 * profile.gradient_bytes)
    backward += (len(load.micros) - 1) * adding
    host = calls * load.device.overhead * load.crowding
    reading = load.samples * (
        stream_seconds(load, "copy_", 2 * profile.input_bytes) + _SAMPLE * load.device.overhead * load.crowding
    )
    words = talk(profile, plan, load)
    hidden = min(words.hideable * _overlap(load), backward / len(load.micros))
    share = 1 / plan.mesh.dp if plan.zero else 1.0
    optimizer = gathering = 0.0
    for rule, full in zip(profile.optimizers, whole.optimizers, strict=True):
        mine = owned(plan, rule.reads, rule.draws)
        if mine is None:
            fused = plan.fused and rule.fuses(sharded=plan.sharded)
            optimizer += optimizer_seconds(rule, load, fused=fused, share=share)
            continue
        optimizer += optimizer_seconds(full, load, fused=False, share=mine.share)
        size = mine.share * trained_share(whole, full) * whole.gradient_bytes
        gathering += MESSAGES * message_seconds(load, "all_gather", size, mine.ranks)
    if load.device.kind == "cuda":
        # The host runs ahead of the device: its work shows only where the device waits for it.
        host, reading = held_up(_stretches(whole, profile, plan, load, passes, adding, optimizer)), 0.0
    if profile.clip:
        optimizer += stream_seconds(load, "mul", 3 * share * profile.gradient_bytes)
    causes = {
        "forward": forward,
        "backward": backward,
        "bubble": 0.0,
        "exchange": words.total - hidden + within + gathering,
        "optimizer": optimizer,
        "input": reading,
        "overhead": host,
    }
    return Time(**causes, hidden=hidden, low=0.0, high=0.0), forward + backward + within + host


def _stretches(
    whole: Profile,
    profile: Profile,
    plan: Plan,
    load: Load,
    passes: Mapping[int, tuple[float, float]],
    adding: float,
    optimizer: float,
) -> Iterator[Stretch]:
    """The step as the host issues it, with what the device takes for each stretch; `passes`: for forward and backward, by samples."""
    before, after = issuing(whole, profile, plan, load)
    for number, samples in enumerate(load.micros):
        forward, backward = passes[samples]
        yield before + samples * _SAMPLE * load.device.overhead, forward
        more = adding_up(profile, load) if number else 0.0
        yield after + more, backward + (adding if number else 0.0)
    fused = plan.fused and all(rule.fuses(sharded=plan.sharded) for rule in profile.optimizers)
    yield updating(profile, load, fused=fused), optimizer


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

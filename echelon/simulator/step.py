"""The forecast of one step: every operator priced by the cluster's curves, the exchange, the optimizer, the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.batch_split import local_batch_sizes
from echelon.plan.cluster import Cluster, Device
from echelon.plan.forecast import Forecast, TimeForecast
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Operator, Phase, Profile
from echelon.simulator.calibration import FittedConstants, constants_digest, load_constants
from echelon.simulator.collectives import data_parallel_exchange, pipeline_transfer_seconds, tensor_parallel_seconds
from echelon.simulator.cost.curves import message_seconds, operator_seconds, optimizer_seconds, stream_seconds
from echelon.simulator.launch_bound import (
    LaunchSegment,
    accumulation_issue_seconds,
    host_stall_seconds,
    optimizer_issue_seconds,
    pass_issue_seconds,
)
from echelon.simulator.memory import forecast_memory
from echelon.simulator.node_load import NodeLoad, compute_node_load, require_uniform_node
from echelon.simulator.parameter_server_cost import (
    add_server_costs,
    fill_served_tables,
    without_served_tables,
    without_servers,
)
from echelon.simulator.pipeline_schedule import bubble_seconds
from echelon.simulator.plan_layout import lay_out_plan
from echelon.simulator.rank_profile import RankProfile, rank_profiles
from echelon.simulator.rank_shares import RankShares
from echelon.simulator.recomputation import recomputed_operators
from echelon.simulator.sheet_memory import fullest_rank_memory
from echelon.simulator.sheet_step import PlacedPlan, step_time
from echelon.simulator.summarize_profile import summarize_profile
from echelon.simulator.training_stack import TrainingStack
from echelon.simulator.whole_tensor_cost import TRANSFERS_PER_STEP, find_owned_tensors, trained_fraction

#: How far a step may lie from the forecast (the bound that bench/forecast holds it to).
_RELATIVE_ERROR = 0.25
#: Of a step, what a device may wait for its host before a note says so.
_HOST_BOUND_FRACTION = 0.05
#: Reading and collating one sample costs about so many operators' overhead.
_OPERATORS_PER_SAMPLE = 1


def simulate(profile: Profile, cluster: Cluster, plan: Plan, *, stack: TrainingStack | None = None) -> Forecast:
    """What a step of `plan` takes and holds on `cluster`; `stack`: how others than echelon's engine execute it.

    A device that was measured is priced by its curves, one that was not by its data sheet. On devices that are not alike every rank waits
    for the one that takes longest.
    """
    if not uses_data_sheets(cluster):
        require_uniform_node(cluster)
        return simulate_measured(profile, cluster, plan)
    if plan.uses_servers:
        resolved_plan = fill_served_tables(plan, profile)
        base = simulate(
            without_served_tables(profile, resolved_plan), cluster, without_servers(resolved_plan), stack=stack
        )
        return add_server_costs(base, profile, cluster, resolved_plan)
    constants = load_constants()
    return forecast_placed_plan(place_plan(profile, cluster, plan, stack), constants)


def place_plan(profile: Profile, cluster: Cluster, plan: Plan, stack: TrainingStack | None = None) -> list[PlacedPlan]:
    """The plan on each kind of device of the cluster that ranks are on."""
    model, uniform_clusters = summarize_profile(profile, plan), split_by_device_kind(cluster, plan.ranks)
    ranks_by_kind = ranks_by_device_kind(profile.batch, plan, device_kinds_by_rank(cluster), len(uniform_clusters))
    return [
        PlacedPlan(
            lay_out_plan(
                model,
                profile.batch,
                uniform_cluster,
                plan,
                stack or TrainingStack(),
                most_samples=largest_local_batch,
                pp_ranks=pp_ranks,
            ),
            uniform_cluster,
        )
        for uniform_cluster, (largest_local_batch, pp_ranks) in zip(uniform_clusters, ranks_by_kind, strict=True)
        if pp_ranks
    ]


def device_kinds_by_rank(cluster: Cluster) -> list[int]:
    """For each rank that the cluster can have, in order, which of its kinds of device it is on."""
    devices = rank_devices(cluster)
    distinct_kinds = distinct_devices(device for node in cluster.nodes for device in node.devices)
    kind_by_id = {
        id(device): distinct_kinds.index(device)
        for device in {id(rank_device): rank_device for rank_device in devices}.values()
    }
    return [kind_by_id[id(device)] for device in devices]


def ranks_by_device_kind(
    batch: int, plan: Plan, kind_by_rank: Sequence[int], kind_count: int
) -> list[tuple[int | None, tuple[int, ...]]]:
    """For each of so many kinds of device the most samples that a rank on one has (None: as many as any), and the ranks of pp that are on such.

    Without a pipeline all ranks do the same, on whatever device they are: what is unequal then are shares of the batch.
    """
    mesh = plan.mesh
    if mesh.pp > 1 and kind_count == 1:
        return [(None, tuple(range(mesh.pp)))]
    if mesh.pp > 1:
        ranks_per_stage = plan.ranks // mesh.pp
        kinds_by_stage = [
            set(kind_by_rank[rank * ranks_per_stage : (rank + 1) * ranks_per_stage]) for rank in range(mesh.pp)
        ]
        return [
            (None, tuple(rank for rank in range(mesh.pp) if kind in kinds_by_stage[rank])) for kind in range(kind_count)
        ]
    if not plan.data.batch_shares or plan.ranks != mesh.dp or batch < mesh.dp:
        used_kinds = set(kind_by_rank[: plan.ranks])
        return [(None, (0,) if kind in used_kinds else ()) for kind in range(kind_count)]
    sizes_by_rank = list(zip(kind_by_rank, local_batch_sizes(batch, mesh.dp, plan.data.batch_shares), strict=False))
    largest_by_kind = [
        max((size for rank_kind, size in sizes_by_rank if rank_kind == kind), default=0) for kind in range(kind_count)
    ]
    return [(size, (0,) if size else ()) for size in largest_by_kind]


def uses_data_sheets(cluster: Cluster) -> bool:
    """Whether its devices were never measured and have data sheets instead."""
    device = cluster.nodes[0].devices[0]
    return device.sheet is not None and not device.curves


def split_by_device_kind(cluster: Cluster, ranks: int | None = None) -> list[Cluster]:
    """For each kind of device the cluster as it would be with that kind alone, as many in each node as all nodes have, over the slowest
    link of the nodes that the first `ranks` ranks are on."""
    devices = distinct_devices(device for node in cluster.nodes for device in node.devices)
    if len(devices) == 1:
        return [cluster]
    missing_sheet = next((device.name for device in devices if device.sheet is None), None)
    if missing_sheet is not None:
        raise PlanError(
            f"{cluster.name}: {missing_sheet} has no data sheet and others have; describe it in the cluster's file too"
        )
    devices_per_node = min(len(node.devices) for node in cluster.nodes)
    used_nodes = cluster.nodes if ranks is None else cluster.nodes[: -(-ranks // devices_per_node)]
    links = [node.wire for node in used_nodes if node.wire is not None]
    slowest_link = min(links, key=lambda link: link.rate) if links else None
    names = " and ".join(sorted({device.name for device in devices}))
    notes = [f"{names}: what has the same work waits for the slowest, and a plan must fit wherever it is"]
    unused_devices = sum(len(node.devices) for node in cluster.nodes) - devices_per_node * len(cluster.nodes)
    notes += [f"{unused_devices} devices of larger nodes are not used"] if unused_devices else []
    return [
        replace(
            cluster,
            nodes=tuple(
                replace(node, devices=(device,) * devices_per_node, wire=slowest_link) for node in cluster.nodes
            ),
            notes=(*cluster.notes, *notes),
        )
        for device in devices
    ]


def rank_devices(cluster: Cluster) -> list[Device]:
    """The devices that ranks are on, in their order: as many of each node as all nodes have."""
    devices_per_node = min(len(node.devices) for node in cluster.nodes)
    return [device for node in cluster.nodes for device in node.devices[:devices_per_node]]


def distinct_devices(devices: Iterable[Device]) -> list[Device]:
    """Each device once of those that are alike in everything."""
    distinct: list[Device] = []
    for device in {id(candidate): candidate for candidate in devices}.values():
        if device not in distinct:
            distinct.append(device)
    return distinct


def worst_forecast(forecasts: Sequence[Forecast]) -> Forecast:
    """The device that takes longest decides the time, the one with the least room left the memory."""
    longest = max(forecasts, key=lambda forecast: forecast.time.step)
    tightest = max(
        forecasts, key=lambda forecast: (forecast.memory.high + forecast.memory.framework) / forecast.capacity
    )
    return replace(
        longest,
        memory=tightest.memory,
        capacity=tightest.capacity,
        peak_at=tightest.peak_at,
        notes=tuple(dict.fromkeys(note for forecast in forecasts for note in forecast.notes)),
    )


def forecast_placed_plan(placed: Sequence[PlacedPlan], constants: FittedConstants) -> Forecast:
    """The forecast of a plan that was laid out on a cluster by its data sheets.

    Without a pipeline every rank has all of the model: the kind of device that takes longest decides. With one each stage is on its own.
    """
    if placed[0].layout.plan.mesh.pp == 1:
        return worst_forecast(
            [
                _forecast_on_device_kind(placed_plan, step_time([placed_plan], constants), constants)
                for placed_plan in placed
            ]
        )
    time = step_time(placed, constants)
    return worst_forecast([_forecast_on_device_kind(placed_plan, time, constants) for placed_plan in placed])


def _forecast_on_device_kind(placed: PlacedPlan, time: TimeForecast, constants: FittedConstants) -> Forecast:
    layout, cluster = placed.layout, placed.cluster
    memory, peak_location = fullest_rank_memory(layout, constants)
    return Forecast(
        plan=layout.plan,
        batch=layout.batch,
        time=time,
        memory=memory,
        capacity=layout.capacity,
        peak_at=peak_location,
        notes=(*cluster.notes, *_sheet_notes(cluster)),
    )


def _sheet_notes(cluster: Cluster) -> list[str]:
    name = cluster.nodes[0].devices[0].name
    return [f"priced by the data sheet of {name} and constants {constants_digest()}: nothing was measured there"]


def simulate_measured(profile: Profile, cluster: Cluster, plan: Plan) -> Forecast:
    """`simulate` on a cluster that passed `require_uniform_node`: a search asks that once for hundreds of plans."""
    if plan.uses_servers:
        return _simulate_with_servers(profile, cluster, fill_served_tables(plan, profile))
    if plan.precision == "fp8":
        raise PlanError("precision=fp8: it is forecast by data sheets only; use bf16, or give a cluster by name")
    for axis in ("cp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            raise PlanError(f"{axis}={getattr(plan.mesh, axis)}: this axis is not forecast; use {axis}=1")
    if plan.incomplete:
        raise PlanError(
            f'"{plan}" leaves open how the model is cut, and a forecast needs to know: `echelon simulate FILE --plan ...` finds it'
        )
    if profile.batch < plan.mesh.dp:
        raise PlanError(
            f"dp={plan.mesh.dp}: a batch of {profile.batch} cannot feed so many ranks; use dp={profile.batch} or less"
        )
    load = compute_node_load(profile, cluster, plan)
    rank_parts = rank_profiles(profile, plan, load.micro_batch_sizes)
    memory, peak_location = max(
        (
            forecast_memory(
                rank_part.profile, plan, load, rank_part.in_flight_bytes, rank_part.freed_bytes, full_profile=profile
            )
            for rank_part in rank_parts
        ),
        key=lambda each: each[0].peak,
    )
    time = max(_rank_times(profile, plan, load, rank_parts), key=lambda each: each.step)
    return Forecast(
        plan=plan,
        batch=profile.batch,
        time=time,
        memory=memory,
        capacity=load.capacity,
        peak_at=peak_location,
        notes=(*_notes(profile, cluster, plan, load), *_host_bound_notes(cluster, time)),
    )


def _host_bound_notes(cluster: Cluster, time: TimeForecast) -> list[str]:
    if cluster.device_kind != "cuda" or time.overhead < _HOST_BOUND_FRACTION * time.step:
        return []
    return [
        f"the device waits {time.overhead / time.step:.0%} of the step for its host, which issues operators more slowly than they run: larger "
        "micro-batches help, and how long it takes depends on what else the host does"
    ]


def _simulate_with_servers(profile: Profile, cluster: Cluster, plan: Plan) -> Forecast:
    """With a parameter server; a link between two processes is what gathering over two ranks was measured at."""
    ranks_profile, ranks_plan = without_served_tables(profile, plan), without_servers(plan)
    load = compute_node_load(ranks_profile, cluster, ranks_plan)
    return add_server_costs(
        simulate_measured(ranks_profile, cluster, ranks_plan),
        profile,
        cluster,
        plan,
        lambda size: message_seconds(load, "all_gather", 2 * size, 2),
    )


def rank_times(profile: Profile, cluster: Cluster, plan: Plan) -> list[TimeForecast]:
    """The step as each rank of pp spends it, by measured curves."""
    load = compute_node_load(profile, cluster, plan)
    return _rank_times(profile, plan, load, rank_profiles(profile, plan, load.micro_batch_sizes))


def _rank_times(profile: Profile, plan: Plan, load: NodeLoad, ranks: Sequence[RankProfile]) -> list[TimeForecast]:
    times = [_rank_time(profile, rank_part.profile, rank, plan, load) for rank, rank_part in enumerate(ranks)]
    bubbles = bubble_seconds(plan, len(load.micro_batch_sizes), [busy_seconds for _, busy_seconds in times])
    return [_with_error_bounds(replace(time, bubble=bubble)) for (time, _), bubble in zip(times, bubbles, strict=True)]


def _with_error_bounds(time: TimeForecast) -> TimeForecast:
    return replace(time, low=time.step * (1 - _RELATIVE_ERROR), high=time.step * (1 + _RELATIVE_ERROR))


def _rank_time(
    full_profile: Profile, rank_profile: Profile, rank: int, plan: Plan, load: NodeLoad
) -> tuple[TimeForecast, float]:
    """The step as the rank `rank` of pp spends it, waiting for others aside, and how much of it is in the pipeline; `rank_profile` is its part
    of the `full_profile`."""
    shares = RankShares(full_profile, plan)
    forward, backward, operator_calls, in_pipeline_seconds = 0.0, 0.0, 0, 0.0
    pass_seconds: dict[int, tuple[float, float]] = {}
    recomputed = recomputed_operators(full_profile, rank_profile, plan)
    for samples in sorted(set(load.micro_batch_sizes)):
        micro_batches_of_size = load.micro_batch_sizes.count(samples)
        pass_seconds[samples] = (
            _pass_seconds(rank_profile, plan, load, samples, "forward"),
            _pass_seconds(rank_profile, plan, load, samples, "backward")
            + _operators_seconds(recomputed, plan.precision or rank_profile.precision, load, samples),
        )
        forward += micro_batches_of_size * pass_seconds[samples][0]
        backward += micro_batches_of_size * pass_seconds[samples][1]
        operator_calls += micro_batches_of_size * sum(
            operator.count for operator in (*rank_profile.operators, *recomputed)
        )
        in_pipeline_seconds += micro_batches_of_size * tensor_parallel_seconds(
            full_profile, plan, load, shares, rank, samples
        )
        in_pipeline_seconds += micro_batches_of_size * pipeline_transfer_seconds(
            full_profile, plan, load, rank, samples
        )
    accumulate_seconds = stream_seconds(load, "add_", 3 * rank_profile.gradient_bytes)
    backward += (len(load.micro_batch_sizes) - 1) * accumulate_seconds
    host_seconds = operator_calls * load.device.overhead * load.oversubscription
    input_seconds = load.samples * (
        stream_seconds(load, "copy_", 2 * rank_profile.input_bytes)
        + _OPERATORS_PER_SAMPLE * load.device.overhead * load.oversubscription
    )
    exchange = data_parallel_exchange(rank_profile, plan, load)
    hidden = min(exchange.overlappable * _overlap_fraction(load), backward / len(load.micro_batch_sizes))
    shard_fraction = 1 / plan.mesh.dp if plan.zero else 1.0
    optimizer = gather_seconds = 0.0
    for optimizer_profile, full_optimizer in zip(rank_profile.optimizers, full_profile.optimizers, strict=True):
        owned = find_owned_tensors(plan, optimizer_profile.update_scope, optimizer_profile.uses_rng)
        if owned is None:
            fused = plan.fused and optimizer_profile.has_fused_kernel(sharded=plan.is_sharded)
            optimizer += optimizer_seconds(optimizer_profile, load, fused=fused, fraction=shard_fraction)
            continue
        optimizer += optimizer_seconds(full_optimizer, load, fused=False, fraction=owned.fraction)
        size = owned.fraction * trained_fraction(full_profile, full_optimizer) * full_profile.gradient_bytes
        gather_seconds += TRANSFERS_PER_STEP * message_seconds(load, "all_gather", size, owned.ranks)
    if load.device.kind == "cuda":
        # The host runs ahead of the device: its work shows only where the device waits for it.
        host_seconds, input_seconds = (
            host_stall_seconds(
                _launch_segments(full_profile, rank_profile, plan, load, pass_seconds, accumulate_seconds, optimizer)
            ),
            0.0,
        )
    if rank_profile.clips_gradients:
        optimizer += stream_seconds(load, "mul", 3 * shard_fraction * rank_profile.gradient_bytes)
    causes = {
        "forward": forward,
        "backward": backward,
        "bubble": 0.0,
        "exchange": exchange.total - hidden + in_pipeline_seconds + gather_seconds,
        "optimizer": optimizer,
        "input": input_seconds,
        "overhead": host_seconds,
    }
    return TimeForecast(
        **causes, hidden=hidden, low=0.0, high=0.0
    ), forward + backward + in_pipeline_seconds + host_seconds


def _launch_segments(
    full_profile: Profile,
    rank_profile: Profile,
    plan: Plan,
    load: NodeLoad,
    pass_seconds: Mapping[int, tuple[float, float]],
    accumulate_seconds: float,
    optimizer: float,
) -> Iterator[LaunchSegment]:
    """The step as the host issues it, with what the device takes for each stretch; `pass_seconds`: for forward and backward, by samples."""
    forward_issue, backward_issue = pass_issue_seconds(full_profile, rank_profile, plan, load)
    for index, samples in enumerate(load.micro_batch_sizes):
        forward, backward = pass_seconds[samples]
        yield forward_issue + samples * _OPERATORS_PER_SAMPLE * load.device.overhead, forward
        accumulate_issue = accumulation_issue_seconds(rank_profile, load) if index else 0.0
        yield backward_issue + accumulate_issue, backward + (accumulate_seconds if index else 0.0)
    fused = plan.fused and all(
        optimizer_profile.has_fused_kernel(sharded=plan.is_sharded) for optimizer_profile in rank_profile.optimizers
    )
    yield optimizer_issue_seconds(rank_profile, load, fused=fused), optimizer


def _pass_seconds(profile: Profile, plan: Plan, load: NodeLoad, samples: int, phase: Phase) -> float:
    operators = [operator for operator in profile.operators if operator.phase == phase]
    seconds = _operators_seconds(operators, plan.precision or profile.precision, load, samples)
    if load.device.page_fault_seconds:
        # What a step keeps was given back after the last one: the system hands it out anew. So are gradients of one rank alone.
        fresh_bytes = (
            profile.saved_bytes(samples) if phase == "forward" else profile.gradient_bytes * (plan.mesh.dp == 1)
        )
        seconds += load.device.page_fault_seconds * fresh_bytes * load.oversubscription
    return seconds


def _operators_seconds(operators: Sequence[Operator], precision: Precision, load: NodeLoad, samples: int) -> float:
    return sum(operator.count * operator_seconds(operator, samples, load, precision) for operator in operators)


def _overlap_fraction(load: NodeLoad) -> float:
    timing = load.node.nearest_timing("all_reduce", load.ranks)
    return timing.overlap if timing is not None else 0.0


def _notes(profile: Profile, cluster: Cluster, plan: Plan, load: NodeLoad) -> tuple[str, ...]:
    notes = [*profile.notes, *cluster.notes]
    if plan.compile:
        notes.append(
            "torch.compile is not forecast: the time is that of the uncompiled model, the compiled one is faster"
        )
    if load.oversubscription > 1:
        notes.append(
            f"{load.ranks} ranks x {load.threads} threads on {load.node.cores} cores: everything takes {load.oversubscription:.1f} x as long"
        )
    if plan.precision not in (None, profile.precision):
        notes.append(f"profiled in {profile.precision}, planned in {plan.precision}: the memory is a rough guess")
    if profile.device != cluster.device_kind:
        notes.append(f"traced for {profile.device}, forecast for {cluster.device_kind}: operators may differ")
    return tuple(notes)

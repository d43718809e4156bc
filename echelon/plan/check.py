"""Whether a plan can be executed: every reason why not, each with where, what, the rule and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from echelon.plan.check_model import check_model
from echelon.plan.check_parameter_server import check_server_settings
from echelon.plan.cluster import Cluster
from echelon.plan.plan import Plan, Precision
from echelon.plan.problem import Problem, raise_on_errors
from echelon.plan.profile import Profile
from echelon.plan.stages import INTERLEAVED_SCHEDULES, stage_count

#: More ranks than cores prove numbers and memory, not speed; beyond this many per core a machine only thrashes.
MAX_RANKS_PER_CORE = 8
#: Reasons listed where no module can be cut.
_MAX_REASONS = 3


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Every problem of `plan`, also for this model and these devices where given."""
    problems = list(_check_settings(plan))
    if profile is not None:
        problems += check_model(plan, profile)
    if cluster is not None:
        precision = plan.precision or (profile.precision if profile is not None else None)
        problems += _check_devices(plan, cluster, precision)
    return tuple(problems)


def require_executable(
    plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None
) -> tuple[Problem, ...]:
    """Raise if the plan cannot be executed; return the warnings."""
    return raise_on_errors(plan, check(plan, profile, cluster))


def _check_settings(plan: Plan) -> Iterator[Problem]:
    for axis, name in (("cp", "context"), ("ep", "expert")):
        if getattr(plan.mesh, axis) > 1:
            yield Problem.of(
                plan, axis, f"the {name} axis is not executed yet", f"use dp instead of {axis}", not_implemented=True
            )
    if plan.precision == "fp8":
        yield Problem.of(
            plan, "precision", "fp8 is forecast only, not executed yet", "use precision=bf16", not_implemented=True
        )
    if plan.data.keep_gradients and plan.zero < 2:
        yield Problem.of(
            plan, "keep_gradients", f"zero={plan.zero} keeps full gradients anyway",
            "leave `keep` out, or use zero=2 or 3",
        )  # fmt: skip
    if plan.zero and plan.mesh.dp == 1:
        yield Problem.warning(plan, "zero", "one data rank has nothing to shard over", "it runs as zero=0")
    if plan.recompute != "none" and plan.compile:
        yield Problem.of(
            plan, "recompute", "torch.compile decides by itself what to save for backward",
            "leave one of `recompute` and `compile` out",
        )  # fmt: skip
    yield from check_server_settings(plan)
    yield from _check_tensor_parallel(plan)
    yield from _check_pipeline(plan)


def _check_tensor_parallel(plan: Plan) -> Iterator[Problem]:
    tp, tensor = plan.mesh.tp, plan.tensor
    if tp > 1 and tensor.replicated and not tensor.placements:
        reasons = [f"{module.path or 'the model itself'}: {module.reason}" for module in tensor.replicated]
        listed = "; ".join(reasons[:_MAX_REASONS]) + ("; ..." if len(reasons) > _MAX_REASONS else "")
        yield Problem.of(
            plan, "tp", f"no module of this model can be cut ({listed})",
            f"use a smaller tp, or dp={plan.ranks} zero=3, which also shares the memory", nothing_to_cut=True,
        )  # fmt: skip
    if tp == 1 and tensor.placements:
        yield Problem.of(
            plan, "placements", "modules are cut over tp, and tp is 1", "use tp=2 or more, or leave placements out"
        )
    if tensor.sequence and tp == 1:
        yield Problem.of(
            plan, "sequence", "sequences are cut over tp, and tp is 1", "use tp=2 or more, or leave `sequence` out"
        )
    if tensor.sequence and plan.mesh.pp > 1:
        yield Problem.of(plan, "sequence", "pipeline stages pass full sequences", "leave `sequence` out, or use pp=1")
    if tensor.segments and not tensor.sequence:
        yield Problem.of(
            plan, "segments", "segments belong to `sequence`, which is off", "add `sequence`, or leave segments out"
        )


def _check_pipeline(plan: Plan) -> Iterator[Problem]:
    pp, num_stages, schedule = plan.mesh.pp, stage_count(plan), plan.pipeline.schedule
    if pp == 1:
        if plan.pipeline.stages:
            yield Problem.of(
                plan, "stages", "stages are spread over pp, and pp is 1", f"use pp={num_stages}, or leave stages out"
            )
        return
    is_interleaved = schedule in INTERLEAVED_SCHEDULES
    if num_stages % pp or (not is_interleaved and num_stages != pp):
        needed = f"a multiple of pp={pp}" if is_interleaved else f"one per rank of pp={pp}"
        starts = f"{pp - 1} stage starts{f', or {2 * pp - 1}' if is_interleaved else ''}"
        yield Problem.of(
            plan, "stages", f"they make {num_stages} stages, and schedule={schedule} needs {needed}",
            f"give {starts}, or leave stages out to have them found",
        )  # fmt: skip
    if any(start <= previous for previous, start in pairwise((0, *plan.pipeline.stages))):
        yield Problem.of(
            plan, "stages", "stage starts must ascend from above 0", "sort them, or leave stages out to have them found"
        )
    if schedule == "zero-bubble" and plan.is_sharded:
        yield Problem.of(
            plan, "schedule", f"its split backward skips the hooks by which zero={plan.zero} reduces gradients",
            "use schedule=interleaved, or zero=0",
        )  # fmt: skip
    if schedule == "zero-bubble" and plan.recompute != "none":
        yield Problem.of(
            plan, "schedule", "its backward runs in two parts, and recomputed activations exist for one only",
            "use schedule=interleaved, or leave `recompute` out",
        )  # fmt: skip
    if plan.compile:
        yield Problem.of(
            plan, "compile", "a stage runs part of forward, and torch.compile would compile all of it",
            "leave `compile` out, or use pp=1",
        )  # fmt: skip


def _check_devices(plan: Plan, cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    if cluster.device_kind != "cpu":
        if plan.ranks > cluster.max_ranks:
            yield _too_many_ranks(plan, f"{cluster.max_ranks}", cluster.max_ranks)
        yield from _check_bf16_units(plan, cluster, precision)
        return
    cores = cluster.cores
    threads = plan.threads or max(cores // plan.ranks, 1)
    if plan.ranks > MAX_RANKS_PER_CORE * cores:
        yield _too_many_ranks(plan, f"{cores} cores", cores, f" (at most {MAX_RANKS_PER_CORE} ranks per core)")
    elif plan.ranks * threads > cores:
        yield Problem.warning(
            plan, "threads", f"{plan.ranks} ranks x {threads} threads share {cores} cores",
            "correct, but slower than fewer ranks", value=threads,
        )  # fmt: skip
    if precision in ("bf16", "fp16") and precision not in cluster.nodes[0].devices[0].instructions:
        yield Problem.warning(
            plan, "precision", f"this CPU has no {precision} instructions: about 100 times slower",
            "use precision=fp32", value=precision,
        )  # fmt: skip


def _check_bf16_units(plan: Plan, cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    """Devices older than bf16 compute it without matrix units."""
    sheets = {device.name: device.sheet for node in cluster.nodes for device in node.devices if device.sheet}
    for name, sheet in sheets.items() if precision == "bf16" else ():
        slowdown = sheet.peak_flops("half") / sheet.peak_flops("bf16")
        if slowdown > 1:
            yield Problem.warning(
                plan, "precision", f"{name} has no bf16 matrix units: products take {slowdown:.0f} times as long as in fp16",
                "use precision=fp16", value=precision,
            )  # fmt: skip


def _too_many_ranks(plan: Plan, available: str, max_ranks: int, note: str = "") -> Problem:
    only_data = plan.ranks == plan.mesh.dp
    remedy = f"use dp={max_ranks} or less" if only_data else f"use axes whose product is {max_ranks} or less"
    return Problem(
        path="dp" if only_data else "ranks", value=plan.ranks,
        rule=f"the plan needs {plan.ranks} devices and there are {available}", remedy=remedy + note,
    )  # fmt: skip

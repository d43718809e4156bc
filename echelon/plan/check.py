"""Whether a plan can be executed: every reason why not, each with the place, the value, the rule and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from echelon.plan.check_model import check_model
from echelon.plan.check_parameter_server import check_server_settings
from echelon.plan.cluster import Cluster
from echelon.plan.plan import Plan, Precision
from echelon.plan.problem import Problem, broken_rules, raise_on_errors
from echelon.plan.profile import Profile
from echelon.plan.stages import INTERLEAVED_SCHEDULES, stage_count

#: More ranks than cores test correctness and memory, not speed; with more per core than this a machine only thrashes.
MAX_RANKS_PER_CORE = 8
#: Reasons listed where no module can be cut.
_MAX_REASONS = 3


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Every problem of `plan`, including those with this model and on these devices."""
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
            rule, remedy = f"the {name} axis is not executed yet", f"use dp instead of {axis}"
            yield Problem.of(plan, axis, rule, remedy, not_implemented=True)
    if plan.precision == "fp8":
        rule = "fp8 is forecast only, not executed yet"
        yield Problem.of(plan, "precision", rule, "use precision=bf16", not_implemented=True)
    yield from broken_rules(
        plan,
        (plan.data.keep_gradients and plan.zero < 2, "keep_gradients", f"zero={plan.zero} keeps full gradients anyway",
         "leave `keep` out, or use zero=2 or 3"),
        (plan.recompute != "none" and plan.compile, "recompute", "torch.compile decides by itself what to save for backward",
         "leave one of `recompute` and `compile` out"),
    )  # fmt: skip
    if plan.zero and plan.mesh.dp == 1:
        yield Problem.warning(plan, "zero", "one data rank has nothing to shard over", "it runs as zero=0")
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
    yield from broken_rules(
        plan,
        (tp == 1 and tensor.placements, "placements", "modules are cut over tp, and tp is 1",
         "use tp=2 or more, or leave placements out"),
        (tp == 1 and tensor.sequence, "sequence", "sequences are cut over tp, and tp is 1",
         "use tp=2 or more, or leave `sequence` out"),
        (tensor.sequence and plan.mesh.pp > 1, "sequence", "pipeline stages pass full sequences",
         "leave `sequence` out, or use pp=1"),
        (tensor.segments and not tensor.sequence, "segments", "segments belong to `sequence`, which is off",
         "add `sequence`, or leave segments out"),
    )  # fmt: skip


def _check_pipeline(plan: Plan) -> Iterator[Problem]:
    pp, starts, num_stages, schedule = plan.mesh.pp, plan.pipeline.stages, stage_count(plan), plan.pipeline.schedule
    if pp == 1:
        rule, remedy = "stages are spread over pp, and pp is 1", f"use pp={num_stages}, or leave stages out"
        yield from broken_rules(plan, (starts, "stages", rule, remedy))
        return
    is_interleaved, is_zero_bubble = schedule in INTERLEAVED_SCHEDULES, schedule == "zero-bubble"
    needed = f"a multiple of pp={pp}" if is_interleaved else f"one per rank of pp={pp}"
    valid_starts = f"{pp - 1} stage starts{f', or {2 * pp - 1}' if is_interleaved else ''}"
    yield from broken_rules(
        plan,
        (num_stages % pp if is_interleaved else num_stages != pp, "stages",
         f"they make {num_stages} stages, and schedule={schedule} needs {needed}", f"give {valid_starts}, or leave stages out to have them found"),
        (any(start <= previous for previous, start in pairwise((0, *starts))), "stages", "stage starts must ascend from above 0",
         "sort them, or leave stages out to have them found"),
        (is_zero_bubble and plan.is_sharded, "schedule", f"its split backward skips the hooks by which zero={plan.zero} reduces gradients",
         "use schedule=interleaved, or zero=0"),
        (is_zero_bubble and plan.recompute != "none", "schedule", "its backward runs in two parts, and recomputed activations exist for one only",
         "use schedule=interleaved, or leave `recompute` out"),
        (plan.compile, "compile", "a stage runs part of forward, and torch.compile would compile all of it",
         "leave `compile` out, or use pp=1"),
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
        rule = f"{plan.ranks} ranks x {threads} threads share {cores} cores"
        yield Problem.warning(plan, "threads", rule, "correct, but slower than fewer ranks", value=threads)
    if precision in ("bf16", "fp16") and precision not in cluster.nodes[0].devices[0].instructions:
        rule = f"this CPU has no {precision} instructions: about 100 times slower"
        yield Problem.warning(plan, "precision", rule, "use precision=fp32", value=precision)


def _check_bf16_units(plan: Plan, cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    """Devices older than bf16 compute it without matrix units."""
    sheets = {device.name: device.sheet for node in cluster.nodes for device in node.devices if device.sheet}
    for name, sheet in sheets.items() if precision == "bf16" else ():
        slowdown = sheet.peak_flops("half") / sheet.peak_flops("bf16")
        if slowdown > 1:
            rule = f"{name} has no bf16 matrix units: products take {slowdown:.0f} times as long as in fp16"
            yield Problem.warning(plan, "precision", rule, "use precision=fp16", value=precision)


def _too_many_ranks(plan: Plan, available: str, max_ranks: int, note: str = "") -> Problem:
    only_data = plan.ranks == plan.mesh.dp
    remedy = f"use dp={max_ranks} or less" if only_data else f"use axes whose product is {max_ranks} or less"
    rule = f"the plan needs {plan.ranks} devices and there are {available}"
    return Problem.of(plan, "dp" if only_data else "ranks", rule, remedy + note)

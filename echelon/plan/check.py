"""Can this plan be executed? Every reason why not, each with where, what, the rule and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from echelon.errors import PlanError, UnsplittableModelError
from echelon.plan.batch_split import count_micro_batches, largest_local_batch, largest_micro_batch
from echelon.plan.check_parameter_server import check_server_settings as _served_alone
from echelon.plan.check_parameter_server import check_server_tables
from echelon.plan.cluster import Cluster
from echelon.plan.describe import cut_fraction
from echelon.plan.placement import Placement
from echelon.plan.plan import Plan, Precision
from echelon.plan.problem import Problem as Problem  # whoever checks reads them
from echelon.plan.profile import OptimizerProfile, Profile
from echelon.plan.stages import INTERLEAVED_SCHEDULES, NO_STAGES_REASON, forbidden_stage_starts, stage_count
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner

#: More ranks than cores prove numbers and memory, not speed; beyond this many per core a machine only thrashes.
MAX_RANKS_PER_CORE = 8
#: So many reasons are told where no module can be cut.
_MAX_REASONS = 3
#: Every rank has the whole model.
UNSHARDED_CHANGES = (("zero", 0), ("shard_as_one", False), ("keep_gradients", False))
#: A tensor axis that cuts less of the parameters than this is hardly one.
_MIN_CUT_FRACTION = 0.1


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Every problem of `plan`, for a model and for devices where they are given."""
    problems = list(_check_settings(plan))
    if profile is not None:
        problems += _check_model(plan, profile)
    if cluster is not None:
        problems += _check_devices(
            plan, cluster, plan.precision or (profile.precision if profile is not None else None)
        )
    return tuple(problems)


def require_executable(
    plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None
) -> tuple[Problem, ...]:
    """Raise if the plan cannot be executed; returns the warnings."""
    return raise_on_errors(plan, check(plan, profile, cluster))


def raise_on_errors(plan: Plan, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Raise if one of the problems is an error; returns the others."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        error_type = UnsplittableModelError if any(problem.nothing_to_cut for problem in errors) else PlanError
        raise error_type(
            f'plan "{plan}" cannot be executed:\n' + "\n".join(f"  {problem}" for problem in errors), errors
        )
    return tuple(problem for problem in problems if problem.severity == "warning")


def _check_settings(plan: Plan) -> Iterator[Problem]:
    for axis, name in (("cp", "context"), ("ep", "expert")):
        size = getattr(plan.mesh, axis)
        if size > 1:
            yield Problem(
                path=axis, value=size, rule=f"the {name} axis is not executed yet", remedy=f"use dp instead of {axis}",
                not_implemented=True,
            )  # fmt: skip
    if plan.precision == "fp8":
        yield Problem(
            path="precision", value="fp8", rule="it is forecast and not executed yet", remedy="use precision=bf16",
            not_implemented=True,
        )  # fmt: skip
    if plan.data.keep_gradients and plan.zero < 2:
        yield Problem(
            path="keep_gradients", value=True, rule=f"zero={plan.zero} keeps full gradients as it is",
            remedy="leave `keep` out, or use zero=2 or 3",
        )  # fmt: skip
    if plan.zero and plan.mesh.dp == 1:
        yield Problem(
            path="zero", value=plan.zero, rule="one data rank has nothing to shard over", remedy="it runs as zero=0",
            severity="warning",
        )  # fmt: skip
    if plan.recompute != "none" and plan.compile:
        yield Problem(
            path="recompute", value=plan.recompute, rule="torch.compile decides by itself what to keep for backward",
            remedy="leave one of `recompute` and `compile` out",
        )  # fmt: skip
    yield from _served_alone(plan)
    yield from _check_tensor_parallel(plan)
    yield from _check_pipeline(plan)


def _check_tensor_parallel(plan: Plan) -> Iterator[Problem]:
    tp = plan.mesh.tp
    if tp > 1 and plan.tensor.replicated and not plan.tensor.placements:
        reasons = [f"{uncut.path or 'the model itself'}: {uncut.reason}" for uncut in plan.tensor.replicated]
        reasons_text = "; ".join(reasons[:_MAX_REASONS]) + ("; ..." if len(reasons) > _MAX_REASONS else "")
        yield Problem(
            path="tp", value=tp, rule=f"it divides no module of this model ({reasons_text})",
            remedy=f"use a smaller tp, or dp={plan.ranks} zero=3, which also shares the memory", nothing_to_cut=True,
        )  # fmt: skip
    if tp == 1 and plan.tensor.placements:
        yield Problem(
            path="placements", value=len(plan.tensor.placements), rule="modules are cut over tp, and tp is 1",
            remedy="use tp=2 or more, or leave placements out",
        )  # fmt: skip
    if plan.tensor.sequence and tp == 1:
        yield Problem(
            path="sequence", value=True, rule="sequences are cut over tp, and tp is 1",
            remedy="use tp=2 or more, or leave `sequence` out",
        )  # fmt: skip
    if plan.tensor.sequence and plan.mesh.pp > 1:
        yield Problem(
            path="sequence", value=True, rule="what passes between the stages of a pipeline is whole",
            remedy="leave `sequence` out, or use pp=1",
        )  # fmt: skip
    if plan.tensor.segments and not plan.tensor.sequence:
        yield Problem(
            path="segments", value=len(plan.tensor.segments), rule="they say where the sequence is cut, and `sequence` is not asked for",
            remedy="add `sequence`, or leave segments out",
        )  # fmt: skip


def check_optimizers(plan: Plan, optimizers: Iterable[OptimizerProfile]) -> Iterator[Problem]:
    """What the plan cuts that an optimizer needs whole: it steps on gathered tensors, which costs an exchange."""
    for optimizer in optimizers:
        axes = gathered_axes(plan, optimizer.update_scope, optimizer.uses_rng)
        if not axes:
            continue
        if optimizer.untested_reason:
            reason = f"could not be tried on small parameters ({optimizer.untested_reason}) and may read all of them"
        elif optimizer.uses_rng:
            reason = "draws random numbers, whose order depends on all parameters"
        else:
            reason = f"reads {'whole parameters (norms, factors)' if optimizer.update_scope == 'tensor' else 'across parameters'}"
        causes = {"dp": f"zero={plan.zero} shards", "tp": f"tp={plan.mesh.tp} cuts", "pp": f"pp={plan.mesh.pp} spreads"}
        destination = (
            "one rank, which steps all"
            if needs_single_owner(optimizer.update_scope, optimizer.uses_rng)
            else "the ranks that own them"
        )
        yield Problem(
            path="optimizer", value=optimizer.name, rule=f"{reason}, and {' and '.join(causes[axis] for axis in axes)} them: every step gathers gradients and values at {destination}",
            remedy="it trains the same; an optimizer that treats each number by itself (AdamW) saves the exchange", severity="warning",
        )  # fmt: skip


def check_stored_weights(plan: Plan, units: Sequence[str], pipeline_calls: Sequence[str] = ()) -> Iterator[Problem]:
    """Whether weights that are cut at rest are whole wherever they are used. They are while the module `within` runs, and a block runs
    without it where ZeRO gathers it by itself or backward computes it again. `units`: the blocks; `pipeline_calls`: what a pipeline calls."""
    alternative = f"dp={plan.ranks} zero=3, which cuts no module"
    if plan.is_sharded and (plan.mesh.pp > 1 or not plan.data.shard_as_one):
        for placement, unit in _find_ungathered_unit(plan, pipeline_calls if plan.mesh.pp > 1 else units):
            yield Problem(
                path="zero", value=plan.zero, rule=f"{placement.path} is used all over {placement.gathered_in or 'the model'}, and zero={plan.zero} shards {unit} by itself",
                remedy=f"{'use' if plan.mesh.pp > 1 else 'add `whole`, or use'} zero=0, or {alternative}; or have its weight read by calling it",
                plan_changes=UNSHARDED_CHANGES if plan.mesh.pp > 1 else (("shard_as_one", True),),
            )  # fmt: skip
    if plan.recompute != "none":
        for placement, unit in _find_ungathered_unit(plan, units):
            yield Problem(
                path="recompute", value=plan.recompute,
                rule=f"{placement.path} is used all over {placement.gathered_in or 'the model'}, and {unit} would be computed again after that, with a piece of its weight",
                remedy=f"leave `recompute` out, or use {alternative}; or have its weight read by calling it",
                plan_changes=(("recompute", "none"),),
            )  # fmt: skip


def _find_ungathered_unit(plan: Plan, units: Sequence[str]) -> Iterator[tuple[Placement, str]]:
    """The first weight that is cut at rest, in one of `units`, and put together around that unit."""
    for placement in plan.tensor.placements:
        for unit in units if placement.cut == "stored" else ():
            if _is_within(placement.path, unit) and not _is_within(placement.gathered_in, unit):
                yield placement, unit
                return


def _is_within(path: str, unit: str) -> bool:
    return path == unit or path.startswith(f"{unit}.")


def _check_pipeline(plan: Plan) -> Iterator[Problem]:
    pp, total_stages = plan.mesh.pp, stage_count(plan)
    if pp == 1:
        if plan.pipeline.stages:
            yield Problem(
                path="stages", value=list(plan.pipeline.stages), rule="stages are spread over pp, and pp is 1",
                remedy=f"use pp={total_stages}, or leave stages out",
            )  # fmt: skip
        return
    is_interleaved = plan.pipeline.schedule in INTERLEAVED_SCHEDULES
    if total_stages % pp or (not is_interleaved and total_stages != pp):
        rule = f"a multiple of pp={pp}" if is_interleaved else f"one per rank of pp={pp}"
        yield Problem(
            path="stages", value=list(plan.pipeline.stages), rule=f"they make {total_stages} stages, and schedule={plan.pipeline.schedule} needs {rule}",
            remedy=f"give {pp - 1} places where a stage begins{f', or {2 * pp - 1}' if is_interleaved else ''}, or leave stages out: they are found",
        )  # fmt: skip
    if any(start <= previous_start for previous_start, start in pairwise((0, *plan.pipeline.stages))):
        yield Problem(
            path="stages", value=list(plan.pipeline.stages), rule="places where stages begin, each after the one before and after 0",
            remedy="put them in order, or leave stages out: they are found",
        )  # fmt: skip
    if plan.pipeline.schedule == "zero-bubble" and plan.is_sharded:
        yield Problem(
            path="schedule", value=plan.pipeline.schedule, rule=f"its split backward runs none of the hooks that zero={plan.zero} exchanges gradients by",
            remedy="use schedule=interleaved, or zero=0",
        )  # fmt: skip
    if plan.pipeline.schedule == "zero-bubble" and plan.recompute != "none":
        yield Problem(
            path="schedule", value=plan.pipeline.schedule, rule="its backward runs in two parts, and what was computed again is there for one only",
            remedy="use schedule=interleaved, or leave `recompute` out",
        )  # fmt: skip
    if plan.compile:
        yield Problem(
            path="compile", value=True, rule="a stage runs part of the model's forward, which torch.compile would compile whole",
            remedy="leave `compile` out, or use pp=1",
        )  # fmt: skip


def splits_batch(plan: Plan, batch: int) -> bool:
    """Whether ranks or micro-batches have parts of the global batch, so that its samples do not meet."""
    return plan.mesh.dp > 1 or (plan.micro is not None and plan.micro < batch)


def _check_model(plan: Plan, profile: Profile) -> Iterator[Problem]:
    dp, batch = plan.mesh.dp, profile.batch
    if plan.model is not None and plan.model != profile.model:
        yield Problem(
            path="model", value=plan.model[:12], rule=f"this model is {profile.model[:12]}: the plan was made for another",
            remedy="plan again: echelon plan FILE",
        )  # fmt: skip
    yield from _check_model_cuts(plan, profile)
    yield from check_server_tables(plan, profile)
    yield from _check_experts(plan, profile)
    if batch < dp:
        yield Problem(
            path="dp", value=dp, rule=f"a batch of {batch} gives some rank no sample", remedy=f"use dp={batch} or less",
            plan_changes=(("mesh", replace(plan.mesh, dp=batch, ep=1)), ("batch_shares", ())) if not plan.uses_servers else (),
        )  # fmt: skip
        return
    micro_batch_count, total_stages = (
        count_micro_batches(batch, dp, plan.micro, plan.data.batch_shares),
        stage_count(plan),
    )
    local_batch = largest_local_batch(batch, dp, plan.data.batch_shares)
    if plan.mesh.pp > 1 and micro_batch_count < total_stages:
        micro_batch_size = max(batch // dp // (2 * total_stages), 1)
        yield Problem(
            path="micro", value=plan.micro or local_batch, rule=f"{micro_batch_count} micro-batch{'es' * (micro_batch_count > 1)} through {total_stages} stages: ranks wait for each other most of the time",
            remedy=f"use micro={micro_batch_size}" + ("" if batch // dp >= total_stages else ", a larger batch or fewer stages"), severity="warning",
        )  # fmt: skip
    if plan.micro is not None and plan.micro > local_batch:
        yield Problem(
            path="micro", value=plan.micro, rule=f"a rank's share of batch={batch} over dp={dp} is {local_batch} sample{'s' * (local_batch > 1)}",
            remedy=f"use micro={local_batch} or less",
        )  # fmt: skip
    largest_micro = largest_micro_batch(batch, dp, plan.micro, plan.data.batch_shares)
    if plan.micro is not None and largest_micro > plan.micro + 1:
        yield Problem(
            path="micro", value=plan.micro, rule=f"the smallest share of batch={batch} lasts for {micro_batch_count} micro-batch{'es' * (micro_batch_count > 1)}, so that the "
            f"largest share needs {largest_micro} samples in each", remedy=f"use micro={largest_micro}, a larger batch or shares that are nearer to each other",
        )  # fmt: skip
    if splits_batch(plan, batch):
        yield from _check_coupling(plan, profile)
    if 0 < profile.samples < batch:
        yield Problem(
            path="batch", value=batch, rule=f"the data set has {profile.samples:,} sample{'s' * (profile.samples > 1)}: a step takes them all, an epoch is one step",
            remedy=f"say batch={profile.samples} if that is meant", severity="warning",
        )  # fmt: skip
    last_batch = profile.samples % batch if profile.samples else 0
    if 0 < last_batch < dp:
        yield Problem(
            path="dp", value=dp, rule=f"the last batch of an epoch has {last_batch} of {profile.samples:,} samples",
            remedy=f"use dp={last_batch} or less, or another batch",
            plan_changes=(("mesh", replace(plan.mesh, dp=last_batch, ep=1)), ("batch_shares", ())) if not plan.uses_servers else (),
        )  # fmt: skip
    if plan.is_sharded and profile.unshardable_reason:
        yield Problem(
            path="zero", value=plan.zero, rule=profile.unshardable_reason, remedy="use zero=0", plan_changes=UNSHARDED_CHANGES,
        )  # fmt: skip
    elif plan.zero and dp > 1 and not plan.data.shard_as_one and profile.varying_blocks_reason:
        yield Problem(
            path="zero", value=plan.zero, rule=f"{profile.varying_blocks_reason}, block by block sharding would fail or deadlock",
            remedy="add `whole`, or use zero=0", plan_changes=(("shard_as_one", True),),
        )  # fmt: skip
    if plan.recompute != "none" and not profile.fsdp_units:
        yield Problem(
            path="recompute", value=plan.recompute, rule="the model has no repeated blocks, so that everything is kept all the same",
            remedy="leave `recompute` out", severity="warning",
        )  # fmt: skip
    if plan.precision not in (None, profile.precision):
        yield Problem(
            path="precision", value=plan.precision, rule=f"the job asks for {profile.precision}",
            remedy=f"use precision={profile.precision}, or change the job", severity="warning",
        )  # fmt: skip


def _check_coupling(plan: Plan, profile: Profile) -> Iterator[Problem]:
    path, value = ("dp", plan.mesh.dp) if plan.mesh.dp > 1 else ("micro", plan.micro)
    if profile.samples_coupled:
        yield Problem(
            path=path, value=value, rule="a sample's loss depends on the others of its batch: in parts another objective is trained",
            remedy="use dp=1 without micro; or give the loss as (sum, count) if it is a mean over unequal numbers of items",
            plan_changes=unsplit_batch_changes(plan),
        )  # fmt: skip
    elif profile.samples_coupled is None:
        yield Problem(
            path=path, value=value, rule=f"it is not known whether samples of a batch see each other, as in contrastive losses, because {profile.coupling_unknown_reason}",
            remedy="they are taken as independent; if they are not, use dp=1 without micro", severity="warning",
        )  # fmt: skip


def unsplit_batch_changes(plan: Plan) -> tuple[tuple[str, Any], ...]:
    """The changes by which all samples of a batch meet on one data rank."""
    server_changes = (
        (("exchange", "allreduce"), ("dense", "allreduce"), ("staleness", 0), ("tables", ()))
        if plan.uses_servers
        else ()
    )
    return (
        ("mesh", replace(plan.mesh, dp=1, ep=1)),
        ("micro", None),
        ("batch_shares", ()),
        *UNSHARDED_CHANGES,
        *server_changes,
    )


def _check_model_cuts(plan: Plan, profile: Profile) -> Iterator[Problem]:
    tp, pp, total_stages, unit_count = plan.mesh.tp, plan.mesh.pp, stage_count(plan), len(profile.pipeline_units)
    alternative = f"dp={plan.ranks} zero=3, which also shares the memory"
    module_paths = {name.rpartition(".")[0] for each in profile.parameters for name in (each.name, *each.aliases)}
    unknown_path = next((each.path for each in plan.tensor.placements if each.path not in module_paths), None)
    if unknown_path is not None:
        yield Problem(
            path="placements", value=unknown_path, rule=f"{profile.name} (model {profile.model[:12]}) has no such module with parameters",
            remedy="leave placements out: they are found",
        )  # fmt: skip
    elif tp > 1 and plan.tensor.placements and cut_fraction(plan, profile) < _MIN_CUT_FRACTION:
        yield Problem(
            path="tp", value=tp, rule=f"only {cut_fraction(plan, profile):.0%} of the parameters' bytes are cut, the rest is whole on every rank",
            remedy=f"use {alternative}", severity="warning",
        )  # fmt: skip
    yield from check_optimizers(plan, profile.optimizers)
    yield from check_stored_weights(plan, profile.fsdp_units, [visit.path for visit in profile.pipeline_units])
    if pp > 1 and not unit_count:
        yield Problem(
            path="pp", value=pp, remedy=f"use {alternative}", rule=NO_STAGES_REASON, nothing_to_cut=True,
        )  # fmt: skip
    elif pp > 1 and total_stages > unit_count:
        smaller_pp = (
            f"use pp={unit_count} or less"
            if total_stages == pp or unit_count < pp
            else "use schedule=1f1b, which has one stage per rank"
        )
        yield Problem(
            path="pp", value=pp, rule=f"{total_stages} stages, and the model has {unit_count} unit{'s' * (unit_count > 1)} that forward calls one after another",
            remedy=f"{smaller_pp}, or {alternative}", nothing_to_cut=True,
        )  # fmt: skip
    elif pp > 1 and plan.pipeline.stages and plan.pipeline.stages[-1] >= unit_count:
        yield Problem(
            path="stages", value=list(plan.pipeline.stages), rule=f"the model has {unit_count} units, and each stage needs one",
            remedy="leave stages out: they are found",
        )  # fmt: skip
    elif pp > 1 and (
        forbidden_starts := sorted(forbidden_stage_starts(plan, profile.pipeline_units) & {*plan.pipeline.stages})
    ):
        yield Problem(
            path="stages", value=list(plan.pipeline.stages),
            rule=f"one begins at {profile.pipeline_units[forbidden_starts[0]].path}, inside a pair that tp cuts or between two calls that change one buffer",
            remedy="leave stages out: they are found",
        )  # fmt: skip


def _check_experts(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """Whether ranks of ep have whole experts: modules in a list within a block."""
    ep, experts_by_list = plan.mesh.ep, dict[str, set[str]]()
    for each in profile.parameters if ep > 1 else ():
        unit = next((unit for unit in profile.fsdp_units if each.name.startswith(f"{unit}.")), None)
        list_item = re.match(r"(.*?)\.(\d+)\.", each.name[len(unit) :]) if unit is not None else None
        if list_item is not None:
            experts_by_list.setdefault(f"{unit}{list_item[1]}", set()).add(list_item[2])
    expert_counts = sorted({len(each) for each in experts_by_list.values()})
    if expert_counts and not any(expert_count % ep == 0 for expert_count in expert_counts):
        yield Problem(
            path="ep", value=ep, rule=f"a block has {' or '.join(map(str, expert_counts))} experts, which so many ranks cannot share evenly",
            remedy=f"use a divisor of {expert_counts[-1]}",
        )  # fmt: skip


def _check_devices(plan: Plan, cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    if cluster.device_kind != "cpu":
        if plan.ranks > cluster.max_ranks:
            yield Problem(
                **_rank_count_field(plan), rule=f"the plan needs {plan.ranks} devices and there are {cluster.max_ranks}",
                remedy=_fewer_ranks_remedy(plan, cluster.max_ranks),
            )  # fmt: skip
        yield from _check_bf16_units(cluster, precision)
        return
    cores = cluster.cores
    threads = plan.threads or max(cores // plan.ranks, 1)
    if plan.ranks > MAX_RANKS_PER_CORE * cores:
        yield Problem(
            **_rank_count_field(plan), rule=f"the plan needs {plan.ranks} devices and there are {cores} cores",
            remedy=f"{_fewer_ranks_remedy(plan, cores)} ({MAX_RANKS_PER_CORE} ranks per core at the very most, to prove numbers)",
        )  # fmt: skip
    elif plan.ranks * threads > cores:
        yield Problem(
            path="threads", value=threads, rule=f"{plan.ranks} ranks x {threads} threads share {cores} cores",
            remedy="right numbers, but slower than fewer ranks", severity="warning",
        )  # fmt: skip
    if precision in ("bf16", "fp16") and precision not in cluster.nodes[0].devices[0].instructions:
        yield Problem(
            path="precision", value=precision, rule=f"this CPU has no {precision} instructions: about 100 times slower",
            remedy="use precision=fp32", severity="warning",
        )  # fmt: skip


def _check_bf16_units(cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    """Devices older than bf16 compute it without matrix units."""
    sheets = {device.name: device.sheet for node in cluster.nodes for device in node.devices if device.sheet}
    for name, sheet in sheets.items():
        if precision == "bf16" and sheet.peak_flops("bf16") < sheet.peak_flops("half"):
            yield Problem(
                path="precision", value=precision,
                rule=f"{name} has no matrix units for bf16: products take {sheet.peak_flops('half') / sheet.peak_flops('bf16'):.0f} times as long as in fp16",
                remedy="use precision=fp16", severity="warning",
            )  # fmt: skip


def _rank_count_field(plan: Plan) -> dict[str, Any]:
    """Path and value of how many ranks a plan has."""
    if plan.ranks == plan.mesh.dp:
        return {"path": "dp", "value": plan.mesh.dp}
    return {"path": "ranks", "value": plan.ranks}


def _fewer_ranks_remedy(plan: Plan, max_ranks: int) -> str:
    return (
        f"use dp={max_ranks} or less"
        if plan.ranks == plan.mesh.dp
        else f"use axes whose product is {max_ranks} or less"
    )

"""Whether a plan can be executed for one model: its cuts, its batch, its optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from echelon.plan.batch_split import count_micro_batches, largest_local_batch, largest_micro_batch
from echelon.plan.check_parameter_server import check_server_tables
from echelon.plan.describe import cut_fraction, pluralize
from echelon.plan.placement import Placement
from echelon.plan.plan import Plan, ServerPlan
from echelon.plan.problem import Problem, broken_rules
from echelon.plan.profile import OptimizerProfile, Profile, is_within
from echelon.plan.stages import NO_STAGES_REASON, forbidden_stage_starts, stage_count
from echelon.plan.whole_tensor_rules import gathered_axes, needs_single_owner

PlanChanges = tuple[tuple[str, Any], ...]

#: Every rank holds the whole model.
_UNSHARDED: PlanChanges = (("zero", 0), ("shard_as_one", False), ("keep_gradients", False))
_SHARDED_AS_ONE: PlanChanges = (("shard_as_one", True),)
#: Cutting less of the parameters than this is hardly worth a tensor axis.
_MIN_CUT_FRACTION = 0.1


def check_model(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """Every problem of `plan` with this model."""
    if plan.model is not None and plan.model != profile.model:
        rule = f"the plan was made for another model than this one ({profile.model[:12]})"
        yield Problem.of(plan, "model", rule, "plan again: echelon plan FILE", value=plan.model[:12])
    yield from _check_tensor_cuts(plan, profile)
    yield from check_optimizers(plan, profile.optimizers)
    yield from check_stored_weights(plan, profile.fsdp_units, [unit.path for unit in profile.pipeline_units])
    yield from _check_stages(plan, profile)
    yield from check_server_tables(plan, profile)
    yield from _check_experts(plan, profile)
    if profile.batch < plan.mesh.dp:
        yield _too_many_data_ranks(plan, profile.batch, f"a batch of {profile.batch} leaves some rank without a sample")
    else:
        yield from _check_batch(plan, profile)
        yield from _check_sharding(plan, profile)
    if plan.recompute != "none" and not profile.fsdp_units:
        rule = "the model has no repeated blocks, so nothing is recomputed"
        yield Problem.warning(plan, "recompute", rule, "leave `recompute` out")
    if plan.precision not in (None, profile.precision):
        remedy = f"use precision={profile.precision}, or change the job"
        yield Problem.warning(plan, "precision", f"the job asks for {profile.precision}", remedy)


def _too_many_data_ranks(plan: Plan, max_dp: int, rule: str, more: str = "") -> Problem:
    changes: PlanChanges = (("mesh", replace(plan.mesh, dp=max_dp, ep=1)), ("batch_shares", ()))
    remedy = f"use dp={max_dp} or less{more}"
    return Problem.of(plan, "dp", rule, remedy, plan_changes=() if plan.uses_servers else changes)


def _check_batch(plan: Plan, profile: Profile) -> Iterator[Problem]:
    dp, batch, shares, samples = plan.mesh.dp, profile.batch, plan.data.batch_shares, profile.samples
    num_micro_batches, num_stages = count_micro_batches(batch, dp, plan.micro, shares), stage_count(plan)
    local_batch, micro = largest_local_batch(batch, dp, shares), plan.micro
    if plan.mesh.pp > 1 and num_micro_batches < num_stages:
        shorten = "" if batch // dp >= num_stages else ", a larger batch or fewer stages"
        rule = f"{pluralize(num_micro_batches, 'micro-batch')} for {num_stages} stages: ranks idle most of the time"
        remedy = f"use micro={max(batch // dp // (2 * num_stages), 1)}{shorten}"
        yield Problem.warning(plan, "micro", rule, remedy, value=micro or local_batch)
    largest_micro = largest_micro_batch(batch, dp, micro, shares)
    yield from broken_rules(
        plan,
        (micro and micro > local_batch, "micro", f"a rank's share of batch={batch} over dp={dp} is {pluralize(local_batch, 'sample')}",
         f"use micro={local_batch} or less"),
        (micro and largest_micro > micro + 1, "micro", f"the smallest share of batch={batch} makes {pluralize(num_micro_batches, 'micro-batch')}, "
         f"and the largest share needs {largest_micro} samples in each", f"use micro={largest_micro}, a larger batch or less uneven shares"),
    )  # fmt: skip
    if splits_batch(plan, batch):
        yield from _check_coupling(plan, profile)
    if 0 < samples < batch:
        rule = f"the data set has {pluralize(samples, 'sample')}: each step takes all of them"
        yield Problem.warning(plan, "batch_size", rule, f"use batch_size={samples} if that is intended", value=batch)
    last_batch = samples % batch
    if 0 < last_batch < dp:
        rule = f"the last batch of an epoch has {last_batch} of {samples:,} samples"
        yield _too_many_data_ranks(plan, last_batch, rule, ", or another batch size")


def splits_batch(plan: Plan, batch: int) -> bool:
    """Whether ranks or micro-batches compute parts of the global batch, so that its samples never meet."""
    return plan.mesh.dp > 1 or (plan.micro is not None and plan.micro < batch)


def _check_coupling(plan: Plan, profile: Profile) -> Iterator[Problem]:
    path = "dp" if plan.mesh.dp > 1 else "micro"
    if profile.samples_coupled:
        rule = "a sample's loss depends on the others of its batch: splitting the batch changes the objective"
        remedy = "use dp=1 without micro; or return the loss as (sum, count) if it is a mean over unequal counts"
        yield Problem.of(plan, path, rule, remedy, plan_changes=unsplit_batch_changes(plan))
    elif profile.samples_coupled is None:
        rule = "whether samples depend on each other, as in contrastive losses, is unknown"
        remedy = "they are taken as independent; if they are not, use dp=1 without micro"
        yield Problem.warning(plan, path, f"{rule}: {profile.coupling_unknown_reason}", remedy)


def unsplit_batch_changes(plan: Plan) -> PlanChanges:
    """The changes that bring all samples of a batch together on one data rank."""
    mesh = replace(plan.mesh, dp=1, ep=1)
    changes: PlanChanges = (("mesh", mesh), ("micro", None), ("batch_shares", ()), *_UNSHARDED)
    return (*changes, ("exchange", "allreduce"), ("server", ServerPlan())) if plan.uses_servers else changes


def _check_sharding(plan: Plan, profile: Profile) -> Iterator[Problem]:
    if plan.is_sharded and profile.unshardable_reason:
        yield Problem.of(plan, "zero", profile.unshardable_reason, "use zero=0", plan_changes=_UNSHARDED)
    elif plan.is_sharded and not plan.data.shard_as_one and profile.varying_blocks_reason:
        rule = f"{profile.varying_blocks_reason}, sharding block by block would fail or deadlock"
        yield Problem.of(plan, "zero", rule, "add `whole`, or use zero=0", plan_changes=_SHARDED_AS_ONE)


def check_optimizers(plan: Plan, optimizers: Iterable[OptimizerProfile]) -> Iterator[Problem]:
    """Optimizers that need tensors which the plan shards: they step on gathered tensors, which costs communication."""
    shards = {"dp": f"zero={plan.zero} shards", "tp": f"tp={plan.mesh.tp} cuts", "pp": f"pp={plan.mesh.pp} spreads"}
    for optimizer in optimizers:
        axes = gathered_axes(plan, optimizer.update_scope, optimizer.uses_rng)
        if not axes:
            continue
        reason = "it reads across parameters"
        if optimizer.untested_reason:
            reason = f"it could not be tested on small parameters ({optimizer.untested_reason}) and may read all"
        elif optimizer.uses_rng:
            reason = "it draws random numbers, whose order depends on all parameters"
        elif optimizer.update_scope == "tensor":
            reason = "it reads full parameters (norms, factors)"
        single_owner = needs_single_owner(optimizer.update_scope, optimizer.uses_rng)
        destination = "on one rank, which steps all" if single_owner else "on the ranks that own them"
        cuts = " and ".join(shards[axis] for axis in axes)
        rule = f"{reason}, and {cuts} them: every step gathers gradients and values {destination}"
        remedy = "the result is the same; an elementwise optimizer (AdamW) saves the exchange"
        yield Problem.warning(plan, "optimizer", rule, remedy, value=optimizer.name)


def check_stored_weights(plan: Plan, units: Sequence[str], pipeline_calls: Sequence[str] = ()) -> Iterator[Problem]:
    """Weights that are sharded only at rest must be gathered wherever they are used.

    They are while the module `gathered_in` runs. A block runs outside of that where ZeRO gathers it by itself or backward recomputes it.
    `units`: the blocks; `pipeline_calls`: what a pipeline calls.
    """
    alternative = f"dp={plan.ranks} zero=3, which cuts no module; or read its weight by calling it"
    has_stages = plan.mesh.pp > 1
    if plan.is_sharded and (has_stages or not plan.data.shard_as_one):
        for placement, unit in _find_ungathered_unit(plan, pipeline_calls if has_stages else units):
            scope = placement.gathered_in or "the model"
            rule = f"{placement.path} is used all over {scope}, and zero={plan.zero} shards {unit} by itself"
            remedy = f"{'use' if has_stages else 'add `whole`, or use'} zero=0, or {alternative}"
            changes = _UNSHARDED if has_stages else _SHARDED_AS_ONE
            yield Problem.of(plan, "zero", rule, remedy, plan_changes=changes)
    if plan.recompute != "none":
        for placement, unit in _find_ungathered_unit(plan, units):
            scope = placement.gathered_in or "the model"
            cause = f"{unit} would be recomputed later with a shard of its weight"
            rule = f"{placement.path} is used all over {scope}, and {cause}"
            remedy = f"leave `recompute` out, or use {alternative}"
            yield Problem.of(plan, "recompute", rule, remedy, plan_changes=(("recompute", "none"),))


def _find_ungathered_unit(plan: Plan, units: Sequence[str]) -> Iterator[tuple[Placement, str]]:
    """The first weight that is cut at rest, inside one of `units`, and gathered around that unit."""
    for placement in plan.tensor.placements:
        for unit in units if placement.cut == "stored" else ():
            if is_within(placement.path, unit) and not is_within(placement.gathered_in, unit):
                yield placement, unit
                return


def _check_tensor_cuts(plan: Plan, profile: Profile) -> Iterator[Problem]:
    placements = plan.tensor.placements
    module_paths = {name.rpartition(".")[0] for item in profile.parameters for name in (item.name, *item.aliases)}
    unknown_path = next((placement.path for placement in placements if placement.path not in module_paths), None)
    if unknown_path is not None:
        rule = f"{profile.name} (model {profile.model[:12]}) has no such module with parameters"
        yield Problem.of(plan, "placements", rule, "leave placements out to have them found", value=unknown_path)
    elif plan.mesh.tp > 1 and placements and (fraction := cut_fraction(plan, profile)) < _MIN_CUT_FRACTION:
        rule = f"only {fraction:.0%} of the parameters' bytes are cut, the rest is replicated"
        yield Problem.warning(plan, "tp", rule, f"use dp={plan.ranks} zero=3, which also shares the memory")


def _check_stages(plan: Plan, profile: Profile) -> Iterator[Problem]:
    pp, num_stages, units, starts = plan.mesh.pp, stage_count(plan), profile.pipeline_units, plan.pipeline.stages
    alternative = f"dp={plan.ranks} zero=3, which also shares the memory"
    if pp == 1:
        return
    if not units:
        yield Problem.of(plan, "pp", NO_STAGES_REASON, f"use {alternative}", nothing_to_cut=True)
    elif num_stages > len(units):
        fewer_stages = num_stages == pp or len(units) < pp
        smaller = f"pp={len(units)} or less" if fewer_stages else "schedule=1f1b, which has one stage per rank"
        rule = f"{num_stages} stages, and the model has {pluralize(len(units), 'unit')} that forward calls in sequence"
        yield Problem.of(plan, "pp", rule, f"use {smaller}, or {alternative}", nothing_to_cut=True)
    elif starts and starts[-1] >= len(units):
        rule = f"the model has {len(units)} units, and each stage needs one"
        yield Problem.of(plan, "stages", rule, "leave stages out to have them found")
    elif forbidden := sorted(forbidden_stage_starts(plan, units) & {*starts}):
        reason = "inside a pair that tp cuts or between two calls that change one buffer"
        rule = f"one starts at {units[forbidden[0]].path}, {reason}"
        yield Problem.of(plan, "stages", rule, "leave stages out to have them found")


def _check_experts(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """Whether the ranks of ep hold whole experts: modules in a list within a block."""
    ep, experts_by_list = plan.mesh.ep, dict[str, set[str]]()
    for parameter in profile.parameters if ep > 1 else ():
        block = next((unit for unit in profile.fsdp_units if is_within(parameter.name, unit)), None)
        item = re.match(r"(.*?)\.(\d+)\.", parameter.name[len(block) :]) if block is not None else None
        if item is not None:
            experts_by_list.setdefault(f"{block}{item[1]}", set()).add(item[2])
    counts = sorted({len(experts) for experts in experts_by_list.values()})
    if counts and all(count % ep for count in counts):
        rule = f"{' or '.join(map(str, counts))} experts per block cannot be divided evenly"
        yield Problem.of(plan, "ep", rule, f"use a divisor of {counts[-1]}")

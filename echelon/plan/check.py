"""Can this plan be executed? Every reason why not, each with where, what, the rule and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from echelon.errors import NothingToCut, PlanError
from echelon.plan.batch_split import largest_micro, largest_share, rounds
from echelon.plan.check_parameter_server import alone as _served_alone
from echelon.plan.check_parameter_server import check_served
from echelon.plan.cluster import Cluster
from echelon.plan.describe import cut_bytes
from echelon.plan.placement import Placement
from echelon.plan.plan import Plan, Precision
from echelon.plan.problem import Problem as Problem  # whoever checks reads them
from echelon.plan.profile import Profile, Rule
from echelon.plan.stages import INTERLEAVING, UNCUT, bound, stage_count
from echelon.plan.whole_tensor_rules import gathered_axes, one_owner

#: More ranks than cores prove numbers and memory, not speed; beyond this many per core a machine only thrashes.
RANKS_PER_CORE = 8
#: So many reasons are told where no module can be cut.
_REASONS = 3
#: Every rank has the whole model.
UNSHARDED = (("zero", 0), ("whole", False), ("keep_gradients", False))
#: A tensor axis that cuts less of the parameters than this is hardly one.
_LITTLE = 0.1


def check(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Every problem of `plan`, for a model and for devices where they are given."""
    found = list(_alone(plan))
    if profile is not None:
        found += _with_model(plan, profile)
    if cluster is not None:
        found += _with_devices(plan, cluster, plan.precision or (profile.precision if profile is not None else None))
    return tuple(found)


def require(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> tuple[Problem, ...]:
    """Raise if the plan cannot be executed; returns the warnings."""
    return refuse(plan, check(plan, profile, cluster))


def refuse(plan: Plan, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Raise if one of the problems is an error; returns the others."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        kind = NothingToCut if any(problem.uncut for problem in errors) else PlanError
        raise kind(f'plan "{plan}" cannot be executed:\n' + "\n".join(f"  {problem}" for problem in errors), errors)
    return tuple(problem for problem in problems if problem.severity == "warning")


def _alone(plan: Plan) -> Iterator[Problem]:
    for axis, name in (("cp", "context"), ("ep", "expert")):
        size = getattr(plan.mesh, axis)
        if size > 1:
            yield Problem(
                path=axis, value=size, rule=f"the {name} axis is not executed yet", remedy=f"use dp instead of {axis}",
                ahead=True,
            )  # fmt: skip
    if plan.precision == "fp8":
        yield Problem(
            path="precision", value="fp8", rule="it is forecast and not executed yet", remedy="use precision=bf16",
            ahead=True,
        )  # fmt: skip
    if plan.keep_gradients and plan.zero < 2:
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
    yield from _tensor(plan)
    yield from _pipeline(plan)


def _tensor(plan: Plan) -> Iterator[Problem]:
    tp = plan.mesh.tp
    if tp > 1 and plan.uncut and not plan.placements:
        reasons = [f"{each.path or 'the model itself'}: {each.why}" for each in plan.uncut]
        told = "; ".join(reasons[:_REASONS]) + ("; ..." if len(reasons) > _REASONS else "")
        yield Problem(
            path="tp", value=tp, rule=f"it divides no module of this model ({told})",
            remedy=f"use a smaller tp, or dp={plan.ranks} zero=3, which also shares the memory", uncut=True,
        )  # fmt: skip
    if tp == 1 and plan.placements:
        yield Problem(
            path="placements", value=len(plan.placements), rule="modules are cut over tp, and tp is 1",
            remedy="use tp=2 or more, or leave placements out",
        )  # fmt: skip
    if plan.sequence and tp == 1:
        yield Problem(
            path="sequence", value=True, rule="sequences are cut over tp, and tp is 1",
            remedy="use tp=2 or more, or leave `sequence` out",
        )  # fmt: skip
    if plan.sequence and plan.mesh.pp > 1:
        yield Problem(
            path="sequence", value=True, rule="what passes between the stages of a pipeline is whole",
            remedy="leave `sequence` out, or use pp=1",
        )  # fmt: skip
    if plan.segments and not plan.sequence:
        yield Problem(
            path="segments", value=len(plan.segments), rule="they say where the sequence is cut, and `sequence` is not asked for",
            remedy="add `sequence`, or leave segments out",
        )  # fmt: skip


def check_optimizers(plan: Plan, optimizers: Iterable[Rule]) -> Iterator[Problem]:
    """What the plan cuts that an optimizer needs whole: it steps on gathered tensors, which costs an exchange."""
    for each in optimizers:
        axes = gathered_axes(plan, each.reads, each.draws)
        if not axes:
            continue
        if each.untried:
            why = f"could not be tried on small parameters ({each.untried}) and may read all of them"
        elif each.draws:
            why = "draws random numbers, whose order depends on all parameters"
        else:
            why = f"reads {'whole parameters (norms, factors)' if each.reads == 'tensor' else 'across parameters'}"
        cut = {"dp": f"zero={plan.zero} shards", "tp": f"tp={plan.mesh.tp} cuts", "pp": f"pp={plan.mesh.pp} spreads"}
        where = "one rank, which steps all" if one_owner(each.reads, each.draws) else "the ranks that own them"
        yield Problem(
            path="optimizer", value=each.name, rule=f"{why}, and {' and '.join(cut[axis] for axis in axes)} them: every step gathers gradients and values at {where}",
            remedy="it trains the same; an optimizer that treats each number by itself (AdamW) saves the exchange", severity="warning",
        )  # fmt: skip


def check_stored(plan: Plan, units: Sequence[str], visits: Sequence[str] = ()) -> Iterator[Problem]:
    """Whether weights that are cut at rest are whole wherever they are used. They are while the module `within` runs, and a block runs
    without it where ZeRO gathers it by itself or backward computes it again. `units`: the blocks; `visits`: what a pipeline calls."""
    instead = f"dp={plan.ranks} zero=3, which cuts no module"
    if plan.sharded and (plan.mesh.pp > 1 or not plan.whole):
        for each, unit in _torn(plan, visits if plan.mesh.pp > 1 else units):
            yield Problem(
                path="zero", value=plan.zero, rule=f"{each.path} is used all over {each.within or 'the model'}, and zero={plan.zero} shards {unit} by itself",
                remedy=f"{'use' if plan.mesh.pp > 1 else 'add `whole`, or use'} zero=0, or {instead}; or have its weight read by calling it",
                instead=UNSHARDED if plan.mesh.pp > 1 else (("whole", True),),
            )  # fmt: skip
    if plan.recompute != "none":
        for each, unit in _torn(plan, units):
            yield Problem(
                path="recompute", value=plan.recompute,
                rule=f"{each.path} is used all over {each.within or 'the model'}, and {unit} would be computed again after that, with a piece of its weight",
                remedy=f"leave `recompute` out, or use {instead}; or have its weight read by calling it",
                instead=(("recompute", "none"),),
            )  # fmt: skip


def _torn(plan: Plan, units: Sequence[str]) -> Iterator[tuple[Placement, str]]:
    """The first weight that is cut at rest, in one of `units`, and put together around that unit."""
    for each in plan.placements:
        for unit in units if each.cut == "stored" else ():
            if _inside(each.path, unit) and not _inside(each.within, unit):
                yield each, unit
                return


def _inside(path: str, unit: str) -> bool:
    return path == unit or path.startswith(f"{unit}.")


def _pipeline(plan: Plan) -> Iterator[Problem]:
    pp, count = plan.mesh.pp, stage_count(plan)
    if pp == 1:
        if plan.stages:
            yield Problem(
                path="stages", value=list(plan.stages), rule="stages are spread over pp, and pp is 1",
                remedy=f"use pp={count}, or leave stages out",
            )  # fmt: skip
        return
    several = plan.schedule in INTERLEAVING
    if count % pp or (not several and count != pp):
        rule = f"a multiple of pp={pp}" if several else f"one per rank of pp={pp}"
        yield Problem(
            path="stages", value=list(plan.stages), rule=f"they make {count} stages, and schedule={plan.schedule} needs {rule}",
            remedy=f"give {pp - 1} places where a stage begins{f', or {2 * pp - 1}' if several else ''}, or leave stages out: they are found",
        )  # fmt: skip
    if any(after <= before for before, after in pairwise((0, *plan.stages))):
        yield Problem(
            path="stages", value=list(plan.stages), rule="places where stages begin, each after the one before and after 0",
            remedy="put them in order, or leave stages out: they are found",
        )  # fmt: skip
    if plan.schedule == "zero-bubble" and plan.sharded:
        yield Problem(
            path="schedule", value=plan.schedule, rule=f"its split backward runs none of the hooks that zero={plan.zero} exchanges gradients by",
            remedy="use schedule=interleaved, or zero=0",
        )  # fmt: skip
    if plan.schedule == "zero-bubble" and plan.recompute != "none":
        yield Problem(
            path="schedule", value=plan.schedule, rule="its backward runs in two parts, and what was computed again is there for one only",
            remedy="use schedule=interleaved, or leave `recompute` out",
        )  # fmt: skip
    if plan.compile:
        yield Problem(
            path="compile", value=True, rule="a stage runs part of the model's forward, which torch.compile would compile whole",
            remedy="leave `compile` out, or use pp=1",
        )  # fmt: skip


def parts_batches(plan: Plan, batch: int) -> bool:
    """Whether ranks or micro-batches have parts of the global batch, so that its samples do not meet."""
    return plan.mesh.dp > 1 or (plan.micro is not None and plan.micro < batch)


def _with_model(plan: Plan, profile: Profile) -> Iterator[Problem]:
    dp, batch = plan.mesh.dp, profile.batch
    if plan.model is not None and plan.model != profile.model:
        yield Problem(
            path="model", value=plan.model[:12], rule=f"this model is {profile.model[:12]}: the plan was made for another",
            remedy="plan again: echelon plan FILE",
        )  # fmt: skip
    yield from _cuts_of_model(plan, profile)
    yield from check_served(plan, profile)
    yield from _experts(plan, profile)
    if batch < dp:
        yield Problem(
            path="dp", value=dp, rule=f"a batch of {batch} gives some rank no sample", remedy=f"use dp={batch} or less",
            instead=(("mesh", replace(plan.mesh, dp=batch, ep=1)), ("shares", ())) if not plan.served else (),
        )  # fmt: skip
        return
    turns, stages = rounds(batch, dp, plan.micro, plan.shares), stage_count(plan)
    share = largest_share(batch, dp, plan.shares)
    if plan.mesh.pp > 1 and turns < stages:
        size = max(batch // dp // (2 * stages), 1)
        yield Problem(
            path="micro", value=plan.micro or share, rule=f"{turns} micro-batch{'es' * (turns > 1)} through {stages} stages: ranks wait for each other most of the time",
            remedy=f"use micro={size}" + ("" if batch // dp >= stages else ", a larger batch or fewer stages"), severity="warning",
        )  # fmt: skip
    if plan.micro is not None and plan.micro > share:
        yield Problem(
            path="micro", value=plan.micro, rule=f"a rank's share of batch={batch} over dp={dp} is {share} sample{'s' * (share > 1)}",
            remedy=f"use micro={share} or less",
        )  # fmt: skip
    most = largest_micro(batch, dp, plan.micro, plan.shares)
    if plan.micro is not None and most > plan.micro + 1:
        yield Problem(
            path="micro", value=plan.micro, rule=f"the smallest share of batch={batch} lasts for {turns} micro-batch{'es' * (turns > 1)}, so that the "
            f"largest share needs {most} samples in each", remedy=f"use micro={most}, a larger batch or shares that are nearer to each other",
        )  # fmt: skip
    if parts_batches(plan, batch):
        yield from _coupling(plan, profile)
    if 0 < profile.samples < batch:
        yield Problem(
            path="batch", value=batch, rule=f"the data set has {profile.samples:,} sample{'s' * (profile.samples > 1)}: a step takes them all, an epoch is one step",
            remedy=f"say batch={profile.samples} if that is meant", severity="warning",
        )  # fmt: skip
    tail = profile.samples % batch if profile.samples else 0
    if 0 < tail < dp:
        yield Problem(
            path="dp", value=dp, rule=f"the last batch of an epoch has {tail} of {profile.samples:,} samples",
            remedy=f"use dp={tail} or less, or another batch",
            instead=(("mesh", replace(plan.mesh, dp=tail, ep=1)), ("shares", ())) if not plan.served else (),
        )  # fmt: skip
    if plan.sharded and profile.unsharded:
        yield Problem(
            path="zero", value=plan.zero, rule=profile.unsharded, remedy="use zero=0", instead=UNSHARDED,
        )  # fmt: skip
    elif plan.zero and dp > 1 and not plan.whole and profile.unsteady:
        yield Problem(
            path="zero", value=plan.zero, rule=f"{profile.unsteady}, block by block sharding would fail or deadlock",
            remedy="add `whole`, or use zero=0", instead=(("whole", True),),
        )  # fmt: skip
    if plan.recompute != "none" and not profile.units:
        yield Problem(
            path="recompute", value=plan.recompute, rule="the model has no repeated blocks, so that everything is kept all the same",
            remedy="leave `recompute` out", severity="warning",
        )  # fmt: skip
    if plan.precision not in (None, profile.precision):
        yield Problem(
            path="precision", value=plan.precision, rule=f"the job asks for {profile.precision}",
            remedy=f"use precision={profile.precision}, or change the job", severity="warning",
        )  # fmt: skip


def _coupling(plan: Plan, profile: Profile) -> Iterator[Problem]:
    path, value = ("dp", plan.mesh.dp) if plan.mesh.dp > 1 else ("micro", plan.micro)
    if profile.coupled:
        yield Problem(
            path=path, value=value, rule="a sample's loss depends on the others of its batch: in parts another objective is trained",
            remedy="use dp=1 without micro; or give the loss as (sum, count) if it is a mean over unequal numbers of items",
            instead=undivided(plan),
        )  # fmt: skip
    elif profile.coupled is None:
        yield Problem(
            path=path, value=value, rule=f"it is not known whether samples of a batch see each other, as in contrastive losses, because {profile.uncompared}",
            remedy="they are taken as independent; if they are not, use dp=1 without micro", severity="warning",
        )  # fmt: skip


def undivided(plan: Plan) -> tuple[tuple[str, Any], ...]:
    """The changes by which all samples of a batch meet on one data rank."""
    served = (
        (("exchange", "allreduce"), ("dense", "allreduce"), ("staleness", 0), ("tables", ())) if plan.served else ()
    )
    return ("mesh", replace(plan.mesh, dp=1, ep=1)), ("micro", None), ("shares", ()), *UNSHARDED, *served


def _cuts_of_model(plan: Plan, profile: Profile) -> Iterator[Problem]:
    tp, pp, count, units = plan.mesh.tp, plan.mesh.pp, stage_count(plan), len(profile.visits)
    instead = f"dp={plan.ranks} zero=3, which also shares the memory"
    held = {name.rpartition(".")[0] for each in profile.parameters for name in (each.name, *each.aliases)}
    strange = next((each.path for each in plan.placements if each.path not in held), None)
    if strange is not None:
        yield Problem(
            path="placements", value=strange, rule=f"{profile.name} (model {profile.model[:12]}) has no such module with parameters",
            remedy="leave placements out: they are found",
        )  # fmt: skip
    elif tp > 1 and plan.placements and cut_bytes(plan, profile) < _LITTLE:
        yield Problem(
            path="tp", value=tp, rule=f"only {cut_bytes(plan, profile):.0%} of the parameters' bytes are cut, the rest is whole on every rank",
            remedy=f"use {instead}", severity="warning",
        )  # fmt: skip
    yield from check_optimizers(plan, profile.optimizers)
    yield from check_stored(plan, profile.units, [visit.path for visit in profile.visits])
    if pp > 1 and not units:
        yield Problem(
            path="pp", value=pp, remedy=f"use {instead}", rule=UNCUT, uncut=True,
        )  # fmt: skip
    elif pp > 1 and count > units:
        fewer = (
            f"use pp={units} or less"
            if count == pp or units < pp
            else "use schedule=1f1b, which has one stage per rank"
        )
        yield Problem(
            path="pp", value=pp, rule=f"{count} stages, and the model has {units} unit{'s' * (units > 1)} that forward calls one after another",
            remedy=f"{fewer}, or {instead}", uncut=True,
        )  # fmt: skip
    elif pp > 1 and plan.stages and plan.stages[-1] >= units:
        yield Problem(
            path="stages", value=list(plan.stages), rule=f"the model has {units} units, and each stage needs one",
            remedy="leave stages out: they are found",
        )  # fmt: skip
    elif pp > 1 and (inside := sorted(bound(plan, profile.visits) & {*plan.stages})):
        yield Problem(
            path="stages", value=list(plan.stages),
            rule=f"one begins at {profile.visits[inside[0]].path}, inside a pair that tp cuts or between two calls that change one buffer",
            remedy="leave stages out: they are found",
        )  # fmt: skip


def _experts(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """Whether ranks of ep have whole experts: modules in a list within a block."""
    ep, lists = plan.mesh.ep, dict[str, set[str]]()
    for each in profile.parameters if ep > 1 else ():
        unit = next((unit for unit in profile.units if each.name.startswith(f"{unit}.")), None)
        inner = re.match(r"(.*?)\.(\d+)\.", each.name[len(unit) :]) if unit is not None else None
        if inner is not None:
            lists.setdefault(f"{unit}{inner[1]}", set()).add(inner[2])
    numbers = sorted({len(each) for each in lists.values()})
    if numbers and not any(number % ep == 0 for number in numbers):
        yield Problem(
            path="ep", value=ep, rule=f"a block has {' or '.join(map(str, numbers))} experts, which so many ranks cannot share evenly",
            remedy=f"use a divisor of {numbers[-1]}",
        )  # fmt: skip


def _with_devices(plan: Plan, cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    if cluster.kind != "cpu":
        if plan.ranks > cluster.ranks:
            yield Problem(
                **_size(plan), rule=f"the plan needs {plan.ranks} devices and there are {cluster.ranks}",
                remedy=_smaller(plan, cluster.ranks),
            )  # fmt: skip
        yield from _slow_bf16(cluster, precision)
        return
    cores = cluster.cores
    threads = plan.threads or max(cores // plan.ranks, 1)
    if plan.ranks > RANKS_PER_CORE * cores:
        yield Problem(
            **_size(plan), rule=f"the plan needs {plan.ranks} devices and there are {cores} cores",
            remedy=f"{_smaller(plan, cores)} ({RANKS_PER_CORE} ranks per core at the very most, to prove numbers)",
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


def _slow_bf16(cluster: Cluster, precision: Precision | None) -> Iterator[Problem]:
    """Devices older than bf16 compute it without matrix units."""
    sheets = {device.name: device.sheet for node in cluster.nodes for device in node.devices if device.sheet}
    for name, sheet in sheets.items():
        if precision == "bf16" and sheet.peak("bf16") < sheet.peak("half"):
            yield Problem(
                path="precision", value=precision,
                rule=f"{name} has no matrix units for bf16: products take {sheet.peak('half') / sheet.peak('bf16'):.0f} times as long as in fp16",
                remedy="use precision=fp16", severity="warning",
            )  # fmt: skip


def _size(plan: Plan) -> dict[str, Any]:
    """Path and value of how many ranks a plan has."""
    if plan.ranks == plan.mesh.dp:
        return {"path": "dp", "value": plan.mesh.dp}
    return {"path": "ranks", "value": plan.ranks}


def _smaller(plan: Plan, most: int) -> str:
    return f"use dp={most} or less" if plan.ranks == plan.mesh.dp else f"use axes whose product is {most} or less"

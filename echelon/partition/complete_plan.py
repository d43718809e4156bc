"""What a plan leaves open about a model: how the tensor axis cuts its modules, and where the stages of a pipeline begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.errors import EchelonError, NothingToCut, PlanError
from echelon.job import Job, call_loss, call_model, lift
from echelon.partition.find_sequence_parallel import find_segments
from echelon.partition.find_tp import Cuts, shard
from echelon.plan.check import Problem, check_stored, refuse, require
from echelon.plan.check_parameter_server import check_served
from echelon.plan.parameter_server import choose
from echelon.plan.placement import Placement, Uncut
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fingerprint, units
from echelon.plan.stages import UNCUT, find_stages, stage_count
from echelon.profiler.pipeline_units import chain
from echelon.profiler.sample_coupling import first_line
from echelon.tree import tree_map
from echelon.trials.example_batch import Example
from echelon.trials.isolation import Isolated
from echelon.trials.module_tree import module_tree
from echelon.trials.random_state import random_states
from echelon.trials.shape_model import built, made
from echelon.trials.trial_context import trial_context

Found = TypeVar("Found")


@trial_context()
def complete(plan: Plan, job: Job, profile: Profile | None = None) -> Plan:
    """`plan` with the placements and stages that it lacks, for this model. `profile`: where it is known already.

    A plan that cannot be completed is refused with what to use instead.
    """
    isolated = Isolated(job)  # cuts are found by running the model, whose state and the loss's stay as they are
    with isolated.active():
        return _completed(plan, isolated.job, profile)


def _completed(plan: Plan, job: Job, profile: Profile | None) -> Plan:
    if plan.served and not plan.tables:
        plan = _served(plan, job, profile)
    known = profile or (_outline(job) if plan.mesh.tp > 1 else None)
    if not plan.open:
        return plan
    if plan.mesh.tp > 1 and not plan.placements:
        plan = _cut(plan, job)
    if plan.sequence and not plan.segments:
        require(plan)  # looking for them where they cannot be used is not worth the time
        plan = _parted(plan, job)
    if plan.mesh.pp > 1:
        plan = dataclasses.replace(plan, placements=tuple(map(_gathered, plan.placements)))
    if plan.mesh.pp > 1 and not plan.stages:
        plan = _staged(plan, job, profile)
    require(plan)
    if known is not None:
        refuse(plan, tuple(check_stored(plan, known.units)))
    return dataclasses.replace(plan, model=plan.model or (known.model if known else fingerprint_of(job)))


@trial_context()
def fingerprint_of(job: Job) -> str:
    """The fingerprint of the job's model, as profiles and plans name it."""
    return _fingerprint(_built(job))


def _served(plan: Plan, job: Job, profile: Profile | None) -> Plan:
    """With the tables that the servers hold."""
    if profile is None:
        from echelon.profiler.profile_model import profile as made

        profile = made(job)
    refuse(plan, tuple(check_served(plan, profile)))
    return dataclasses.replace(plan, tables=choose(plan, profile), model=plan.model or profile.model)


def _uncut(plan: Plan, axis: str, rule: str, *, fewer: str = "") -> NothingToCut:
    """That `axis` finds nothing to cut, and what to use instead."""
    remedy = f"use {fewer}{', or ' if fewer else ''}dp={plan.ranks} zero=3, which also shares the memory"
    problem = Problem(path=axis, value=getattr(plan.mesh, axis), rule=rule, remedy=remedy, uncut=True)
    return NothingToCut(str(problem), [problem])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outline:
    """What is known of a job without running it, in the names that its profile has for it."""

    model: str
    units: tuple[str, ...]


def _outline(job: Job) -> _Outline:
    model = _built(job)
    return _Outline(model=_fingerprint(model), units=units(module_tree(model)))


def _built(job: Job) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return built(job)


def _fingerprint(model: nn.Module) -> str:
    named = model.named_parameters()
    return fingerprint((name, value.shape, str(value.dtype).removeprefix("torch.")) for name, value in named)


def _cut(plan: Plan, job: Job) -> Plan:
    try:
        found = cuts(job, plan.mesh.tp)
    except EchelonError:
        raise
    except Exception as error:  # a user's forward that does not run so
        raise _uncut(
            plan, "tp", f"the cuts are found by running the model on the CPU, and there it fails ({type(error).__name__}: {first_line(error)})"
        ) from error  # fmt: skip
    if not found.placements:
        why = next(iter(found.whole.values()), "it has no parameters")
        raise _uncut(plan, "tp", f"nothing of the model can be cut ({why})")
    there = {name.rpartition(".")[0] for name, _ in _built(job).named_parameters(remove_duplicate=False)}
    late = {each.path for each in found.placements} - there
    if late:
        raise _uncut(plan, "tp", f"{min(late)} is created in forward, so it does not exist yet when the model is cut")
    uncut = tuple(Uncut(path=path, why=why) for path, why in found.whole.items())
    return dataclasses.replace(plan, placements=found.placements, uncut=uncut)


def _parted(plan: Plan, job: Job) -> Plan:
    """With where each rank has a part of the sequence."""
    found = _looked_at(job, lambda model, step: find_segments(model, step, plan.mesh.tp, plan.placements))
    if not found.segments:
        problem = Problem(
            path="sequence", value=True, rule=f"no blocks of the model work on a part of the sequence ({found.why})",
            remedy="put what mixes positions into a module of its own, leave `sequence` out, or use recompute=block, which saves activations as well",
            instead=(("sequence", False),),
        )  # fmt: skip
        raise PlanError(f"sequence: {problem.rule}; {problem.remedy}", [problem])
    return dataclasses.replace(plan, placements=found.placements, segments=found.segments)


@trial_context()
def cuts(job: Job, ways: int) -> Cuts:
    """How the job's model is cut over so many ranks, and what stays whole."""
    return _looked_at(job, lambda model, step: shard(model, step, ways))


def _looked_at(job: Job, find: Callable[[nn.Module, Callable[[], Any]], Found]) -> Found:
    """What `find(model, step)` finds by running the job's model on real numbers, in float64 where it runs so."""
    with random_states():
        try:
            return _found(job, find, torch.float64)
        except EchelonError:
            raise
        except Exception:  # some models run in no other type than their own
            return _found(job, find, None)


def _found(job: Job, find: Callable[[nn.Module, Callable[[], Any]], Found], dtype: torch.dtype | None) -> Found:
    torch.manual_seed(job.seed)
    own = made(job)
    model, batch = own, Example(job).batch(2)
    if dtype is not None:
        model, batch = lift(model, dtype), _lifted(batch)
    return find(model, lambda: call_loss(job, call_model(job, model, batch), batch, model))


def _gathered(placement: Placement) -> Placement:
    """What passes between stages is whole."""
    return dataclasses.replace(placement, cut="gather") if placement.cut == "logits" else placement


def _lifted(batch: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _staged(plan: Plan, job: Job, profile: Profile | None) -> Plan:
    count, pp = stage_count(plan), plan.mesh.pp
    visits = profile.visits if profile is not None else ()
    if not visits:
        try:
            visits = chain(job)
        except EchelonError:
            raise
        except Exception as error:  # whatever a user's forward does with values it does not have
            raise _uncut(
                plan, "pp", f"stages are found by running the model without numbers, and there it fails ({type(error).__name__}: {first_line(error)})"
            ) from error  # fmt: skip
    if not visits:
        raise _uncut(plan, "pp", UNCUT)
    if len(visits) < count:
        fewer = f"pp={len(visits)} or less" if count == pp else "schedule=1f1b, which has one stage per rank"
        rule = f"{count} stages, and the model has {len(visits)} units that forward calls one after another"
        raise _uncut(plan, "pp", rule, fewer=fewer)
    stages = find_stages(plan, visits)
    if stages is None:
        rule = (
            f"{count} stages, and there are too few places between the pairs of modules that tp={plan.mesh.tp} cuts and the calls of modules "
            "that keep statistics"
        )
        raise _uncut(plan, "pp", rule, fewer="fewer stages, or tp=1")
    return dataclasses.replace(plan, stages=stages)

"""Complete a plan for a model: served tables, cuts over the tensor axis, sequence segments, pipeline stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.errors import EchelonError, PlanError, UnsplittableModelError, describe_error
from echelon.job import Job, call_loss, call_model, cast_model
from echelon.partition.find_sequence_parallel import find_segments
from echelon.partition.find_tp import TensorCuts, find_tensor_cuts
from echelon.plan.check import require_executable
from echelon.plan.check_model import check_stored_weights
from echelon.plan.check_parameter_server import check_server_tables
from echelon.plan.parameter_server import choose_served_tables
from echelon.plan.placement import Placement, ReplicatedModule
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem, raise_on_errors
from echelon.plan.profile import Profile, find_fsdp_units, model_fingerprint
from echelon.plan.stages import NO_STAGES_REASON, find_stages, stage_count
from echelon.profiler.pipeline_units import find_pipeline_units
from echelon.tree import map_tensors
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.isolation import IsolatedJob
from echelon.trials.module_tree import list_modules
from echelon.trials.random_state import preserve_random_states
from echelon.trials.shape_model import build_fake_model, make_model
from echelon.trials.trial_context import trial_context
from echelon.trials.trial_run import RunStep

SearchResult = TypeVar("SearchResult")


@trial_context()
def complete(plan: Plan, job: Job, profile: Profile | None = None) -> Plan:
    """`plan` with the placements and stages that it lacks, for this model; an error with a remedy if there are none."""
    isolated = IsolatedJob(job)  # cuts are found by running the model; its state and the loss's must not change
    with isolated.active():
        return _complete(plan, isolated.job, profile)


def _complete(plan: Plan, job: Job, profile: Profile | None) -> Plan:
    if plan.uses_servers and not plan.server.tables:
        plan = _with_tables(plan, job, profile)
    outline = profile or (_outline_model(job) if plan.mesh.tp > 1 else None)
    if not plan.incomplete:
        return plan
    if plan.mesh.tp > 1 and not plan.tensor.placements:
        plan = _with_placements(plan, job)
    if plan.tensor.sequence and not plan.tensor.segments:
        require_executable(plan)  # looking for them where they cannot be used is not worth the time
        plan = _with_segments(plan, job)
    if plan.mesh.pp > 1:
        plan = plan.replace(placements=tuple(map(_gather_logits, plan.tensor.placements)))
    if plan.mesh.pp > 1 and not plan.pipeline.stages:
        plan = _with_stages(plan, job, profile)
    require_executable(plan)
    if outline is not None:
        raise_on_errors(plan, tuple(check_stored_weights(plan, outline.fsdp_units)))
    return dataclasses.replace(plan, model=plan.model or (outline.model if outline else compute_fingerprint(job)))


@trial_context()
def compute_fingerprint(job: Job) -> str:
    """The fingerprint of the job's model, as in profiles and plans."""
    return _fingerprint_parameters(_build_fake_model(job))


def _with_tables(plan: Plan, job: Job, profile: Profile | None) -> Plan:
    if profile is None:
        from echelon.profiler.profile_model import profile as make_profile

        profile = make_profile(job)
    raise_on_errors(plan, tuple(check_server_tables(plan, profile)))
    return plan.replace(tables=choose_served_tables(plan, profile), model=plan.model or profile.model)


def _nothing_to_cut_error(plan: Plan, axis: str, rule: str, *, smaller_degree: str = "") -> UnsplittableModelError:
    either = f"{smaller_degree}, or " if smaller_degree else ""
    remedy = f"use {either}dp={plan.ranks} zero=3, which also shares the memory"
    problem = Problem.of(plan, axis, rule, remedy, nothing_to_cut=True)
    return UnsplittableModelError(str(problem), [problem])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ModelOutline:
    model: str
    fsdp_units: tuple[str, ...]


def _outline_model(job: Job) -> _ModelOutline:
    model = _build_fake_model(job)
    return _ModelOutline(model=_fingerprint_parameters(model), fsdp_units=find_fsdp_units(list_modules(model)))


def _build_fake_model(job: Job) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return build_fake_model(job)


def _fingerprint_parameters(model: nn.Module) -> str:
    named = model.named_parameters()
    return model_fingerprint((name, value.shape, str(value.dtype).removeprefix("torch.")) for name, value in named)


def _with_placements(plan: Plan, job: Job) -> Plan:
    try:
        cuts = find_job_cuts(job, plan.mesh.tp)
    except EchelonError:
        raise
    except Exception as error:  # a user's forward that does not run on the CPU
        rule = f"the cuts are found by running the model on the CPU, and there it fails ({describe_error(error)})"
        raise _nothing_to_cut_error(plan, "tp", rule) from error
    if not cuts.placements:
        reason = next(iter(cuts.replicated.values()), "it has no parameters")
        raise _nothing_to_cut_error(plan, "tp", f"nothing of the model can be cut ({reason})")
    names = [name for name, _ in _build_fake_model(job).named_parameters(remove_duplicate=False)]
    missing = {placement.path for placement in cuts.placements} - {name.rpartition(".")[0] for name in names}
    if missing:
        rule = f"{min(missing)} is created in forward, so it does not exist yet when the model is cut"
        raise _nothing_to_cut_error(plan, "tp", rule)
    uncut = tuple(ReplicatedModule(path=path, reason=reason) for path, reason in cuts.replicated.items())
    return plan.replace(placements=cuts.placements, replicated=uncut)


def _with_segments(plan: Plan, job: Job) -> Plan:
    tp, placements = plan.mesh.tp, plan.tensor.placements
    sequence_cut = _search_model(job, lambda model, run_step: find_segments(model, run_step, tp, placements))
    if not sequence_cut.segments:
        rule = f"no blocks of the model work on a part of the sequence ({sequence_cut.reason})"
        remedy = "put what mixes positions into a module of its own, leave `sequence` out, or use recompute=block, which saves activations as well"
        problem = Problem.of(plan, "sequence", rule, remedy, plan_changes=(("sequence", False),))
        raise PlanError(f"sequence: {problem.rule}; {problem.remedy}", [problem])
    return plan.replace(placements=sequence_cut.placements, segments=sequence_cut.segments)


@trial_context()
def find_job_cuts(job: Job, tp_size: int) -> TensorCuts:
    """How the job's model is cut over `tp_size` ranks, and what stays whole."""
    return _search_model(job, lambda model, run_step: find_tensor_cuts(model, run_step, tp_size))


def _search_model(job: Job, search: Callable[[nn.Module, RunStep], SearchResult]) -> SearchResult:
    """The result of `search(model, run_step)` on real numbers, in float64 if the model supports it."""
    with preserve_random_states():
        try:
            return _search_in_dtype(job, search, torch.float64)
        except EchelonError:
            raise
        except Exception:  # some models run in their own dtype only
            return _search_in_dtype(job, search, None)


def _search_in_dtype(job: Job, search: Callable[[nn.Module, RunStep], SearchResult], dtype: Any) -> SearchResult:
    torch.manual_seed(job.seed)
    model, batch = make_model(job), ExampleBatches(job).batch(2)
    if dtype is not None:
        model = cast_model(model, dtype)
        batch = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
    return search(model, lambda: call_loss(job, call_model(job, model, batch), batch, model))


def _gather_logits(placement: Placement) -> Placement:
    """Stages pass full tensors."""
    return dataclasses.replace(placement, cut="gather") if placement.cut == "logits" else placement


def _with_stages(plan: Plan, job: Job, profile: Profile | None) -> Plan:
    num_stages, pp = stage_count(plan), plan.mesh.pp
    units = profile.pipeline_units if profile is not None else ()
    if not units:
        try:
            units = find_pipeline_units(job)
        except EchelonError:
            raise
        except Exception as error:  # a user's forward may do anything with missing values
            rule = f"stages are found by running the model on fake tensors, where it fails ({describe_error(error)})"
            raise _nothing_to_cut_error(plan, "pp", rule) from error
    if not units:
        raise _nothing_to_cut_error(plan, "pp", NO_STAGES_REASON)
    if len(units) < num_stages:
        remedy = f"pp={len(units)} or less" if num_stages == pp else "schedule=1f1b, which has one stage per rank"
        rule = f"{num_stages} stages, and the model has {len(units)} units that forward calls in sequence"
        raise _nothing_to_cut_error(plan, "pp", rule, smaller_degree=remedy)
    stages = find_stages(plan, units)
    if stages is None:
        places = f"between the pairs of modules that tp={plan.mesh.tp} cuts and the calls of modules with statistics"
        rule = f"{num_stages} stages, and there are too few places {places}"
        raise _nothing_to_cut_error(plan, "pp", rule, smaller_degree="fewer stages, or tp=1")
    return plan.replace(stages=stages)

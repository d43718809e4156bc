"""A smaller job that stands for a large one, so that a proof ends in the time it was given.

First fewer samples: every rank keeps its share, its micro-batches (two at least, if there are several) and uneven rests. If one
sample each is still too much, fewer layers: of a list of equal blocks the first few stand for all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.batch_split import rounds
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.stages import stage_count
from echelon.profiler.repeated_blocks import TRACED, Run, find
from echelon.trials.deep_copies import copy_module
from echelon.trials.shape_model import built, call_factory

#: Passes over a global batch that a proof of two or three steps makes, reference and plan together, and the part of a product's rate
#: that a model's step reaches. Measured on GPT and ResNet steps on 2 cores.
_PASSES, _EFFICIENCY = 8.0, 0.4
#: The part of the time that the passes may take; building models, gathering and comparing take the rest.
_COMPUTING = 0.5
#: Side of the product that the rate is measured with.
_SIDE = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A job and a plan that stand for larger ones, and what was left out."""

    job: Job
    plan: Plan
    profile: Profile
    note: str


def affordable_flops(device: torch.device, seconds: float) -> float:
    """Floating-point operations that a step of the proof may have so that it ends in `seconds`."""
    return _COMPUTING * seconds * _EFFICIENCY * rate(device) / _PASSES


def smaller(job: Job, plan: Plan, profile: Profile, affordable: float, total: int) -> Sample | None:
    """What to prove in place of the whole job where a step may have `affordable` operations; None: the whole. `total`: steps of the
    whole training."""
    needed = profile.flops(job.batch)
    if needed <= affordable:
        return None
    batch, micro = _batch(plan, job.batch, affordable / needed)
    note = f"the time allows {batch} samples a step, of {job.batch}"
    if batch < job.batch:
        # As many steps as the whole training has: schedules depend on it.
        job = dataclasses.replace(job, batch=batch, epochs=None, steps=total)
        plan, profile = dataclasses.replace(plan, micro=micro), dataclasses.replace(profile, batch=batch)
    found = _blocks(job) if profile.flops(batch) > affordable else None
    if found is not None:
        note += f" and the first {TRACED} of {found.count} equal blocks in {found.path or 'the model'}"
        job = dataclasses.replace(job, model=_shortened(job, found))
        plan = _without(plan, found, job)
    return Sample(job=job, plan=plan, profile=profile, note=f"sampled: {note}")


def _batch(plan: Plan, batch: int, share: float) -> tuple[int, int | None]:
    """Samples of a step and of a micro-batch that keep the plan's structure: every rank, several rounds, an uneven rest."""
    dp, turns = plan.mesh.dp, rounds(batch, plan.mesh.dp, plan.micro, plan.shares)
    turns = min(turns, max(2, stage_count(plan))) if plan.mesh.pp > 1 else min(turns, 2)
    # Two in each micro-batch at least: batch norm and some code treat a single one apart.
    least = max(dp * turns * min(2, plan.micro or 2), sum(plan.shares))
    fewer = max(int(batch * share), least)
    fewer += bool(batch % dp) * (fewer % dp == 0)
    if fewer >= batch:
        return batch, plan.micro
    return fewer, None if plan.micro is None else max(-(-fewer // dp) // turns, 1)


def rate(device: torch.device) -> float:
    """Floating-point operations that the device makes in a second, in float64."""
    one = torch.rand(_SIDE, _SIDE, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        float((one @ one)[0, 0])  # reading a number waits for a GPU
        best = min(best, time.perf_counter() - begin)
    return 2 * _SIDE**3 / best


def _blocks(job: Job) -> Run | None:
    """The longest list of equal blocks."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return find(built(job))
    except Exception:  # a model that cannot be built without its values: it is proved whole
        return None


def _shortened(job: Job, run: Run) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        made: Any = copy_module(job.model) if isinstance(job.model, nn.Module) else call_factory(job.model)
        holder = made.get_submodule(run.path)
        for name in list(holder._modules)[TRACED:]:
            del holder._modules[name]
        return made

    return model


def _without(plan: Plan, run: Run, job: Job) -> Plan:
    """The plan for the shortened model: what it says of the blocks that are left stays."""
    gone = tuple(f"{run.block(number)}." for number in range(TRACED, run.count))
    plan = dataclasses.replace(
        plan,
        model=None,
        placements=tuple(each for each in plan.placements if not f"{each.path}.".startswith(gone)),
        uncut=tuple(each for each in plan.uncut if not f"{each.path}.".startswith(gone)),
        segments=(),
        stages=(),
    )
    return complete(plan, job) if plan.open else plan

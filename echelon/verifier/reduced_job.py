"""Reduce a large job to a smaller one that represents it, so that a proof ends in time.

First fewer samples: every rank keeps its share, its micro-batches (at least two, if there are several) and uneven rests. If that is
still too much, fewer layers: the first few of a list of equal blocks represent all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.stages import stage_count
from echelon.profiler.repeated_blocks import TRACED_BLOCKS, RepeatedBlocks, find_repeated_blocks
from echelon.trials.deep_copies import copy_module
from echelon.trials.shape_model import build_fake_model, call_factory

#: Passes over a global batch in a proof of two or three steps, reference and plan together, and the share of a matrix product's rate
#: that a model's step reaches. Measured on GPT and ResNet steps on 2 cores.
_PASSES_PER_PROOF, _EFFICIENCY = 8.0, 0.4
#: The share of the time for these passes; building models, gathering and comparing take the rest.
_COMPUTE_SHARE = 0.5
#: Side of the matrices of which the product's rate is measured.
_MATRIX_SIZE = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReducedJob:
    """A job and a plan that represent larger ones, and a note on what was left out."""

    job: Job
    plan: Plan
    profile: Profile
    note: str


def affordable_flops(device: torch.device, seconds: float) -> float:
    """Floating-point operations that a step may have if the proof is to end in `seconds`."""
    return _COMPUTE_SHARE * seconds * _EFFICIENCY * measure_flops_rate(device) / _PASSES_PER_PROOF


def reduce_job(job: Job, plan: Plan, profile: Profile, affordable: float, total_steps: int) -> ReducedJob | None:
    """What to verify instead of a job of `total_steps` steps, if a step may have `affordable` operations; None: the whole job."""
    needed_flops = profile.flops(job.batch_size)
    if needed_flops <= affordable:
        return None
    batch, micro = _reduced_batch(plan, job.batch_size, affordable / needed_flops)
    note = f"the time allows {batch} samples a step, of {job.batch_size}"
    if batch < job.batch_size:
        # As many steps as the whole training has, because schedules depend on it.
        job = dataclasses.replace(job, batch_size=batch, epochs=None, steps=total_steps)
        plan, profile = dataclasses.replace(plan, micro=micro), dataclasses.replace(profile, batch=batch)
    blocks: RepeatedBlocks | None = None
    if profile.flops(batch) > affordable:
        with (
            contextlib.suppress(Exception),  # a model that cannot be built without its values is verified whole
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            blocks = find_repeated_blocks(build_fake_model(job))
    if blocks is not None:
        note += f" and the first {TRACED_BLOCKS} of {blocks.count} equal blocks in {blocks.path or 'the model'}"
        job = dataclasses.replace(job, model=_shorten_model(job, blocks))
        plan = _remove_blocks(plan, blocks, job)
    return ReducedJob(job=job, plan=plan, profile=profile, note=f"sampled: {note}")


def _reduced_batch(plan: Plan, batch: int, share: float) -> tuple[int, int | None]:
    """Samples of a step and of a micro-batch that preserve the plan's structure: every rank, several rounds, an uneven rest."""
    dp, rounds = plan.mesh.dp, max(2, stage_count(plan)) if plan.mesh.pp > 1 else 2
    rounds = min(plan.count_micro_batches(batch), rounds)
    # At least two in each micro-batch: batch norm and some code treat a single one specially.
    min_samples = max(dp * rounds * min(2, plan.micro or 2), sum(plan.data.batch_shares))
    samples = max(int(batch * share), min_samples)
    samples += bool(batch % dp) * (samples % dp == 0)
    if samples >= batch:
        return batch, plan.micro
    return samples, None if plan.micro is None else max(-(-samples // dp) // rounds, 1)


def measure_flops_rate(device: torch.device) -> float:
    matrix = torch.rand(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.float64, device=device)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading a number waits for a GPU
        best = min(best, time.perf_counter() - begin)
    return 2 * _MATRIX_SIZE**3 / best


def _shorten_model(job: Job, blocks: RepeatedBlocks) -> Callable[[], nn.Module]:
    def build_model() -> nn.Module:
        model: Any = copy_module(job.model) if isinstance(job.model, nn.Module) else call_factory(job.model)
        holder = model.get_submodule(blocks.path)
        for name in list(holder._modules)[TRACED_BLOCKS:]:
            del holder._modules[name]
        return model

    return build_model


def _remove_blocks(plan: Plan, blocks: RepeatedBlocks, job: Job) -> Plan:
    removed = tuple(f"{blocks.block_path(number)}." for number in range(TRACED_BLOCKS, blocks.count))
    placements = tuple(item for item in plan.tensor.placements if not f"{item.path}.".startswith(removed))
    replicated = tuple(item for item in plan.tensor.replicated if not f"{item.path}.".startswith(removed))
    plan = plan.replace(model=None, placements=placements, replicated=replicated, segments=(), stages=())
    return complete(plan, job) if plan.incomplete else plan

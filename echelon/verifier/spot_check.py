"""Spot checks: recompute random later steps on one device and compare.

The gate verifies the first steps. What begins later (a gate that opens, a loss that starts to couple samples, rare labels) shows here:

    1  before the step    parameters, buffers and attributes that forward changed go to rank 0
    2  the step           forward and backward as always; if random numbers were drawn, once more without them
    3  on rank 0          a plain float64 loop computes loss and gradients of the same samples from the same state
    4  compare            beyond what rounding explains the run stops, before the optimizer has stepped

Where one device would take too long for all samples of a step, a pass over a few of them, on every rank, is compared instead.
One random step of each doubling of the step number is checked, so what begins at step N is seen before step 4 N, on other steps in every
launch. Checks take a small share of the training's time, and a checked step trains the same values as an unchecked one.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.run import Run
from echelon.engine.step_result import StepResult
from echelon.errors import DivergenceError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.trials.dataset_state import preserve_datasets
from echelon.verifier.reduced_job import measure_flops_rate
from echelon.verifier.reference_data import ReferenceData, collate_as_ranks, open_reference_data
from echelon.verifier.spot_check_batch import (
    collect_readings,
    find_misreading_rank,
    is_rereadable,
    join_readings,
    reduce_batch,
)
from echelon.verifier.spot_check_device import IncomparableStepError, SingleDeviceStep, StepState
from echelon.verifier.spot_check_pass import PassResult, PassState, copy_batch, run_checked_pass, run_without_randomness

#: The gate has verified the steps before this one.
FIRST_CHECKED_STEP = 3
#: Checks may take this share of the time since training began, at least so many seconds; a single one may keep one device busy so long.
TIME_SHARE, MIN_SECONDS, SECONDS_PER_CHECK = 0.01, 10.0, 2.0
#: The share of a matrix product's rate that a step reaches, and the bytes that one device needs for each parameter in float64.
_EFFICIENCY, _BYTES_PER_PARAMETER = 0.4, 24


class SpotChecks:
    """The checks of one run. Every rank makes the same calls."""

    def __init__(
        self, job: Job, run: Run, pristine: nn.Module | None, profile: Profile | None, *, entropy: int | None = None
    ) -> None:
        """`pristine`: a copy of the job's module from before the run took it, on rank 0; None: the job has a factory. `entropy`: seed of the
        steps; None: rank 0 draws it, from no generator that training uses."""
        self._run, self._profile, self._job = run, profile, dataclasses.replace(job, warmup_data=None)
        self._single_device = SingleDeviceStep(run, pristine)
        self._start_time, self.seconds, self.count = time.perf_counter(), 0.0, 0
        seed = run.ranks.broadcast_object(secrets.randbits(64)) if entropy is None else entropy
        self._chosen_steps = _choose_steps(seed, run.total_steps)
        #: Whether rank 0 reads the samples again, and from where; else it gets those that the ranks have.
        self._rereads_samples = True
        self._data: ReferenceData | None = None
        #: The last step (from 1) that was compared and agreed, on rank 0. The gate compared the first ones.
        self.last_agreed_step = FIRST_CHECKED_STEP - 1
        self.stop_reason = ""  #: why there are no more checks; empty: there are
        #: The share of a step's samples that one device can compute in time; None: not known yet.
        self._sample_share: float | None = None
        self._doubtful_steps = 0
        self._warned: set[str] = set()

    def is_due(self, step: int) -> bool:
        """Whether step `step` (from 0) is checked; if it is chosen, rank 0's clock decides."""
        return step in self._chosen_steps and self._can_check()

    def _is_worth_it(self, step: int) -> bool:
        """Whether a doubtful step is checked: the 1st, 2nd, 4th, 8th ..., as other checks need time too."""
        self._doubtful_steps += 1
        if self._doubtful_steps.bit_count() == 1 and self._can_check():
            return True
        self._warn_once(
            f"step {step + 1}",
            "how many items the loss of a part of the batch counts does not show; of such steps only the 1st, 2nd, 4th, 8th ... are compared with "
            "one device; return (sum, count) from the loss, with the count as it is (0 for none)",
        )
        return False

    def _warn_once(self, step: str, text: str) -> None:
        if text not in self._warned and self._run.world.is_main:
            self._run.warn(f"{step}: {text}")
        self._warned.add(text)

    def _can_check(self) -> bool:
        if self._run.plan.uses_servers or self._run.loss_scale is not None:
            return False
        mean_seconds = self.seconds / self.count if self.count else 0.0
        time_budget = max(MIN_SECONDS, TIME_SHARE * (time.perf_counter() - self._start_time))
        has_time = self.seconds + mean_seconds <= time_budget
        return bool(self._run.ranks.broadcast_object(has_time and not self.stop_reason))

    def step(self, batch: StepBatch) -> StepResult:
        """Train a step, checked where it is due or does something that was never compared."""
        if self.is_due(batch.step):
            return self.check_step(batch)
        run = self._run
        loss = run.backward(batch)
        if (
            run.train_step.needs_comparison
            and batch.step + 1 >= FIRST_CHECKED_STEP
            and self._is_worth_it(batch.step)
            and all(run.ranks.all_gather_object(run.train_step.is_batch_unchanged(batch)))
        ):
            begin = time.perf_counter()
            self._check_reduced_step(batch, self._affordable_share())
            self._count_check(begin)
        return run.finish_step(loss, batch)

    def check_step(self, batch: StepBatch) -> StepResult:
        """Train a step, checked; raises DivergenceError where one device computes something else."""
        run, begin = self._run, time.perf_counter()
        if (sample_share := self._affordable_share()) < 1:
            self._check_reduced_step(batch, sample_share)
            loss = run.backward(batch)
        else:
            loss = self._check_full_step(batch)
        self._count_check(begin)
        return run.finish_step(loss, batch)

    def _count_check(self, begin: float) -> None:
        self.seconds += time.perf_counter() - begin
        self.count += 1

    def _affordable_share(self) -> float:
        if self._sample_share is None:
            own = self._affordable() if self._run.world.is_main else None
            self._sample_share, self._single_device.device = self._run.ranks.broadcast_object(own)
        return self._sample_share

    def _affordable(self) -> tuple[float, torch.device]:
        """(The share of a step's samples that one device computes in SECONDS_PER_CHECK, that device: the GPU if its memory suffices)."""
        device, profile = self._run.device, self._profile
        if profile is None:
            return 1.0, torch.device("cpu")
        needed_bytes = _BYTES_PER_PARAMETER * profile.elements + 4 * profile.saved_bytes(2)
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed_bytes:
            device = torch.device("cpu")
        affordable_flops = SECONDS_PER_CHECK * _EFFICIENCY * measure_flops_rate(device)
        return affordable_flops / max(profile.flops(self._job.batch_size), 1.0), device

    def _check_full_step(self, batch: StepBatch) -> Tensor:
        """Compare forward and backward of the step itself; returns the loss."""
        run, state, batch_as_read = self._run, self._gather_state(), copy_batch(batch)
        loss, result = run_checked_pass(run, batch, batch_as_read)
        with preserve_datasets(self._job.data, self._job.collate):
            compare = partial(self._compare, batch.step, state, result, plan=run.plan)
            error = compare(self._open_data(batch_as_read))
            if self._rereads_samples and run.ranks.broadcast_object(error is not None):
                error = self._compare_own_samples(batch_as_read, compare, error)
        self._raise_on_all_ranks(error)
        return loss

    def _check_reduced_step(self, full_batch: StepBatch, sample_share: float) -> None:
        """Compare a pass over a few samples, or all; nothing of it stays."""
        run = self._run
        reduced = reduce_batch(run, full_batch, sample_share) if sample_share < 1 else (full_batch, run.plan)
        if reduced is None:
            return
        batch, plan = reduced
        state = self._gather_state()
        result = run_without_randomness(run, copy_batch(batch), PassState(run))
        self._raise_on_all_ranks(self._compare(batch.step, state, result, self._gather_samples(batch), plan=plan))

    def _raise_on_all_ranks(self, error: DivergenceError | None) -> None:
        with self._run.ranks.raise_on_all_ranks():
            if error is not None:
                raise error

    def _compare(
        self, step: int, state: StepState, result: PassResult, data: ReferenceData | None, *, plan: Plan
    ) -> DivergenceError | None:
        """How one device differs; None: it does not, it cannot be compared, or this is another rank."""
        if not self._run.world.is_main or data is None or self.stop_reason:
            return None
        step_name = f"step {step + 1}"
        if not result.is_deterministic:
            reason = "it draws random numbers in a way that cannot be held still"
            self._warn_once(step_name, f"not compared with one device: {reason}")
            return None
        try:
            divergence = self._single_device.find_divergence(step, state, result, data, plan)
        except IncomparableStepError as error:
            self.stop_reason = str(error)
            consequence = "later steps are not checked; the proof of the first steps stands"
            self._run.warn(f"{step_name} could not be computed again on one device, so {consequence} ({error})")
            return None
        if divergence is None:
            self.last_agreed_step = step + 1
            return None
        tensor, description = divergence
        return DivergenceError(
            f"{step_name}: {description}, and the first steps agreed: something that begins later, or is rare, depends on how the batch or the model "
            f"is cut; nothing was updated by this step. The last step that was checked and found equal is {self.last_agreed_step}: resume from a "
            "checkpoint at or before it, because later ones may contain the error",
            tensor=tensor, cause="behaviour that begins after the first steps", last_agreed_step=self.last_agreed_step,
        )  # fmt: skip

    def _compare_own_samples(
        self, batch: StepBatch, compare: Callable[[ReferenceData | None], DivergenceError | None], error: DivergenceError | None
    ) -> DivergenceError | None:  # fmt: skip
        """Compare again on the samples that the ranks have read: the difference may be in those. Every rank must call it."""
        run, step, last_agreed_step = self._run, batch.step + 1, self.last_agreed_step
        with run.ranks.raise_on_all_ranks():
            data = open_reference_data(self._job)
        readings = collect_readings(run, batch, data)
        own_data = join_readings(run, batch, readings)
        with run.ranks.raise_on_all_ranks():
            if own_data is not None and (error := compare(own_data)) is None:
                assert self._data is not None
                rank = find_misreading_rank(batch.step, readings, self._data)
                if rank is not None:
                    return DivergenceError(
                        f"step {step}: for its part of the batch data rank {rank} read other samples than rank 0 reads there, and the first steps "
                        "agreed: the data set depends on the rank or the process that reads it; nothing was updated by this step. Give every rank "
                        "the same data set: echelon splits each batch between them",
                        cause="samples that depend on the rank", last_agreed_step=last_agreed_step,
                    )  # fmt: skip
                self._use_own_samples(step)
        return error

    def _use_own_samples(self, step: int) -> None:
        self._run.warn(
            f"step {step}: the data gave other samples when they were read again, as it draws random numbers of its own or has changed; "
            "spot checks compare with one device on the samples that the ranks have read"
        )
        self._rereads_samples = False

    def _open_data(self, batch: StepBatch) -> ReferenceData | None:
        """The step's samples for one device, read again or, where that returns others, as the ranks have them."""
        run = self._run
        with run.ranks.raise_on_all_ranks():
            if run.world.is_main and self._rereads_samples:
                self._data = self._data or collate_as_ranks(open_reference_data(self._job), run.plan)
                if not is_rereadable(run, batch, self._data):
                    self._use_own_samples(batch.step + 1)
        self._rereads_samples = run.ranks.broadcast_object(self._rereads_samples)
        return self._data if self._rereads_samples else self._gather_samples(batch)

    def _gather_samples(self, batch: StepBatch) -> ReferenceData | None:
        return join_readings(self._run, batch, collect_readings(self._run, batch))

    def _gather_state(self) -> StepState:
        """The state before the step. In a pipeline the last stage calls the loss: rank 0, whose own loss is never called, gets its state."""
        run, functions = self._run, self._run.attributes.functions
        if run.rank_model.pipeline is not None:
            is_source = run.is_reporting and run.data_parallel.rank == 0
            own_values = functions.read_slots(list(functions.digest_changes())) if is_source else {}
            sources = [values for values in run.ranks.all_gather_object(own_values) if values and run.world.is_main]
            if not all(functions.write_slots(values, run.device) for values in sources) and not self.stop_reason:
                self.stop_reason = "the loss keeps objects that were made while it trained"
                reason = f"{self.stop_reason}, on a pipeline's last stage"
                run.warn(f"steps from here on are not compared with one device: {reason}")
        return StepState.gather(run, self._job)


def _choose_steps(seed: int, total_steps: int) -> frozenset[int]:
    """One random step of each doubling from FIRST_CHECKED_STEP on, and the last; the same on every rank."""
    generator, steps, start = random.Random(seed), set[int](), FIRST_CHECKED_STEP
    while start < total_steps:
        steps.add(generator.randrange(start, min(2 * start, total_steps)))
        start *= 2
    return frozenset(steps | ({total_steps - 1} if total_steps > FIRST_CHECKED_STEP else set()))

"""Spot checks: at random later steps the step is computed again on one device and compared.

The gate proves the first steps. What begins later (a gate that opens, a loss that starts to couple samples, rare labels) shows here:

    1  before the step    parameters, buffers and attributes that forward changed go to rank 0
    2  the step           forward and backward as always; if random numbers were drawn, once more with them held still
    3  on rank 0          a plain float64 loop computes loss and gradients of the same samples from the same state
    4  compare            beyond what rounding explains the run stops, before the optimizer has stepped

Where one device would take too long for all samples of a step, a pass over a few of them, on every rank, is compared instead.
Checks fall on one random step of each doubling of the step number, so what begins at step N is seen before step 4 N, on other steps at
every launch, and they stay within a small share of the training's time. The checked step trains the same numbers as an unchecked one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.checkpoint.held_state import StateChanges
from echelon.engine.checkpoint.model_extra_state import has_extra_state
from echelon.engine.checkpoint.run_attributes import ModelState, read_trainable, set_trainable, snapshot_model
from echelon.engine.data_setup import find_generators
from echelon.engine.full_state import gather_full_tensors
from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.precision import autocast
from echelon.engine.run import Run
from echelon.engine.step_result import StepResult
from echelon.errors import DivergenceError, JobError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.profiler.sample_coupling import first_line
from echelon.tree import copy_tensors
from echelon.trials.dataset_state import preserve_datasets
from echelon.trials.determinism import DeterministicMode, randomness_disabled
from echelon.trials.isolation import IsolatedJob
from echelon.trials.snapshot import Snapshot
from echelon.trials.torch_patches import TorchPatches
from echelon.verifier import tolerances
from echelon.verifier.batch_collation import collate_as_ranks
from echelon.verifier.compare import NOT_COMPARABLE, Bounds, Difference, compare_tensors, to_float64
from echelon.verifier.precision_drift import DRIFT_BOUNDS
from echelon.verifier.reduced_job import measure_flops_rate
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import CachedData, ReferenceData, open_reference_data
from echelon.verifier.spot_check_batch import (
    collect_readings,
    find_misreading_rank,
    is_rereadable,
    join_readings,
    reduce_batch,
)

#: The gate has looked at the steps before this one.
FIRST_CHECKED_STEP = 3
#: Checks may take this share of the time since training began, at least this many seconds; one of them may keep one device busy this long.
TIME_SHARE, MIN_SECONDS, SECONDS_PER_CHECK = 0.01, 10.0, 2.0
#: A step's part of the rate of a product, and bytes of float64 that one device needs for each parameter.
_EFFICIENCY, _BYTES_PER_PARAMETER = 0.4, 24
#: How many times one device's own rounding a difference may be.
_ROUNDING_FACTOR = 16
#: Where one device reads the samples, and the plan by which it splits them where batch statistics ask for that.
_Source = tuple[ReferenceData | None, Plan]


class SpotChecks:
    """The checks of one run. Every rank makes the same calls."""

    def __init__(
        self,
        job: Job,
        run: Run,
        pristine: nn.Module | None,
        profile: Profile | None,
        *,
        entropy: int | None = None,
    ) -> None:
        """`pristine`: a copy of the job's module from before the run took it, on rank 0; None: the job has a factory. `entropy`: what the
        steps are drawn from; None: rank 0 draws it, from no generator that training has."""
        self._run, self._profile = run, profile
        self._job, self._pristine = dataclasses.replace(job, warmup_data=None), pristine
        self._start_time, self.seconds, self.count = time.perf_counter(), 0.0, 0
        launch = run.ranks.all_gather_object(secrets.randbits(64))[0] if entropy is None else entropy
        self._chosen_steps = _choose_steps(launch, run.total_steps)
        #: Whether rank 0 reads samples once more, and from where; else it gets those that the ranks have.
        self._rereads_samples = True
        self._data: ReferenceData | None = None
        #: The last step (from 1) that was compared and agreed, on rank 0. The gate compared those before FIRST.
        self.last_agreed_step = FIRST_CHECKED_STEP - 1
        #: Why there are no more checks; empty: there are.
        self.stop_reason = ""
        #: Of a step's samples what one device can compute in time; None: not known yet.
        self._sample_share: float | None = None
        #: Doubtful steps so far, and whether one that was not compared was reported.
        self._doubtful_steps, self._warned_of_doubts = 0, False
        #: Whether a step was reported that draws although random numbers are held still.
        self._warned_of_draws = False
        self._device = torch.device("cpu")

    def is_due(self, step: int) -> bool:
        """Whether step `step` (from 0) is checked; if it is by its number, rank 0's clock decides."""
        return step in self._chosen_steps and self._can_check()

    def _is_worth_it(self, step: int) -> bool:
        """Whether a doubtful step is checked: the 1st, 2nd, 4th, 8th ..., as other checks need time too."""
        self._doubtful_steps += 1
        if self._doubtful_steps.bit_count() == 1 and self._can_check():
            return True
        if not self._warned_of_doubts and self._run.world.is_main:
            self._run.warn(
                f"step {step + 1}: how many items the loss of a part of the batch counts does not show; of such steps only the 1st, 2nd, 4th, 8th ... are "
                "compared with one device; return (sum, count) from the loss, with the count as it is (0 for none)"
            )
        self._warned_of_doubts = True
        return False

    def _can_check(self) -> bool:
        if self._run.plan.uses_servers or self._run.loss_scale is not None:
            return False
        mean_seconds = self.seconds / self.count if self.count else 0.0
        time_budget = max(MIN_SECONDS, TIME_SHARE * (time.perf_counter() - self._start_time))
        return bool(
            self._run.ranks.all_gather_object(not self.stop_reason and self.seconds + mean_seconds <= time_budget)[0]
        )

    def step(self, batch: StepBatch) -> StepResult:
        """The step, checked where it is due, and where it does something that was never compared."""
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
            self.seconds += time.perf_counter() - begin
            self.count += 1
        return run.finish_step(loss, batch)

    def check_step(self, batch: StepBatch) -> StepResult:
        """The step, checked; raises DivergenceError where one device computes something else."""
        run, begin = self._run, time.perf_counter()
        sample_share = self._affordable_share()
        if sample_share < 1:
            self._check_reduced_step(batch, sample_share)
            loss = run.backward(batch)
        else:
            loss = self._check_full_step(batch)
        self.seconds += time.perf_counter() - begin
        self.count += 1
        return run.finish_step(loss, batch)

    def _affordable_share(self) -> float:
        if self._sample_share is None:
            ranks = self._run.ranks
            self._sample_share, self._device = ranks.all_gather_object(
                self._affordable() if self._run.world.is_main else None
            )[0]
        return self._sample_share

    def _affordable(self) -> tuple[float, torch.device]:
        """Of a step's samples what one device computes in EACH seconds, and which device: the GPU, if it has the room."""
        run, profile = self._run, self._profile
        device = run.device
        if profile is None:
            return 1.0, torch.device("cpu")
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[
            0
        ] < _BYTES_PER_PARAMETER * profile.elements + 4 * profile.saved_bytes(2):
            device = torch.device("cpu")
        return SECONDS_PER_CHECK * _EFFICIENCY * measure_flops_rate(device) / max(
            profile.flops(self._job.batch_size), 1.0
        ), device

    def _check_full_step(self, batch: StepBatch) -> Tensor:
        """Forward and backward of the step itself, compared; gives its loss."""
        run = self._run
        state, pass_state, batch_as_read = self._gather_state(), self._snapshot_pass_state(), _copy_batch(batch)
        is_random, loss = self._backward(batch)
        if is_random:
            actual_loss, gradients, is_deterministic = self._backward_without_randomness(
                _copy_batch(batch_as_read), pass_state
            )
        else:
            actual_loss, gradients, is_deterministic = loss, self._gather_gradients(), True
        with preserve_datasets(self._job.data, self._job.collate):
            data = self._open_data(batch_as_read)
            compare_with = partial(
                self._compare_with_one_device,
                batch.step,
                state,
                actual_loss,
                gradients,
                is_deterministic=is_deterministic,
                without_randomness=is_random,
            )
            error = compare_with((data, run.plan))
            if self._rereads_samples and run.ranks.all_gather_object(error is not None)[0]:
                error = self._compare_own_samples(batch_as_read, compare_with, error)
        with run.ranks.raise_on_all_ranks():
            if error is not None:
                raise error
        return loss

    def _compare_own_samples(
        self, batch: StepBatch, compare_with: Callable[[_Source], DivergenceError | None], error: DivergenceError | None
    ) -> DivergenceError | None:
        """Compare once more, with what the ranks have read: the difference may be in the samples. Every rank must call it."""
        run, step, last_agreed_step = self._run, batch.step + 1, self.last_agreed_step
        with run.ranks.raise_on_all_ranks():
            data = open_reference_data(self._job)
        readings = collect_readings(run, batch, data)
        own_data = join_readings(run, batch, readings)
        with run.ranks.raise_on_all_ranks():
            if own_data is not None and (error := compare_with((own_data, run.plan))) is None:
                assert self._data is not None
                rank = find_misreading_rank(batch.step, readings, self._data)
                if rank is not None:
                    return DivergenceError(
                        f"step {step}: for its part of the batch data rank {rank} read other samples than rank 0 reads there, and the first steps "
                        "agreed: the data set depends on the rank or the process that reads it; nothing was updated by this step. Give every rank "
                        "the same data set: echelon splits each batch between them",
                        cause="samples that depend on the rank",
                        last_agreed_step=last_agreed_step,
                    )
                self._use_own_samples(step)
        return error

    def _use_own_samples(self, step: int) -> None:
        """From now on, compare with the samples that the ranks have. On rank 0."""
        self._run.warn(
            f"step {step}: the data gave other samples when they were read again, as it draws random numbers of its own or has changed; "
            "spot checks compare with one device on the samples that the ranks have read"
        )
        self._rereads_samples = False

    def _check_reduced_step(self, full_batch: StepBatch, sample_share: float) -> None:
        """A pass over a few samples, or all, compared; nothing of it stays."""
        run = self._run
        reduced = reduce_batch(run, full_batch, sample_share) if sample_share < 1 else (full_batch, run.plan)
        if reduced is None:
            return
        batch, plan = reduced
        state = self._gather_state()
        actual_loss, gradients, is_deterministic = self._backward_without_randomness(
            _copy_batch(batch), self._snapshot_pass_state()
        )
        error = self._compare_with_one_device(
            batch.step,
            state,
            actual_loss,
            gradients,
            (self._gather_samples(batch), plan),
            is_deterministic=is_deterministic,
            without_randomness=True,
        )
        with run.ranks.raise_on_all_ranks():
            if error is not None:
                raise error

    # The run's side

    def _open_data(self, batch: StepBatch) -> ReferenceData | None:
        """The step's samples for one device, read once more or, where that gives others, as the ranks have them."""
        run = self._run
        with run.ranks.raise_on_all_ranks():
            if run.world.is_main and self._rereads_samples:
                self._data = self._data or collate_as_ranks(open_reference_data(self._job), run.plan)
                if not is_rereadable(run, batch, self._data):
                    self._use_own_samples(batch.step + 1)
        self._rereads_samples = run.ranks.all_gather_object(self._rereads_samples)[0]
        return self._data if self._rereads_samples else self._gather_samples(batch)

    def _gather_samples(self, batch: StepBatch) -> ReferenceData | None:
        return join_readings(self._run, batch, collect_readings(self._run, batch))

    def _backward(self, batch: StepBatch) -> tuple[bool, Tensor]:
        """Forward and backward as always; whether a rank drew random numbers in it."""
        run = self._run
        draw_detector = _DrawDetector(run.device, find_generators(run.model))
        run.seed_context = draw_detector.around_seeding  # a pipeline seeds before every micro-batch
        try:
            loss = run.backward(batch)
        finally:
            run.seed_context = None
        return any(run.ranks.all_gather_object(draw_detector.has_drawn())), loss

    def _snapshot_pass_state(self) -> _PassState:
        """What a pass changes on this rank, to begin another one from."""
        run = self._run
        return _PassState(
            tensors=_copy_tensors_to_cpu(run.model),
            attributes=snapshot_model(run.model),
            trainable=read_trainable(run.model),
            functions=IsolatedJob(run.job, shared_model=run.model),
        )

    def _backward_without_randomness(
        self, batch: StepBatch, pass_state: _PassState
    ) -> tuple[Tensor, dict[str, Tensor], bool]:
        """Loss and gradients without random numbers, and whether none were drawn. What the real pass left is put back."""
        run = self._run
        trained = [*run.model.parameters(), *run.loss_parameters.values()]
        saved_gradients = [(value, value.grad, value.grad.clone()) for value in trained if value.grad is not None]
        tensors_after = _copy_tensors_to_cpu(run.model)
        attributes, trainable_flags = snapshot_model(run.model), read_trainable(run.model)
        pass_state.attributes.restore()
        _assign_tensors(_local_tensors(run.model), pass_state.tensors)
        set_trainable(run.model, pass_state.trainable)
        for value in trained:
            value.grad = None
        generators = [(own_generator, own_generator.get_state()) for own_generator in find_generators(run.model)]
        own_job, run.job = run.job, pass_state.functions.job  # a loss that counts its calls must not count this one
        try:
            with pass_state.functions.active(), randomness_disabled(run.model), DeterministicMode(fix_random=True)():
                is_random, loss = self._backward(batch)
        finally:
            run.job = own_job
            for generator, generator_state in generators:
                generator.set_state(generator_state)
        gradients = self._gather_gradients()
        for value in trained:
            value.grad = None
        for value, grad, saved in saved_gradients:
            grad.copy_(saved)  # in its place: the exchange keeps gradients in buckets of its own
            value.grad = grad
        attributes.restore()
        _assign_tensors(_local_tensors(run.model), tensors_after)
        set_trainable(run.model, trainable_flags)
        return loss, gradients, not is_random

    def _gather_gradients(self) -> dict[str, Tensor]:
        parameters = self._run.model.named_parameters()
        return gather_full_tensors(
            self._run, {name: value.grad for name, value in parameters if value.grad is not None}
        )

    def _gather_state(self) -> _StepState:
        """What the step starts from, whole on rank 0."""
        run = self._run
        self._fetch_function_state()
        attributes, uncopyable = run.attributes.collect_model()
        trainable_flags = {
            name: flag
            for rank_flags in run.ranks.all_gather_object(run.attributes.changed_trainable())
            for name, flag in rank_flags.items()
        }
        return _StepState(
            parameters=gather_full_tensors(run, dict(run.model.named_parameters())),
            aliases=_parameter_aliases(run.model),
            buffers=gather_full_tensors(run, dict(run.model.named_buffers())),
            attributes=attributes,
            uncopyable=uncopyable,
            trainable=trainable_flags,
            functions=IsolatedJob(self._job, shared_model=run.model) if run.world.is_main else None,
            # A checkpoint brings it back before the first look at attributes.
            extra_state={
                path: copy.deepcopy(module.get_extra_state()) for path, module in _modules_with_extra_state(run.model)
            },
        )

    def _fetch_function_state(self) -> None:
        """In a pipeline the last stage calls the loss: give rank 0, whose own loss is never called, what it keeps there."""
        run = self._run
        if run.rank_model.pipeline is None:
            return
        functions = run.attributes.functions
        rank_values = (
            functions.read_slots(list(functions.digest_changes()))
            if run.is_reporting and run.data_parallel.rank == 0
            else {}
        )
        for values in run.ranks.all_gather_object(rank_values):
            if values and run.world.is_main and not functions.write_slots(values, run.device) and not self.stop_reason:
                self.stop_reason = "the loss keeps objects that were made while it trained"
                run.warn(
                    f"steps from here on are not compared with one device: {self.stop_reason}, on a pipeline's last stage"
                )

    # One device's side, on rank 0

    def _compare_with_one_device(
        self,
        step: int,
        state: _StepState,
        actual_loss: Tensor,
        actual_gradients: Mapping[str, Tensor],
        source: _Source,
        *,
        is_deterministic: bool,
        without_randomness: bool,
    ) -> DivergenceError | None:
        """How one device's loss and gradients differ; None: they do not, or they cannot be compared, or this is another rank. `is_deterministic`: whether
        what was computed on the ranks had no random numbers."""
        if not self._run.world.is_main or source[0] is None or self.stop_reason:
            return None
        if not is_deterministic:
            if not self._warned_of_draws:
                self._run.warn(
                    f"step {step + 1} was not compared with one device: random numbers are drawn in a way that cannot be held still"
                )
            self._warned_of_draws = True
            return None
        # Both computations of one device get the same samples: data that draws by itself is no rounding.
        source = CachedData(source[0]), source[1]
        try:
            expected_loss, expected_gradients = self._compute_on_one_device(
                state, step, source, torch.float64, without_randomness=without_randomness
            )
        except Exception as error:  # one device cannot be given this state: nothing is known, and nothing is wrong
            self.stop_reason = f"{type(error).__name__}: {first_line(error)}"
            self._run.warn(
                f"step {step + 1} could not be computed again on one device, so later steps are not checked; the proof of the first steps "
                f"stands ({self.stop_reason})"
            )
            return None
        differences = _compare_loss_and_gradients(
            actual_loss, actual_gradients, expected_loss, expected_gradients, step
        )
        bounds = Bounds(default=DRIFT_BOUNDS[self._run.precision])
        zero_gradients = set(tolerances.zero_gradients(expected_gradients))
        out_of_bounds = [
            difference
            for difference in differences
            if not bounds.allows(difference) and difference.name not in zero_gradients
        ]
        if not out_of_bounds:
            self.last_agreed_step = step + 1
            return None
        # One device in the run's own precision tells what rounding does to this model at this step.
        rounded_loss, rounded_gradients = self._compute_on_one_device(
            state, step, source, None, without_randomness=without_randomness
        )
        rounding_differences = {
            difference.name: difference.value
            for difference in _compare_loss_and_gradients(
                rounded_loss, rounded_gradients, expected_loss, expected_gradients, step
            )
        }
        out_of_bounds = [
            difference
            for difference in out_of_bounds
            if difference.value > _ROUNDING_FACTOR * rounding_differences.get(difference.name, 0.0)
        ]
        if out_of_bounds and state.uncopyable:
            self.stop_reason = f"a copy of the model lacks {state.uncopyable[0]}"
            self._run.warn(
                f"step {step + 1} could not be computed again on one device, so later steps are not checked ({self.stop_reason})"
            )
            return None
        if out_of_bounds:
            largest_difference = max(out_of_bounds, key=lambda difference: difference.value)
            pair = (
                (actual_loss, expected_loss)
                if largest_difference.kind == "loss"
                else (actual_gradients.get(largest_difference.name), expected_gradients.get(largest_difference.name))
            )
            return DivergenceError(
                f"step {step + 1}: {_describe_difference(largest_difference, self._run.plan, *pair)} from the same state "
                f"and samples ({len(out_of_bounds)} of {len(differences)} values differ), and the first steps agreed: something that begins "
                f"later, or is rare, depends on how the batch or the model is cut; nothing was updated by this step. The last step that "
                f"was checked and found equal is {self.last_agreed_step}: resume from a checkpoint at or before it, because later ones may contain the error",
                tensor=largest_difference.name,
                cause="behaviour that begins after the first steps",
                last_agreed_step=self.last_agreed_step,
            )
        self.last_agreed_step = step + 1
        return None

    def _compute_on_one_device(
        self, state: _StepState, step: int, source: _Source, dtype: torch.dtype | None, *, without_randomness: bool
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Loss and gradients of one device in `dtype`; None: in the precision of the run."""
        data, plan = source
        assert data is not None
        in_float64 = dtype == torch.float64
        determinism = DeterministicMode(
            fix_random=without_randomness, widen_casts=in_float64
        )  # some models run in float64 only so
        autocasting = contextlib.nullcontext() if in_float64 else autocast(self._run.precision, self._device)
        functions = state.functions
        assert functions is not None
        with _preserving_generators(), functions.active():
            # Making the schedule would reset what it shares with the loss.
            job, patches = dataclasses.replace(functions.job, lr_schedule=None), TorchPatches()
            reference = Reference(
                job, plan, data, device=self._device, determinism=determinism, pristine=self._pristine, dtype=dtype
            )
            patches.restore()
            state.load_into(reference.model, dtype)
            with autocasting, randomness_disabled(reference.model) if without_randomness else contextlib.nullcontext():
                loss = reference.backward(step)
        return loss, reference.gradients()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StepState:
    """What a step starts from: tensors by unsharded name, and what modules keep otherwise."""

    parameters: dict[str, Tensor]
    aliases: dict[str, str]  #: further names of parameters on rank 0, with their first
    buffers: dict[str, Tensor]
    attributes: StateChanges  #: what modules keep otherwise and changed since the start
    uncopyable: list[str]  #: and what of that cannot be copied
    trainable: dict[str, bool]  #: parameters that were frozen or unfrozen since the start
    extra_state: dict[str, Any]  #: what modules return from get_extra_state()
    #: The job's functions with what they held before the step; None on other ranks.
    functions: IsolatedJob | None

    @torch.no_grad()
    def load_into(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Give it to a fresh model, of `dtype` if that is given."""
        for name, value in model.named_parameters():
            if name not in self.parameters:
                first_name = self.aliases.get(name)
                raise JobError(
                    f"{name} is the same parameter as {first_name} since forward replaced it, and was one of its own at the start"
                    if first_name
                    else f"{name} was a parameter at the start, and is none any more since forward replaced it"
                )
            value.copy_(self.parameters[name])
        cast = partial(
            _cast, dtype=dtype, device=next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        )
        _assign_tensors(_local_buffers(model), self.buffers)
        _restore_replaced_buffers(model, {name: cast(value) for name, value in self.buffers.items()})
        for path, module in _modules_with_extra_state(model):
            module.set_extra_state(copy.deepcopy(self.extra_state[path]))
        ModelState(model).restore(self.attributes, cast)
        set_trainable(model, self.trainable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PassState:
    """What a pass may change on one rank: buffers, parameters (a teacher's) and whether they require gradients, attributes of modules, and what
    the job's functions hold."""

    tensors: dict[str, Tensor]
    attributes: Snapshot
    trainable: dict[str, bool]
    functions: IsolatedJob


def _choose_steps(entropy: int, total_steps: int) -> frozenset[int]:
    """One random step of each doubling from FIRST on, and the last: the same on every rank."""
    generator, steps, start = random.Random(entropy), set(), FIRST_CHECKED_STEP
    while start < total_steps:
        steps.add(generator.randrange(start, min(2 * start, total_steps)))
        start *= 2
    return frozenset(steps | ({total_steps - 1} if total_steps > FIRST_CHECKED_STEP else set()))


def _compare_loss_and_gradients(
    actual_loss: Tensor,
    actual_gradients: Mapping[str, Tensor | None],
    expected_loss: Tensor,
    expected_gradients: Mapping[str, Tensor | None],
    step: int,
) -> list[Difference]:
    differences = compare_tensors("loss", {"loss": actual_loss}, {"loss": expected_loss}, step=step)
    return differences + compare_tensors(
        "gradient", {name: actual_gradients.get(name) for name in expected_gradients}, expected_gradients, step=step
    )


def _describe_difference(difference: Difference, plan: Plan, actual: Tensor | None, expected: Tensor | None) -> str:
    """How far a tensor is off; as two numbers where one device's is zero or a number is not finite."""
    tensor_name = "the loss" if difference.kind == "loss" else f"the gradient of {difference.name}"
    if difference.value < NOT_COMPARABLE:
        return f'{tensor_name} under "{plan}" is {difference.value:.2g} off what one device computes'
    if actual is not None and expected is not None and actual.shape != expected.shape:
        return f'{tensor_name} under "{plan}" has the shape {tuple(actual.shape)}, and {tuple(expected.shape)} is what one device computes'
    if difference.kind == "loss":
        return f'{tensor_name} under "{plan}" is {_format_largest(actual)}, and {_format_largest(expected)} is what one device computes'
    return f'the largest element of {tensor_name} under "{plan}" is {_format_largest(actual)}, and {_format_largest(expected)} is what one device computes'


def _format_largest(tensor: Tensor | None) -> str:
    """A loss, or a gradient's largest element; one that nothing reached is zero."""
    if tensor is None or not tensor.numel():
        return "0"
    values = to_float64(tensor)
    return f"{float(values.abs().max()) if values.dim() or values.is_complex() else float(values):.4g}"


def _copy_batch(batch: StepBatch) -> StepBatch:
    """The batch with tensors of its own: forward may change those that it is given."""
    micro_batches = tuple(
        dataclasses.replace(micro_batch, batch=copy_tensors(micro_batch.batch)) for micro_batch in batch.micro_batches
    )
    return dataclasses.replace(batch, micro_batches=micro_batches)


class _DrawDetector:
    """Whether random numbers are drawn from any generator between seedings. `own`: the model's."""

    def __init__(self, device: torch.device, model_generators: Sequence[torch.Generator]) -> None:
        self._device, self._model_generators = device, model_generators
        self._has_drawn, self._state_after_seeding = False, list[bytes]()

    def has_drawn(self) -> bool:
        """Whether there were any since the first seeding."""
        self._has_drawn = self._has_drawn or (
            bool(self._state_after_seeding)
            and self._state_after_seeding != _generator_states(self._device, self._model_generators)
        )
        return self._has_drawn

    @contextlib.contextmanager
    def around_seeding(self) -> Iterator[None]:
        """Around a seeding."""
        self.has_drawn()
        yield
        self._state_after_seeding = _generator_states(self._device, self._model_generators)


def _generator_states(device: torch.device, model_generators: Sequence[torch.Generator] = ()) -> list[bytes]:
    """Where the random generators are; `model_generators`: those of the model."""
    states = [generator.get_state().numpy().tobytes() for generator in model_generators]
    states += [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    states.append(repr(numpy.random.get_state(legacy=True)).encode())
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


@contextlib.contextmanager
def _preserving_generators() -> Iterator[None]:
    """Leave the random generators as they were: the optimizer's own seeding comes after."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    numpy.random.set_state(arrays)


def _cast(value: Tensor, *, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    return value.to(device, dtype if value.is_floating_point() else None, copy=True)


def _parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Names of parameters that have several, but for the first, with the first."""
    first_names = {id(value): name for name, value in model.named_parameters()}
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name: first_names[id(value)] for name, value in named_parameters if first_names[id(value)] != name}


def _modules_with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if has_extra_state(module)]


def _local_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if not value.is_meta}


def _local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of parameters and buffers."""
    parameters = {name: to_local(value.detach()) for name, value in model.named_parameters()}
    return {name: value for name, value in parameters.items() if not value.is_meta} | _local_buffers(model)


def _copy_tensors_to_cpu(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in _local_tensors(model).items()}


def _restore_replaced_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give the model the buffers that forward has made, or made of another shape, since the start."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in module._buffers.items():
            new_value = buffers.get(f"{path}.{key}" if path else key)
            if new_value is not None and (value is None or value.shape != new_value.shape):
                module._buffers[key] = new_value.clone()


@torch.no_grad()
def _assign_tensors(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give tensors these values; those that have them already stay untouched."""
    for name, value in tensors.items():
        if name in values and values[name].shape == value.shape and not torch.equal(value, values[name].to(value)):
            value.copy_(values[name])

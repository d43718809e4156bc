"""The truth on one device, as rank 0 sees it: what is held still, what rounding is granted, and references to compare with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.profiler.sample_coupling import first_line
from echelon.trials.determinism import DeterministicMode, disable_randomness
from echelon.verifier import tolerances
from echelon.verifier.choose_reference import ReferenceChoice
from echelon.verifier.compare import Bounds
from echelon.verifier.compare_outputs import format_names
from echelon.verifier.context import Comparator, VerificationContext, dropout_note
from echelon.verifier.nondeterminism_scan import NondeterminismScan
from echelon.verifier.reference import Reference, StepRecord
from echelon.verifier.reference_data import ReferenceData


class SingleDeviceContext(VerificationContext):
    """One device tells. `still` and `bounds` follow from a survey of the reference's first step."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        data: ReferenceData,
        steps: Sequence[int],
        device: torch.device | str = "cpu",
        reference_choice: ReferenceChoice | None = None,
    ) -> None:
        super().__init__(job, plan, data, steps, reference_choice or ReferenceChoice())
        self.device = torch.device(device)
        cast_error = ""
        try:
            scan, warm_reference = self._scan_first_step()
        except RuntimeError as error:
            # Layers that cast their inputs to a type of their own (Keras) do not run beside weights that are now float64.
            cast_error, self.determinism = first_line(error), DeterministicMode(widen_casts=True)
            scan, warm_reference = self._scan_first_step()
        remaining = scan
        if scan.random_modules or scan.low_precision_modules:
            self.determinism = DeterministicMode(
                fix_random=bool(scan.random_modules), widen_casts=bool(scan.low_precision_modules or cast_error)
            )
            del warm_reference  # before the next one is made
            remaining, warm_reference = self._scan_first_step()
        if remaining.random_modules and plan.mesh.pp == 1:
            self.determinism = dataclasses.replace(self.determinism, needs_seeding=True)
            del warm_reference
            remaining, warm_reference = self._scan_first_step()
        self._warm_reference: WarmReference | None = warm_reference
        self.model_hash = warm_reference.reference.fingerprint
        self.draws_random_numbers = bool(warm_reference.modules_without_dropout or scan.random_modules)
        self._perturbation = (
            tolerances.FLOAT32_PERTURBATION if remaining.low_precision_modules else tolerances.FLOAT64_PERTURBATION
        )
        if remaining.low_precision_modules:
            self.bounds = self._widen_bounds(tolerances.FLOAT32_BOUND)
        self.notes = [
            *_scope_notes(warm_reference.reference, data, steps),
            *_determinism_notes(warm_reference.modules_without_dropout, scan, remaining, self.determinism),
        ]
        if cast_error:
            self.notes.append(
                f"casts below float64 are lifted to float64 in both runs: the model does not run without that ({cast_error})"
            )

    def take_reference(self) -> WarmReference:
        """The reference that the survey has made; whoever takes it holds it alone, so that it goes when they have done with it."""
        warm_reference, self._warm_reference = self._warm_reference, None
        assert warm_reference is not None
        return warm_reference

    def widen_bounds_for_rounding(self, comparator: Comparator) -> None:
        """Rounding alone may be larger than the bounds. What it explains is granted, and said."""
        if comparator.first_divergence is None:
            return
        wider_bounds = self._widen_bounds(self.bounds.default)
        newly_allowed = [
            difference
            for difference in comparator.differences
            if not self.bounds.allows(difference) and wider_bounds.allows(difference)
        ]
        if newly_allowed:
            self.bounds = wider_bounds
            comparator.find_first_divergence()
            names = list(
                dict.fromkeys(
                    f"{difference.kind} of {difference.name}, to {wider_bounds.bound_for(difference):.0e}"
                    for difference in newly_allowed
                )
            )
            self.notes.append(
                f"ill-conditioned, so that the reference differs from itself when its parameters are off by one rounding; bounds widened by that: {format_names(names)}"
            )

    def _widen_bounds(self, default: float) -> Bounds:
        return tolerances.widen_bounds(
            self.build_reference(), self.build_reference(perturbed=True), self.steps, default=default
        )

    def build_reference(self, *, perturbed: bool = False) -> Reference:
        """A fresh one; a `perturbed` differs from it by rounding alone."""
        perturbation = self._perturbation if perturbed else 0.0
        reference = Reference(
            self.job, self.plan, self.data, device=self.device, perturbation=perturbation, determinism=self.determinism
        )
        reference.seeds_micro_batches = self.determinism.needs_seeding
        disable_randomness(reference.model)
        return reference

    def reference_at(self, step: int) -> Reference:
        """A fresh one that has trained up to `step`."""
        reference = self.build_reference()
        for earlier_step in self.steps[: self.steps.index(step)]:
            reference.step(earlier_step)
        return reference

    def _scan_first_step(self) -> tuple[NondeterminismScan, WarmReference]:
        """What the first step does, and the reference that made it."""
        reference = Reference(self.job, self.plan, self.data, device=self.device)
        reference.seeds_micro_batches = self.determinism.needs_seeding
        silenced = disable_randomness(reference.model)
        scan = NondeterminismScan(reference.model)

        @contextlib.contextmanager
        def scanned() -> Iterator[None]:
            with self.determinism(), scan:
                yield

        # Forward may change parameters as well: a teacher's, rows of an embedding with max_norm.
        start_values = tolerances.copy_to_float64(
            dict(reference.model.named_parameters()) | dict(reference.model.named_buffers())
        )
        reference.determinism = scanned
        loss = reference.backward(self.steps[0])
        reference.determinism = self.determinism
        return scan, WarmReference(reference, loss, start_values, silenced)


class WarmReference:
    """A reference whose first step's gradients are made already."""

    def __init__(
        self, reference: Reference, loss: Tensor, start_values: dict[str, Tensor], modules_without_dropout: list[str]
    ) -> None:
        self.reference, self.modules_without_dropout = reference, modules_without_dropout
        self._loss: Tensor | None = loss
        #: What the run started from, `noise.copied`.
        self.start_values = start_values

    def step(self, step: int) -> StepRecord:
        """As the reference's."""
        loss, self._loss = self._loss, None
        return self.reference.step(step, loss)


def _scope_notes(reference: Reference, data: ReferenceData, steps: Sequence[int]) -> list[str]:
    batch = data.batch_size
    if reference.seeds_micro_batches and not reference.couples_samples:
        notes = ["the reference runs the plan's micro-batches one after another"]
    elif not reference.couples_samples:
        notes = [f"the reference runs each global batch of {batch} samples as one"]
    elif reference.plan.batchnorm == "local":
        notes = ["batch norm is local: the reference runs the plan's micro-batches one after another"]
    else:
        notes = ["batch norm is synchronised: the reference runs each round's micro-batches of all ranks as one"]
    short_sizes = [data.samples_in(step) for step in steps if data.samples_in(step) < batch]
    return [*notes, f"one of the steps is the epoch's last, of {short_sizes[-1]} samples"] if short_sizes else notes


def _determinism_notes(
    modules_without_dropout: Sequence[str],
    scan: NondeterminismScan,
    remaining: NondeterminismScan,
    determinism: DeterministicMode,
) -> list[str]:
    """What was made comparable, and what could not be."""
    notes = []
    if modules_without_dropout:
        notes.append(dropout_note(modules_without_dropout))
    if scan.random_modules:
        notes.append(
            f"random numbers are held at the middle of their distribution in both runs: {format_names(_format_operators(scan.random_modules))}"
        )
    if remaining.random_modules:
        consequence = (
            "both runs are seeded alike before each micro-batch, which the reference runs one after another"
            if determinism.needs_seeding
            else "the runs draw different ones"
        )
        notes.append(
            f"random numbers that could not be held: {format_names(_format_operators(remaining.random_modules))}; {consequence}"
        )
    if scan.low_precision_modules:
        notes.append(
            f"casts below float64 are lifted to float64 in both runs: {format_names(_format_operators(scan.low_precision_modules))}"
        )
    if remaining.low_precision_modules:
        notes.append(
            f"computed below float64 all the same, with bounds from the reference's own rounding: {format_names(_format_operators(remaining.low_precision_modules))}"
        )
    return notes


def _format_operators(operators: dict[str, str]) -> list[str]:
    return [f"{path} ({operator})" for path, operator in operators.items()]

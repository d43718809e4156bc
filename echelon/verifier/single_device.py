"""A proof against one device, as rank 0 sees it: what is made deterministic, what rounding is granted, and fresh references."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.errors import first_line
from echelon.job import Job
from echelon.plan.batch_split import SampleRange
from echelon.plan.plan import Plan
from echelon.trials.determinism import DeterministicMode, disable_randomness
from echelon.verifier import tolerances
from echelon.verifier.choose_reference import ReferenceChoice
from echelon.verifier.compare import Bounds
from echelon.verifier.compare_outputs import format_names
from echelon.verifier.context import Comparator, VerificationContext, dropout_note
from echelon.verifier.nondeterminism_scan import NondeterminismScan
from echelon.verifier.reference import Reference, StepRecord
from echelon.verifier.reference_data import ReferenceData, micro_batches


class SingleDeviceContext(VerificationContext):
    """A proof against one device. `determinism` and `bounds` follow from a scan of the reference's first step."""

    def __init__(
        self, job: Job, plan: Plan, data: ReferenceData, steps: Sequence[int], device: torch.device | str = "cpu",
        reference_choice: ReferenceChoice | None = None,
    ) -> None:  # fmt: skip
        super().__init__(job, plan, data, steps, reference_choice or ReferenceChoice())
        self.determinism = DeterministicMode()
        self.device = torch.device(device)
        self._perturbation = tolerances.FLOAT64_PERTURBATION
        self._warm_reference: WarmReference | None = None
        cast_error = ""
        try:
            scan = remaining = self._scan_first_step()
        except RuntimeError as error:
            # Layers that cast their inputs to a dtype of their own (Keras) do not run with float64 weights.
            cast_error, self.determinism = first_line(error), DeterministicMode(widen_casts=True)
            scan = remaining = self._scan_first_step()
        if scan.random_modules or scan.low_precision_modules:
            widen_casts = bool(scan.low_precision_modules or cast_error)
            self.determinism = DeterministicMode(fix_random=bool(scan.random_modules), widen_casts=widen_casts)
            remaining = self._scan_first_step()
        if remaining.random_modules and plan.mesh.pp == 1:
            self.determinism = dataclasses.replace(self.determinism, needs_seeding=True)
            remaining = self._scan_first_step()
        warm = self._warm_reference
        assert warm is not None
        self.model_hash = warm.reference.fingerprint
        self.draws_random_numbers = bool(warm.modules_without_dropout or scan.random_modules)
        if remaining.low_precision_modules:
            self._perturbation = tolerances.FLOAT32_PERTURBATION
            self.bounds = self._widen_bounds(tolerances.FLOAT32_BOUND)
        self.notes = [
            *_scope_notes(warm.reference, data, steps),
            *_determinism_notes(warm.modules_without_dropout, scan, remaining, self.determinism),
        ]
        if cast_error:
            reason = f"the model does not run without that ({cast_error})"
            self.notes.append(f"casts below float64 are lifted to float64 in both runs: {reason}")

    def output_ranges(self, step: int) -> list[SampleRange]:
        return micro_batches(self.plan, self.data.samples_in(step))

    def take_reference(self) -> WarmReference:
        """The reference of the scan, which the caller alone holds from now on, so that it is freed after use."""
        warm_reference, self._warm_reference = self._warm_reference, None
        assert warm_reference is not None
        return warm_reference

    def widen_bounds_for_rounding(self, comparator: Comparator) -> None:
        """Grant what rounding alone explains."""
        if comparator.first_divergence is None:
            return
        wider = self._widen_bounds(self.bounds.default)
        granted = {
            f"{difference.kind} of {difference.name}, to {wider.bound_for(difference):.0e}": None
            for difference in comparator.differences
            if not self.bounds.allows(difference) and wider.allows(difference)
        }
        if granted:
            self.bounds = wider
            comparator.find_first_divergence()
            reason = "the reference differs from itself when its parameters are off by one rounding"
            names = format_names(list(granted))
            self.notes.append(f"ill-conditioned, so that {reason}; bounds widened by that: {names}")

    def _widen_bounds(self, default: float) -> Bounds:
        perturbed = self.build_reference(perturbed=True)
        return tolerances.widen_bounds(self.build_reference(), perturbed, self.steps, default=default)

    def build_reference(self, *, perturbed: bool = False) -> Reference:
        """A fresh reference; a `perturbed` one differs from it by rounding alone."""
        reference = Reference(
            self.job, self.plan, self.data, device=self.device, determinism=self.determinism,
            perturbation=self._perturbation if perturbed else 0.0,
        )  # fmt: skip
        reference.seeds_micro_batches = self.determinism.needs_seeding
        disable_randomness(reference.model)
        return reference

    def reference_at(self, step: int) -> Reference:
        reference = self.build_reference()
        for earlier_step in self.steps[: self.steps.index(step)]:
            reference.step(earlier_step)
        return reference

    def _scan_first_step(self) -> NondeterminismScan:
        """Scan the first step of a fresh reference, and keep it."""
        self._warm_reference = None  # free the last one before building the next
        reference = Reference(self.job, self.plan, self.data, device=self.device)
        reference.seeds_micro_batches = self.determinism.needs_seeding
        silenced = disable_randomness(reference.model)
        scan = NondeterminismScan(reference.model)

        @contextlib.contextmanager
        def scanned() -> Iterator[None]:
            with self.determinism(), scan:
                yield

        # Before forward, which may change parameters: a teacher's, rows of an embedding with max_norm.
        tensors = dict(reference.model.named_parameters()) | dict(reference.model.named_buffers())
        start_values = tolerances.copy_to_float64(tensors)
        reference.determinism = scanned
        loss = reference.backward(self.steps[0])
        reference.determinism = self.determinism
        self._warm_reference = WarmReference(reference, loss, start_values, silenced)
        return scan


@dataclasses.dataclass(slots=True)
class WarmReference:
    """A reference whose first backward has run already."""

    reference: Reference
    loss: Tensor | None  #: of that backward; None once its step has been taken
    start_values: dict[str, Tensor]  #: what the run started from, `tolerances.copy_to_float64`
    modules_without_dropout: list[str]

    def step(self, step: int) -> StepRecord:
        loss, self.loss = self.loss, None
        return self.reference.step(step, loss)


def _scope_notes(reference: Reference, data: ReferenceData, steps: Sequence[int]) -> list[str]:
    batch = data.batch_size
    if not reference.couples_samples and reference.seeds_micro_batches:
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
    without_dropout: Sequence[str], scan: NondeterminismScan, remaining: NondeterminismScan, determinism: DeterministicMode
) -> list[str]:  # fmt: skip
    seeding = "the runs draw different ones"
    if determinism.needs_seeding:
        seeding = "both runs are seeded alike before each micro-batch, which the reference runs one after another"
    sentences = (
        ("random numbers are held at the middle of their distribution in both runs: {}", scan.random_modules),
        (f"random numbers that could not be held: {{}}; {seeding}", remaining.random_modules),
        ("casts below float64 are lifted to float64 in both runs: {}", scan.low_precision_modules),
        (
            "computed below float64 all the same, with bounds from the reference's own rounding: {}",
            remaining.low_precision_modules,
        ),
    )
    notes = [dropout_note(without_dropout)] if without_dropout else []
    for sentence, operators in sentences:
        if operators:
            notes.append(sentence.format(format_names([f"{path} ({op})" for path, op in operators.items()])))
    return notes

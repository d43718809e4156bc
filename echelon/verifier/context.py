"""What rank 0 knows about a proof: the job, the plan, its reference, and the notes for the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from echelon.job import Job
from echelon.plan.batch_split import SampleRange
from echelon.plan.certificate import Finding
from echelon.plan.plan import Plan
from echelon.trials.determinism import DeterministicMode
from echelon.verifier import first_divergence, tolerances
from echelon.verifier.choose_reference import ReferenceChoice
from echelon.verifier.compare import Bounds, Difference
from echelon.verifier.compare_outputs import format_names, single_sample_ranges, uncompared_outputs_note
from echelon.verifier.reference import StepRecord
from echelon.verifier.reference_data import ReferenceData
from echelon.verifier.tensor_checksum import RankChecksums, compare_replicas, compare_start_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why a proof fails although no tensor differs between the runs, in words and as a finding."""

    description: str
    finding: Finding


class VerificationContext:
    """A proof before its runs: against the same job under another plan, for models that fit on no device. There is no scan for nondeterminism,
    which needs the model on one device: all random numbers are fixed and all casts are widened."""

    def __init__(
        self, job: Job, plan: Plan, data: ReferenceData, steps: Sequence[int], choice: ReferenceChoice
    ) -> None:
        self.job, self.plan, self.data, self.steps, self.reference_choice = job, plan, data, steps, choice
        self.model_hash = ""  #: hash of the parameters' names and shapes
        self.determinism = DeterministicMode(fix_random=True, widen_casts=True)
        self.draws_random_numbers = True  #: whether the model draws random numbers at all, as far as is known
        self.bounds = Bounds()
        treatment = "random numbers are held at the middle of their distribution, casts are lifted to float64"
        self.notes = [f"not surveyed: {treatment}"]

    def output_ranges(self, step: int) -> list[SampleRange]:
        """The samples by which outputs are compared: one by one, because the two plans split the batch differently."""
        return single_sample_ranges(SampleRange(0, self.data.samples_in(step)))


class Comparator:
    """Compares a run with the reference and collects the differences."""

    def __init__(
        self, context: VerificationContext, start_values: Mapping[str, Tensor], forward_order: Mapping[str, int], *, in_float64: bool
    ) -> None:  # fmt: skip
        """`start_values`: the reference's parameters and buffers before the first step, from `tolerances.copy_to_float64`."""
        self._context, self._start_values, self._in_float64 = context, start_values, in_float64
        self.forward_order = forward_order  #: module path -> when forward first entered it
        self._parameter_tolerance = tolerances.ParameterTolerance(start_values)
        self.differences: list[Difference] = []
        self.first_divergence: Difference | None = None  #: the first divergent tensor, if there is one
        self._zero_gradients: dict[str, None] = {}
        self._outputs_note = ""
        #: The common factor of the first step's gradients, in a run that is not in float64.
        self.gradient_factor: float | None = None

    @property
    def notes(self) -> list[str]:
        names = format_names(list(self._zero_gradients))
        drift_note = f"drift leaves out gradients that are zero in truth and rounding alone: {names}" if names else ""
        return [*filter(None, [self._outputs_note, drift_note])]

    @property
    def divergence_text(self) -> str:
        """The first divergent tensor in words; empty: none."""
        divergence = self.first_divergence
        return "" if divergence is None else first_divergence.describe(divergence, self._context.bounds)

    def compare_start(self, checksums: RankChecksums, step: int) -> None:
        self.add_differences(compare_start_values(checksums, self._start_values, step))

    def compare_step(self, actual: StepRecord, expected: StepRecord, checksums: RankChecksums = ()) -> None:
        """Compare a step with the reference's, and the ranks' `checksums` after it with each other."""
        differences = tolerances.compare_records(actual, expected, self._parameter_tolerance)
        is_first_step = actual.step == self._context.steps[0]
        if self._in_float64 and is_first_step:
            output_ranges = self._context.output_ranges(actual.step)
            self._outputs_note = uncompared_outputs_note(actual.outputs, expected.outputs, output_ranges)
        if not self._in_float64:
            if is_first_step:
                self.gradient_factor = tolerances.common_gradient_factor(actual, expected)
            # The bias before a batch norm, or of attention's keys: in float32 its noise is far above 1e-6 of the largest gradient.
            self._zero_gradients.update(dict.fromkeys(tolerances.zero_gradients(expected.gradients)))
            name_of = first_divergence.parameter_name
            differences = [item for item in differences if name_of(item) not in self._zero_gradients]
        self.add_differences([*differences, *compare_replicas(checksums, actual.step)])

    def add_differences(self, differences: Sequence[Difference]) -> None:
        self.differences += differences
        self.find_first_divergence()

    def find_first_divergence(self) -> None:
        """Find the first divergent tensor again, under the current bounds."""
        find = first_divergence.find_first_divergence
        self.first_divergence = find(self.differences, self._context.bounds, self.forward_order)


def dropout_note(paths: Sequence[str]) -> str:
    return f"dropout is off in both runs, so its masks are no part of the proof: {format_names(paths)}"

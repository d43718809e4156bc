"""What a proof rests on, as rank 0 knows it: the job, the plan, what it is compared with, and what a reader must be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from echelon.job import Job
from echelon.plan.batch_split import SampleRange, split_batch
from echelon.plan.plan import Plan
from echelon.trials.determinism import DeterministicMode
from echelon.verifier import first_divergence, precision_drift, tolerances
from echelon.verifier.choose_reference import ReferenceChoice
from echelon.verifier.compare import Bounds, Difference
from echelon.verifier.compare_outputs import format_names, uncompared_outputs_note
from echelon.verifier.reference import StepRecord
from echelon.verifier.reference_data import ReferenceData
from echelon.verifier.tensor_checksum import RankChecksums, compare_replicas, compare_start_values


class VerificationContext:
    """What is known before the runs, whatever the truth is computed on."""

    def __init__(
        self, job: Job, plan: Plan, data: ReferenceData, steps: Sequence[int], reference_choice: ReferenceChoice
    ) -> None:
        self.job, self.plan, self.data, self.steps, self.reference_choice = job, plan, data, steps, reference_choice
        #: Hash of the parameters' names and shapes.
        self.model_hash = ""
        self.determinism = DeterministicMode()
        #: Whether the model takes random numbers at all, as far as is known.
        self.draws_random_numbers = True
        self.bounds = Bounds()
        self.notes: list[str] = []

    def output_ranges(self, step: int) -> list[SampleRange]:
        """How a step's samples are shared out where outputs are compared."""
        plan = self.plan
        return [
            sample_range
            for rank_ranges in split_batch(self.data.samples_in(step), plan.mesh.dp, plan.micro, plan.data.batch_shares)
            for sample_range in rank_ranges
        ]

    def widen_bounds_for_rounding(self, comparator: Comparator) -> None:
        """Before a no: whether rounding alone explains it. Only a reference on one device can be run again so as to tell."""


class Comparator:
    """Holds a run against the truth and keeps how far they are apart. `exact`: the run is in float64 too."""

    def __init__(
        self,
        context: VerificationContext,
        start_values: Mapping[str, Tensor],
        forward_order: Mapping[str, int],
        *,
        in_float64: bool,
    ) -> None:
        """`start_values`: the truth's parameters and buffers before the first step, `noise.copied`."""
        self._context, self._start_values, self._in_float64 = context, start_values, in_float64
        #: Module path -> when forward first entered it.
        self.forward_order = forward_order
        self._parameter_tolerance = tolerances.ParameterTolerance(start_values)
        self.differences: list[Difference] = []
        #: The first divergent tensor, as long as there is one.
        self.first_divergence: Difference | None = None
        self._zero_gradients: dict[str, None] = {}
        self._outputs_note = ""
        #: What all gradients of the first step are multiplied by, in a run that is not in float64.
        self.gradient_factor: float | None = None

    @property
    def notes(self) -> list[str]:
        """What was left out."""
        names = list(self._zero_gradients)
        note = f"drift leaves out gradients that are zero in truth and rounding alone: {format_names(names)}"
        return [*filter(None, [self._outputs_note]), *([note] if names else [])]

    @property
    def divergence_text(self) -> str:
        """The first divergent tensor, in words; empty where there is none."""
        return (
            ""
            if self.first_divergence is None
            else first_divergence.describe(self.first_divergence, self._context.bounds)
        )

    def compare_start(self, checksums: RankChecksums, step: int) -> None:
        """Compare what the ranks start from with the truth's values."""
        self.add_differences(compare_start_values(checksums, self._start_values, step))

    def compare_step(self, actual: StepRecord, expected: StepRecord, checksums: RankChecksums = ()) -> None:
        """Compare a step of the run with the truth's, and what the ranks hold after it with each other."""
        differences = tolerances.compare_records(actual, expected, self._parameter_tolerance)
        if self._in_float64 and actual.step == self._context.steps[0]:
            self._outputs_note = uncompared_outputs_note(
                actual.outputs, expected.outputs, self._context.output_ranges(actual.step)
            )
        if not self._in_float64:
            if actual.step == self._context.steps[0]:
                self.gradient_factor = precision_drift.common_gradient_factor(actual, expected)
            # The bias before a batch norm, or of attention's keys: in float32 its noise is far above 1e-6 of the largest gradient.
            self._zero_gradients.update(dict.fromkeys(tolerances.zero_gradients(expected.gradients)))
            differences = [
                difference
                for difference in differences
                if first_divergence.parameter_name(difference) not in self._zero_gradients
            ]
        self.add_differences([*differences, *compare_replicas(checksums, actual.step)])

    def add_differences(self, differences: Sequence[Difference]) -> None:
        """Take more differences into account."""
        self.differences += differences
        self.find_first_divergence()

    def find_first_divergence(self) -> None:
        """Name the first divergent tensor again, under the bounds as they are now."""
        self.first_divergence = first_divergence.find_first_divergence(
            self.differences, self._context.bounds, self.forward_order
        )


def dropout_note(paths: Sequence[str]) -> str:
    """The note on modules whose dropout was turned off."""
    return f"dropout is off in both runs, so its masks are no part of the proof: {format_names(paths)}"

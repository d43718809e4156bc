"""The truth where no device holds the model: the same job under another plan, in float64, executed by the engine beside the first.

Nothing is surveyed, because that needs a model on one device: all that draws is held, all casts are lifted. Nor is there a second look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from echelon.engine.process_groups import WorldCommunicator
from echelon.job import Job
from echelon.plan.batch_split import SampleRange
from echelon.plan.plan import Plan
from echelon.trials.determinism import DeterministicMode
from echelon.verifier import job_reader
from echelon.verifier.candidate_run import CandidateRun
from echelon.verifier.choose_reference import ReferenceChoice
from echelon.verifier.compare_outputs import hookable_modules, single_sample_ranges
from echelon.verifier.context import VerificationContext, dropout_note
from echelon.verifier.reference import StepRecord
from echelon.verifier.reference_data import ReferenceData


class PlanReferenceContext(VerificationContext):
    """Another plan tells."""

    def __init__(
        self, job: Job, plan: Plan, data: ReferenceData, steps: Sequence[int], reference_choice: ReferenceChoice
    ) -> None:
        super().__init__(job, plan, data, steps, reference_choice)
        self.determinism = DeterministicMode(fix_random=True, widen_casts=True)
        self.notes = [
            "not surveyed: whatever draws is held at the middle of its distribution, casts are lifted to float64"
        ]

    def output_ranges(self, step: int) -> list[SampleRange]:
        return single_sample_ranges(
            SampleRange(0, self.data.samples_in(step))
        )  # the two plans share the samples out in ways of their own


class ReferencePlanRun(CandidateRun):
    """The other plan's run on this rank."""

    def __init__(self, job: Job, plan: Plan, ranks: WorldCommunicator, determinism: DeterministicMode) -> None:
        super().__init__(job, plan, ranks, determinism, torch.float64, per_sample=True)
        #: Module path -> when forward first entered it on this rank.
        self.forward_order: dict[str, int] = {}
        for path, module in hookable_modules(self.run.model):
            module.register_forward_pre_hook(lambda *_, path=path: self._record_entry(path))

    def _record_entry(self, path: str) -> None:
        self.forward_order.setdefault(path, len(self.forward_order))

    def _run_step(self, step: int) -> StepRecord | None:
        substitutes = [pair for each in self.run.full_tensor_optimizers.values() for pair in each.parameters.items()]
        groups_by_rank = self._ranks.all_gather_object(
            job_reader.optimizer_groups(self.run.model, self.run.optimizers, substitutes)
        )
        record = super()._run_step(step)
        groups = {name: group for each in groups_by_rank for name, group in each.items()}
        return None if record is None else dataclasses.replace(record, groups=groups)

    def add_notes(self, context: VerificationContext) -> None:
        """What is known of the model only when it is there."""
        if self.modules_without_dropout:
            context.notes.append(dropout_note(self.modules_without_dropout))

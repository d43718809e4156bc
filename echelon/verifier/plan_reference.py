"""The truth where no device holds the model: the same job under another plan, in float64, executed by the engine beside the first.

Nothing is surveyed, because that needs a model on one device: all that draws is held, all casts are lifted. Nor is there a second look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from echelon.engine.process_groups import Ranks
from echelon.job import Job
from echelon.plan.batch_split import Span
from echelon.plan.plan import Plan
from echelon.trials.determinism import Stillness
from echelon.verifier import job_reader
from echelon.verifier.candidate_run import Trial
from echelon.verifier.choose_reference import Footing
from echelon.verifier.compare_outputs import hookable, singles
from echelon.verifier.context import Basis, without_dropout
from echelon.verifier.reference import Record
from echelon.verifier.reference_data import Feed


class Versus(Basis):
    """Another plan tells."""

    def __init__(self, job: Job, plan: Plan, feed: Feed, steps: Sequence[int], footing: Footing) -> None:
        super().__init__(job, plan, feed, steps, footing)
        self.still = Stillness(random=True, narrow=True)
        self.notes = [
            "not surveyed: whatever draws is held at the middle of its distribution, casts are lifted to float64"
        ]

    def parts(self, step: int) -> list[Span]:
        return singles(Span(0, self.feed.size(step)))  # the two plans share the samples out in ways of their own


class Peer(Trial):
    """The other plan's run on this rank."""

    def __init__(self, job: Job, plan: Plan, ranks: Ranks, still: Stillness) -> None:
        super().__init__(job, plan, ranks, still, torch.float64, singly=True)
        #: Module path -> when forward first entered it on this rank.
        self.order: dict[str, int] = {}
        for path, module in hookable(self.run.model):
            module.register_forward_pre_hook(lambda *_, path=path: self._enter(path))

    def _enter(self, path: str) -> None:
        self.order.setdefault(path, len(self.order))

    def _step(self, number: int) -> Record | None:
        standins = [pair for each in self.run.whole.values() for pair in each.parameters.items()]
        told = self._ranks.gather(job_reader.groups(self.run.model, self.run.optimizers, standins))
        record = super()._step(number)
        groups = {name: group for each in told for name, group in each.items()}
        return None if record is None else dataclasses.replace(record, groups=groups)

    def tell(self, basis: Basis) -> None:
        """What is known of the model only when it is there."""
        if self.silenced:
            basis.notes.append(without_dropout(self.silenced))

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
from echelon.trials.determinism import Stillness, silence
from echelon.verifier import tolerances
from echelon.verifier.choose_reference import Footing
from echelon.verifier.compare import Bounds
from echelon.verifier.compare_outputs import listed
from echelon.verifier.context import Basis, Referee, without_dropout
from echelon.verifier.nondeterminism_scan import Survey
from echelon.verifier.reference import Record, Reference
from echelon.verifier.reference_data import Feed


class Case(Basis):
    """One device tells. `still` and `bounds` follow from a survey of the reference's first step."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        feed: Feed,
        steps: Sequence[int],
        device: torch.device | str = "cpu",
        footing: Footing | None = None,
    ) -> None:
        super().__init__(job, plan, feed, steps, footing or Footing())
        self.device = torch.device(device)
        needed = ""
        try:
            seen, truth = self._survey()
        except RuntimeError as error:
            # Layers that cast their inputs to a type of their own (Keras) do not run beside weights that are now float64.
            needed, self.still = first_line(error), Stillness(narrow=True)
            seen, truth = self._survey()
        left = seen
        if seen.random or seen.narrow:
            self.still = Stillness(random=bool(seen.random), narrow=bool(seen.narrow or needed))
            del truth  # before the next one is made
            left, truth = self._survey()
        if left.random and plan.mesh.pp == 1:
            self.still = dataclasses.replace(self.still, seeded=True)
            del truth
            left, truth = self._survey()
        self._truth: Truth | None = truth
        self.model = truth.reference.fingerprint
        self.draws = bool(truth.silenced or seen.random)
        self._shake = tolerances.SHAKE_NARROW if left.narrow else tolerances.SHAKE
        if left.narrow:
            self.bounds = self._widened(tolerances.NARROW)
        self.notes = [*_scope(truth.reference, feed, steps), *_held(truth.silenced, seen, left, self.still)]
        if needed:
            self.notes.append(
                f"casts below float64 are lifted to float64 in both runs: the model does not run without that ({needed})"
            )

    def take(self) -> Truth:
        """The reference that the survey has made; whoever takes it holds it alone, so that it goes when they have done with it."""
        truth, self._truth = self._truth, None
        assert truth is not None
        return truth

    def reconsider(self, proof: Referee) -> None:
        """Rounding alone may be larger than the bounds. What it explains is granted, and said."""
        if proof.worst is None:
            return
        wider = self._widened(self.bounds.least)
        eased = [each for each in proof.differences if not self.bounds.hold(each) and wider.hold(each)]
        if eased:
            self.bounds = wider
            proof.repeat()
            names = list(dict.fromkeys(f"{each.kind} of {each.name}, to {wider.of(each):.0e}" for each in eased))
            self.notes.append(
                f"ill-conditioned, so that the reference differs from itself when its parameters are off by one rounding; bounds widened by that: {listed(names)}"
            )

    def _widened(self, least: float) -> Bounds:
        return tolerances.widened(self.reference(), self.reference(twin=True), self.steps, least=least)

    def reference(self, *, twin: bool = False) -> Reference:
        """A fresh one; a `twin` differs from it by rounding alone."""
        shake = self._shake if twin else 0.0
        reference = Reference(self.job, self.plan, self.feed, device=self.device, shake=shake, still=self.still)
        reference.seeded = self.still.seeded
        silence(reference.model)
        return reference

    def at(self, step: int) -> Reference:
        """A fresh one that has trained up to `step`."""
        reference = self.reference()
        for earlier in self.steps[: self.steps.index(step)]:
            reference.step(earlier)
        return reference

    def _survey(self) -> tuple[Survey, Truth]:
        """What the first step does, and the reference that made it."""
        reference = Reference(self.job, self.plan, self.feed, device=self.device)
        reference.seeded = self.still.seeded
        silenced = silence(reference.model)
        survey = Survey(reference.model)

        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            with self.still(), survey:
                yield

        # Forward may change parameters as well: a teacher's, rows of an embedding with max_norm.
        start = tolerances.copied(dict(reference.model.named_parameters()) | dict(reference.model.named_buffers()))
        reference.hold = watched
        loss = reference.backward(self.steps[0])
        reference.hold = self.still
        return survey, Truth(reference, loss, start, silenced)


class Truth:
    """A reference whose first step's gradients are made already."""

    def __init__(self, reference: Reference, loss: Tensor, start: dict[str, Tensor], silenced: list[str]) -> None:
        self.reference, self.silenced = reference, silenced
        self._loss: Tensor | None = loss
        #: What the run started from, `noise.copied`.
        self.start = start

    def step(self, number: int) -> Record:
        """As the reference's."""
        loss, self._loss = self._loss, None
        return self.reference.step(number, loss)


def _scope(reference: Reference, feed: Feed, steps: Sequence[int]) -> list[str]:
    batch = feed.batch
    if reference.seeded and not reference.coupled:
        notes = ["the reference runs the plan's micro-batches one after another"]
    elif not reference.coupled:
        notes = [f"the reference runs each global batch of {batch} samples as one"]
    elif reference.plan.batchnorm == "local":
        notes = ["batch norm is local: the reference runs the plan's micro-batches one after another"]
    else:
        notes = ["batch norm is synchronised: the reference runs each round's micro-batches of all ranks as one"]
    short = [feed.size(step) for step in steps if feed.size(step) < batch]
    return [*notes, f"one of the steps is the epoch's last, of {short[-1]} samples"] if short else notes


def _held(silenced: Sequence[str], seen: Survey, left: Survey, still: Stillness) -> list[str]:
    """What was made comparable, and what could not be."""
    notes = []
    if silenced:
        notes.append(without_dropout(silenced))
    if seen.random:
        notes.append(
            f"random numbers are held at the middle of their distribution in both runs: {listed(_where(seen.random))}"
        )
    if left.random:
        how = (
            "both runs are seeded alike before each micro-batch, which the reference runs one after another"
            if still.seeded
            else "the runs draw different ones"
        )
        notes.append(f"random numbers that could not be held: {listed(_where(left.random))}; {how}")
    if seen.narrow:
        notes.append(f"casts below float64 are lifted to float64 in both runs: {listed(_where(seen.narrow))}")
    if left.narrow:
        notes.append(
            f"computed below float64 all the same, with bounds from the reference's own rounding: {listed(_where(left.narrow))}"
        )
    return notes


def _where(found: dict[str, str]) -> list[str]:
    return [f"{path} ({operator})" for path, operator in found.items()]

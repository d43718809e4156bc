"""One proof as rank 0 sees it: what is held still, what rounding is granted, what differs, and what a reader must be told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.profiler.coupling import first_line
from echelon.profiler.still import Stillness, silence
from echelon.verifier import diagnose, noise
from echelon.verifier.compare import Bounds, Difference
from echelon.verifier.feed import Feed
from echelon.verifier.mark import Holdings, copies, starts
from echelon.verifier.reference import Record, Reference
from echelon.verifier.survey import Survey


class Case:
    """What is known before the runs. `still` and `bounds` follow from a survey of one step of the reference."""

    def __init__(self, job: Job, plan: Plan, feed: Feed, device: torch.device, steps: Sequence[int]) -> None:
        self.job, self.plan, self.feed, self.device, self.steps = job, plan, feed, device, steps
        self.still = Stillness()
        needed = ""
        try:
            seen, reference, silenced = self._survey()
        except RuntimeError as error:
            # Layers that cast their inputs to a type of their own (Keras) do not run beside weights that are now float64.
            needed, self.still = first_line(error), Stillness(narrow=True)
            seen, reference, silenced = self._survey()
        self.model = reference.fingerprint
        left = seen
        if seen.random or seen.narrow:
            self.still = Stillness(random=bool(seen.random), narrow=bool(seen.narrow or needed))
            left, _, _ = self._survey()
        self.bounds = Bounds()
        self._shake = noise.SHAKE_NARROW if left.narrow else noise.SHAKE
        if left.narrow:
            self.bounds = self._widened(noise.NARROW)
        self.notes = [*_scope(reference, feed, steps), *_held(silenced, seen, left)]
        if needed:
            self.notes.append(
                f"casts below float64 are lifted to float64 in both runs: the model does not run without that ({needed})"
            )

    def reconsider(self, proof: Referee) -> None:
        """Before a no: rounding alone may be larger than the bounds. What it explains is granted, and said."""
        if proof.worst is None:
            return
        wider = self._widened(self.bounds.least)
        eased = [each for each in proof.differences if not self.bounds.hold(each) and wider.hold(each)]
        if eased:
            self.bounds = wider
            proof.repeat()
            names = list(dict.fromkeys(f"{each.kind} of {each.name}, to {wider.of(each):.0e}" for each in eased))
            self.notes.append(
                f"ill-conditioned, so that the reference differs from itself when its parameters are off by one rounding; bounds widened by that: {_list(names)}"
            )

    def _widened(self, least: float) -> Bounds:
        return noise.widened(self.reference(), self.reference(twin=True), self.steps, least=least)

    def reference(self, *, twin: bool = False) -> Reference:
        """A fresh one; a `twin` differs from it by rounding alone."""
        shake = self._shake if twin else 0.0
        reference = Reference(self.job, self.plan, self.feed, device=self.device, shake=shake, still=self.still)
        silence(reference.model)
        return reference

    def at(self, step: int) -> Reference:
        """A fresh one that has trained up to `step`."""
        reference = self.reference()
        for earlier in self.steps[: self.steps.index(step)]:
            reference.step(earlier)
        return reference

    def _survey(self) -> tuple[Survey, Reference, list[str]]:
        reference = Reference(self.job, self.plan, self.feed, device=self.device)
        silenced = silence(reference.model)
        survey = Survey(reference.model)

        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            with self.still(), survey:
                yield

        reference.still = watched
        reference.backward(self.steps[0])
        return survey, reference, silenced


class Referee:
    """Runs the reference beside a plan's run and keeps how far they are apart. `exact`: the run is in float64 too."""

    def __init__(self, case: Case, *, exact: bool) -> None:
        self._case, self._reference, self._exact = case, case.reference(), exact
        self._slack = noise.Slack(dict(self._reference.model.named_parameters()))
        self.differences: list[Difference] = []
        #: The first divergent tensor, as long as there is one.
        self.worst: Difference | None = None
        self._zero: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        """What was left out."""
        names = list(self._zero)
        return (
            [f"drift leaves out gradients that are zero in truth and rounding alone: {_list(names)}"] if names else []
        )

    @property
    def divergent(self) -> str:
        """The first divergent tensor, in words; empty where there is none."""
        return "" if self.worst is None else diagnose.describe(self.worst, self._case.bounds)

    @property
    def order(self) -> dict[str, int]:
        """Module path -> when forward first entered it."""
        return self._reference.order

    def begin(self, holdings: Holdings, step: int) -> None:
        """Compare what the ranks start from with the reference's values."""
        model = self._reference.model
        self.note(starts(holdings, dict(model.named_parameters()) | dict(model.named_buffers()), step))

    def judge(self, mine: Record, holdings: Holdings = ()) -> None:
        """Compare a step of the plan's run with the reference's, and what the ranks hold after it with each other."""
        true = self._reference.step(mine.step)
        made = noise.differences(mine, true, self._slack)
        if not self._exact:
            # The bias before a batch norm, or of attention's keys: in float32 its noise is far above 1e-6 of the largest gradient.
            self._zero.update(dict.fromkeys(noise.zeros(true.gradients)))
            made = [each for each in made if diagnose.owner(each) not in self._zero]
        self.note([*made, *copies(holdings, mine.step)])

    def note(self, made: Sequence[Difference]) -> None:
        """Take more differences into account."""
        self.differences += made
        self.repeat()

    def repeat(self) -> None:
        """Name the first divergent tensor again, under the case's bounds as they are now."""
        self.worst = diagnose.first(self.differences, self._case.bounds, self._reference.order)


def _scope(reference: Reference, feed: Feed, steps: Sequence[int]) -> list[str]:
    batch = feed.batch
    if not reference.coupled:
        notes = [f"the reference runs each global batch of {batch} samples as one"]
    elif reference.plan.batchnorm == "local":
        notes = ["batch norm is local: the reference runs the plan's micro-batches one after another"]
    else:
        notes = ["batch norm is synchronised: the reference runs each round's micro-batches of all ranks as one"]
    short = [feed.size(step) for step in steps if feed.size(step) < batch]
    return [*notes, f"one of the steps is the epoch's last, of {short[-1]} samples"] if short else notes


def _held(silenced: Sequence[str], seen: Survey, left: Survey) -> list[str]:
    """What was made comparable, and what could not be."""
    notes = []
    if silenced:
        notes.append(f"dropout is off in both runs: {_list(silenced)}")
    if seen.random:
        notes.append(
            f"random numbers are held at the middle of their distribution in both runs: {_list(_where(seen.random))}"
        )
    if left.random:
        notes.append(
            f"random numbers that could not be held: {_list(_where(left.random))}; the runs draw different ones"
        )
    if seen.narrow:
        notes.append(f"casts below float64 are lifted to float64 in both runs: {_list(_where(seen.narrow))}")
    if left.narrow:
        notes.append(
            f"computed below float64 all the same, with bounds from the reference's own rounding: {_list(_where(left.narrow))}"
        )
    return notes


def _where(found: dict[str, str]) -> list[str]:
    return [f"{path} ({operator})" for path, operator in found.items()]


def _list(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

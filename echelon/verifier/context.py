"""What a proof rests on, as rank 0 knows it: the job, the plan, what it is compared with, and what a reader must be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from echelon.job import Job
from echelon.plan.batch_split import Span, split
from echelon.plan.plan import Plan
from echelon.trials.determinism import Stillness
from echelon.verifier import first_divergence, precision_drift, tolerances
from echelon.verifier.choose_reference import Footing
from echelon.verifier.compare import Bounds, Difference
from echelon.verifier.compare_outputs import left_out, listed
from echelon.verifier.reference import Record
from echelon.verifier.reference_data import Feed
from echelon.verifier.tensor_checksum import Holdings, copies, starts


class Basis:
    """What is known before the runs, whatever the truth is computed on."""

    def __init__(self, job: Job, plan: Plan, feed: Feed, steps: Sequence[int], footing: Footing) -> None:
        self.job, self.plan, self.feed, self.steps, self.footing = job, plan, feed, steps, footing
        #: Hash of the parameters' names and shapes.
        self.model = ""
        self.still = Stillness()
        #: Whether the model takes random numbers at all, as far as is known.
        self.draws = True
        self.bounds = Bounds()
        self.notes: list[str] = []

    def parts(self, step: int) -> list[Span]:
        """How a step's samples are shared out where outputs are compared."""
        plan = self.plan
        return [part for share in split(self.feed.size(step), plan.mesh.dp, plan.micro, plan.shares) for part in share]

    def reconsider(self, proof: Referee) -> None:
        """Before a no: whether rounding alone explains it. Only a reference on one device can be run again so as to tell."""


class Referee:
    """Holds a run against the truth and keeps how far they are apart. `exact`: the run is in float64 too."""

    def __init__(self, basis: Basis, start: Mapping[str, Tensor], order: Mapping[str, int], *, exact: bool) -> None:
        """`start`: the truth's parameters and buffers before the first step, `noise.copied`."""
        self._basis, self._start, self._exact = basis, start, exact
        #: Module path -> when forward first entered it.
        self.order = order
        self._slack = tolerances.Slack(start)
        self.differences: list[Difference] = []
        #: The first divergent tensor, as long as there is one.
        self.worst: Difference | None = None
        self._zero: dict[str, None] = {}
        self._left_out = ""
        #: What all gradients of the first step are multiplied by, in a run that is not in float64.
        self.factor: float | None = None

    @property
    def notes(self) -> list[str]:
        """What was left out."""
        names = list(self._zero)
        zero = f"drift leaves out gradients that are zero in truth and rounding alone: {listed(names)}"
        return [*filter(None, [self._left_out]), *([zero] if names else [])]

    @property
    def divergent(self) -> str:
        """The first divergent tensor, in words; empty where there is none."""
        return "" if self.worst is None else first_divergence.describe(self.worst, self._basis.bounds)

    def begin(self, holdings: Holdings, step: int) -> None:
        """Compare what the ranks start from with the truth's values."""
        self.note(starts(holdings, self._start, step))

    def judge(self, mine: Record, true: Record, holdings: Holdings = ()) -> None:
        """Compare a step of the run with the truth's, and what the ranks hold after it with each other."""
        made = tolerances.differences(mine, true, self._slack)
        if self._exact and mine.step == self._basis.steps[0]:
            self._left_out = left_out(mine.outputs, true.outputs, self._basis.parts(mine.step))
        if not self._exact:
            if mine.step == self._basis.steps[0]:
                self.factor = precision_drift.factor(mine, true)
            # The bias before a batch norm, or of attention's keys: in float32 its noise is far above 1e-6 of the largest gradient.
            self._zero.update(dict.fromkeys(tolerances.zeros(true.gradients)))
            made = [each for each in made if first_divergence.owner(each) not in self._zero]
        self.note([*made, *copies(holdings, mine.step)])

    def note(self, made: Sequence[Difference]) -> None:
        """Take more differences into account."""
        self.differences += made
        self.repeat()

    def repeat(self) -> None:
        """Name the first divergent tensor again, under the bounds as they are now."""
        self.worst = first_divergence.first(self.differences, self._basis.bounds, self.order)


def without_dropout(paths: Sequence[str]) -> str:
    """The note on modules whose dropout was turned off."""
    return f"dropout is off in both runs, so its masks are no part of the proof: {listed(paths)}"

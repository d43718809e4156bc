"""Whether the rules by which calls change the model's state are known, at the first steps and wherever state begins to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.engine.buffer_rules import RULES, CallState, find_rules
from echelon.errors import DivergenceError

if TYPE_CHECKING:
    from echelon.data.loader import Micro, StepBatch
    from echelon.engine.run import Run


#: Steps of a run in which a table or a flag may be set: a proof has compared as many, and caches that no checkpoint holds are made there.
_FIRST = 3


class StateRules:
    """Of one run. State that calls change goes by a known rule, or the run ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._applies = run.hub is None and run.assembly.pipeline is None and not run.plan.free
        #: Whether ranks compute their parts of a batch in micro-batches.
        self.split = self._applies and run.plan.micro is not None
        #: Rules are looked for again before the step after: state that is zero at first seems to change by other rules than it does.
        self._has_new = True
        self._last = -1
        #: How many steps were computed.
        self._steps = 0

    def prepare(self, batch: StepBatch) -> None:
        """Before a step: learn how calls change the model's state, by calling it."""
        if not self._applies or not self._is_parted(batch):
            return
        if self._run.statistics.surprised:  # on an accelerator, where ranks hear of it a step later
            self._judge(batch)
        elif self._has_new and batch.step != self._last:
            self._has_new, self._last = False, batch.step
            self._learn(batch.micros[0], batch.micros[-1])

    def require_known(self, batch: StepBatch) -> None:
        """After a step's forwards: state that has changed for the first time has changed as on one device."""
        self._steps += 1
        if not self._applies or not self._run.statistics.surprised:
            return
        if self._is_parted(batch):
            self._judge(batch)
        else:
            self._has_new = True  # one device has called it with the whole batch
            self._run.statistics.looked()

    def _is_parted(self, batch: StepBatch) -> bool:
        return self._run.data.size > 1 or len(batch.micros) > 1

    def _learn(self, micro: Micro, other: Micro, *, known_shapes: bool = False) -> dict[str, str]:
        statistics = self._run.statistics
        rules = {} if statistics.calls is None else statistics.calls.rules
        found = find_rules(self._run, micro, other, known=rules, known_shapes=known_shapes)
        if found:
            self._has_new = self._has_new or not found.keys() <= rules.keys()
            statistics.adopt(CallState(self._run, rules | found))
        return found

    def _judge(self, batch: StepBatch) -> None:
        """Call the model once more: what calls leave alone now is a table, a flag or a cache, on which all parts of the batch agree."""
        run, micros = self._run, batch.micros
        surprised = run.statistics.surprised
        averaged = set[str]().union(*run.ranks.gather(run.statistics.averaged))
        found: dict[str, str] = {}
        for place in range(min(run.ranks.gather(len(micros)))):
            found |= self._learn(micros[place], micros[place - 1], known_shapes=True)
        run.statistics.looked()
        for name in sorted(surprised):
            rule = found.get(name)
            if rule is None and name in averaged:
                raise _late(name, batch.step, "ranks left different values in it, or a hook on gradients changes it")
            if self.split and (rule is not None or self._steps > _FIRST):
                raise _late(
                    name,
                    batch.step,
                    "micro-batches find it changed by those before them, where one device calls the model once",
                    rule or "same",
                )
            if rule not in (None, "mean", "same"):
                raise _late(name, batch.step, "ranks took its mean", rule)


def _late(name: str, step: int, what: str, rule: str = "mean") -> DivergenceError:
    declared = f"buffer_reductions = {{{name.rpartition('.')[2]!r}: {rule!r}}}"
    return DivergenceError(
        f"step {step + 1}: {name} has changed for the first time, and {what}; declare its rule in its module, {declared} (one of "
        f"{', '.join(RULES)}; make it in the constructor if forward does), or use one process without micro-batches (dp=1)",
        tensor=name,
        cause="state without a known reduction",
    )

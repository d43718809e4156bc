"""Whether the rules by which calls change the model's state are known, at the first steps and wherever state begins to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.engine.buffers.buffer_rules import RULES, ReducedState, find_rules
from echelon.errors import DivergenceError

if TYPE_CHECKING:
    from echelon.data.loader import MicroBatch, StepBatch
    from echelon.engine.run import Run


#: Steps of a run in which a table or a flag may be set: a proof has compared as many, and caches that no checkpoint holds are made there.
_INITIALIZATION_STEPS = 3


class BufferRuleCheck:
    """Of one run. State that calls change goes by a known rule, or the run ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._applies = run.server_backend is None and run.rank_model.pipeline is None and not run.plan.asynchronous
        #: Whether ranks compute their parts of a batch in micro-batches.
        self.uses_micro_batches = self._applies and run.plan.micro is not None
        #: Rules are looked for again before the step after: state that is zero at first seems to change by other rules than it does.
        self._has_new_state = True
        self._last_learned_step = -1
        #: How many steps were computed.
        self._step_count = 0

    def learn_rules(self, batch: StepBatch) -> None:
        """Before a step: learn how calls change the model's state, by calling it."""
        if not self._applies or not self._is_split(batch):
            return
        if self._run.step_metrics.newly_changed:  # on an accelerator, where ranks hear of it a step later
            self._check_new_changes(batch)
        elif self._has_new_state and batch.step != self._last_learned_step:
            self._has_new_state, self._last_learned_step = False, batch.step
            self._find_rules(batch.micro_batches[0], batch.micro_batches[-1])

    def require_known(self, batch: StepBatch) -> None:
        """After a step's forwards: state that has changed for the first time has changed as on one device."""
        self._step_count += 1
        if not self._applies or not self._run.step_metrics.newly_changed:
            return
        if self._is_split(batch):
            self._check_new_changes(batch)
        else:
            self._has_new_state = True  # one device has called it with the whole batch
            self._run.step_metrics.clear_newly_changed()

    def _is_split(self, batch: StepBatch) -> bool:
        return self._run.data_parallel.size > 1 or len(batch.micro_batches) > 1

    def _find_rules(
        self, micro_batch: MicroBatch, other_micro_batch: MicroBatch, *, caches_exist: bool = False
    ) -> dict[str, str]:
        step_metrics = self._run.step_metrics
        known_rules = {} if step_metrics.reduced_state is None else step_metrics.reduced_state.rules
        new_rules = find_rules(
            self._run, micro_batch, other_micro_batch, known_rules=known_rules, caches_exist=caches_exist
        )
        if new_rules:
            self._has_new_state = self._has_new_state or not new_rules.keys() <= known_rules.keys()
            step_metrics.set_reduced_state(ReducedState(self._run, known_rules | new_rules))
        return new_rules

    def _check_new_changes(self, batch: StepBatch) -> None:
        """Call the model once more: what calls leave alone now is a table, a flag or a cache, on which all parts of the batch agree."""
        run, micro_batches = self._run, batch.micro_batches
        newly_changed = run.step_metrics.newly_changed
        differed_from_mean = set[str]().union(*run.ranks.all_gather_object(run.step_metrics.differed_from_mean))
        rules: dict[str, str] = {}
        for index in range(min(run.ranks.all_gather_object(len(micro_batches)))):
            rules |= self._find_rules(micro_batches[index], micro_batches[index - 1], caches_exist=True)
        run.step_metrics.clear_newly_changed()
        for name in sorted(newly_changed):
            rule = rules.get(name)
            if rule is None and name in differed_from_mean:
                raise _late_change_error(
                    name, batch.step, "ranks left different values in it, or a hook on gradients changes it"
                )
            if self.uses_micro_batches and (rule is not None or self._step_count > _INITIALIZATION_STEPS):
                raise _late_change_error(
                    name,
                    batch.step,
                    "micro-batches find it changed by those before them, where one device calls the model once",
                    rule or "same",
                )
            if rule not in (None, "mean", "same"):
                raise _late_change_error(name, batch.step, "ranks took its mean", rule)


def _late_change_error(name: str, step: int, reason: str, rule: str = "mean") -> DivergenceError:
    declaration = f"buffer_reductions = {{{name.rpartition('.')[2]!r}: {rule!r}}}"
    return DivergenceError(
        f"step {step + 1}: {name} has changed for the first time, and {reason}; declare its rule in its module, {declaration} (one of "
        f"{', '.join(RULES)}; make it in the constructor if forward does), or use one process without micro-batches (dp=1)",
        tensor=name,
        cause="state without a known reduction",
    )

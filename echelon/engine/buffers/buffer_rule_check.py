"""Find the rules by which forward changes state, at the first steps and whenever state begins to change; without a rule the run ends."""

from __future__ import annotations

from echelon.data.loader import MicroBatch, StepBatch
from echelon.engine.buffers.buffer_rules import find_rules
from echelon.engine.buffers.reduced_state import RULES, ReducedState
from echelon.engine.run_state import RunState
from echelon.engine.step_metrics import StepMetrics
from echelon.errors import DivergenceError

#: Steps of a run that may set a table or a flag: a proof has compared them, and they allocate caches that no checkpoint holds.
_INITIALIZATION_STEPS = 3


def rules_apply(run: RunState) -> bool:
    """Whether the model can be called on parts of a batch to learn rules."""
    return run.rank_model.pipeline is None and not run.plan.uses_servers


class BufferRuleCheck:
    """Looks for the rules of one run."""

    def __init__(self, run: RunState, step_metrics: StepMetrics) -> None:
        self._run, self._step_metrics, self._tracker = run, step_metrics, step_metrics.buffer_tracker
        self._applies = rules_apply(run)
        #: Whether to look before the next step again: state that is zero at first seems to follow other rules than it does.
        self._has_new_state = True
        self._last_learned_step = -1
        self._step_count = 0

    def learn_rules(self, batch: StepBatch) -> None:
        """Before a step: learn how calls change the model's state, by calling it."""
        if not self._applies or not self._run.is_split(batch):
            return
        if self._tracker.newly_changed:  # on an accelerator, whose host reads changes a step later
            self._check_new_changes(batch)
        elif self._has_new_state and batch.step != self._last_learned_step:
            self._has_new_state, self._last_learned_step = False, batch.step
            self._find_rules(batch.micro_batches[0], batch.micro_batches[-1], caches_exist=False)

    def require_known(self, batch: StepBatch) -> None:
        """After a step's forwards: require that state which changed for the first time changed as on one device."""
        self._step_count += 1
        if not self._applies or not self._tracker.newly_changed:
            return
        if self._run.is_split(batch):
            self._check_new_changes(batch)
        else:
            self._has_new_state = True  # one device has called it with the whole batch
            self._tracker.clear_newly_changed()

    def _find_rules(self, batch: MicroBatch, other_batch: MicroBatch, *, caches_exist: bool) -> dict[str, str]:
        reduced_state = self._step_metrics.reduced_state
        known_rules = {} if reduced_state is None else reduced_state.rules
        new_rules = find_rules(self._run, batch, other_batch, known_rules=known_rules, caches_exist=caches_exist)
        if new_rules:
            self._has_new_state = self._has_new_state or not new_rules.keys() <= known_rules.keys()
            ranks = self._run.backend.step_ranks
            self._step_metrics.set_reduced_state(ReducedState(self._run.model, ranks, known_rules | new_rules))
        return new_rules

    def _check_new_changes(self, batch: StepBatch) -> None:
        """Call the model once more: what this call does not change is a table, a flag or a cache, the same for all parts of the batch."""
        run, micro_batches, rules = self._run, batch.micro_batches, dict[str, str]()
        newly_changed = sorted(self._tracker.newly_changed)
        differed_from_mean = set[str]().union(*run.ranks.all_gather_object(self._tracker.differed_from_mean))
        for index in range(min(run.ranks.all_gather_object(len(micro_batches)))):
            rules |= self._find_rules(micro_batches[index], micro_batches[index - 1], caches_exist=True)
        self._tracker.clear_newly_changed()
        for name in newly_changed:
            rule = rules.get(name)
            if rule is None and name in differed_from_mean:
                declared_rule = "mean"
                reason = "ranks left different values in it, or a hook on gradients changes it"
            elif run.plan.micro is not None and (rule is not None or self._step_count > _INITIALIZATION_STEPS):
                declared_rule = rule or "same"
                reason = "each micro-batch reads what earlier ones left in it, where one device calls the model once"
            elif rule not in (None, "mean", "same"):
                declared_rule, reason = rule, "ranks took its mean"
            else:
                continue
            raise DivergenceError(
                f"step {batch.step + 1}: {name} has changed for the first time, and {reason}; declare its rule in its module, "
                f"buffer_reductions = {{{name.rpartition('.')[2]!r}: {declared_rule!r}}} (one of {', '.join(RULES)}; make it in the constructor "
                "if forward does), or use one process without micro-batches (dp=1)",
                tensor=name,
                cause="state without a known reduction",
            )

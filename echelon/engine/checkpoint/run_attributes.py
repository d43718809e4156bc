"""State that a run keeps outside of `state_dict()`: attributes, closures and globals (reachable_state.py) that changed since the job was made, and
which parameters forward froze or unfroze."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.engine.checkpoint import reachable_state
from echelon.engine.checkpoint.function_state import FunctionState, MetricState, describe_slot, find_differing_slots
from echelon.engine.checkpoint.json_values import StoreTensor, TensorRecorder, find_tensor_refs
from echelon.engine.checkpoint.optimizer_state import read_state_dict
from echelon.engine.checkpoint.reachable_state import CollectedChanges, ReachableState, StateChanges
from echelon.engine.group_settings import parameters_of
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError
from echelon.plan.codec import from_plain, to_plain
from echelon.plan.plan import Plan
from echelon.tree import tree_tensors
from echelon.trials.snapshot import Snapshot

_CHANGE_PARTS = ("model", "functions", "metrics", "optimizers")


class ModelState(ReachableState):
    """State of a model's modules besides parameters and persistent buffers."""

    max_tensor_bytes = 2**26  # larger ones are caches of activations

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module) for module in model.modules()}
        super().__init__({"model": model}, excluded_ids=_state_dict_ids(model), module_ids=modules)


def snapshot_model(model: nn.Module) -> Snapshot:
    """The present state of the modules besides parameters and persistent buffers."""
    return Snapshot({"model": model}, excluded_ids=_state_dict_ids(model))


def _state_dict_ids(model: nn.Module) -> set[int]:
    ids = set(map(id, model.parameters()))
    for module in model.modules():
        names = set(module._buffers.keys()) - module._non_persistent_buffers_set  # TorchScript's keys are a list
        ids |= {id(module._buffers[name]) for name in names}
    return ids


class OptimizerAttributes(ReachableState):
    """State of optimizers, and of functions that schedules call, besides what `state_dict()` returns."""

    def __init__(self, optimizers: Sequence[Optimizer], schedules: Sequence[Any], *, excluded_ids: Set[int]) -> None:
        self._optimizers, self._other_ids = optimizers, excluded_ids
        roots = _number_roots("optimizer", optimizers)
        roots |= _number_roots("schedule", [_schedule_functions(schedule) for schedule in schedules])
        super().__init__(roots, excluded_ids=self._ids_saved_elsewhere())

    def collect_changes(self, store_tensor: StoreTensor, names: Collection[str] | None = None) -> CollectedChanges:
        states = [read_state_dict(optimizer) for optimizer in self._optimizers]  # exists once they have stepped
        self._excluded_ids = self._ids_saved_elsewhere() | {id(tensor) for tensor in tree_tensors(states)}
        return super().collect_changes(store_tensor, names)

    def _ids_saved_elsewhere(self) -> set[int]:
        return {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}.union(self._other_ids)

    def _is_saved_elsewhere(self, value: Any) -> bool:
        return id(value) in self._excluded_ids  # not every sharded tensor: others are reported as lost


def _number_roots(kind: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{kind}{index + 1 if len(values) > 1 else ''}": value for index, value in enumerate(values)}


def _schedule_functions(schedule: Any) -> list[Any]:
    """A schedule's class and the functions that it calls; schedule_state.py saves its attributes."""
    objects = reachable_state.iterate_user_objects(schedule, set())
    return [type(schedule), *(item for item in objects if isinstance(item, FunctionType | MethodType | partial))]


class RunAttributes:
    """Saves and restores the attributes of one run."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._initial_trainable = read_trainable(run.model)
        self.model = ModelState(run.model)
        #: Of the loss and `inputs`.
        self.functions = FunctionState(run.job, run.model, trained_parameters=run.loss_parameters.values())
        saved_ids = {id(item) for item in (*run.model.modules(), *run.model.parameters(), *run.model.buffers())}
        saved_ids |= self.model.object_ids() | self.functions.object_ids()
        self.optimizers = OptimizerAttributes(run.optimizers, run.schedules, excluded_ids=saved_ids)
        self._metrics = MetricState(run.job, run.model)
        self._warned_names: set[str] = set()
        #: Whether no proof has shown that the loss reads no state that differs between data ranks.
        self.is_unproved = True

    def changes_functions(self, call: Callable[[], Any]) -> bool:
        """Whether a call of a metric changes what the loss or `inputs` reads."""
        metric_ids, metric_slots = self._metrics.ids_and_slots()
        digests_before = self.functions.digest_shared(metric_ids, metric_slots)
        with contextlib.suppress(Exception):  # of an unusual batch
            call()
        return self.functions.digest_shared(metric_ids, metric_slots) != digests_before

    def share_metrics(self, *, has_metrics: bool) -> None:
        """Copy the metrics' state from the first rank that has it (`has_metrics`) to the others. Every rank must call it."""
        changes = self._metrics.collect_changes(lambda _, value: value.cpu())[0] if has_metrics else None
        rank_changes = self._run.ranks.all_gather_object(changes)
        if not has_metrics:
            self._metrics.restore(next(item for item in rank_changes if item is not None), lambda value: value)

    def changed_trainable(self) -> dict[str, bool]:
        """Parameters of this rank that were frozen (False) or unfrozen (True) since the start."""
        initial = self._initial_trainable
        return {name: flag for name, flag in read_trainable(self._run.model).items() if initial.get(name) != flag}

    def collect(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The changes since the start, of all stages, as JSON, and the tensors in it that this rank must write. Every rank must call it."""
        run, recorder = self._run, TensorRecorder()
        model, unstorable = self.model.collect_changes(recorder, self._model_objects_to_store())
        functions = metrics = None
        differing_slots = find_differing_slots(run.data_parallel.all_gather_object(self.functions.digest_changes()))
        if not run.data_parallel.rank and run.is_reporting:  # the rank that calls stateful metrics
            lost_slots = differing_slots if self.is_unproved else []
            functions, unstorable_functions = self.functions.collect_changes_except(lost_slots, recorder)
            metrics, unstorable_metrics = self._metrics.collect_changes(recorder)
            unstorable += [*unstorable_functions, *unstorable_metrics]
            unstorable += [f"{describe_slot(slot)}: the ranks' values differ" for slot in lost_slots]
        optimizers, differing, missing = self._collect_optimizers(recorder)
        self._warn_unstorable([*unstorable, *differing])
        slots = [describe_slot(slot) for slot in differing_slots] if run.is_reporting else []
        rank_states = run.ranks.all_gather_object((model, self.changed_trainable(), functions, metrics, missing, slots))
        models, trainable, all_functions, all_metrics, all_missing, all_slots = zip(*rank_states, strict=True)
        model = {slot: reference for changes in models for slot, reference in changes.items()}
        functions, metrics = (next(c for c in kept if c is not None) for kept in (all_functions, all_metrics))
        kinds = {"model": model, "functions": functions, "metrics": metrics, "optimizers": optimizers}
        return {
            **{kind: reachable_state.nest_changes(changes) for kind, changes in kinds.items()},
            "missing": sorted(set(chain.from_iterable(all_missing))),
            "trainable": {name: flag for flags in trainable for name, flag in flags.items()},
            "apart": dict.fromkeys(chain.from_iterable(all_slots), "lost" if self.is_unproved else "first"),
        }, recorder.tensors

    def _model_objects_to_store(self) -> list[str]:
        """The changed objects in the model that this rank stores: the first of the stages that changed them."""
        ranks = self._run.ranks
        changed_by_rank = ranks.all_gather_object(self.model.changed_objects() if self._run.is_first_replica else [])
        earlier = set(chain.from_iterable(changed_by_rank[: ranks.rank]))
        return [name for name in changed_by_rank[ranks.rank] if name not in earlier]

    def _collect_optimizers(self, store_tensor: StoreTensor) -> tuple[StateChanges, list[str], list[str]]:
        """Changes that all ranks' optimizers share; why others cannot be stored; and the names of lost tensors, which would change the numbers."""
        run, recorder = self._run, TensorRecorder()
        local_digests, unstorable = self.optimizers.collect_changes(reachable_state.store_digest)
        local_changes, _ = self.optimizers.collect_changes(recorder)
        missing = [reason.partition(":")[0] for reason in unstorable if reachable_state.SHARDED_TENSOR_REASON in reason]
        rank_changes = run.ranks.all_gather_object((local_digests, local_changes))
        common_changes: StateChanges = {}
        for slot in dict.fromkeys(slot for digests, _ in rank_changes for slot in digests):
            digests_by_rank = [digests.get(slot) for digests, _ in rank_changes]
            # An optimizer on full tensors steps on some ranks only: nothing changes on the others.
            known = [digest for digest in digests_by_rank if digest is not None or not run.full_tensor_optimizers]
            if any(digest != known[0] for digest in known):
                unstorable.append(f"{''.join(slot)}: the ranks' values differ")
                refs = find_tensor_refs(local_changes.get(slot))
                missing += ["".join(slot)] * any(recorder.tensors[path].ndim for path, _ in refs)
                continue
            first_rank = digests_by_rank.index(known[0])
            common_changes[slot] = rank_changes[first_rank][1][slot]
            for path, _ in find_tensor_refs(common_changes[slot]) if first_rank == run.ranks.rank else ():
                store_tensor(path, recorder.tensors[path])
        return common_changes, unstorable, missing

    def collect_model(self) -> CollectedChanges:
        """The changes in all stages' modules since the start, with their tensors, and why others cannot be copied. Every rank must call it."""
        run = self._run
        local_changes = self.model.collect_changes(lambda _, value: value.cpu()) if run.is_first_replica else ({}, [])
        changes: StateChanges = {}
        unstorable: list[str] = []
        for rank_changes, rank_unstorable in run.ranks.all_gather_object(local_changes):
            changes = rank_changes | changes
            unstorable += rank_unstorable
        return changes, unstorable

    def _warn_unstorable(self, unstorable: Sequence[str]) -> None:
        for reason in unstorable:
            name = reason.partition(":")[0]
            if name not in self._warned_names:
                self._warned_names.add(name)
                self._run.warn(f"{reason}: checkpoints do not hold it, so a resumed run starts with its initial value")

    def allocate_targets(self, checkpoint: StoredCheckpoint) -> dict[str, Tensor]:
        """Tensors to fill from a checkpoint before `restore`."""
        attributes = checkpoint.manifest["attributes"]
        self._targets: dict[str, Tensor] = {}
        for path, device_type in find_tensor_refs([attributes[part] for part in _CHANGE_PARTS]):
            self._targets[path] = checkpoint.allocate(f"held/{path}", device_type, self._run.device)
        return self._targets

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Restore what `collect` returned."""
        run, stored = self._run, manifest["attributes"]
        set_trainable(run.model, self._initial_trainable | stored["trainable"])
        states = (self.model, self.functions, self._metrics, self.optimizers)
        for part, state in zip(_CHANGE_PARTS, states, strict=True):
            for name in state.restore(reachable_state.flatten_changes(stored[part]), lambda ref: self._targets[ref[0]]):
                run.warn(f"{name}: the checkpoint holds a value for it that this job has no place for; it is ignored")
        for name, value_kept in stored.get("apart", {}).items() if run.world.is_main else ():
            start = "it starts with its initial value" if value_kept == "lost" else "it starts with the first rank's"
            problem = f"{name}: the data ranks that wrote the checkpoint held different values: {start}"
            run.warn(f"{problem}; if the loss reads it, train again from the start (--fresh --plan dp=1)")

    def require_compatible(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Refuse a checkpoint that lacks tensors which optimizers keep outside of their state, or has them in another plan's layout."""
        run, attributes, stored_plan = self._run, manifest["attributes"], manifest["plan"]
        plan = to_plain(run.plan)
        missing, other_layout = attributes["missing"], []
        is_sharded = run.full_tensor_optimizers or _is_sharded_plan(plan) or _is_sharded_plan(stored_plan)
        if is_sharded and plan != stored_plan:
            changes = reachable_state.flatten_changes(attributes["optimizers"])
            refs = {"".join(slot): find_tensor_refs(reference) for slot, reference in changes.items()}
            other_layout = [n for n, tensors in refs.items() if any(self._targets[path].ndim for path, _ in tensors)]
        if not missing and not other_layout:
            return
        resume = "" if missing else f', resume under "{from_plain(Plan, stored_plan, "plan")}"'
        reason = "a checkpoint cannot hold under the plan that wrote it" if missing else "another plan cannot read"
        problem = f"{', '.join(missing or other_layout)}: tensors that the optimizer keeps outside of its state, which {reason}"
        remedy = f"return them from its state_dict(){resume}, or start a new run with weights={str(folder)!r}"
        raise IncompatibleCheckpointError(f"{folder}: {problem}; {remedy}")


def _is_sharded_plan(plan: Mapping[str, Any]) -> bool:
    return bool(plan["zero"]) or plan["mesh"]["tp"] > 1 or plan["mesh"]["pp"] > 1


def read_trainable(model: nn.Module) -> dict[str, bool]:
    """Parameter name -> whether it requires a gradient."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def set_trainable(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Freeze and unfreeze parameters by name; others stay as they are."""
    for name, parameter in model.named_parameters():
        if flags.get(name, parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad_(flags[name])

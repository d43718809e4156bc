"""What a run keeps besides `state_dict()`: what modules, the loss, metrics and optimizers hold in attributes, closures and globals (held_state.py), and
which parameters forward froze or unfroze.

A checkpoint holds what changed since the job was made, and a resumed run gets it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.engine.checkpoint.function_state import FunctionState, MetricState, describe_slot, find_differing_slots
from echelon.engine.checkpoint.held_state import SHARDED_TENSOR_REASON, ReachableState, StateChanges, digest_tensor
from echelon.engine.checkpoint.json_values import StoreTensor, find_tensor_refs
from echelon.engine.checkpoint.optimizer_state import read_state_dict
from echelon.engine.checks.shared_state_check import iterate_user_objects
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError
from echelon.plan.codec import from_plain, to_plain
from echelon.plan.plan import Plan
from echelon.tree import tree_tensors
from echelon.trials.snapshot import Snapshot


class ModelState(ReachableState):
    """Saves and restores what the modules of a model keep besides parameters and persistent buffers."""

    max_tensor_bytes = 2**26  # a cache of activations is not worth it

    def __init__(self, model: nn.Module) -> None:
        super().__init__(
            {"model": model},
            excluded_ids=_state_dict_ids(model),
            registered_ids={id(module) for module in model.modules()},
        )


def snapshot_model(model: nn.Module) -> Snapshot:
    """What the modules keep besides parameters and persistent buffers."""
    return Snapshot({"model": model}, excluded_ids=_state_dict_ids(model))


def _state_dict_ids(model: nn.Module) -> set[int]:
    """The ids of what `state_dict()` returns."""
    buffers = (
        value
        for module in model.modules()
        for name, value in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )
    return {id(value) for value in (*model.parameters(), *buffers)}


class OptimizerAttributes(ReachableState):
    """Saves and restores what optimizers, and functions of schedules, keep besides what `state_dict()` returns."""

    def __init__(
        self, optimizers: Sequence[Optimizer], schedules: Sequence[Any], *, excluded_ids: Collection[int]
    ) -> None:
        self._optimizers, self._other_ids = optimizers, excluded_ids
        roots: dict[str, Any] = {}
        for kind, live_objects in (
            ("optimizer", optimizers),
            ("schedule", [_schedule_functions(item) for item in schedules]),
        ):
            roots |= {
                f"{kind}{index + 1 if len(live_objects) > 1 else ''}": item for index, item in enumerate(live_objects)
            }
        super().__init__(roots, excluded_ids=self._excluded_parameter_ids())

    def collect_changes(
        self, store_tensor: StoreTensor, only_names: Collection[str] | None = None
    ) -> tuple[StateChanges, list[str]]:
        state_tensors = [
            tree_tensors(read_state_dict(optimizer)) for optimizer in self._optimizers
        ]  # made while they step
        self._excluded_ids = self._excluded_parameter_ids() | {
            id(value) for values in state_tensors for value in values
        }
        return super().collect_changes(store_tensor, only_names)

    def _excluded_parameter_ids(self) -> set[int]:
        parameter_lists = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return {id(value) for values in parameter_lists for value in values}.union(self._other_ids)

    def _is_saved_elsewhere(self, value: Any) -> bool:
        return id(value) in self._excluded_ids  # a sharded tensor of its own is none: it is named as lost


def _schedule_functions(schedule: Any) -> list[Any]:
    """Those that a schedule calls, and its class: its attributes are in schedule_state.py."""
    return [
        type(schedule),
        *(
            item
            for item in iterate_user_objects(schedule, set())
            if isinstance(item, FunctionType | MethodType | partial)
        ),
    ]


class RunAttributes:
    """Saves and restores what one run keeps so."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._initial_trainable = read_trainable(run.model)
        self.model = ModelState(run.model)
        #: What the loss and `inputs` keep.
        self.functions = FunctionState(run.job, run.model, trained_parameters=run.loss_parameters.values())
        models = {id(item) for item in (*run.model.modules(), *run.model.parameters(), *run.model.buffers())}
        self.optimizers = OptimizerAttributes(
            run.optimizers, run.schedules, excluded_ids=models | self.model.object_ids() | self.functions.object_ids()
        )
        self._metrics = MetricState(run.job, run.model)
        self._warned_names: set[str] = set()
        #: Whether no proof has shown that the loss reads nothing that data ranks hold differently.
        self.is_unproved = True

    def changes_functions(self, call: Callable[[], Any]) -> bool:
        """Whether a call of a metric changes what the loss or `inputs` reads."""
        metric_ids, metric_slots = self._metrics.ids_and_slots()
        digests_before = self.functions.digest_shared(metric_ids, metric_slots)
        with contextlib.suppress(Exception):  # of a part that it was not made for
            call()
        return self.functions.digest_shared(metric_ids, metric_slots) != digests_before

    def share_metrics(self, *, has_metrics: bool) -> None:
        """Give every rank what metrics keep on the first that has it (`has_metrics`). Every rank must call it."""
        changes = self._metrics.collect_changes(lambda _, value: value.cpu())[0] if has_metrics else None
        shared_changes = next(
            rank_changes for rank_changes in self._run.ranks.all_gather_object(changes) if rank_changes is not None
        )
        if not has_metrics:
            self._metrics.restore(shared_changes, lambda value: value)

    def changed_trainable(self) -> dict[str, bool]:
        """Parameters that were frozen (False) or unfrozen (True) since the start, as far as this rank has them."""
        return _changed_entries(read_trainable(self._run.model), self._initial_trainable)

    def collect(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What changed since the start, of all stages, for JSON, and the tensors in it that this rank is to write. Every rank must call it."""
        run, tensors = self._run, dict[str, Tensor]()

        def store_tensor(path: str, value: Tensor) -> Any:
            tensors[path] = value
            return [path, value.device.type]

        stores_model = not run.axes["dp"].rank and not run.axes["tp"].rank
        changed_by_rank = run.ranks.all_gather_object(self.model.changed_objects() if stores_model else [])
        # Of stages that changed the same object the first one stores it.
        changed_here = [
            name
            for name in changed_by_rank[run.ranks.rank]
            if not any(name in each for each in changed_by_rank[: run.ranks.rank])
        ]
        model, unstorable = self.model.collect_changes(store_tensor, changed_here)
        functions = metrics = None
        differing_slots = find_differing_slots(run.data_parallel.all_gather_object(self.functions.digest_changes()))
        if not run.data_parallel.rank and run.is_reporting:  # the rank that calls metrics which keep state
            functions, unstorable_functions = self.functions.collect_changes_except(
                differing_slots if self.is_unproved else (), store_tensor
            )
            metrics, unstorable_metrics = self._metrics.collect_changes(store_tensor)
            unstorable += [*unstorable_functions, *unstorable_metrics]
            unstorable += [
                f"{describe_slot(slot_name)}: the ranks' values differ"
                for slot_name in differing_slots
                if self.is_unproved
            ]
        optimizers, differing, missing = self._collect_optimizers(store_tensor)
        self._warn_unstorable([*unstorable, *differing])
        rank_changes = run.ranks.all_gather_object((model, self.changed_trainable(), functions, metrics))
        differing_names = run.ranks.all_gather_object(
            [describe_slot(slot_name) for slot_name in differing_slots] if run.is_reporting else []
        )
        return {
            "model": {name: labels for each, *_ in rank_changes for name, labels in each.items()},
            "optimizers": optimizers,
            "missing": sorted(
                {name for rank_trainable in run.ranks.all_gather_object(missing) for name in rank_trainable}
            ),
            "trainable": {
                name: flag for _, rank_trainable, *_ in rank_changes for name, flag in rank_trainable.items()
            },
            "functions": next(each for *_, each, _ in rank_changes if each is not None),
            "metrics": next(each for *_, each in rank_changes if each is not None),
            "apart": {name: "lost" if self.is_unproved else "first" for each in differing_names for name in each},
        }, tensors

    def _collect_optimizers(self, store_tensor: StoreTensor) -> tuple[StateChanges, list[str], list[str]]:
        """What all ranks' optimizers keep alike, with its tensors from the first rank that has it; what cannot be stored; and the names of
        tensors among that, without which a run would not go on as it was."""
        run = self._run
        local_digests, unstorable = self.optimizers.collect_changes(
            lambda _, value: digest_tensor(value, include_large=True).hex()
        )
        local_tensors: dict[str, Tensor] = {}

        def remember_tensor(path: str, value: Tensor) -> Any:
            local_tensors[path] = value
            return [path, value.device.type]

        local_changes, _ = self.optimizers.collect_changes(remember_tensor)
        missing = [each.partition(":")[0] for each in unstorable if SHARDED_TENSOR_REASON in each]
        rank_changes = run.ranks.all_gather_object((local_digests, local_changes))
        slot_names = dict.fromkeys(
            (name, label) for each, _ in rank_changes for name, labels in each.items() for label in labels
        )
        kept_changes: StateChanges = {}
        for name, label in slot_names:
            digests_by_rank = [each.get(name, {}).get(label) for each, _ in rank_changes]
            # One that gathers whole tensors steps on some ranks only; on the others nothing changes.
            known_digests = [each for each in digests_by_rank if each is not None or not run.full_tensor_optimizers]
            if any(each != known_digests[0] for each in known_digests):
                unstorable.append(f"{name}{label}: the ranks' values differ")
                missing += [f"{name}{label}"] * any(
                    local_tensors[path].ndim for path, _ in find_tensor_refs(local_changes.get(name, {}).get(label))
                )
                continue
            first_rank = digests_by_rank.index(known_digests[0])
            kept_changes.setdefault(name, {})[label] = rank_changes[first_rank][1][name][label]
            for path, _ in find_tensor_refs(kept_changes[name][label]) if first_rank == run.ranks.rank else ():
                store_tensor(path, local_tensors[path])
        return kept_changes, unstorable, missing

    def collect_model(self) -> tuple[StateChanges, list[str]]:
        """What the modules of all stages keep and changed since the start, with tensors as they are; and what of it cannot be copied. Every rank
        must call it."""
        run = self._run
        stores_model = not run.axes["dp"].rank and not run.axes["tp"].rank
        local_changes = self.model.collect_changes(lambda _, value: value.cpu()) if stores_model else ({}, [])
        changes: StateChanges = {}
        unstorable: list[str] = []
        for rank_changes, unstorable_names in run.ranks.all_gather_object(local_changes):
            changes = rank_changes | changes
            unstorable += unstorable_names
        return changes, unstorable

    def _warn_unstorable(self, unstorable: Sequence[str]) -> None:
        for reason in unstorable:
            name = reason.partition(":")[0]
            if name not in self._warned_names:
                self._warned_names.add(name)
                self._run.warn(f"{reason}: checkpoints do not hold it, so that a resumed run has its first value again")

    def allocate_targets(self, checkpoint: StoredCheckpoint) -> dict[str, Tensor]:
        """Tensors to be filled from a checkpoint before `restore`."""
        self._targets: dict[str, Tensor] = {}
        attributes = checkpoint.manifest["attributes"]
        for path, device in find_tensor_refs(
            [attributes[part] for part in ("model", "functions", "metrics", "optimizers")]
        ):
            entry = checkpoint.entries[f"held/{path}"]
            target_device = torch.device("cpu") if device == "cpu" else self._run.device
            self._targets[path] = torch.empty(entry.shape, dtype=entry.dtype, device=target_device)
        return self._targets

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Give back what `collect` returned."""
        run, stored = self._run, manifest["attributes"]
        set_trainable(run.model, self._initial_trainable | stored["trainable"])
        states_and_changes = (
            (self.model, stored["model"]),
            (self.functions, stored["functions"]),
            (self._metrics, stored["metrics"]),
            (self.optimizers, stored["optimizers"]),
        )
        for state, changes in states_and_changes:
            for name in state.restore(changes, lambda ref: self._targets[ref[0]]):
                run.warn(
                    f"{name}: the checkpoint holds a value for it, and this job has no place for it; it is left out"
                )

        for name, kept_value in stored.get("apart", {}).items() if run.world.is_main else ():
            run.warn(
                f"{name}: the data ranks that wrote the checkpoint held different values, "
                + (
                    "and the checkpoint has none: it has its first value again"
                    if kept_value == "lost"
                    else "of which the checkpoint has the first rank's"
                )
                + "; if the loss reads it, this run goes on with other numbers: train again from the start (--fresh --plan dp=1)"
            )

    def require_compatible(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Refuse a checkpoint that lacks tensors which optimizers keep outside of their state, or holds them as another plan lays them out."""
        run, attributes, stored_plan = self._run, manifest["attributes"], manifest["plan"]
        missing = attributes["missing"]
        plan, refs = to_plain(run.plan), []
        if plan != stored_plan and (
            run.full_tensor_optimizers or _is_sharded_plan(plan) or _is_sharded_plan(stored_plan)
        ):
            refs = [
                f"{name}{label}"
                for name, labels in attributes["optimizers"].items()
                for label, reference in labels.items()
                if any(self._targets[path].ndim for path, _ in find_tensor_refs(reference))
            ]
        if missing or refs:
            raise IncompatibleCheckpointError(
                f"{folder}: {', '.join(missing or refs)}: tensors that the optimizer keeps outside of its state and that "
                + (
                    "a checkpoint cannot hold under the plan that wrote it"
                    if missing
                    else "another plan cannot take over"
                )
                + "; the run would go on with other numbers. Have the optimizer's state_dict() return them"
                + ("" if missing else f', resume under "{from_plain(Plan, stored_plan, "plan")}"')
                + f", or begin a new run with weights={str(folder)!r}"
            )


def _is_sharded_plan(plan: Mapping[str, Any]) -> bool:
    """Whether some rank has a part of the parameters only."""
    return bool(plan["zero"]) or plan["mesh"]["tp"] > 1 or plan["mesh"]["pp"] > 1


def _changed_entries(values: Mapping[str, Any], initial_values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if name not in initial_values or initial_values[name] != value
    }


def read_trainable(model: nn.Module) -> dict[str, bool]:
    """By name whether a parameter requires gradients."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def set_trainable(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Freeze and unfreeze parameters as `read_trainable` returned them; others stay as they are."""
    for name, parameter in model.named_parameters():
        if flags.get(name, parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad_(flags[name])

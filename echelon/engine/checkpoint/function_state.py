"""State that the loss, `inputs` and metrics keep between calls: attributes, closures, mutable defaults, globals."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.engine.checkpoint.json_values import StoreTensor, TensorRecorder, find_tensor_refs
from echelon.engine.checkpoint.reachable_state import (
    CollectedChanges,
    ReachableState,
    SlotName,
    StateChanges,
    store_digest,
)
from echelon.errors import JobError
from echelon.job import Job
from echelon.trials.reachable import find_reachable
from echelon.trials.snapshot import Snapshot


class MetricState(ReachableState):
    """State of a job's metrics."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__({"metrics": dict(job.metrics)}, excluded_ids=_model_object_ids(job, model))


class FunctionState(ReachableState):
    """State of a job's loss and `inputs`."""

    def __init__(self, job: Job, model: nn.Module, *, trained_parameters: Collection[Tensor] = ()) -> None:
        """`trained_parameters`: parameters of the loss that optimizers step, and its calls do not change."""
        self._trained_ids = set(map(id, trained_parameters))
        super().__init__(_roots(job), excluded_ids=_model_object_ids(job, model))

    def changed_objects(self) -> list[str]:
        """The names of the objects that calls have changed."""
        return [name for name in super().changed_objects() if id(self._objects[name]) not in self._trained_ids]

    def digest_changes(self) -> dict[SlotName, str]:
        """Digests of what calls have changed, by slot. They contain no addresses: ranks can compare them."""
        changes, _ = self.collect_changes(store_digest, self.changed_objects())
        texts = {slot: json.dumps(reference, sort_keys=True) for slot, reference in changes.items()}
        return {slot: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for slot, text in texts.items()}

    def collect_changes_except(self, excluded: Collection[SlotName], store_tensor: StoreTensor) -> CollectedChanges:
        """`collect_changes` without these slots."""
        recorder = TensorRecorder()
        changes, unstorable = self.collect_changes(recorder)
        changes = {slot: reference for slot, reference in changes.items() if slot not in excluded}
        for path, _ in find_tensor_refs(changes):
            store_tensor(path, recorder.tensors[path])
        return changes, unstorable

    def read_slots(self, slots: Collection[SlotName]) -> StateChanges:
        """The present values of these slots, changed or not, with copies of tensors on the host."""
        names = [name for name in dict.fromkeys(name for name, _ in slots) if name in self._objects]
        initial_digests = self._initial_digests
        self._initial_digests = {name: {} for name in self._objects}  # every value counts as changed
        try:
            changes, _ = self.collect_changes(lambda _, value: [value.to("cpu", copy=True), value.device.type], names)
        finally:
            self._initial_digests = initial_digests
        return {slot: reference for slot, reference in changes.items() if slot in slots}

    def write_slots(self, values: StateChanges, device: torch.device) -> bool:
        """Restore what `read_slots` returned, perhaps on another rank; returns whether every value has a slot here."""
        try:
            return not self.restore(values, lambda ref: ref[0].to(device if ref[1] != "cpu" else "cpu", copy=True))
        except KeyError:  # it refers to an object that was created later
            return False


def find_differing_slots(digests: Sequence[Mapping[SlotName, str]]) -> list[SlotName]:
    """The slots that differ between ranks, given each rank's `digest_changes`."""
    slots = dict.fromkeys(slot for rank_digests in digests for slot in rank_digests)
    return [slot for slot in slots if len({rank_digests.get(slot) for rank_digests in digests}) > 1]


def describe_slot(slot: SlotName) -> str:
    """A slot as users write it: `memory of loss=`."""
    path = "".join(slot)
    root = "inputs" if path.startswith("inputs") else "loss"
    name = path.removeprefix(root).replace(":", ".").lstrip(".")
    return f"{name} of {root}=" if name else f"{root}="


def find_loss_parameters(job: Job, model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the loss and `inputs` (class proxies, a temperature), under names that the model does not use."""
    used_names = {name for name, _ in model.named_parameters()}
    parameters: dict[str, nn.Parameter] = {}
    for name, value in find_reachable(_roots(job), excluded_ids=_model_object_ids(job, model)).items():
        if isinstance(value, nn.Parameter):
            while name in used_names:
                name += "'"
            parameters[name] = value
    return parameters


def snapshot_functions(job: Job, model: nn.Module) -> Callable[[], None]:
    """Save the state of the loss and `inputs`; returns a function that restores it."""
    saved = Snapshot(_roots(job), excluded_ids=_model_object_ids(job, model))

    def restore() -> None:
        saved.restore()
        for name in saved.list_unrestored():
            problem = "it changes in place, in trial calls too, and is too large to be restored"
            raise JobError(f"{name}: {problem}; make it a buffer of the model")

    return restore


def snapshot_metrics(job: Job, model: nn.Module) -> Snapshot:
    """The present state of the metrics."""
    return Snapshot({"metrics": dict(job.metrics)}, excluded_ids=_model_object_ids(job, model))


@contextlib.contextmanager
def preserve_function_state(job: Job, model: nn.Module) -> Iterator[None]:
    """Calls inside leave the state of the loss and `inputs` as it was."""
    restore = snapshot_functions(job, model)
    try:
        yield
    except BaseException:
        with contextlib.suppress(JobError):
            restore()
        raise
    restore()


def _roots(job: Job) -> dict[str, Any]:
    return {"loss": job.loss, "inputs": job.inputs}


def _model_object_ids(job: Job, model: nn.Module) -> set[int]:
    models = [model, job.model] if isinstance(job.model, nn.Module) else [model]
    return {id(item) for module in models for item in (*module.modules(), *module.parameters(), *module.buffers())}

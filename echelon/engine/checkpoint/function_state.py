"""What the loss, `inputs` and metrics keep between calls: attributes, closures, mutable defaults, globals."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.engine.checkpoint.held_state import Changes, HeldState, digest_of
from echelon.engine.checkpoint.json_values import Put, tensor_refs
from echelon.errors import JobError
from echelon.job import Job
from echelon.trials.reachable import reachable
from echelon.trials.snapshot import Snapshot

#: The name of an object and the label of what it holds, as in `Changes`.
Place = tuple[str, str]


class MetricState(HeldState):
    """Saves and restores what the metrics of one job keep."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__({"metrics": dict(job.metrics)}, without=_models_own(job, model))


class FunctionState(HeldState):
    """Saves and restores what the loss and `inputs` of one job keep."""

    def __init__(self, job: Job, model: nn.Module, *, trained: Collection[Tensor] = ()) -> None:
        """`trained`: parameters of the loss that optimizers step: calls of the loss do not change them."""
        self._trained = set(map(id, trained))
        super().__init__(_roots(job), without=_models_own(job, model))

    def changed(self) -> list[str]:
        """The names of the objects that calls changed since the start."""
        return [name for name in super().changed() if id(self._nodes[name]) not in self._trained]

    def fingerprints(self) -> dict[Place, str]:
        """Digests of what calls changed since the start, by place. They contain no addresses, so that ranks can compare them."""
        changes, _ = self.changes(lambda _, value: digest_of(value, whole=True).hex(), self.changed())
        return {
            (name, label): hashlib.blake2b(json.dumps(reference, sort_keys=True).encode(), digest_size=16).hexdigest()
            for name, labels in changes.items()
            for label, reference in labels.items()
        }

    def changes_without(self, places: Collection[Place], put: Put) -> tuple[Changes, list[str]]:
        """As `changes`, but for these places."""
        live: dict[str, Tensor] = {}

        def note(path: str, value: Tensor) -> Any:
            live[path] = value
            return [path, value.device.type]

        changes, lost = self.changes(note)
        kept = {
            name: {label: reference for label, reference in labels.items() if (name, label) not in places}
            for name, labels in changes.items()
        }
        for path, _ in tensor_refs(kept):
            put(path, live[path])
        return {name: labels for name, labels in kept.items() if labels}, lost

    def values(self, places: Collection[Place]) -> Changes:
        """What these places hold now, changed or not, with copies of tensors on the host."""
        first, self._first = self._first, {name: {} for name in self._nodes}  # so that every value counts as changed
        try:
            names = [name for name in dict.fromkeys(name for name, _ in places) if name in self._nodes]
            changes, _ = self.changes(lambda _, value: [value.to("cpu", copy=True), value.device.type], names)
        finally:
            self._first = first
        return {
            name: {label: reference for label, reference in labels.items() if (name, label) in places}
            for name, labels in changes.items()
        }

    def adopt(self, values: Changes, device: torch.device) -> bool:
        """Hold what `values` returned, perhaps on another rank; whether every value has a place here."""
        try:
            return not self.restore(values, lambda ref: ref[0].to(device if ref[1] != "cpu" else "cpu", copy=True))
        except KeyError:  # it refers to an object that was made later
            return False


def places_apart(digests: Sequence[Mapping[Place, str]]) -> list[Place]:
    """The places that not all ranks hold alike, given each rank's `fingerprints`."""
    places = dict.fromkeys(place for each in digests for place in each)
    return [place for place in places if len({each.get(place) for each in digests}) > 1]


def in_words(place: Place) -> str:
    """A place as the user writes it: `Elr.memory` is `memory` of the loss."""
    path = "".join(place)
    root = "inputs" if path.startswith("inputs") else "loss"
    name = path.removeprefix(root).replace(":", ".").lstrip(".")
    return f"{name} of {root}=" if name else f"{root}="


def loss_parameters(job: Job, model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the loss and `inputs` hold (class proxies, a temperature), by names that no parameter of the model has."""
    taken = {name for name, _ in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for name, value in reachable(_roots(job), without=_models_own(job, model)).items():
        if isinstance(value, nn.Parameter):
            while name in taken:
                name += "'"
            found[name] = value
    return found


def snapshot(job: Job, model: nn.Module) -> Callable[[], None]:
    """Note what the loss and `inputs` keep; returns what puts it back."""
    held = Snapshot(_roots(job), without=_models_own(job, model))

    def put_back() -> None:
        held.put_back()
        for name in held.unrestored():
            raise JobError(
                f"{name}: it is changed in place, also by calls that are only tried, and is too large to be put back; make it a buffer of the model"
            )

    return put_back


def metrics_snapshot(job: Job, model: nn.Module) -> Snapshot:
    """What metrics keep, as it is now."""
    return Snapshot({"metrics": dict(job.metrics)}, without=_models_own(job, model))


@contextlib.contextmanager
def unchanged(job: Job, model: nn.Module) -> Iterator[None]:
    """Calls inside leave no trace in what the loss and `inputs` keep."""
    put_back = snapshot(job, model)
    try:
        yield
    except BaseException:
        with contextlib.suppress(JobError):
            put_back()
        raise
    put_back()


def _roots(job: Job) -> dict[str, Any]:
    return {"loss": job.loss, "inputs": job.inputs}


def _models_own(job: Job, model: nn.Module) -> set[int]:
    models = [model, job.model] if isinstance(job.model, nn.Module) else [model]
    return {id(each) for one in models for each in (*one.modules(), *one.parameters(), *one.buffers())}

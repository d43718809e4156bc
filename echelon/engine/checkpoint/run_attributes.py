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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint.checkpoint_reader import Stored
from echelon.engine.checkpoint.function_state import FunctionState, MetricState, in_words, places_apart
from echelon.engine.checkpoint.held_state import SHARDED, Changes, HeldState, digest_of
from echelon.engine.checkpoint.json_values import Put, tensor_refs
from echelon.engine.checkpoint.optimizer_state import state_dict_of
from echelon.engine.shared_state_check import opened
from echelon.errors import ForeignCheckpoint
from echelon.plan.codec import from_plain, to_plain
from echelon.plan.plan import Plan
from echelon.plan.text import to_text
from echelon.tree import tensors
from echelon.trials.snapshot import Snapshot

if TYPE_CHECKING:
    from echelon.engine.run import Run


class ModelState(HeldState):
    """Saves and restores what the modules of a model keep besides parameters and persistent buffers."""

    largest = 2**26  # a cache of activations is not worth it

    def __init__(self, model: nn.Module) -> None:
        super().__init__({"model": model}, without=_saved(model), registered={id(each) for each in model.modules()})


def model_snapshot(model: nn.Module) -> Snapshot:
    """What the modules keep besides parameters and persistent buffers."""
    return Snapshot({"model": model}, without=_saved(model))


def _saved(model: nn.Module) -> set[int]:
    """The ids of what `state_dict()` returns."""
    buffers = (
        value
        for module in model.modules()
        for name, value in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )
    return {id(value) for value in (*model.parameters(), *buffers)}


class OptimizerAttributes(HeldState):
    """Saves and restores what optimizers, and functions of schedules, keep besides what `state_dict()` returns."""

    def __init__(self, optimizers: Sequence[Optimizer], schedules: Sequence[Any], *, without: Collection[int]) -> None:
        self._optimizers, self._others = optimizers, without
        roots: dict[str, Any] = {}
        for kind, live in (("optimizer", optimizers), ("schedule", [_functions(each) for each in schedules])):
            roots |= {f"{kind}{place + 1 if len(live) > 1 else ''}": each for place, each in enumerate(live)}
        super().__init__(roots, without=self._parameters())

    def changes(self, put: Put, only: Collection[str] | None = None) -> tuple[Changes, list[str]]:
        state = [tensors(state_dict_of(each)) for each in self._optimizers]  # made while they step
        self._without = self._parameters() | {id(value) for values in state for value in values}
        return super().changes(put, only)

    def _parameters(self) -> set[int]:
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        return {id(value) for values in groups for value in values}.union(self._others)

    def _is_others(self, value: Any) -> bool:
        return id(value) in self._without  # a sharded tensor of its own is none: it is named as lost


def _functions(schedule: Any) -> list[Any]:
    """Those that a schedule calls, and its class: its attributes are in schedule_state.py."""
    return [
        type(schedule),
        *(each for each in opened(schedule, set()) if isinstance(each, FunctionType | MethodType | partial)),
    ]


class Attributes:
    """Saves and restores what one run keeps so."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trainable = trainable(run.model)
        self.model = ModelState(run.model)
        #: What the loss and `inputs` keep.
        self.functions = FunctionState(run.job, run.model, trained=run.loss_parameters.values())
        models = {id(each) for each in (*run.model.modules(), *run.model.parameters(), *run.model.buffers())}
        self.optimizers = OptimizerAttributes(
            run.optimizers, run.schedules, without=models | self.model.ids() | self.functions.ids()
        )
        self._metrics = MetricState(run.job, run.model)
        self._lost: set[str] = set()
        #: Whether no proof has shown that the loss reads nothing that data ranks hold differently.
        self.unproved = True

    def steered_by(self, call: Callable[[], Any]) -> bool:
        """Whether a call of a metric changes what the loss or `inputs` reads."""
        ids, places = self._metrics.places()
        before = self.functions.shared(ids, places)
        with contextlib.suppress(Exception):  # of a part that it was not made for
            call()
        return self.functions.shared(ids, places) != before

    def share_metrics(self, *, mine: bool) -> None:
        """Give every rank what metrics keep on the first that has it (`mine`). Every rank must call it."""
        changes = self._metrics.changes(lambda _, value: value.cpu())[0] if mine else None
        first = next(each for each in self._run.ranks.gather(changes) if each is not None)
        if not mine:
            self._metrics.restore(first, lambda value: value)

    def switched(self) -> dict[str, bool]:
        """Parameters that were frozen (False) or unfrozen (True) since the start, as far as this rank has them."""
        return _changed(trainable(self._run.model), self._trainable)

    def collect(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What changed since the start, of all stages, for JSON, and the tensors in it that this rank is to write. Every rank must call it."""
        run, tensors = self._run, dict[str, Tensor]()

        def put(path: str, value: Tensor) -> Any:
            tensors[path] = value
            return [path, value.device.type]

        speaks = not run.axes["dp"].rank and not run.axes["tp"].rank
        changed = run.ranks.gather(self.model.changed() if speaks else [])
        # Of stages that changed the same object the first one stores it.
        mine = [name for name in changed[run.ranks.rank] if not any(name in each for each in changed[: run.ranks.rank])]
        model, lost = self.model.changes(put, mine)
        functions = metrics = None
        apart = places_apart(run.data.gather(self.functions.fingerprints()))
        if not run.data.rank and run.tells:  # the rank that calls metrics which keep state
            functions, lost_too = self.functions.changes_without(apart if self.unproved else (), put)
            metrics, also_lost = self._metrics.changes(put)
            lost += [*lost_too, *also_lost]
            lost += [f"{in_words(place)}: the ranks' values differ" for place in apart if self.unproved]
        optimizers, differing, missing = self._of_optimizers(put)
        self._warn([*lost, *differing])
        everyone = run.ranks.gather((model, self.switched(), functions, metrics))
        names = run.ranks.gather([in_words(place) for place in apart] if run.tells else [])
        return {
            "model": {name: labels for each, *_ in everyone for name, labels in each.items()},
            "optimizers": optimizers,
            "missing": sorted({name for theirs in run.ranks.gather(missing) for name in theirs}),
            "trainable": {name: flag for _, theirs, *_ in everyone for name, flag in theirs.items()},
            "functions": next(each for *_, each, _ in everyone if each is not None),
            "metrics": next(each for *_, each in everyone if each is not None),
            "apart": {name: "lost" if self.unproved else "first" for each in names for name in each},
        }, tensors

    def _of_optimizers(self, put: Put) -> tuple[Changes, list[str], list[str]]:
        """What all ranks' optimizers keep alike, with its tensors from the first rank that has it; what cannot be stored; and the names of
        tensors among that, without which a run would not go on as it was."""
        run = self._run
        mine, lost = self.optimizers.changes(lambda _, value: digest_of(value, whole=True).hex())
        live: dict[str, Tensor] = {}

        def note(path: str, value: Tensor) -> Any:
            live[path] = value
            return [path, value.device.type]

        noted, _ = self.optimizers.changes(note)
        missing = [each.partition(":")[0] for each in lost if SHARDED in each]
        everyone = run.ranks.gather((mine, noted))
        places = dict.fromkeys(
            (name, label) for each, _ in everyone for name, labels in each.items() for label in labels
        )
        kept: Changes = {}
        for name, label in places:
            theirs = [each.get(name, {}).get(label) for each, _ in everyone]
            # One that gathers whole tensors steps on some ranks only; on the others nothing changes.
            found = [each for each in theirs if each is not None or not run.whole]
            if any(each != found[0] for each in found):
                lost.append(f"{name}{label}: the ranks' values differ")
                missing += [f"{name}{label}"] * any(
                    live[path].ndim for path, _ in tensor_refs(noted.get(name, {}).get(label))
                )
                continue
            first = theirs.index(found[0])
            kept.setdefault(name, {})[label] = everyone[first][1][name][label]
            for path, _ in tensor_refs(kept[name][label]) if first == run.ranks.rank else ():
                put(path, live[path])
        return kept, lost, missing

    def of_model(self) -> tuple[Changes, list[str]]:
        """What the modules of all stages keep and changed since the start, with tensors as they are; and what of it cannot be copied. Every rank
        must call it."""
        run = self._run
        speaks = not run.axes["dp"].rank and not run.axes["tp"].rank
        mine = self.model.changes(lambda _, value: value.cpu()) if speaks else ({}, [])
        found: Changes = {}
        lost: list[str] = []
        for theirs, names in run.ranks.gather(mine):
            found = theirs | found
            lost += names
        return found, lost

    def _warn(self, lost: Sequence[str]) -> None:
        for why in lost:
            name = why.partition(":")[0]
            if name not in self._lost:
                self._lost.add(name)
                self._run.warn(f"{why}: checkpoints do not hold it, so that a resumed run has its first value again")

    def rooms(self, stored: Stored) -> dict[str, Tensor]:
        """Tensors to be filled from a checkpoint before `restore`."""
        self._rooms: dict[str, Tensor] = {}
        attributes = stored.manifest["attributes"]
        for path, device in tensor_refs([attributes[part] for part in ("model", "functions", "metrics", "optimizers")]):
            entry = stored.entries[f"held/{path}"]
            where = torch.device("cpu") if device == "cpu" else self._run.device
            self._rooms[path] = torch.empty(entry.shape, dtype=entry.dtype, device=where)
        return self._rooms

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Give back what `collect` returned."""
        run, stored = self._run, manifest["attributes"]
        set_trainable(run.model, self._trainable | stored["trainable"])
        held = (
            (self.model, stored["model"]),
            (self.functions, stored["functions"]),
            (self._metrics, stored["metrics"]),
            (self.optimizers, stored["optimizers"]),
        )
        for each, changes in held:
            for name in each.restore(changes, lambda ref: self._rooms[ref[0]]):
                run.warn(
                    f"{name}: the checkpoint holds a value for it, and this job has no place for it; it is left out"
                )

        for name, kept in stored.get("apart", {}).items() if run.world.main else ():
            run.warn(
                f"{name}: the data ranks that wrote the checkpoint held different values, "
                + (
                    "and the checkpoint has none: it has its first value again"
                    if kept == "lost"
                    else "of which the checkpoint has the first rank's"
                )
                + "; if the loss reads it, this run goes on with other numbers: train again from the start (--fresh --plan dp=1)"
            )

    def require_fits(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Refuse a checkpoint that lacks tensors which optimizers keep outside of their state, or holds them as another plan lays them out."""
        run, attributes, written = self._run, manifest["attributes"], manifest["plan"]
        lacks = attributes["missing"]
        plan, refs = to_plain(run.plan), []
        if plan != written and (run.whole or _cuts(plan) or _cuts(written)):
            refs = [
                f"{name}{label}"
                for name, labels in attributes["optimizers"].items()
                for label, reference in labels.items()
                if any(self._rooms[path].ndim for path, _ in tensor_refs(reference))
            ]
        if lacks or refs:
            raise ForeignCheckpoint(
                f"{folder}: {', '.join(lacks or refs)}: tensors that the optimizer keeps outside of its state and that "
                + (
                    "a checkpoint cannot hold under the plan that wrote it"
                    if lacks
                    else "another plan cannot take over"
                )
                + "; the run would go on with other numbers. Have the optimizer's state_dict() return them"
                + ("" if lacks else f', resume under "{to_text(from_plain(Plan, written, "plan"))}"')
                + f", or begin a new run with weights={str(folder)!r}"
            )


def _cuts(plan: Mapping[str, Any]) -> bool:
    """Whether some rank has a part of the parameters only."""
    return bool(plan["zero"]) or plan["mesh"]["tp"] > 1 or plan["mesh"]["pp"] > 1


def _changed(values: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in first or first[name] != value}


def trainable(model: nn.Module) -> dict[str, bool]:
    """By name whether a parameter requires gradients."""
    return {name: value.requires_grad for name, value in model.named_parameters()}


def set_trainable(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Freeze and unfreeze parameters as `trainable` returned them; others stay as they are."""
    for name, value in model.named_parameters():
        if flags.get(name, value.requires_grad) != value.requires_grad:
            value.requires_grad_(flags[name])

"""All that optimizers keep, by parameter name: what `state_dict()` returns, saved whole and restored under any plan.

    state    per parameter, in any nesting; its tensors are laid out as the parameter is, or whole
    shared   what `optimizer.state` holds under other keys than parameters
    extra    what an optimizer's own `state_dict` adds

Settings of parameter groups are in groups.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.checkpoint_reader import Stored
from echelon.engine.checkpoint.json_values import Unstorable, decode, encode, tensor_refs
from echelon.engine.checkpoint.param_group_state import group_settings, names
from echelon.engine.checkpoint.tensor_storage import raw
from echelon.engine.parallel.shard_layout import whole_shape
from echelon.errors import ForeignCheckpoint, JobError

if TYPE_CHECKING:
    from echelon.engine.run import Run


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of an optimizer's state on this rank, and the parameter whose layout it has ("": none, it is whole)."""

    value: Tensor
    like: str


@dataclass(frozen=True, slots=True)
class Split:
    """A state dict by what its parts belong to."""

    state: dict[int, Any]  #: by the parameter's place
    shared: dict[Any, Any]
    extra: dict[str, Any]


def split(state: Mapping[str, Any], count: int) -> Split:
    """What an optimizer of `count` parameters returned from `state_dict()`."""
    inner, groups = state.get("state"), state.get("param_groups")
    kept: dict[Any, Any] = inner if isinstance(inner, dict) else {}
    mine = {key: entry for key, entry in kept.items() if type(key) is int and key < count}
    rest = {key: entry for key, entry in kept.items() if key not in mine}
    own = {"state"} if isinstance(inner, dict) else set()
    own |= {"param_groups"} if isinstance(groups, list) else set()
    return Split(mine, rest, {key: value for key, value in state.items() if key not in own})


def parameters_of(run: Run, optimizer: Optimizer) -> list[str]:
    """The names of its parameters in the order of its groups; "" for one that stands for none."""
    known = names(run)
    return [known.get(id(value), "") for group in optimizer.param_groups for value in group["params"]]


def collect(run: Run) -> tuple[list[dict[str, Any]], dict[str, Held]]:
    """The optimizers' state of all ranks for JSON, and the tensors in it that this rank holds. Every rank must call it; raises JobError for
    state that a checkpoint cannot hold."""
    tensors: dict[str, Held] = {}
    with run.ranks.together():
        here = [_one(run, index, optimizer, tensors) for index, optimizer in enumerate(run.optimizers)]
    everyone = run.ranks.gather((here, _digests(run, tensors)))
    _require_same_on_stages(run, everyone)
    return [_merged([part[index] for part, _ in everyone]) for index in range(len(here))], tensors


def _one(run: Run, index: int, optimizer: Optimizer, tensors: dict[str, Held]) -> dict[str, Any]:
    order = parameters_of(run, optimizer)
    found = split(state_dict_of(optimizer), len(order))
    served = run.hub.trained if run.hub is not None else frozenset()

    def put(like: str | None) -> Any:
        def note(path: str, value: Tensor) -> list[str]:
            while path in tensors:
                path += "'"  # a key may hold a slash
            value = value.to_dense() if value.is_sparse else value  # a step on it computes the same
            owner = _owner(run, index, optimizer, path, value) if like is None else like
            # On whole tensors a rank steps what it owns, and the first of them what is shared.
            if index not in run.whole or like is not None or run.world.main:
                tensors[path] = Held(value, "" if index in run.whole else owner)
            return [path, owner, value.device.type]

        return note

    try:
        return {
            "state": {
                order[place]: encode(entry, f"{index}/{order[place]}", put(order[place]))
                for place, entry in found.state.items()
                if order[place] and order[place] not in served
            },
            "shared": encode(found.shared, f"{index}:state", put(None)),
            "extra": encode(found.extra, f"{index}:extra", put(None)),
        }
    except Unstorable as error:
        raise refusal(optimizer, error) from error


def state_dict_of(optimizer: Optimizer) -> dict[str, Any]:
    """Its `state_dict()`, or why there is none."""
    try:
        found = optimizer.state_dict()
    except Exception as error:
        raise JobError(
            f"optimizer= is {type(optimizer).__name__}, whose state_dict() fails ({type(error).__name__}: {error}): its state could not be "
            "saved; repair it, or use another optimizer"
        ) from error
    if not isinstance(found, dict):
        raise JobError(f"optimizer= is {type(optimizer).__name__}, whose state_dict() is no dict; return one")
    return found


def refusal(optimizer: Optimizer, error: Unstorable) -> JobError:
    """The error for state that a checkpoint cannot hold."""
    path = error.path.partition("/")[2] or error.path
    return JobError(
        f"optimizer= is {type(optimizer).__name__}, which keeps {error.why} in state_dict() ({path}): a checkpoint does not hold it, and a "
        "resumed run would go on without it; keep tensors, numbers, strings and containers of these, or return such from its state_dict()"
    )


def _owner(run: Run, index: int, optimizer: Optimizer, path: str, value: Tensor) -> str:
    """The parameter that a tensor which belongs to none is laid out like; "": it is whole."""
    if index in run.whole:
        return ""
    known = names(run)
    params = {known[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in known}
    if value.dim() and any(name in run.pieces and run.pieces[name].shape == value.shape for name in params):
        raise Unstorable(
            path, "a tensor that may be whole or a piece of a parameter under tp; use tp=1, or keep it per parameter"
        )
    alike = [name for name, p in params.items() if _alike(p, value)]
    if not alike and isinstance(value, DTensor):
        raise Unstorable(path, "a sharded tensor of no parameter's shape")
    place = path.rpartition("/")[2]
    twin = (
        list(params)[int(place)] if place.isdigit() and int(place) < len(params) else ""
    )  # of a list with one for each parameter
    return twin if twin in alike else next(iter(alike), "")


def _alike(parameter: Tensor, value: Tensor) -> bool:
    if (
        isinstance(parameter, DTensor) != isinstance(value, DTensor)
        or parameter.shape != value.shape
        or not value.dim()
    ):
        return False
    return not isinstance(parameter, DTensor) or parameter.placements == value.placements  # type: ignore[attr-defined]


def _digests(run: Run, tensors: Mapping[str, Held]) -> dict[str, str]:
    """Of tensors that belong to no parameter, for stages to compare."""
    if run.axes["pp"].size == 1:
        return {}
    loose = {path: held.value for path, held in tensors.items() if ":" in path.split("/")[0]}
    return {
        path: hashlib.sha256(raw(value.to_local() if isinstance(value, DTensor) else value)).hexdigest()
        for path, value in loose.items()
    }


def _require_same_on_stages(run: Run, everyone: Sequence[tuple[list[dict[str, Any]], dict[str, str]]]) -> None:
    if run.axes["pp"].size == 1:
        return
    for index, optimizer in enumerate(run.optimizers):
        if index in run.whole:
            continue  # one rank steps it, or each tensor by itself
        loose = [(part[index]["shared"], part[index]["extra"]) for part, _ in everyone]
        digests = [{k: v for k, v in each.items() if k.startswith(f"{index}:")} for _, each in everyone]
        if any(each != loose[0] for each in loose) or any(each != digests[0] for each in digests):
            raise JobError(
                f"optimizer= is {type(optimizer).__name__}, which keeps state besides that of its parameters, and pipeline stages keep "
                "different ones: a checkpoint could not be read under another plan; keep it per parameter (optimizer.state[parameter]), "
                "or use pp=1"
            )


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: a parameter's state from the first that has it."""
    return {
        "state": {name: entry for part in reversed(parts) for name, entry in part["state"].items()},
        "shared": parts[0]["shared"],
        "extra": parts[0]["extra"],
    }


# Back


class Loading:
    """Restores optimizers from a checkpoint: `rooms` are to be filled in between."""

    def __init__(self, run: Run, stored: Stored) -> None:
        self._run, self._plain = run, stored.manifest["optimizers"]
        self.rooms: dict[str, Held] = {}
        parameters = dict(run.model.named_parameters()) | run.loss_parameters
        for index, optimizer in enumerate(run.optimizers):
            plain, mine = self._plain[index], self._mine(index, optimizer)
            for name in plain["state"]:
                if name not in parameters:
                    raise ForeignCheckpoint(
                        f"{stored.folder}: optimizer state for {name}, which neither the model nor the loss has"
                    )
            kept = [entry for name, entry in plain["state"].items() if name in mine]
            for path, like, device in tensor_refs([*kept, plain["shared"], plain["extra"]]):
                loose = ":" in path.split("/")[0]
                if loose and like and index not in run.whole and (run.axes["pp"].size > 1 or like in run.pieces):
                    raise ForeignCheckpoint(
                        f"{stored.folder}: {type(optimizer).__name__} kept tensors of its parameters' shapes outside of their state, of which a "
                        "stage or a piece cannot take up its part; go on under a plan with pp=1 and tp=1"
                    )
                entry = stored.entries[f"optimizer/{path}"]
                self.rooms[path] = self._room(index, parameters.get(like), like, entry, device)

    def _mine(self, index: int, optimizer: Optimizer) -> set[str]:
        """The parameters whose state this rank keeps."""
        run = self._run
        served = run.hub.trained if run.hub is not None else frozenset()
        here = set(parameters_of(run, optimizer)) - {""} - served
        return here & run.whole[index].owned if index in run.whole else here

    def _room(self, index: int, parameter: Tensor | None, like: str, entry: Any, device: str) -> Held:
        run = self._run
        if (
            parameter is not None
            and index not in run.whole
            and entry.shape == whole_shape(parameter, run.pieces.get(like))
        ):
            return Held(torch.empty_like(parameter, dtype=entry.dtype).detach(), like)
        where = torch.device("cpu") if device == "cpu" or not entry.shape else run.device
        return Held(torch.empty(entry.shape, dtype=entry.dtype, device=where), "")

    def finish(self) -> None:
        """Give each optimizer what was filled, through its own load_state_dict."""
        for index, optimizer in enumerate(self._run.optimizers):
            self._finish(index, optimizer)

    def _finish(self, index: int, optimizer: Optimizer) -> None:
        plain, mine = self._plain[index], self._mine(index, optimizer)
        order = parameters_of(self._run, optimizer)

        def take(ref: Any) -> Tensor:
            return self.rooms[ref[0]].value

        entries = {
            place: decode(plain["state"][name], take)
            for place, name in enumerate(order)
            if name in mine and name in plain["state"]
        }
        live = optimizer.state_dict()
        served = self._run.hub.trained if self._run.hub is not None else frozenset()
        # What a parameter server trains has its state there, and what stands for it here keeps its own.
        own = {place: e for place, e in split(live, len(order)).state.items() if order[place] in served}
        restore(
            optimizer,
            live,
            entries | own,
            decode(plain["shared"], take),
            decode(plain["extra"], take),
            group_settings(self._run, index, optimizer, plain["groups"]),
        )


def restore(
    optimizer: Optimizer,
    live: dict[str, Any],
    entries: dict[int, Any],
    shared: dict[Any, Any],
    extra: dict[str, Any],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Load state into an optimizer. `live`: its present state dict; `settings`: of each group what to change."""
    state = dict(live) | extra
    if isinstance(state.get("param_groups"), list) and "param_groups" not in extra:
        state["param_groups"] = [{**group, **new} for group, new in zip(state["param_groups"], settings, strict=True)]
    if isinstance(state.get("state"), dict) and "state" not in extra:
        state["state"] = {**entries, **shared}
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    # torch casts state to its parameter's dtype, and makes other strings of strings (2.13).
    params = [value for group in optimizer.param_groups for value in group["params"]]
    for place, entry in entries.items():
        optimizer.state[params[place]] = _exact(entry, optimizer.state[params[place]], "")


def _exact(ours: Any, theirs: Any, key: Any) -> Any:
    """What was saved, on the device that torch chose; what an optimizer made a tensor of by itself stays one."""
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor):
        if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)) or key == "step":
            return theirs
        return ours.to(theirs.device)
    if type(ours) is dict and isinstance(theirs, dict):
        extra = {name: each for name, each in theirs.items() if name not in ours}
        return {name: _exact(each, theirs.get(name), name) for name, each in ours.items()} | extra
    if type(ours) in (list, tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        return type(ours)(_exact(each, was, None) for each, was in zip(ours, theirs, strict=True))
    return ours


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)

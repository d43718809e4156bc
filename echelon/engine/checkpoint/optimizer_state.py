"""Optimizer state by parameter name: everything that `state_dict()` returns, but the settings of groups (param_group_state.py).

state    per parameter, nested in any way; a tensor has its parameter's layout, or is full
shared   entries of `optimizer.state` under keys other than parameters
extra    what an optimizer's own `state_dict` adds
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.checkpoint_files.tensor_files import tensor_bytes
from echelon.engine.checkpoint.json_values import UnstorableValue, decode, encode, find_tensor_refs
from echelon.engine.checkpoint.param_group_state import decode_group_settings, map_parameter_names
from echelon.engine.group_settings import parameters_of
from echelon.engine.parallel.shard_layout import full_tensor_shape, to_local
from echelon.engine.run_state import RunState
from echelon.errors import IncompatibleCheckpointError, JobError


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state tensor on this rank, and the parameter whose layout it has ("": it is full)."""

    value: Tensor
    layout_parameter: str


@dataclass(frozen=True, slots=True)
class SplitState:
    """A state dict, split by what its entries belong to."""

    state: dict[int, Any]  #: by the parameter's position
    shared: dict[Any, Any]
    extra: dict[str, Any]


def split_state_dict(state: Mapping[str, Any], parameter_count: int) -> SplitState:
    """Split the `state_dict()` of an optimizer with `parameter_count` parameters."""
    entries, groups = state.get("state"), state.get("param_groups")
    standard_keys = {"state"} if isinstance(entries, dict) else set()
    standard_keys |= {"param_groups"} if isinstance(groups, list) else set()
    extra = {key: value for key, value in state.items() if key not in standard_keys}
    if not isinstance(entries, dict):
        return SplitState({}, {}, extra)
    by_position = {key: entry for key, entry in entries.items() if type(key) is int and key < parameter_count}
    return SplitState(by_position, {key: entry for key, entry in entries.items() if key not in by_position}, extra)


def _named_parameters(run: RunState, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """An optimizer's parameters in the order of its groups; the name is "" for one that is not a parameter of the job."""
    names_by_id = map_parameter_names(run)
    return [(names_by_id.get(id(parameter), ""), parameter) for parameter in parameters_of(optimizer)]


def _is_shared(path: str) -> bool:
    """Whether a tensor belongs to no parameter: `0:state/...`, `0:extra/...`, not `0/weight/...`."""
    return ":" in path.split("/")[0]


def collect(run: RunState) -> tuple[list[dict[str, Any]], dict[str, StateTensor]]:
    """The state of all ranks' optimizers as JSON, and this rank's tensors in it; refuses what a checkpoint cannot hold. Every rank must call it."""
    tensors: dict[str, StateTensor] = {}
    with run.ranks.raise_on_all_ranks():
        local_states = [_encode_optimizer(run, index, tensors) for index in range(len(run.optimizers))]
    # For stages to compare.
    shared = {path: tensor for path, tensor in tensors.items() if _is_shared(path) and run.axes["pp"].size > 1}
    digests = {p: hashlib.sha256(tensor_bytes(to_local(t.value))).hexdigest() for p, t in shared.items()}
    rank_states = run.ranks.all_gather_object((local_states, digests))
    _require_same_on_stages(run, rank_states)
    merged = []
    for states in zip(*(states for states, _ in rank_states), strict=True):
        # A parameter's from the first rank that has it.
        entries = {name: entry for state in reversed(states) for name, entry in state["state"].items()}
        merged.append({**states[0], "state": entries})
    return merged, tensors


def _encode_optimizer(run: RunState, index: int, tensors: dict[str, StateTensor]) -> dict[str, Any]:
    optimizer, steps_full_tensors = run.optimizers[index], index in run.full_tensor_optimizers
    names = [name for name, _ in _named_parameters(run, optimizer)]
    parts = split_state_dict(read_state_dict(optimizer), len(names))

    def store_tensor(parameter_name: str | None, path: str, value: Tensor) -> list[str]:
        while path in tensors:
            path += "'"  # keys may contain slashes
        value = value.to_dense() if value.is_sparse else value  # the next step computes the same
        layout = _find_layout_parameter(run, index, path, value) if parameter_name is None else parameter_name
        # Of an optimizer on full tensors each rank stores what it owns, and the first rank what is shared.
        if not steps_full_tensors or parameter_name is not None or run.world.is_main:
            tensors[path] = StateTensor(value, "" if steps_full_tensors else layout)
        return [path, layout, value.device.type]

    entries = {names[position]: entry for position, entry in parts.state.items()}
    saved_names = entries.keys() - {""} - run.backend.server_trained
    try:
        return {
            "state": {
                name: encode(entry, f"{index}/{name}", partial(store_tensor, name))
                for name, entry in entries.items()
                if name in saved_names
            },
            "shared": encode(parts.shared, f"{index}:state", partial(store_tensor, None)),
            "extra": encode(parts.extra, f"{index}:extra", partial(store_tensor, None)),
        }
    except UnstorableValue as error:
        raise make_unstorable_error(optimizer, error) from error


def _of(optimizer: Optimizer) -> str:
    return f"optimizer= is {type(optimizer).__name__}"


def read_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()`; raises JobError where that fails."""
    try:
        state_dict = optimizer.state_dict()
    except Exception as error:
        problem = f"fails ({type(error).__name__}: {error}), so its state cannot be saved"
        raise JobError(f"{_of(optimizer)}, whose state_dict() {problem}; repair it, or use another one") from error
    if not isinstance(state_dict, dict):
        raise JobError(f"{_of(optimizer)}, whose state_dict() is not a dict; return one")
    return state_dict


def make_unstorable_error(optimizer: Optimizer, error: UnstorableValue) -> JobError:
    """The error for optimizer state that a checkpoint cannot hold."""
    path = error.path.partition("/")[2] or error.path
    problem = f"which keeps {error.reason} in state_dict() ({path}): a checkpoint cannot hold it, and a resumed run would lose it"
    return JobError(f"{_of(optimizer)}, {problem}; keep tensors, numbers, strings and containers of these")


def _find_layout_parameter(run: RunState, index: int, path: str, value: Tensor) -> str:
    """The parameter that shares its layout with a tensor that belongs to none; "": the tensor is full."""
    if index in run.full_tensor_optimizers:
        return ""
    by_name = {name: parameter for name, parameter in _named_parameters(run, run.optimizers[index]) if name}
    local_shapes = [run.tp_shards[name].local_shape for name in by_name if name in run.tp_shards]
    if value.dim() and value.shape in local_shapes:
        problem = "a tensor that may be full or a tp shard of a parameter"
        raise UnstorableValue(path, f"{problem}; use tp=1, or keep it per parameter")

    def layout(tensor: Tensor) -> Any:
        return tensor.shape, tensor.placements if isinstance(tensor, DTensor) else None

    matching = [name for name, p in by_name.items() if layout(p) == layout(value)] if value.dim() else []
    if not matching and isinstance(value, DTensor):
        raise UnstorableValue(path, "a sharded tensor that has no parameter's shape")
    position = path.rpartition("/")[2]  # in a list with one item per parameter
    same_position = list(by_name)[int(position)] if position.isdigit() and int(position) < len(by_name) else ""
    return same_position if same_position in matching else next(iter(matching), "")


def _require_same_on_stages(run: RunState, rank_states: Sequence[tuple[list[dict[str, Any]], dict[str, str]]]) -> None:
    for index, optimizer in enumerate(run.optimizers) if run.axes["pp"].size > 1 else ():
        if index in run.full_tensor_optimizers:
            continue  # one rank steps it, or each tensor separately
        shared_states = []
        for states, digests in rank_states:
            own_digests = {path: digest for path, digest in digests.items() if path.startswith(f"{index}:")}
            shared_states.append((states[index]["shared"], states[index]["extra"], own_digests))
        if any(state != shared_states[0] for state in shared_states):
            problem = "which keeps state that belongs to no parameter and differs between pipeline stages"
            raise JobError(f"{_of(optimizer)}, {problem}; keep it in optimizer.state[parameter], or use pp=1")


class OptimizerLoader:
    """Restores optimizers: fill `targets`, then call `apply`."""

    def __init__(self, run: RunState, checkpoint: StoredCheckpoint) -> None:
        self._run, self._checkpoint, self._encoded = run, checkpoint, checkpoint.manifest["optimizers"]
        self.targets: dict[str, StateTensor] = {}
        parameters = dict(run.model.named_parameters()) | run.loss_parameters
        for index, optimizer in enumerate(run.optimizers):
            encoded, local_names = self._encoded[index], self._local_names(index)
            unknown = next((name for name in encoded["state"] if name not in parameters), None)
            if unknown is not None:
                problem = f"optimizer state for {unknown}, which neither the model nor the loss has"
                raise IncompatibleCheckpointError(f"{checkpoint.folder}: {problem}")
            local_entries = [entry for name, entry in encoded["state"].items() if name in local_names]
            for path, layout, device_type in find_tensor_refs([*local_entries, encoded["shared"], encoded["extra"]]):
                on_full_tensors = index in run.full_tensor_optimizers
                is_split = run.axes["pp"].size > 1 or layout in run.tp_shards
                if _is_shared(path) and layout and not on_full_tensors and is_split:
                    problem = "kept tensors of its parameters' shapes outside of their state, which stages and tp ranks cannot split"
                    message = f"{checkpoint.folder}: {type(optimizer).__name__} {problem}; resume under a plan with pp=1 and tp=1"
                    raise IncompatibleCheckpointError(message)
                parameter = None if on_full_tensors else parameters.get(layout)
                self.targets[path] = self._allocate_target(path, device_type, parameter, layout)

    def _local_names(self, index: int) -> set[str]:
        run = self._run
        names = {name for name, _ in _named_parameters(run, run.optimizers[index])} - {""} - run.backend.server_trained
        full_tensor_optimizer = run.full_tensor_optimizers.get(index)
        return names if full_tensor_optimizer is None else names & full_tensor_optimizer.owned_names

    def _allocate_target(self, path: str, device_type: str, parameter: Tensor | None, name: str) -> StateTensor:
        entry = self._checkpoint.entries[f"optimizer/{path}"]
        if parameter is not None and entry.shape == full_tensor_shape(parameter, self._run.tp_shards.get(name)):
            return StateTensor(torch.empty_like(parameter, dtype=entry.dtype).detach(), name)
        device_type = device_type if entry.shape else "cpu"
        return StateTensor(self._checkpoint.allocate(f"optimizer/{path}", device_type, self._run.device), "")

    def apply(self) -> None:
        """Load the filled state into each optimizer through its own load_state_dict."""
        for index, optimizer in enumerate(self._run.optimizers):
            encoded, local_names = self._encoded[index], self._local_names(index)
            names = [name for name, _ in _named_parameters(self._run, optimizer)]
            stored = {name: entry for name, entry in encoded["state"].items() if name in local_names}
            entries = {i: self._decode(stored[name]) for i, name in enumerate(names) if name in stored}
            live = optimizer.state_dict()
            # Stand-ins for parameters that servers train keep their own state.
            for position, entry in split_state_dict(live, len(names)).state.items():
                if names[position] in self._run.backend.server_trained:
                    entries[position] = entry
            settings = decode_group_settings(self._run, optimizer, encoded["groups"])
            parts = SplitState(entries, self._decode(encoded["shared"]), self._decode(encoded["extra"]))
            restore(optimizer, live, parts, settings)

    def _decode(self, encoded: Any) -> Any:
        return decode(encoded, lambda ref: self.targets[ref[0]].value)


def restore(optimizer: Optimizer, live: dict[str, Any], parts: SplitState, settings: list[dict[str, Any]]) -> None:
    """Load state into an optimizer. `live`: its present state dict; `settings`: what to change in each group."""
    state = dict(live) | parts.extra
    if isinstance(state.get("param_groups"), list) and "param_groups" not in parts.extra:
        state["param_groups"] = [{**group, **new} for group, new in zip(state["param_groups"], settings, strict=True)]
    if isinstance(state.get("state"), dict) and "state" not in parts.extra:
        state["state"] = {**parts.state, **parts.shared}
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    # torch casts state to its parameter's dtype, and turns strings into other strings (2.13).
    parameters = parameters_of(optimizer)
    for position, entry in parts.state.items():
        optimizer.state[parameters[position]] = _undo_cast(entry, optimizer.state[parameters[position]], "")


def _undo_cast(saved: Any, loaded: Any, key: Any) -> Any:
    """The saved value on the device that torch chose; what the optimizer made a tensor of stays one."""
    if isinstance(saved, Tensor) or isinstance(loaded, Tensor):
        if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)) or key == "step":
            return loaded
        return saved.to(loaded.device)
    if type(saved) is dict and isinstance(loaded, dict):
        return loaded | {name: _undo_cast(item, loaded.get(name), name) for name, item in saved.items()}
    if type(saved) in (list, tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)(_undo_cast(item, loaded_item, None) for item, loaded_item in zip(saved, loaded, strict=True))
    return saved

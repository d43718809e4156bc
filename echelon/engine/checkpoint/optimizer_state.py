"""Optimizer state by parameter name: everything that `state_dict()` returns, saved and restored under any plan.

    state    per parameter, nested in any way; a tensor has its parameter's layout, or is full
    shared   entries of `optimizer.state` under keys other than parameters
    extra    what an optimizer's own `state_dict` adds

param_group_state.py holds the settings of parameter groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.checkpoint_files.checkpoint_reader import StoredCheckpoint
from echelon.checkpoint_files.tensor_format import tensor_bytes
from echelon.engine.checkpoint.json_values import UnstorableValue, decode, encode, find_tensor_refs
from echelon.engine.checkpoint.param_group_state import decode_group_settings, map_parameter_names
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


def _parameter_names(run: RunState, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters in the order of its groups; "" for one that is not a parameter of the job."""
    names_by_id = map_parameter_names(run)
    return [names_by_id.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def _is_shared(path: str) -> bool:
    """Whether a tensor belongs to no parameter: `0:state/...`, `0:extra/...`, not `0/weight/...`."""
    return ":" in path.split("/")[0]


# Save


def collect(run: RunState) -> tuple[list[dict[str, Any]], dict[str, StateTensor]]:
    """The state of all ranks' optimizers as JSON, and the tensors in it that this rank holds. Every rank must call it; raises JobError for
    state that a checkpoint cannot hold."""
    tensors: dict[str, StateTensor] = {}
    with run.ranks.raise_on_all_ranks():
        local_states = [
            _encode_optimizer(run, index, optimizer, tensors) for index, optimizer in enumerate(run.optimizers)
        ]
    rank_states = run.ranks.all_gather_object((local_states, _digest_shared_tensors(run, tensors)))
    _require_same_on_stages(run, rank_states)
    return [_merge_ranks([states[index] for states, _ in rank_states]) for index in range(len(local_states))], tensors


def _encode_optimizer(
    run: RunState, index: int, optimizer: Optimizer, tensors: dict[str, StateTensor]
) -> dict[str, Any]:
    names = _parameter_names(run, optimizer)
    parts = split_state_dict(read_state_dict(optimizer), len(names))
    steps_full_tensors = index in run.full_tensor_optimizers

    def make_store_tensor(parameter_name: str | None) -> Any:
        def store_tensor(path: str, value: Tensor) -> list[str]:
            while path in tensors:
                path += "'"  # keys may contain slashes
            value = value.to_dense() if value.is_sparse else value  # the next step computes the same
            layout = (
                _find_layout_parameter(run, index, optimizer, path, value) if parameter_name is None else parameter_name
            )
            # Of an optimizer on full tensors each rank stores what it owns, and the first rank what is shared.
            if not steps_full_tensors or parameter_name is not None or run.world.is_main:
                tensors[path] = StateTensor(value, "" if steps_full_tensors else layout)
            return [path, layout, value.device.type]

        return store_tensor

    try:
        return {
            "state": {
                names[position]: encode(entry, f"{index}/{names[position]}", make_store_tensor(names[position]))
                for position, entry in parts.state.items()
                if names[position] and names[position] not in run.backend.server_trained
            },
            "shared": encode(parts.shared, f"{index}:state", make_store_tensor(None)),
            "extra": encode(parts.extra, f"{index}:extra", make_store_tensor(None)),
        }
    except UnstorableValue as error:
        raise make_unstorable_error(optimizer, error) from error


def read_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()`; raises JobError where that fails."""
    try:
        state_dict = optimizer.state_dict()
    except Exception as error:
        raise JobError(
            f"optimizer= is {type(optimizer).__name__}, whose state_dict() fails ({type(error).__name__}: {error}), so its state cannot be "
            "saved; repair it, or use another optimizer"
        ) from error
    if not isinstance(state_dict, dict):
        raise JobError(f"optimizer= is {type(optimizer).__name__}, whose state_dict() is not a dict; return one")
    return state_dict


def make_unstorable_error(optimizer: Optimizer, error: UnstorableValue) -> JobError:
    """The error for optimizer state that a checkpoint cannot hold."""
    path = error.path.partition("/")[2] or error.path
    return JobError(
        f"optimizer= is {type(optimizer).__name__}, which keeps {error.reason} in state_dict() ({path}): a checkpoint cannot hold it, and a "
        "resumed run would lose it; keep tensors, numbers, strings and containers of these, or return such from its state_dict()"
    )


def _find_layout_parameter(run: RunState, index: int, optimizer: Optimizer, path: str, value: Tensor) -> str:
    """The parameter that shares its layout with a tensor that belongs to none; "": the tensor is full."""
    if index in run.full_tensor_optimizers:
        return ""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = {name: item for name, item in zip(_parameter_names(run, optimizer), parameters, strict=True) if name}
    local_shapes = [run.tp_shards[name].local_shape for name in by_name if name in run.tp_shards]
    if value.dim() and value.shape in local_shapes:
        raise UnstorableValue(
            path, "a tensor that may be full or a tp shard of a parameter; use tp=1, or keep it per parameter"
        )
    matching = [name for name, parameter in by_name.items() if _has_same_layout(parameter, value)]
    if not matching and isinstance(value, DTensor):
        raise UnstorableValue(path, "a sharded tensor that has no parameter's shape")
    position = path.rpartition("/")[2]  # in a list with one item per parameter
    same_position = list(by_name)[int(position)] if position.isdigit() and int(position) < len(by_name) else ""
    return same_position if same_position in matching else next(iter(matching), "")


def _has_same_layout(parameter: Tensor, tensor: Tensor) -> bool:
    if isinstance(parameter, DTensor) and isinstance(tensor, DTensor) and parameter.placements != tensor.placements:
        return False
    same_kind = isinstance(parameter, DTensor) == isinstance(tensor, DTensor)
    return same_kind and parameter.shape == tensor.shape and bool(tensor.dim())


def _digest_shared_tensors(run: RunState, tensors: Mapping[str, StateTensor]) -> dict[str, str]:
    """Digests of tensors that belong to no parameter, for stages to compare."""
    if run.axes["pp"].size == 1:
        return {}
    return {
        path: hashlib.sha256(tensor_bytes(to_local(state_tensor.value))).hexdigest()
        for path, state_tensor in tensors.items()
        if _is_shared(path)
    }


def _require_same_on_stages(run: RunState, rank_states: Sequence[tuple[list[dict[str, Any]], dict[str, str]]]) -> None:
    for index, optimizer in enumerate(run.optimizers) if run.axes["pp"].size > 1 else ():
        if index in run.full_tensor_optimizers:
            continue  # one rank steps it, or each tensor separately
        shared_states = [
            (
                states[index]["shared"],
                states[index]["extra"],
                {path: digest for path, digest in digests.items() if path.startswith(f"{index}:")},
            )
            for states, digests in rank_states
        ]
        if any(state != shared_states[0] for state in shared_states):
            raise JobError(
                f"optimizer= is {type(optimizer).__name__}, which keeps state that belongs to no parameter and differs between pipeline "
                "stages: another plan could not read the checkpoint; keep it per parameter (optimizer.state[parameter]), or use pp=1"
            )


def _merge_ranks(rank_states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' state: a parameter's from the first rank that has it."""
    return {
        "state": {name: entry for rank_state in reversed(rank_states) for name, entry in rank_state["state"].items()},
        "shared": rank_states[0]["shared"],
        "extra": rank_states[0]["extra"],
    }


# Load


class OptimizerLoader:
    """Restores optimizers: fill `targets`, then call `apply`."""

    def __init__(self, run: RunState, checkpoint: StoredCheckpoint) -> None:
        self._run, self._encoded = run, checkpoint.manifest["optimizers"]
        self.targets: dict[str, StateTensor] = {}
        parameters = dict(run.model.named_parameters()) | run.loss_parameters
        for index, optimizer in enumerate(run.optimizers):
            encoded, local_names = self._encoded[index], self._local_names(index, optimizer)
            unknown_name = next((name for name in encoded["state"] if name not in parameters), None)
            if unknown_name is not None:
                raise IncompatibleCheckpointError(
                    f"{checkpoint.folder}: optimizer state for {unknown_name}, which neither the model nor the loss has"
                )
            local_entries = [entry for name, entry in encoded["state"].items() if name in local_names]
            for path, layout, device_type in find_tensor_refs([*local_entries, encoded["shared"], encoded["extra"]]):
                on_full_tensors = index in run.full_tensor_optimizers
                is_split = run.axes["pp"].size > 1 or layout in run.tp_shards
                if _is_shared(path) and layout and not on_full_tensors and is_split:
                    raise IncompatibleCheckpointError(
                        f"{checkpoint.folder}: {type(optimizer).__name__} kept tensors of its parameters' shapes outside of their state, which "
                        "pipeline stages and tp ranks cannot split; resume under a plan with pp=1 and tp=1"
                    )
                self.targets[path] = self._allocate_target(
                    checkpoint, path, device_type, None if on_full_tensors else parameters.get(layout), layout
                )

    def _local_names(self, index: int, optimizer: Optimizer) -> set[str]:
        """The parameters whose state this rank keeps."""
        names = set(_parameter_names(self._run, optimizer)) - {""} - self._run.backend.server_trained
        full_tensor_optimizer = self._run.full_tensor_optimizers.get(index)
        return names if full_tensor_optimizer is None else names & full_tensor_optimizer.owned_names

    def _allocate_target(
        self, checkpoint: StoredCheckpoint, path: str, device_type: str, parameter: Tensor | None, name: str
    ) -> StateTensor:
        entry = checkpoint.entries[f"optimizer/{path}"]
        if parameter is not None and entry.shape == full_tensor_shape(parameter, self._run.tp_shards.get(name)):
            return StateTensor(torch.empty_like(parameter, dtype=entry.dtype).detach(), name)
        device_type = device_type if entry.shape else "cpu"
        return StateTensor(checkpoint.allocate(f"optimizer/{path}", device_type, self._run.device), "")

    def apply(self) -> None:
        """Load the filled state into each optimizer through its own load_state_dict."""
        for index, optimizer in enumerate(self._run.optimizers):
            encoded, local_names = self._encoded[index], self._local_names(index, optimizer)
            names = _parameter_names(self._run, optimizer)
            entries = {
                position: self._decode(encoded["state"][name])
                for position, name in enumerate(names)
                if name in local_names and name in encoded["state"]
            }
            live = optimizer.state_dict()
            # Stand-ins for parameters that servers train keep their own state.
            entries |= {
                position: entry
                for position, entry in split_state_dict(live, len(names)).state.items()
                if names[position] in self._run.backend.server_trained
            }
            settings = decode_group_settings(self._run, optimizer, encoded["groups"])
            restore(optimizer, live, entries, self._decode(encoded["shared"]), self._decode(encoded["extra"]), settings)

    def _decode(self, encoded: Any) -> Any:
        return decode(encoded, lambda ref: self.targets[ref[0]].value)


def restore(
    optimizer: Optimizer,
    live: dict[str, Any],
    entries: dict[int, Any],
    shared: dict[Any, Any],
    extra: dict[str, Any],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Load state into an optimizer. `live`: its present state dict; `settings`: what to change in each group."""
    state = dict(live) | extra
    if isinstance(state.get("param_groups"), list) and "param_groups" not in extra:
        state["param_groups"] = [
            {**group, **new_settings} for group, new_settings in zip(state["param_groups"], settings, strict=True)
        ]
    if isinstance(state.get("state"), dict) and "state" not in extra:
        state["state"] = {**entries, **shared}
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    # torch casts state to its parameter's dtype, and turns strings into other strings (2.13).
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, entry in entries.items():
        optimizer.state[parameters[position]] = _undo_cast(entry, optimizer.state[parameters[position]], "")


def _undo_cast(saved: Any, loaded: Any, key: Any) -> Any:
    """The saved value on the device that torch chose; what the optimizer made a tensor of stays one."""
    if isinstance(saved, Tensor) or isinstance(loaded, Tensor):
        if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)) or key == "step":
            return loaded
        return saved.to(loaded.device)
    if type(saved) is dict and isinstance(loaded, dict):
        extra = {name: item for name, item in loaded.items() if name not in saved}
        return {name: _undo_cast(item, loaded.get(name), name) for name, item in saved.items()} | extra
    if type(saved) in (list, tuple) and isinstance(loaded, list | tuple) and len(saved) == len(loaded):
        return type(saved)(_undo_cast(item, loaded_item, None) for item, loaded_item in zip(saved, loaded, strict=True))
    return saved

"""What a model keeps besides parameters and buffers: `get_extra_state()` of its modules.

One rank speaks for each module: the first of those that compute it. Its state goes into the manifest, tensors in it into the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.engine.checkpoint.checkpoint_reader import Stored
from echelon.engine.checkpoint.json_values import Unstorable, decode, encode, tensor_refs
from echelon.errors import ForeignCheckpoint, JobError

if TYPE_CHECKING:
    from echelon.engine.run import Run

_SUFFIX = "_extra_state"


def split_model(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's tensors but those that other stages or servers hold, and the extra state of its modules."""
    served = run.hub.names if run.hub is not None else frozenset()
    found = run.model.state_dict()
    extra = {name: value for name, value in found.items() if name.rpartition(".")[2] == _SUFFIX}
    other = {name: value for name, value in found.items() if name not in extra and name not in served}
    for name, value in other.items():
        if not isinstance(value, Tensor):
            raise JobError(
                f"model=: its state_dict() holds {name}, a {type(value).__name__}, which a checkpoint could not give back; leave it out, or "
                "return it from get_extra_state() and take it in set_extra_state()"
            )
    return {name: value.detach() for name, value in other.items() if not value.is_meta}, extra


def derived(run: Run, found: Mapping[str, Tensor]) -> list[str]:
    """Tensors that the model's hooks make while it is saved: it must take them back by itself."""
    known = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in run.model.named_buffers(remove_duplicate=False)}
    return [name for name in found if name not in known]


def collect_extra(run: Run, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The extra state of all stages for JSON, and the tensors in it that this rank is to write. Every rank must call it."""
    tensors: dict[str, Tensor] = {}
    mine = spoken_for(run, extra)

    def put(path: str, value: Tensor) -> list[str]:
        if isinstance(value, DTensor):
            raise Unstorable(path, "a sharded tensor")
        while path in tensors:
            path += "'"
        tensors[path] = value
        return [path, value.device.type]

    with run.ranks.together():
        try:
            here = {name: encode(value, name, put) for name, value in extra.items() if name in mine}
        except Unstorable as error:
            raise JobError(
                f"model=: get_extra_state() gives {error.why} ({error.path}), which a checkpoint does not hold; return tensors, numbers, strings "
                "and containers of these"
            ) from error
    found = {name: value for part in run.ranks.gather(here) for name, value in part.items()}
    return found, tensors


def spoken_for(run: Run, names: Iterable[str]) -> set[str]:
    """Of which modules (as "path.anything") this rank stores the state: of replicas the first does, of stages the first that computes the module."""
    units = run.assembly.pipeline.units if run.assembly.pipeline is not None else [""]
    here = {
        n for n in names if any(f"{n.rpartition('.')[0]}.".startswith(f"{unit}." if unit else "") for unit in units)
    }
    stages = run.axes["pp"].gather(here)
    if run.axes["dp"].rank or run.axes["tp"].rank:
        return set()
    speaker = {name: next((at for at, each in enumerate(stages) if name in each), 0) for name in names}
    return {name for name, stage in speaker.items() if stage == run.axes["pp"].rank}


class LoadingExtra:
    """Restores extra state: `rooms` are to be filled in between."""

    def __init__(self, run: Run, stored: Stored) -> None:
        self._run, self._plain = run, stored.manifest["extra_state"]
        self.rooms: dict[str, Tensor] = {}
        modules = {name for name, value in run.model.named_modules() if has_extra_state(value)}
        there = {name.rpartition(".")[0] for name in self._plain}
        if modules != there:
            one = min(modules ^ there)
            which = "here and not there" if one in modules else "there and not here"
            raise ForeignCheckpoint(
                f"{stored.folder}: the module {one or 'model'} has extra state {which}; put it back"
            )
        for path, device in tensor_refs(list(self._plain.values())):
            entry = stored.entries[f"extra/{path}"]
            where = torch.device("cpu") if device == "cpu" else run.device
            self.rooms[path] = torch.empty(entry.shape, dtype=entry.dtype, device=where)

    def finish(self) -> None:
        """Give each module what was filled."""
        for name, plain in self._plain.items():
            module = self._run.model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(decode(plain, lambda ref: self.rooms[ref[0]]))


def has_extra_state(module: nn.Module) -> bool:
    """Whether it overrides `get_extra_state`."""
    return type(module).get_extra_state is not nn.Module.get_extra_state

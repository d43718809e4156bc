"""Pretrained weights read straight into the shards: each rank reads only the rows it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for this arithmetic

from echelon.engine.tensor import Piece
from echelon.errors import JobError

Read = Callable[[slice | None], Tensor]


@torch.no_grad()
def load_weights(
    model: nn.Module, path: str | Path, *, pieces: Mapping[str, Piece], warn: Callable[[str], None]
) -> None:
    """Fill parameters and buffers from a safetensors file, its `.index.json`, or a torch state dict (read without pickle)."""
    path = Path(path)
    targets = dict(model.state_dict(keep_vars=True).items())
    with ExitStack() as files:
        found = _open(path, files)
        unknown = sorted(set(found) - set(targets))
        if unknown:
            raise JobError(
                f"{path}: {len(unknown)} tensors that the model does not have, the first is {unknown[0]}; is it another model's?"
            )
        for name, (shape, read) in found.items():
            target = targets[name]
            if tuple(shape) != tuple(target.shape):
                raise JobError(f"{path}: {name} is {tuple(shape)} there and {tuple(target.shape)} in the model")
            _fill(target, read, pieces.get(name))
    missing = sorted(set(targets) - set(found) - _aliases(model, set(found)))
    if missing:
        warn(
            f"{path} lacks {len(missing)} of {len(targets)} tensors, which keep their initial values: {', '.join(missing[:3])} ..."
        )


def _fill(target: Tensor, read: Read, piece: Piece | None) -> None:
    if not isinstance(target, DTensor):
        target.copy_(read(None))
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if not local.numel():
        return
    if piece is not None:  # cut along another dimension, or in parts: what is left of the whole is not a range of rows
        here = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        local.copy_(piece.joined(read(None))[here])
    else:
        local.copy_(read(slice(offset[0], offset[0] + shape[0])))


def _open(path: Path, files: ExitStack) -> dict[str, tuple[tuple[int, ...], Read]]:
    """name -> (shape, reader of some rows), without reading any data yet."""
    try:
        if path.name.endswith(".index.json"):
            names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            for name in names:
                if Path(name).name != name:
                    raise JobError(f"{path}: shard name {name!r} leaves the folder")
            return {key: value for name in names for key, value in _open(path.parent / name, files).items()}
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            handle = files.enter_context(safe_open(str(path), framework="pt"))
            return {name: _lazy(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except JobError:
        raise
    except Exception as error:
        raise JobError(
            f"{path}: cannot be read as weights ({error}); give a safetensors file, its index, or a torch state dict"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(f"{path}: not a state dict of tensors; save model.state_dict()")
    return {name: (tuple(value.shape), _rows(value)) for name, value in state.items()}


def _lazy(part: Any) -> tuple[tuple[int, ...], Read]:
    shape = tuple(part.get_shape())
    return shape, lambda rows: part[rows] if rows is not None else part[:] if shape else part[...]


def _rows(value: Tensor) -> Read:
    return lambda rows: value if rows is None else value[rows]


def _aliases(model: nn.Module, found: set[str]) -> set[str]:
    """Names whose tensor is shared with one that was found: a file holds a tied weight once."""
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return {name for group in names.values() if found & set(group) for name in group}

"""Weights from files and checkpoints into the shards, each rank reading only the rows it keeps; and out again, into one file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for this arithmetic

from echelon.engine.backends.launch_servers import FOLDER
from echelon.engine.checkpoint.checkpoint_reader import MANIFEST, open_stored
from echelon.engine.parallel.shard_layout import Piece, regions, whole_shape
from echelon.errors import CheckpointError, EchelonError, JobError
from echelon.plan.sealed_json import LIMIT, parse_object

Read = Callable[[slice | None], Tensor]
#: Under which a checkpoint holds the model's tensors; the optimizer's are beside them.
_MODEL = "model/"


@dataclass(frozen=True, slots=True)
class _Found:
    """Tensors that can be read: their shapes, and what fills targets with them."""

    shapes: Mapping[str, tuple[int, ...]]
    fill: Callable[[Mapping[str, Tensor]], None]
    #: Of tensors in files; those of a checkpoint are the model's own.
    kinds: Mapping[str, torch.dtype] = field(default_factory=dict)


@torch.no_grad()
def load_weights(
    model: nn.Module, path: str | Path, *, pieces: Mapping[str, Piece], warn: Callable[[str], None]
) -> None:
    """Fill parameters and buffers from a safetensors file, its `.index.json`, a torch state dict (read without pickle), a
    checkpoint, or the last checkpoint of a run."""
    path = Path(path)
    targets = dict(model.state_dict(keep_vars=True).items())
    with ExitStack() as files:
        found = _open_checkpoint(checkpoint_of(path)) if path.is_dir() else _open_file(path, files)
        unknown = sorted(set(found.shapes) - set(targets))
        if unknown:
            raise JobError(
                f"{path}: {len(unknown)} tensor{'s' * (len(unknown) > 1)} that the model does not have, the first is {unknown[0]}; "
                "is it another model's?"
            )
        for name, shape in found.shapes.items():
            here = tuple(whole_shape(targets[name], pieces.get(name)))
            if shape != here:
                raise JobError(f"{path}: {name} is {shape} there and {here} in the model")
        for name, dtype in found.kinds.items():
            _require_kind(path, name, dtype, targets[name].dtype)
        mine = [name for name in found.shapes if not targets[name].is_meta]  # the others are other stages'
        found.fill({name: targets[name] for name in mine if name not in pieces})
        for name in mine:
            if name in pieces:
                _fill_piece(targets[name], pieces[name], found, name)
    missing = sorted(set(targets) - set(found.shapes) - _aliases(model, set(found.shapes)))
    if missing:
        warn(
            f"{path} lacks {len(missing)} of {len(targets)} tensors, which keep their initial values: {', '.join(missing[:3])} ..."
        )


def _fill_piece(target: Tensor, piece: Piece, found: _Found, name: str) -> None:
    """Cut in another way than by rows: the whole is read, one tensor at a time."""
    whole = torch.empty(piece.whole, dtype=target.dtype)
    found.fill({name: whole})
    for region in regions(target, piece):
        region.values.copy_(whole[region.place])


# Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: of which checkpoint and step, how many tensors and bytes."""

    checkpoint: Path
    step: int
    tensors: int
    bytes: int


def checkpoint_of(path: Path) -> Path:
    """`path` where it is a checkpoint; of a run the newest one."""
    if (path / MANIFEST).is_file():
        return path
    found = [each for each in (path / "checkpoints").glob("step-*") if each.name.removeprefix("step-").isdigit()]
    saved = [each for each in found if (each / MANIFEST).is_file() and not each.is_symlink()]
    if not saved:
        what = "a folder without a checkpoint" if path.is_dir() else "no such folder"
        raise CheckpointError(
            f"{path}: {what}; give a run (runs/NAME) or a checkpoint (runs/NAME/checkpoints/step-00000120)"
        )
    return max(saved, key=lambda each: int(each.name.removeprefix("step-")))


def export_weights(path: str | Path, out: str | Path) -> Exported:
    """Write the model's tensors of a checkpoint, or of a run's last one, to one safetensors file. Needs no ranks and no model."""
    from safetensors.torch import save_file

    folder, out = checkpoint_of(Path(path)), Path(out)
    if out.suffix != ".safetensors":
        raise EchelonError(
            f"{out}: the file that is written is a safetensors file; give a name that ends in .safetensors"
        )
    found = _open_checkpoint(folder)
    manifest = found.manifest
    tensors = {name: torch.empty(shape, dtype=found.dtypes[name]) for name, shape in found.shapes.items()}
    found.fill(tensors)
    partial = out.with_name(out.name + ".partial")
    try:
        save_file(
            tensors, partial, metadata={"format": "pt", "step": str(manifest["step"]), "job": str(manifest["job"])}
        )
        partial.replace(out)
    except Exception as error:  # the disk, the folder, or a dtype that the format does not have
        partial.unlink(missing_ok=True)
        raise EchelonError(f"{out}: could not be written ({error})") from error
    return Exported(checkpoint=folder, step=manifest["step"], tensors=len(tensors), bytes=out.stat().st_size)


def _open_checkpoint(folder: Path) -> _Checkpoint:
    stored = open_stored(folder)  # every rank checks all of it: nobody waits here for the others
    manifest = stored.manifest
    entries = {name.removeprefix(_MODEL): entry for name, entry in stored.entries.items() if name.startswith(_MODEL)}

    tables = {
        name: tuple(manifest["parameters"][name])
        for name in (manifest.get("served") or {}).get("trained", ())
        if name not in entries
    }

    def fill(targets: Mapping[str, Tensor]) -> None:
        for name in tables.keys() & targets.keys():
            _fill_table(targets[name], folder / FOLDER, name)
        wanted: dict[str, Any] = {
            f"{_MODEL}{name}": target.detach() for name, target in targets.items() if name not in tables
        }
        stored.fill(wanted, alone=True)

    return _Checkpoint(
        shapes={name: tuple(entry.shape) for name, entry in entries.items()} | tables,
        fill=fill,
        dtypes={name: entry.dtype for name, entry in entries.items()} | dict.fromkeys(tables, torch.float32),
        manifest=manifest,
    )


def _fill_table(target: Tensor, folder: Path, name: str) -> None:
    """A table whole, from what servers wrote of it."""
    from echelon.server.store.table_export import every_row

    if isinstance(target, DTensor):
        raise JobError(
            f"weights=: {name} is a table of a parameter server's, and zero shards it here; export the checkpoint to a file first "
            "(echelon export), or use zero=0"
        )
    for ids, values in every_row(folder, name, len(target), "f8" if target.dtype == torch.float64 else "f4"):
        target[torch.from_numpy(ids)] = torch.from_numpy(values).to(target.device, target.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint(_Found):
    dtypes: Mapping[str, torch.dtype]
    manifest: Mapping[str, Any]


# Files


def _open_file(path: Path, files: ExitStack) -> _Found:
    found = _open(path, files)

    def fill(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            _fill(target, found[name][1])

    if not found:
        raise JobError(f"{path}: holds no tensors; save model.state_dict()")
    return _Found(
        shapes={name: tuple(shape) for name, (shape, _, _) in found.items()},
        fill=fill,
        kinds={name: dtype for name, (_, _, dtype) in found.items()},
    )


def _require_kind(path: Path, name: str, there: torch.dtype, here: torch.dtype) -> None:
    """Integers in place of numbers are codes of a quantized model: they mean nothing without its scales."""
    if there == here or (there.is_floating_point and here.is_floating_point):
        return
    whole = not any(each.is_floating_point or each.is_complex or each == torch.bool for each in (there, here))
    if whole or (there.is_complex and here.is_complex):
        return
    raise JobError(
        f"{path}: {name} is {str(there).removeprefix('torch.')} there and {str(here).removeprefix('torch.')} in the model; convert it "
        "in the file: dequantize integers, take the real part of complex numbers"
    )


def _fill(target: Tensor, read: Read) -> None:
    if not isinstance(target, DTensor):
        target.copy_(read(None))
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if not local.numel():
        return
    local.copy_(read(slice(offset[0], offset[0] + shape[0])))


def _open(path: Path, files: ExitStack) -> dict[str, tuple[tuple[int, ...], Read, torch.dtype]]:
    """name -> (shape, reader of some rows, dtype), without reading any data yet."""
    try:
        if path.name.endswith(".index.json"):
            return {key: value for part in shards(path) for key, value in _open(part, files).items()}
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            handle = files.enter_context(safe_open(str(path), framework="pt"))
            return {name: _lazy(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except JobError:
        raise
    except Exception as error:
        raise JobError(
            f"{path}: cannot be read as weights ({error}); give a safetensors file, its index, a torch state dict, a checkpoint "
            "or a run"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(f"{path}: not a state dict of tensors; save model.state_dict()")
    for name, value in state.items():
        what = "quantized" if value.is_quantized else "on the meta device" if value.is_meta else ""
        what = what or ("" if value.layout is torch.strided else str(value.layout).removeprefix("torch."))
        if what:
            raise JobError(f"{path}: {name} is {what}; save dense tensors with values (dequantize(), to_dense())")
    return {name: (tuple(value.shape), _rows(value), value.dtype) for name, value in state.items()}


def shards(index: Path) -> list[Path]:
    """The files that an index of safetensors or torch files lists: names in its own folder, each a file of weights."""
    # Links are followed here: Hugging Face's cache is made of them.
    if index.stat().st_size > LIMIT:
        raise JobError(f"{index}: too large for an index of weights")
    names = parse_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise JobError(f"{index}: no weight_map of tensor names to files; give the index that came with the weights")
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith((".safetensors", ".bin", ".pt", ".pth")):
            raise JobError(f"{index}: shard name {name!r} leaves the folder, or is no file of weights")
    return [index.parent / name for name in sorted(set(names.values()))]


def _lazy(part: Any) -> tuple[tuple[int, ...], Read, torch.dtype]:
    shape = tuple(part.get_shape())

    def read(rows: slice | None) -> Tensor:
        found: Tensor = part[rows] if rows is not None else part[:] if shape else part[...]
        return found

    # Its name in the file ("BF16") is not torch's; no row tells the dtype too.
    return shape, read, part[:0].dtype if shape else part[...].dtype


def _rows(value: Tensor) -> Read:
    return lambda rows: value if rows is None else value[rows]


def _aliases(model: nn.Module, found: set[str]) -> set[str]:
    """Names whose tensor is shared with one that was found: a file holds a tied weight once."""
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return {name for group in names.values() if found & set(group) for name in group}

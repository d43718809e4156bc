"""Load weights from files and checkpoints into shards, each rank reading only its rows; and export them into one file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public name for this arithmetic

from echelon.checkpoint_files.checkpoint_reader import MANIFEST_FILE, open_checkpoint
from echelon.engine.backends.launch_servers import SERVER_FOLDER
from echelon.engine.parallel.shard_layout import TPShard, full_tensor_shape, local_regions
from echelon.errors import CheckpointError, EchelonError, JobError
from echelon.files import atomic_writer
from echelon.plan.sealed_json import MAX_FILE_BYTES, parse_object

_ReadRows = Callable[[slice | None], Tensor]
_Warn = Callable[[str], None]
_MODEL_PREFIX = "model/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorSource:
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    fill: Callable[[Mapping[str, Tensor]], None]
    #: Of a checkpoint, whose tensors are the model's own.
    manifest: Mapping[str, Any] | None = None


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path, *, tp_shards: Mapping[str, TPShard], warn: _Warn) -> None:
    """Fill parameters and buffers from a safetensors file, its `.index.json`, a torch state dict (read without pickle), a
    checkpoint, or the last checkpoint of a run."""
    path, targets = Path(path), dict(model.state_dict(keep_vars=True))
    with ExitStack() as files:
        source = _open_checkpoint(find_checkpoint(path)) if path.is_dir() else _open_file(path, files)
        unknown = sorted(source.shapes.keys() - targets.keys())
        if unknown:
            problem = f"{len(unknown)} tensor{'s' * (len(unknown) > 1)} that the model does not have, the first is {unknown[0]}"
            raise JobError(f"{path}: {problem}; is it another model's?")
        for name, shape in source.shapes.items():
            model_shape = tuple(full_tensor_shape(targets[name], tp_shards.get(name)))
            if shape != model_shape:
                raise JobError(f"{path}: {name} is {shape} there and {model_shape} in the model")
            if source.manifest is None:
                _require_compatible_dtype(path, name, source.dtypes[name], targets[name].dtype)
        local_names = [name for name in source.shapes if not targets[name].is_meta]  # the others are other stages'
        source.fill({name: targets[name] for name in local_names if name not in tp_shards})
        for name in (name for name in local_names if name in tp_shards):
            # Not cut by rows: read the whole, one tensor at a time.
            full_tensor = torch.empty(tp_shards[name].full_shape, dtype=targets[name].dtype)
            source.fill({name: full_tensor})
            for region in local_regions(targets[name], tp_shards[name]):
                region.values.copy_(full_tensor[region.slices])
    missing = sorted(targets.keys() - source.shapes.keys() - _tied_names(model, set(source.shapes)))
    if missing:
        count = f"{len(missing)} of {len(targets)} tensors"
        warn(f"{path} lacks {count}, which keep their initial values: {', '.join(missing[:3])} ...")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The checkpoint and step that were exported, and how many tensors and bytes."""

    checkpoint: Path
    step: int
    tensors: int
    bytes: int


def find_checkpoint(path: Path) -> Path:
    """`path` where it is a checkpoint; of a run the newest one."""
    if (path / MANIFEST_FILE).is_file():
        return path
    steps = ((folder.name.removeprefix("step-"), folder) for folder in (path / "checkpoints").glob("step-*"))
    checkpoints = {int(step): folder for step, folder in steps if step.isdigit() and not folder.is_symlink()}
    complete = [step for step, folder in checkpoints.items() if (folder / MANIFEST_FILE).is_file()]
    if not complete:
        problem = "a folder without a checkpoint" if path.is_dir() else "no such folder"
        remedy = "give a run (runs/NAME) or a checkpoint (runs/NAME/checkpoints/step-00000120)"
        raise CheckpointError(f"{path}: {problem}; {remedy}")
    return checkpoints[max(complete)]


def export_weights(path: str | Path, out: str | Path) -> ExportResult:
    """Write the model's tensors of a checkpoint, or of a run's newest one, to a safetensors file. Needs no ranks and no model."""
    from safetensors.torch import save_file

    folder, out = find_checkpoint(Path(path)), Path(out)
    if out.suffix != ".safetensors":
        raise EchelonError(f"{out}: the export is a safetensors file; give a name that ends in .safetensors")
    source = _open_checkpoint(folder)
    manifest = source.manifest or {}
    tensors = {name: torch.empty(shape, dtype=source.dtypes[name]) for name, shape in source.shapes.items()}
    source.fill(tensors)
    metadata = {"format": "pt", "step": str(manifest["step"]), "job": str(manifest["job"])}
    try:
        with atomic_writer(out) as file:
            save_file(tensors, file.name, metadata)
    except Exception as error:  # the disk, the folder, or a dtype that the format does not have
        raise EchelonError(f"{out}: could not be written ({error})") from error
    return ExportResult(checkpoint=folder, step=manifest["step"], tensors=len(tensors), bytes=out.stat().st_size)


def _open_checkpoint(folder: Path) -> _TensorSource:
    stored = open_checkpoint(folder)  # every rank checks all of it: nobody waits here for the others
    manifest, prefix = stored.manifest, _MODEL_PREFIX
    entries = {n.removeprefix(prefix): entry for n, entry in stored.entries.items() if n.startswith(prefix)}
    served_names = (manifest.get("served") or {}).get("trained", ())
    tables = {name: tuple(manifest["parameters"][name]) for name in served_names if name not in entries}

    def fill(targets: Mapping[str, Tensor]) -> None:
        for name in tables.keys() & targets.keys():
            _fill_table(targets[name], folder / SERVER_FOLDER, name)
        stored_targets = {f"{prefix}{name}": t.detach() for name, t in targets.items() if name not in tables}
        stored.load_into(stored_targets, is_single_process=True)

    shapes = {name: tuple(entry.shape) for name, entry in entries.items()} | tables
    dtypes = {name: entry.dtype for name, entry in entries.items()} | dict.fromkeys(tables, torch.float32)
    return _TensorSource(shapes=shapes, dtypes=dtypes, fill=fill, manifest=manifest)


def _fill_table(target: Tensor, folder: Path, name: str) -> None:
    from echelon.server.store.table_export import iterate_complete_rows

    if isinstance(target, DTensor):
        problem = f"{name} is a table of a parameter server's, and zero shards it here"
        raise JobError(f"weights=: {problem}; export the checkpoint to a file first (echelon export), or use zero=0")
    dtype = "f8" if target.dtype == torch.float64 else "f4"
    for ids, values in iterate_complete_rows(folder, name, len(target), dtype):
        target[torch.from_numpy(ids)] = torch.from_numpy(values).to(target.device, target.dtype)


def _open_file(path: Path, files: ExitStack) -> _TensorSource:
    readers = _open_readers(path, files)
    if not readers:
        raise JobError(f"{path}: holds no tensors; save model.state_dict()")

    def fill(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            read = readers[name][1]
            if not isinstance(target, DTensor):
                target.copy_(read(None))
                continue
            shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            local = target.to_local()
            if local.numel():
                local.copy_(read(slice(offset[0], offset[0] + shape[0])))

    shapes = {name: shape for name, (shape, _, _) in readers.items()}
    return _TensorSource(shapes=shapes, dtypes={name: dtype for name, (_, _, dtype) in readers.items()}, fill=fill)


def _require_compatible_dtype(path: Path, name: str, file_dtype: torch.dtype, model_dtype: torch.dtype) -> None:
    """Refuse integers in place of numbers: codes of a quantized model, which mean nothing without its scales."""
    dtypes = (file_dtype, model_dtype)
    are_integers = not any(d.is_floating_point or d.is_complex or d == torch.bool for d in dtypes)
    have_one_kind = all(d.is_floating_point for d in dtypes) or all(d.is_complex for d in dtypes) or are_integers
    if file_dtype != model_dtype and not have_one_kind:
        there, here = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        remedy = "convert it in the file: dequantize integers, take the real part of complex numbers"
        raise JobError(f"{path}: {name} is {there} there and {here} in the model; {remedy}")


def _open_readers(path: Path, files: ExitStack) -> dict[str, tuple[tuple[int, ...], _ReadRows, torch.dtype]]:
    """name -> (shape, reader of some rows, dtype), without reading any data yet."""
    try:
        if path.name.endswith(".index.json"):
            return {key: tensor for shard in list_shards(path) for key, tensor in _open_readers(shard, files).items()}
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            handle = files.enter_context(safe_open(str(path), framework="pt"))
            return {name: _slice_reader(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
        # Files of torch before 1.6 are no zip archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except JobError:
        raise
    except Exception as error:
        remedy = "give a safetensors file, its index, a torch state dict, a checkpoint or a run"
        raise JobError(f"{path}: cannot be read as weights ({error}); {remedy}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise JobError(f"{path}: not a state dict of tensors; save model.state_dict()")
    for name, tensor in state.items():
        problem = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else ""
        problem = problem or ("" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch."))
        if problem:
            raise JobError(f"{path}: {name} is {problem}; save dense tensors with values (dequantize(), to_dense())")
    return {name: (tuple(t.shape), partial(_read_rows, t), t.dtype) for name, t in state.items()}


def _read_rows(tensor: Tensor, rows: slice | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def list_shards(index: Path) -> list[Path]:
    """The weight files that an index of safetensors or torch files lists, all in its own folder."""
    # Links are followed here: Hugging Face's cache is made of them.
    if index.stat().st_size > MAX_FILE_BYTES:
        raise JobError(f"{index}: too large for an index of weights")
    names = parse_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise JobError(f"{index}: no weight_map of tensor names to files; give the index that came with the weights")
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith((".safetensors", ".bin", ".pt", ".pth")):
            raise JobError(f"{index}: shard name {name!r} leaves the folder, or is no file of weights")
    return [index.parent / name for name in sorted(set(names.values()))]


def _slice_reader(tensor_slice: Any) -> tuple[tuple[int, ...], _ReadRows, torch.dtype]:
    shape = tuple(tensor_slice.get_shape())

    def read(rows: slice | None) -> Tensor:
        values: Tensor = tensor_slice[rows] if rows is not None else tensor_slice[:] if shape else tensor_slice[...]
        return values

    # The dtype's name in the file ("BF16") is not torch's; an empty slice has it too.
    return shape, read, tensor_slice[:0].dtype if shape else tensor_slice[...].dtype


def _tied_names(model: nn.Module, loaded_names: set[str]) -> set[str]:
    """Names whose tensor is shared with a loaded one: a file holds a tied weight once."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for tied_names in names.values() if loaded_names & set(tied_names) for name in tied_names}

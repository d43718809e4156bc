"""Checkpoints: torch's distributed checkpoint for the tensors, one JSON manifest for the rest.

    step-00000120/
        __0_0.distcp ...    tensors, each rank's own, under unsharded names: any plan can read what any plan wrote
        .metadata           where each tensor's parts lie (torch's)
        checkpoint.json     step, plan, optimizer settings, schedules, and size and SHA-256 of every file above

A checkpoint is written beside its place and renamed into it once the manifest is there: it exists whole or not at all.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from echelon.engine import state
from echelon.engine.build import fingerprint
from echelon.errors import CheckpointError, ForeignCheckpoint
from echelon.plan.codec import to_plain

if TYPE_CHECKING:
    from echelon.engine.run import Run

MANIFEST = "checkpoint.json"
FORMAT = 1


def save(run: Run, folder: Path) -> int:
    """Write the run's state to `folder` (which must not exist); returns its bytes. Every rank must call it."""
    run.settle()
    partial = folder.with_name(folder.name + ".partial")
    with run.ranks.together():
        if run.world.main:
            if (folder / MANIFEST).exists():
                raise CheckpointError(f"{folder}: there is a checkpoint already")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        return _save(run, folder, partial)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if run.world.main:
            shutil.rmtree(partial, ignore_errors=True)
        raise _named(error, folder) from error


def _save(run: Run, folder: Path, partial: Path) -> int:
    with _quiet():
        save_tensors(
            _tensors(run), storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=run.world.size == 1
        )
    with run.ranks.together():
        mine = [path for path in partial.iterdir() if path.name.startswith(f"__{run.world.rank}_")]
        mine += [partial / ".metadata"] if run.world.main else []
        sums = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in mine}
    files = {name: entry for part in run.ranks.gather(sums) for name, entry in part.items()}
    with run.ranks.together():
        if run.world.main:
            _write(partial / MANIFEST, json.dumps(_manifest(run, files), indent=1))
            os.replace(partial, folder)
            _sync(folder.parent)
    return sum(entry["bytes"] for entry in files.values())


def _tensors(run: Run) -> dict[str, Tensor]:
    model = {f"model/{name}": value.detach() for name, value in run.model.state_dict().items()}
    return model | {f"optimizer/{name}": value for name, value in state.optimizer_tensors(run).items()}


def _manifest(run: Run, files: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": run.step_number,
        "job": run.job.name,
        "plan": to_plain(run.plan),
        "ranks": run.world.size,
        "batch": run.job.batch,
        "seed": run.job.seed,
        "samples": run.samples,
        "model": fingerprint(run.model),
        "parameters": {name: list(value.shape) for name, value in run.model.named_parameters()},
        "optimizers": state.optimizer_plain(run),
        "schedules": [_plain_items(schedule.state_dict()) for schedule in run.schedules],
        "loss_scale": None if run.loss_scale is None else [run.loss_scale.scale, run.loss_scale.good],
        "nominal": run.nominal,
        "torch": torch.__version__,
        "files": files,
    }


def load(run: Run, folder: Path) -> None:
    """Bring the run to where `folder` was saved, whatever plan saved it. Every rank must call it."""
    with run.ranks.together():
        manifest = read_manifest(folder)
        _require_fits(run, manifest, folder)
        _require_whole(folder, manifest, run)
    reader = _Reader(folder)
    wanted = _wanted(run, reader.read_metadata(), folder)
    try:
        with _quiet():
            load_tensors(wanted, storage_reader=reader, no_dist=run.world.size == 1)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder}: could not be read ({error})") from error
    prefix = "optimizer/"
    moments = {name.removeprefix(prefix): value for name, value in wanted.items() if name.startswith(prefix)}
    state.set_optimizers(run, moments, manifest["optimizers"])
    for schedule, saved in zip(run.schedules, manifest["schedules"], strict=True):
        schedule.load_state_dict(schedule.state_dict() | saved)
    if run.loss_scale is not None and manifest["loss_scale"] is not None:
        run.loss_scale.scale, run.loss_scale.good = manifest["loss_scale"]
    run.nominal = manifest["nominal"]
    run.step_number = manifest["step"]


def _wanted(run: Run, metadata: Metadata, folder: Path) -> dict[str, Tensor]:
    """What to read and where to: the model's own tensors, and room for the optimizer's, sharded as its parameters are."""
    wanted = {f"model/{name}": value.detach() for name, value in run.model.state_dict().items()}
    parameters = dict(run.model.named_parameters())
    for path, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder}: {path} is not a tensor; echelon stores only tensors there")
        if not path.startswith("optimizer/"):
            continue
        parameter = parameters.get(path.split("/", 3)[2])
        if parameter is None:
            raise CheckpointError(
                f"{folder}: optimizer state for {path.split('/', 3)[2]}, which the model does not have"
            )
        if isinstance(parameter, DTensor) and entry.size == parameter.shape:
            wanted[path] = torch.empty_like(parameter, dtype=entry.properties.dtype).detach()
        else:
            where = run.device if entry.size else torch.device("cpu")
            wanted[path] = torch.empty(entry.size, dtype=entry.properties.dtype, device=where)
    lost = sorted(set(wanted) - set(metadata.state_dict_metadata))
    if lost:
        raise CheckpointError(f"{folder}: lacks {len(lost)} tensors of the model, the first is {lost[0]}")
    return wanted


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, or the reason why `folder` is none."""
    path = folder / MANIFEST
    if not path.exists():
        what = (
            "no such folder"
            if not folder.exists()
            else f"no {MANIFEST} in it: not an echelon checkpoint, or one cut short"
        )
        raise CheckpointError(f"{folder}: {what}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ForeignCheckpoint(f"{folder}: format {manifest['format']}, this echelon reads {FORMAT}")
        return dict(manifest)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); use an older checkpoint") from error


def _require_fits(run: Run, manifest: dict[str, Any], folder: Path) -> None:
    if manifest["model"] != fingerprint(run.model):
        here = {name: list(value.shape) for name, value in run.model.named_parameters()}
        there = manifest["parameters"]
        name = next((n for n in [*here, *there] if here.get(n) != there.get(n)), "a dtype")
        raise ForeignCheckpoint(
            f"{folder}: made by another model: {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here; "
            "give --fresh to start anew in another folder"
        )
    if len(manifest["optimizers"]) != len(run.optimizers) or any(
        [set(group["names"]) for group in saved["groups"]] != [set(group["names"]) for group in mine["groups"]]
        for saved, mine in zip(manifest["optimizers"], state.optimizer_plain(run), strict=True)
    ):
        raise ForeignCheckpoint(
            f"{folder}: its optimizers cover other parameters than this job's; start anew in another folder"
        )
    for name, mine in (("batch", run.job.batch), ("seed", run.job.seed), ("samples", run.samples)):
        if manifest[name] != mine:
            raise ForeignCheckpoint(
                f"{folder}: made with {name}={manifest[name]}, the job now has {mine}: the order of samples would differ; "
                "put it back, or start anew in another folder with weights= from this one"
            )


def _require_whole(folder: Path, manifest: dict[str, Any], run: Run) -> None:
    """Each rank checks some of the files, so that a large checkpoint is read once over all."""
    for index, (name, entry) in enumerate(sorted(manifest["files"].items())):
        if Path(name).name != name:
            raise CheckpointError(f"{folder}: its manifest names {name!r}, which leaves the folder")
        if index % run.world.size != run.world.rank:
            continue
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; use an older checkpoint")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{path}: {size:,} bytes where {entry['bytes']:,} were written: cut short; use an older checkpoint"
            )
        if _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path}: its content changed since it was written; use an older checkpoint")


class _Reader(FileSystemReader):
    """torch's reader, except that its metadata (a pickle) may name only the classes that such metadata is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
                raise CheckpointError(f"{self.path}: its .metadata cannot be read ({error})") from error
        if getattr(metadata, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")} | {
        (module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # some Python versions store an enum's member as getattr(Class, "NAME")
            return _member
        dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        )
        if module in self._MODULES or (module, name) in self._NAMES or dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner[name]
    raise pickle.UnpicklingError(f"getattr of {owner!r} has no place in a checkpoint")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's word that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _plain_items(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if state._plain(value)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make a rename in `folder` outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named(error: BaseException, folder: Path) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    text = str(error)
    if os.strerror(errno.ENOSPC) in text or getattr(error, "errno", None) == errno.ENOSPC:
        free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        return CheckpointError(
            f"{folder}: the disk is full ({free / 2**20:,.0f} MiB free): not saved, nothing else was touched; free some space or use another --out"
        )
    return CheckpointError(f"{folder}: not saved ({type(error).__name__}: {text[:300]})")

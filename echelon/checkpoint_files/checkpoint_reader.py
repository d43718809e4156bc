"""Open a checkpoint: every byte is checked before it is used, and nothing in it can run code."""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from echelon.checkpoint_files import tensor_files
from echelon.errors import CheckpointError, DocumentError, IncompatibleCheckpointError
from echelon.plan.sealed_json import open_regular, read_regular, read_unsealed_format, unseal
from echelon.world import World

MANIFEST_FILE = "checkpoint.json"
CHECKPOINT_FORMAT = 5
_MANIFEST_FIELDS: dict[str, type | tuple[type, ...]] = {
    "step": int, "job": str, "plan": dict, "ranks": int, "parameters": dict, "optimizers": list, "schedules": list, "files": dict,
}  # fmt: skip
_SHA256_PATTERN = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint whose files have been checked."""

    folder: Path
    manifest: dict[str, Any]
    entries: Mapping[str, tensor_files.TensorEntry]

    def load_into(self, targets: dict[str, Any], *, is_single_process: bool) -> None:
        """Load stored tensors into `targets`, each rank its own part, or in this process alone."""
        reader, planner = tensor_files.TensorReader(self.folder, self.entries), tensor_files.TensorLoadPlanner()
        try:
            with without_single_process_warning():
                load_tensors(targets, storage_reader=reader, planner=planner, no_dist=is_single_process)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise CheckpointError(f"{self.folder}: cannot be read ({error})") from error

    def allocate(self, name: str, device_type: str, device: torch.device) -> Tensor:
        """An empty tensor for a stored one, on `device` unless it was on the CPU when it was saved."""
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if device_type == "cpu" else device)


def open_checkpoint(folder: Path, world: World | None = None) -> StoredCheckpoint:
    """The checkpoint in `folder`; raises CheckpointError, naming the file, where one is damaged. The ranks of `world` share the checks."""
    manifest = read_manifest(folder)
    require_intact_files(folder, manifest, world or World())
    return StoredCheckpoint(folder, manifest, tensor_files.read_index(folder, manifest["files"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        incomplete = f"no {MANIFEST_FILE} in it: not an echelon checkpoint, or an incomplete one"
        raise CheckpointError(f"{folder}: {incomplete if folder.exists() else 'no such folder'}")
    try:
        data = read_regular(path)
        old_format = read_unsealed_format(data)
        if old_format in (1, 2):
            remedy = "export it with the echelon that wrote it (echelon export RUN FILE) and give weights="
            problem = f"format {old_format}, which contains pickled data, is not read"
            raise IncompatibleCheckpointError(f"{folder}: {problem}; {remedy}")
        manifest = unseal(data, str(path))
    except (DocumentError, OSError) as error:
        raise tensor_files.damaged(path, error) from error
    if manifest.get("format") != CHECKPOINT_FORMAT:
        formats = f"format {manifest.get('format')}, this echelon reads {CHECKPOINT_FORMAT}"
        raise IncompatibleCheckpointError(f"{folder}: {formats}; use the echelon that wrote it")
    invalid = [name for name, types in _MANIFEST_FIELDS.items() if not isinstance(manifest.get(name), types)]
    if invalid:
        raise tensor_files.damaged(path, f"{', '.join(invalid)} missing or of another type")
    for name, entry in manifest["files"].items():
        _require_valid_entry(folder, name, entry)
    if tensor_files.INDEX_FILE not in manifest["files"]:
        raise tensor_files.damaged(path, f"does not list {tensor_files.INDEX_FILE}")
    return manifest


def _require_valid_entry(folder: Path, name: str, entry: Any) -> None:
    parts = Path(name).parts
    if not name or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise tensor_files.damaged(folder / MANIFEST_FILE, f"names {name!r}, which leaves the folder")
    is_valid = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
    if not is_valid or entry["bytes"] < 0 or not _SHA256_PATTERN.fullmatch(entry["sha256"]):
        raise tensor_files.damaged(folder / MANIFEST_FILE, f"no size and hash for {name!r}")


def require_intact_files(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    """Refuse files that are not as they were written. The ranks of `world` share the files, so a large checkpoint is read once."""
    for index, (name, entry) in enumerate(sorted(manifest["files"].items())):
        if name != tensor_files.INDEX_FILE and index % world.size != world.rank:
            continue
        path = folder / name
        for parent in path.relative_to(folder).parents:
            if (folder / parent).is_symlink() and parent.parts:
                raise tensor_files.damaged(folder / parent, "a symbolic link, not a folder")
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                if size != entry["bytes"]:
                    change = "cut short" if size < entry["bytes"] else "something was appended"
                    raise tensor_files.damaged(path, f"{size:,} bytes where {entry['bytes']:,} were written: {change}")
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise tensor_files.damaged(path, "missing") from None
        except (DocumentError, OSError) as error:
            raise tensor_files.damaged(path, error) from error
        if digest != entry["sha256"]:
            raise tensor_files.damaged(path, "its content changed since it was written")


@contextlib.contextmanager
def without_single_process_warning() -> Iterator[None]:
    """Suppress torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def read_full_tensors(checkpoint: StoredCheckpoint, prefix: str = "") -> dict[str, Tensor]:
    """The full stored tensors whose names begin with `prefix`, on the CPU."""
    cpu, names = torch.device("cpu"), [name for name in checkpoint.entries if name.startswith(prefix)]
    tensors = {name: checkpoint.allocate(name, "cpu", cpu) for name in names}
    checkpoint.load_into(tensors, is_single_process=True)
    return tensors

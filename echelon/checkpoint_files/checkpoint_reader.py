"""A checkpoint's files for reading: every byte is checked before it is used, and nothing in them can run code."""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from echelon.checkpoint_files.tensor_storage import (
    INDEX_FILE,
    TensorEntry,
    TensorLoadPlanner,
    TensorReader,
    read_index,
)
from echelon.errors import CheckpointError, DocumentError, IncompatibleCheckpointError
from echelon.plan.sealed_json import open_regular, read_regular, read_unsealed_format, unseal
from echelon.world import World

MANIFEST_FILE = "checkpoint.json"
CHECKPOINT_FORMAT = 5
#: What a manifest has, and of which kind.
_MANIFEST_FIELDS: dict[str, type | tuple[type, ...]] = {
    "step": int, "job": str, "plan": dict, "ranks": int, "parameters": dict, "optimizers": list, "schedules": list, "files": dict,
}  # fmt: skip
_SHA256_PATTERN = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint whose files were checked."""

    folder: Path
    manifest: dict[str, Any]
    entries: Mapping[str, TensorEntry]

    def load_into(self, targets: dict[str, Any], *, is_single_process: bool) -> None:
        """Load stored tensors into `targets`, each rank its own part; `is_single_process`: without the other ranks."""
        try:
            with without_single_process_warning():
                load_tensors(
                    targets,
                    storage_reader=TensorReader(self.folder, self.entries),
                    planner=TensorLoadPlanner(),
                    no_dist=is_single_process,
                )
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise CheckpointError(f"{self.folder}: could not be read ({error})") from error


def open_checkpoint(folder: Path, world: World | None = None) -> StoredCheckpoint:
    """The checkpoint in `folder`, or the reason why it cannot be used, naming the file. The ranks of `world` share the checking; without
    one, this process checks all of it."""
    manifest = read_manifest(folder)
    require_intact_files(folder, manifest, world or World())
    return StoredCheckpoint(folder, manifest, read_index(folder, manifest["files"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, or the reason why `folder` is none."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        reason = (
            "no such folder"
            if not folder.exists()
            else f"no {MANIFEST_FILE} in it: not an echelon checkpoint, or one cut short"
        )
        raise CheckpointError(f"{folder}: {reason}")
    try:
        data = read_regular(path)
        old_format = read_unsealed_format(data)
        if old_format in (1, 2):
            raise IncompatibleCheckpointError(
                f"{folder}: format {old_format}, which holds pickled data that this echelon does not read; export it with the echelon that wrote it "
                "(echelon export RUN model.safetensors) and start with weights= from that file, or give --fresh"
            )
        manifest = unseal(data, str(path))
    except (DocumentError, OSError) as error:
        reason_text = str(error) if isinstance(error, DocumentError) else f"{path}: {error.strerror}"
        raise CheckpointError(f"{reason_text}; use an older checkpoint") from error
    if manifest.get("format") != CHECKPOINT_FORMAT:
        raise IncompatibleCheckpointError(
            f"{folder}: format {manifest.get('format')}, this echelon reads {CHECKPOINT_FORMAT}; use the echelon that wrote it"
        )
    invalid_fields = [
        name for name, field_type in _MANIFEST_FIELDS.items() if not isinstance(manifest.get(name), field_type)
    ]
    if invalid_fields:
        raise CheckpointError(
            f"{path}: {', '.join(invalid_fields)} missing or of another type; use an older checkpoint"
        )
    for name, entry in manifest["files"].items():
        _require_valid_entry(folder, name, entry)
    if INDEX_FILE not in manifest["files"]:
        raise CheckpointError(f"{path}: does not list {INDEX_FILE}; use an older checkpoint")
    return manifest


def _require_valid_entry(folder: Path, name: str, entry: Any) -> None:
    parts = Path(name).parts
    if not name or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise CheckpointError(
            f"{folder / MANIFEST_FILE}: names {name!r}, which leaves the folder; use an older checkpoint"
        )
    is_valid = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
    if not is_valid or entry["bytes"] < 0 or not _SHA256_PATTERN.fullmatch(entry["sha256"]):
        raise CheckpointError(f"{folder / MANIFEST_FILE}: no size and hash for {name!r}; use an older checkpoint")


def require_intact_files(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    """Refuse files that are not as they were written. Each rank of `world` checks some, so that a large checkpoint is read once over all."""
    for index, (name, entry) in enumerate(sorted(manifest["files"].items())):
        if name != INDEX_FILE and index % world.size != world.rank:
            continue
        path = folder / name
        for parent in path.relative_to(folder).parents:
            if (folder / parent).is_symlink() and parent.parts:
                raise CheckpointError(f"{folder / parent}: a symbolic link, not a folder; use an older checkpoint")
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                if size != entry["bytes"]:
                    difference = "cut short" if size < entry["bytes"] else "something was appended"
                    raise CheckpointError(
                        f"{path}: {size:,} bytes where {entry['bytes']:,} were written: {difference}; use an older checkpoint"
                    )
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; use an older checkpoint") from None
        except (DocumentError, OSError) as error:
            reason = str(error) if isinstance(error, DocumentError) else f"{path}: {error.strerror}"
            raise CheckpointError(f"{reason}; use an older checkpoint") from error
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path}: its content changed since it was written; use an older checkpoint")


@contextlib.contextmanager
def without_single_process_warning() -> Iterator[None]:
    """Without torch's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def hash_file(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_full_tensors(checkpoint: StoredCheckpoint, prefix: str = "") -> dict[str, Tensor]:
    """Every stored tensor whose name begins with `prefix`, whole, on the CPU."""
    import torch

    tensors: dict[str, Any] = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in checkpoint.entries.items()
        if name.startswith(prefix)
    }
    checkpoint.load_into(tensors, is_single_process=True)
    return tensors

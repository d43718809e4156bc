"""A checkpoint's files, read by whoever needs them: checked first, and without running anything that they say."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from echelon.errors import CheckpointError, ForeignCheckpoint
from echelon.world import World

MANIFEST = "checkpoint.json"
FORMAT = 2


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
            raise ForeignCheckpoint(
                f"{folder}: format {manifest['format']}, this echelon reads {FORMAT}; use the echelon that wrote it"
            )
        return dict(manifest)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); use an older checkpoint") from error


def require_whole(folder: Path, manifest: dict[str, Any], world: World) -> None:
    """Refuse files that are not as they were written. Each rank of `world` checks some, so that a large checkpoint is read once over all."""
    for index, (name, entry) in enumerate(sorted(manifest["files"].items())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder}: its manifest names {name!r}, which leaves the folder")
        if index % world.size != world.rank:
            continue
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; use an older checkpoint")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{path}: {size:,} bytes where {entry['bytes']:,} were written: cut short; use an older checkpoint"
            )
        if sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path}: its content changed since it was written; use an older checkpoint")


class Reader(FileSystemReader):
    """torch's reader, except that its metadata (a pickle) may name only the classes that such metadata is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
                raise CheckpointError(f"{self.path}: its .metadata cannot be read ({error})") from error
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Finds by exact name alone: a module's namespace also holds what that module imports, `os` among it."""

    _NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "torch": ("Size",),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "collections": ("OrderedDict",),
        "pathlib": ("PosixPath", "PurePosixPath"),
        "pathlib._local": ("PosixPath", "PurePosixPath"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # some Python versions store an enum's member as getattr(Class, "NAME")
        dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        )
        if dtype or name in self._NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner[name]
    raise pickle.UnpicklingError(f"getattr of {owner!r} has no place in a checkpoint")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without torch's word that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

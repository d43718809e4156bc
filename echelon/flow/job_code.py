"""Digests of a job's functions, data and weights: equal in every process, and different once they do something else.

Functions count by their code, what they hold and what of the user's own code they name (data/packed/fingerprint.py). Arrays, lists,
mappings and bytes count whole up to a bound (`_FULL_HASH_BYTES` bytes in one description, `_MAX_ENTRIES` entries) and at many fixed positions above it. A
random generator counts by its type, because its state differs from launch to launch. So do values of parameters, which nobody may have
seeded: they have a digest of their own, `ValueDigest.parameter_values`.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import marshal
import os
import random
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.data.packed.fingerprint import FingerprintWalker, is_user_module
from echelon.errors import EchelonError
from echelon.plan.input_digests import ABSENT, digest_file

#: Bytes of arrays that are hashed whole (0.3 s); of larger ones, the number and the size of the blocks that are.
_FULL_HASH_BYTES, _SAMPLED_BLOCKS, _BLOCK_BYTES = 256 << 20, 4096, 16 << 10
#: Files of weights are hashed whole up to this size.
_FULL_HASH_FILE_BYTES = 1 << 30
#: How many entries of a container are described (of more, those at fixed positions), and how many files that they name.
_MAX_ENTRIES, _MAX_FILES = 20_000, 64
#: Things are described up to this many; what lies deeper has no say.
_MAX_OBJECTS = 400_000
#: Smaller numbers are no addresses of objects.
_MIN_ADDRESS = 1 << 32
_NAMESPACES = (Namespace, SimpleNamespace)
_GENERATORS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)
_HOOK_ATTRIBUTES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueDigest:
    """Digests of a value: what it does, and the values of the parameters that it holds ("" where it has none)."""

    code: str
    parameter_values: str = ""


def digest_value(
    value: Any,
    folder: Path | None = None,
    *,
    is_model: bool = False,
    include_length: bool = False,
    training_lengths: Collection[int] = (),
) -> ValueDigest:
    """What a field of a job does and holds. `folder`: where names of files in its code are looked for, besides the current one. `is_model`:
    buffers are values as well. `include_length`: its length counts. `training_lengths`: whole numbers that stand for the length of the training."""
    code_hasher, value_hasher = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    if include_length and hasattr(value, "__len__"):
        try:
            code_hasher.update(f"{len(value)} ".encode())
        except Exception:  # a data set without a length says so where it is opened
            code_hasher.update(b"no length ")
    folders = [Path.cwd(), *([folder] if folder is not None else [])]
    walker = _BoundedWalker(
        code_hasher.update,
        folders,
        write_values=value_hasher.update,
        is_model=is_model,
        training_lengths=frozenset(training_lengths),
    )
    try:
        walker.walk(value)
    except Exception:  # an object that answers no question about itself: it counts by its kind
        code_hasher.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    return ValueDigest(code_hasher.hexdigest(), value_hasher.hexdigest() if walker.has_values else "")


def digest_weights(path: str | Path) -> str:
    """What `weights=` names, by content: a file, an index and its files, or the checkpoint of a folder."""
    from echelon.checkpoint_files.checkpoint_reader import read_manifest
    from echelon.engine.weights import find_checkpoint, list_shards

    path = Path(path)
    try:
        if path.is_dir():
            files = read_manifest(find_checkpoint(path))["files"]
            return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        paths = [path, *(list_shards(path) if path.name.endswith(".index.json") else ())]
        stats = [(file, file.stat()) for file in paths]
    except (OSError, EchelonError):  # loading it raises the reason
        return ABSENT
    digests = [_file_hash(str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _file_hash(path: str, mtime_ns: int, size: int) -> str:
    """Of a file's content; `mtime_ns` and `size` invalidate the cache."""
    hasher = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _FULL_HASH_FILE_BYTES:
            while block := file.read(1 << 20):
                hasher.update(block)
        else:
            for offset in _even_positions(size - _BLOCK_BYTES, _SAMPLED_BLOCKS):
                file.seek(offset)
                hasher.update(file.read(_BLOCK_BYTES))
    return hasher.hexdigest()[:16]


class _BoundedWalker(FingerprintWalker):
    """A walk that is quick. `folders`: where files are that text may name. `values`: takes what parameters hold."""

    def __init__(
        self,
        write: Callable[[Any], Any],
        folders: Sequence[Path],
        *,
        write_values: Callable[[Any], Any],
        is_model: bool,
        training_lengths: frozenset[int],
    ) -> None:
        super().__init__(write, frozenset(name for folder in folders for name in os.listdir(folder)))
        self._folders, self._write_values, self._is_model, self._training_lengths = (
            folders,
            write_values,
            is_model,
            training_lengths,
        )
        self._remaining_bytes = _FULL_HASH_BYTES
        self._object_ids: frozenset[int] | None = None
        #: Whether anything went to `write_values`.
        self.has_values = False

    def visit(self, value: Any) -> None:
        """A small value, or the number of a thing that has its turn."""
        if isinstance(value, np.memmap):
            self.write_words("memory map", str(value.dtype), str(value.shape))
            self._write_array(value)
        elif isinstance(value, nn.Parameter):
            self._write_parameter("parameter", value)
        elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
            self._write_array(value)
        elif isinstance(value, bytes | bytearray):
            self.write_words("bytes", str(len(value)))
            self._write_bytes(np.frombuffer(value, dtype=np.uint8), self.write)
        elif type(value) is int and value in self._training_lengths:
            self.write_words("length")
        elif self._is_address(value):
            self.write_words("address")
        elif self.object_count < _MAX_OBJECTS or isinstance(value, str | int | float | bool | None):
            super().visit(value)

    def _is_address(self, value: Any) -> bool:
        """Whether it is the `id` of an object (a parameter): another one in each process."""
        if type(value) is not int or value < _MIN_ADDRESS:
            return False
        if self._object_ids is None:
            self._object_ids = frozenset(map(id, gc.get_objects()))
        return value in self._object_ids

    def visit_object(self, value: Any) -> None:
        """A thing in its turn."""
        dataset_fingerprint = getattr(value, "__dict__", {}).get("_fingerprint")  # of Hugging Face's data sets
        if isinstance(value, _GENERATORS):
            self.write_words("generator", type(value).__name__)
        elif isinstance(value, Set) and any(map(self._is_address, value)):
            other_items = {item for item in value if not self._is_address(item)}
            self.visit_parts("set with addresses", len(value), other_items)
        elif isinstance(value, Mapping) and any(map(self._is_address, value)):
            self.visit_parts("mapping by address", *value.values())  # in the order of insertion
        elif isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(dataset_fingerprint, str) and not isinstance(value, type):
            self.write_words(dataset_fingerprint)
        elif isinstance(value, list | tuple | Mapping | Set) and len(value) > _MAX_FILES:
            self._visit_container(value)
        elif isinstance(value, np.ndarray) and len(value.shape) and len(value) > _MAX_ENTRIES:
            self.visit_parts(
                f"objects {value.shape}",
                *(value[position] for position in _even_positions(len(value) - 1, _MAX_ENTRIES)),
            )
        elif (
            isinstance(value, torch.utils.data.Dataset)
            and not hasattr(value, "packed_collate")
            and not isinstance(value, list | tuple | Mapping | Set)
        ):
            self.visit_parts("data set", type(value), dict(vars(value)))
            if slots := _read_slots(value):
                self.visit(slots)
        else:
            super().visit_object(value)

    def visit_referenced(self, value: Any, used_names: Set[str]) -> None:
        """Of settings that many functions share (`config["lr"]`, `args.lr`) only those that this one names, where it names any."""
        entries = value if isinstance(value, Mapping) else vars(value) if type(value) in _NAMESPACES else None
        used_entries = (
            {key: entry for key, entry in entries.items() if key in used_names} if entries is not None else {}
        )
        self.visit(used_entries or value)

    def write_text(self, text: str | bytes) -> None:
        """Text; the path of a file counts with the file's content, not with its date."""
        self.write_words("text", repr(text))
        name = os.fsdecode(text)
        if (os.sep in name or (name in self._local_names and "." in name)) and len(name) < 1024 and "\0" not in name:
            file = next((folder / name for folder in self._folders if (folder / name).is_file()), None)
            if file is not None:
                self.write_words(digest_file(file))

    def class_name(self, value: type) -> str:
        """The user's own without its module: `python job.py` and `echelon train job.py` call that differently."""
        return value.__qualname__ if is_user_module(value.__module__) else super().class_name(value)

    def _visit_container(self, value: Any) -> None:
        """A long one: plain values at once, with some of the files that they may name; else one by one."""
        self.write_words(type(value).__name__, str(len(value)))
        if plain_bytes := _marshal_plain(value):
            self._write_bytes(np.frombuffer(plain_bytes, dtype=np.uint8), self.write)
            if isinstance(value, list | tuple):
                for position in _even_positions(len(value) - 1, _MAX_FILES):
                    self.visit(value[position])
            return
        if len(value) <= _MAX_ENTRIES:
            super().visit_object(value)
        elif isinstance(value, list | tuple):
            for position in _even_positions(len(value) - 1, _MAX_ENTRIES):
                self.visit(value[position])
        elif isinstance(value, Mapping):
            for item in itertools.islice(value.items(), 0, None, len(value) // _MAX_ENTRIES):
                self.visit(item)

    def _write_array(self, value: Any) -> None:
        self.write_words(type(value).__name__, str(value.dtype), str(tuple(value.shape)))
        for part in _raw_arrays(value):
            self._write_bytes(part, self.write)

    def _write_parameter(self, name: str, value: Tensor) -> None:
        self.write_words(name, str(value.dtype), str(tuple(value.shape)), str(value.requires_grad))
        self.has_values = True
        self._write_values(name.encode())
        for part in _raw_arrays(value):
            self._write_bytes(part, self._write_values)

    def _write_bytes(self, value: np.ndarray[Any, Any], write: Callable[[Any], Any]) -> None:
        """All of it while the bound allows, else blocks at fixed positions."""
        for part in _byte_blocks(value, in_full=value.nbytes <= self._remaining_bytes):
            write(part)
        self._remaining_bytes -= min(value.nbytes, self._remaining_bytes)

    def _visit_module(self, value: nn.Module) -> None:
        """Classes, settings and hooks of every part. Values of parameters, and of a model all of its tensors, have their own digest."""
        for name, submodule in value.named_modules():
            self.write_words("module", name)
            self.visit(type(submodule))
            own_attributes = {
                key: attribute for key, attribute in vars(submodule).items() if key not in _TORCH_ATTRIBUTES
            }
            self.visit({key: attribute for key, attribute in own_attributes.items() if _is_setting(attribute)})
            for key in _HOOK_ATTRIBUTES:
                if hooks := list(vars(submodule).get(key, {}).values()):
                    self.visit_parts(key, *hooks)
            for key, tensor in _find_tensors(own_attributes):
                self._write_tensor(f"{name}.{key}", tensor)
        for name, tensor in value.named_parameters():
            self._write_parameter(name, tensor)
        for name, tensor in value.named_buffers():
            self._write_tensor(name, tensor)

    def _write_tensor(self, name: str, value: Any) -> None:
        if self._is_model and isinstance(value, Tensor):
            self._write_parameter(name, value)
        else:
            self.write_words(name)
            self._write_array(value)


#: What torch itself keeps in every module.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_setting, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype) or callable(value)


def _find_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and arrays in containers, with their paths."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _find_tensors(item, f"{path}.{key}" if path else str(key))


def _read_slots(value: Any) -> dict[str, Any]:
    names = [name for base in type(value).__mro__ for name in _as_list(vars(base).get("__slots__", ()))]
    return {name: getattr(value, name) for name in sorted(names) if name[:2] != "__" and hasattr(value, name)}


def _as_list(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _marshal_plain(value: Any) -> bytes:
    """A container of plain values as bytes, equal in every process; empty where it holds anything else."""
    try:
        # Version 2: later ones mark objects that are used twice, which differs from process to process.
        if isinstance(value, Set):
            return b"".join(sorted(marshal.dumps(item, 2) for item in value))
        if isinstance(value, Mapping):
            return b"".join(sorted(marshal.dumps(item, 2) for item in value.items()))
        return marshal.dumps(list(value), 2) if type(value) in (list, tuple) else b""
    except (ValueError, TypeError):
        return b""


def _raw_arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """What an array or a tensor of any layout holds, as arrays of plain numbers."""
    if not isinstance(value, Tensor):
        yield value
    elif value.is_meta:
        return
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
        is_row_compressed = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from _raw_arrays(value.crow_indices() if is_row_compressed else value.ccol_indices())
        yield from _raw_arrays(value.col_indices() if is_row_compressed else value.row_indices())
        yield from _raw_arrays(value.values())
    elif value.layout is torch.sparse_coo:
        coalesced = value.detach().coalesce()
        yield from _raw_arrays(coalesced.indices())
        yield from _raw_arrays(coalesced.values())
    elif value.is_quantized:
        yield from _raw_arrays(value.dequantize())
    else:
        strided = value.detach().resolve_conj().resolve_neg()
        is_large_view = strided.nbytes > _FULL_HASH_BYTES and strided.dim() and not strided.is_contiguous()
        # A view of much memory is not copied: some rows of it are.
        chunks = (
            [strided[position] for position in _even_positions(len(strided) - 1, _SAMPLED_BLOCKS)]
            if is_large_view
            else [strided]
        )
        for chunk in chunks:
            yield chunk.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _byte_blocks(value: np.ndarray[Any, Any], *, in_full: bool) -> Iterator[bytes | memoryview]:
    if in_full or value.nbytes <= _SAMPLED_BLOCKS * _BLOCK_BYTES or not value.ndim:
        yield np.ascontiguousarray(value).tobytes() if value.ndim else value.tobytes()
    elif value.flags.c_contiguous:
        flat = value.reshape(-1)
        block_items = max(_BLOCK_BYTES // value.itemsize, 1)
        for position in _even_positions(len(flat) - block_items, _SAMPLED_BLOCKS):
            yield flat[position : position + block_items].tobytes()
    else:
        for position in _even_positions(len(value) - 1, _SAMPLED_BLOCKS):
            yield from _byte_blocks(np.asarray(value[position]), in_full=False)


def _even_positions(last: int, count: int) -> list[int]:
    """At most `count` different positions from 0 to `last`, evenly spread."""
    return sorted({index * last // (count - 1) for index in range(count)}) if last >= count else list(range(last + 1))

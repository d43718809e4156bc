"""Digests of a job's functions, data and weights: equal in every process, and different once they do something else.

Functions count by their code, their closures and the user's own code that they name (data/packed/fingerprint.py). Arrays, lists,
mappings and bytes count in full up to a bound (`_FULL_HASH_BYTES` per digest, `_MAX_ENTRIES` entries), and at many fixed positions
above it. A random generator counts by its type, because its state differs between launches. So may parameter values, which have a
digest of their own, `ValueDigest.parameter_values`.
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

Write = Callable[[Any], Any]

#: Bytes of arrays that are hashed in full (0.3 s); number and size of the blocks of larger ones.
_FULL_HASH_BYTES, _SAMPLED_BLOCKS, _BLOCK_BYTES = 256 << 20, 4096, 16 << 10
#: Files of weights are hashed in full up to this size.
_FULL_HASH_FILE_BYTES = 1 << 30
#: Entries of a container that are digested (of more, those at fixed positions), and files named by them.
_MAX_ENTRIES, _MAX_FILES = 20_000, 64
#: Objects that are digested; those that follow do not count.
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
    """Digests of a value's code and of the values of its parameters ("": none)."""

    code: str
    parameter_values: str = ""


def digest_value(
    value: Any,
    folder: Path | None = None,
    *,
    is_model: bool = False,
    include_length: bool = False,
    lengths: Collection[int] = (),
) -> ValueDigest:
    """The digest of a job's field. `folder`: where file names in its code are looked up, besides the current one. `is_model`: buffers are
    parameter values too. `include_length`: its length counts. `lengths`: integers that stand for the length of the training."""
    code, values = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    if include_length and hasattr(value, "__len__"):
        try:
            code.update(f"{len(value)} ".encode())
        except Exception:  # a data set without a length is reported where it is opened
            code.update(b"no length ")
    folders = [Path.cwd(), *([folder] if folder is not None else [])]
    walker = _BoundedWalker(code.update, values.update, folders, is_model=is_model, lengths=lengths)
    try:
        walker.walk(value)
    except Exception:  # an object that cannot be inspected: it counts by its type
        code.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    return ValueDigest(code.hexdigest(), values.hexdigest() if walker.has_values else "")


def digest_weights(path: str | Path) -> str:
    """The digest of what `weights=` names: a file, an index and its files, or the checkpoint of a folder."""
    from echelon.checkpoint_files.checkpoint_reader import read_manifest
    from echelon.engine.weights import find_checkpoint, list_shards

    path = Path(path)
    try:
        if path.is_dir():
            files = read_manifest(find_checkpoint(path))["files"]
            return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        paths = [path, *(list_shards(path) if path.name.endswith(".index.json") else ())]
        stats = [(file, file.stat()) for file in paths]
    except (OSError, EchelonError):  # loading it reports the reason
        return ABSENT
    digests = [_file_hash(str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _file_hash(path: str, mtime_ns: int, size: int) -> str:
    """Of a file; `mtime_ns` and `size` invalidate the cache."""
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
    """A walk in bounded time. `write_values` takes the values of parameters; text may name files in `folders`."""

    def __init__(
        self, write: Write, write_values: Write, folders: Sequence[Path], *, is_model: bool, lengths: Collection[int]
    ) -> None:
        super().__init__(write, frozenset(name for folder in folders for name in os.listdir(folder)))
        self._write_values, self._folders = write_values, folders
        self._is_model, self._training_lengths = is_model, frozenset(lengths)
        self._remaining_bytes = _FULL_HASH_BYTES
        self._object_ids: frozenset[int] | None = None
        #: Whether anything went to `write_values`.
        self.has_values = False

    def visit(self, value: Any) -> None:
        """A small value, or a reference to an object that is visited later."""
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
        """Whether it is the `id` of an object (a parameter), which differs between processes."""
        if type(value) is not int or value < _MIN_ADDRESS:
            return False
        if self._object_ids is None:
            self._object_ids = frozenset(map(id, gc.get_objects()))
        return value in self._object_ids

    def visit_object(self, value: Any) -> None:
        """An object whose turn has come."""
        is_container = isinstance(value, list | tuple | Mapping | Set)
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
        elif is_container and len(value) > _MAX_FILES:
            self._visit_container(value)
        elif isinstance(value, np.ndarray) and len(value.shape) and len(value) > _MAX_ENTRIES:
            positions = _even_positions(len(value) - 1, _MAX_ENTRIES)
            self.visit_parts(f"objects {value.shape}", *(value[position] for position in positions))
        elif isinstance(value, torch.utils.data.Dataset) and not (is_container or hasattr(value, "packed_collate")):
            self.visit_parts("data set", type(value), dict(vars(value)))
            if slots := _read_slots(value):
                self.visit(slots)
        else:
            super().visit_object(value)

    def visit_referenced(self, value: Any, used_names: Set[str]) -> None:
        """Of settings that functions share (`config["lr"]`, `args.lr`), only those that this function names, where it names any."""
        entries = vars(value) if type(value) in _NAMESPACES else value if isinstance(value, Mapping) else {}
        self.visit({key: entry for key, entry in entries.items() if key in used_names} or value)

    def write_text(self, text: str | bytes) -> None:
        """Text; a path counts with the file's content, not with its date."""
        self.write_words("text", repr(text))
        name = os.fsdecode(text)
        if (os.sep in name or (name in self._local_names and "." in name)) and len(name) < 1024 and "\0" not in name:
            file = next((folder / name for folder in self._folders if (folder / name).is_file()), None)
            if file is not None:
                self.write_words(digest_file(file))

    def class_name(self, value: type) -> str:
        """A user's class without its module, which `python job.py` and `echelon train job.py` name differently."""
        return value.__qualname__ if is_user_module(value.__module__) else super().class_name(value)

    def _visit_container(self, value: Any) -> None:
        """A long container: plain values at once, with some of the files that they may name; else one by one."""
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

    def _write_bytes(self, value: np.ndarray[Any, Any], write: Write) -> None:
        """In full while the bound allows, else blocks at fixed positions."""
        for part in _byte_blocks(value, in_full=value.nbytes <= self._remaining_bytes):
            write(part)
        self._remaining_bytes -= min(value.nbytes, self._remaining_bytes)

    def _visit_module(self, value: nn.Module) -> None:
        """Classes, settings and hooks of every submodule; values of parameters, and of a model all its tensors, go to their own digest."""
        for name, submodule in value.named_modules():
            self.write_words("module", name)
            self.visit(type(submodule))
            attributes = {key: item for key, item in vars(submodule).items() if key not in _TORCH_ATTRIBUTES}
            self.visit({key: attribute for key, attribute in attributes.items() if _is_setting(attribute)})
            for key in _HOOK_ATTRIBUTES:
                if hooks := list(vars(submodule).get(key, {}).values()):
                    self.visit_parts(key, *hooks)
            for key, tensor in _find_tensors(attributes):
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


#: Torch's own attributes of every module.
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
    slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
    names = {name for entry in slots for name in ([entry] if isinstance(entry, str) else entry)}
    return {name: getattr(value, name) for name in sorted(names) if name[:2] != "__" and hasattr(value, name)}


def _marshal_plain(value: Any) -> bytes:
    """A container of plain values as bytes, equal in every process; empty for any other."""
    try:
        # Version 2: later ones mark objects that are used twice, which differs between processes.
        if isinstance(value, Set):
            return b"".join(sorted(marshal.dumps(item, 2) for item in value))
        if isinstance(value, Mapping):
            return b"".join(sorted(marshal.dumps(item, 2) for item in value.items()))
        return marshal.dumps(list(value), 2) if type(value) in (list, tuple) else b""
    except (ValueError, TypeError):
        return b""


def _raw_arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The contents of an array or of a tensor of any layout, as arrays of plain numbers."""
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
        # Of a large view only some rows are copied.
        positions = _even_positions(len(strided) - 1, _SAMPLED_BLOCKS) if is_large_view else []
        for chunk in [strided[position] for position in positions] if is_large_view else [strided]:
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

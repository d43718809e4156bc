"""Digests of a job's functions, data and weights: equal in every process, and different once they do something else.

Functions count by their code, what they hold and what of the user's own code they name (data/packed/fingerprint.py). Arrays, lists,
mappings and bytes count whole up to a bound (`_WHOLE` bytes in one description, `_ROWS` entries) and at many fixed positions above it. A
random generator counts by its type, because its state differs from launch to launch. So do values of parameters, which nobody may have
seeded: they have a digest of their own, `Description.values`.
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

from echelon.data.packed.fingerprint import Walk, is_own
from echelon.errors import EchelonError
from echelon.plan.input_digests import ABSENT, digest_file

#: Bytes of arrays that are hashed whole (0.3 s); of larger ones, the number and the size of the blocks that are.
_WHOLE, _BLOCKS, _BLOCK = 256 << 20, 4096, 16 << 10
#: Files of weights are hashed whole up to this size.
_WHOLE_FILE = 1 << 30
#: How many entries of a container are described (of more, those at fixed positions), and how many files that they name.
_ROWS, _FILES = 20_000, 64
#: Things are described up to this many; what lies deeper has no say.
_THINGS = 400_000
#: Smaller numbers are no addresses of objects.
_ADDRESS = 1 << 32
_NAMESPACES = (Namespace, SimpleNamespace)
_GENERATORS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Description:
    """Digests of a value: what it does, and the values of the parameters that it holds ("" where it has none)."""

    code: str
    values: str = ""


def describe(
    value: Any, folder: Path | None = None, *, model: bool = False, length: bool = False, lengths: Collection[int] = ()
) -> Description:
    """What a field of a job does and holds. `folder`: where names of files in its code are looked for, besides the current one. `model`:
    buffers are values as well. `length`: its length counts. `lengths`: whole numbers that stand for the length of the training."""
    found, values = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    if length and hasattr(value, "__len__"):
        try:
            found.update(f"{len(value)} ".encode())
        except Exception:  # a data set without a length says so where it is opened
            found.update(b"no length ")
    folders = [Path.cwd(), *([folder] if folder is not None else [])]
    walk = _Brief(found.update, folders, values=values.update, model=model, lengths=frozenset(lengths))
    try:
        walk.whole(value)
    except Exception:  # an object that answers no question about itself: it counts by its kind
        found.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    return Description(found.hexdigest(), values.hexdigest() if walk.valued else "")


def describe_code(value: Any, folder: Path | None = None) -> str:
    """What a function, a class or a model does."""
    return describe(value, folder, model=True).code


def describe_data(value: Any) -> str:
    """What a data set holds, without reading a sample through its own code, which may draw random numbers."""
    return describe(value, length=True).code


def describe_weights(path: str | Path) -> str:
    """What `weights=` names, by content: a file, an index and its files, or the checkpoint of a folder."""
    from echelon.engine.checkpoint.checkpoint_reader import read_manifest
    from echelon.engine.weights import checkpoint_of, shards

    path = Path(path)
    try:
        if path.is_dir():
            files = read_manifest(checkpoint_of(path))["files"]
            return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        parts = [path, *(shards(path) if path.name.endswith(".index.json") else ())]
        states = [(each, each.stat()) for each in parts]
    except (OSError, EchelonError):  # loading it raises the reason
        return ABSENT
    digests = [_file_hash(str(each), state.st_mtime_ns, state.st_size) for each, state in states]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _file_hash(path: str, changed: int, size: int) -> str:
    """Of a file's content; `changed` and `size` invalidate the cache."""
    found = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _WHOLE_FILE:
            while block := file.read(1 << 20):
                found.update(block)
        else:
            for place in _places(size - _BLOCK, _BLOCKS):
                file.seek(place)
                found.update(file.read(_BLOCK))
    return found.hexdigest()[:16]


class _Brief(Walk):
    """A walk that is quick. `folders`: where files are that text may name. `values`: takes what parameters hold."""

    def __init__(
        self,
        write: Callable[[Any], Any],
        folders: Sequence[Path],
        *,
        values: Callable[[Any], Any],
        model: bool,
        lengths: frozenset[int],
    ) -> None:
        super().__init__(write, frozenset(name for folder in folders for name in os.listdir(folder)))
        self._folders, self._values, self._model, self._lengths = folders, values, model, lengths
        self._left = _WHOLE
        self._known: frozenset[int] | None = None
        #: Whether anything went to `values`.
        self.valued = False

    def feed(self, value: Any) -> None:
        """A small value, or the number of a thing that has its turn."""
        if isinstance(value, np.memmap):
            self.say("memory map", str(value.dtype), str(value.shape))
            self._array(value)
        elif isinstance(value, nn.Parameter):
            self._parameter("parameter", value)
        elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
            self._array(value)
        elif isinstance(value, bytes | bytearray):
            self.say("bytes", str(len(value)))
            self._bytes(np.frombuffer(value, dtype=np.uint8), self.write)
        elif type(value) is int and value in self._lengths:
            self.say("length")
        elif self._is_address(value):
            self.say("address")
        elif self.count < _THINGS or isinstance(value, str | int | float | bool | None):
            super().feed(value)

    def _is_address(self, value: Any) -> bool:
        """Whether it is the `id` of an object (a parameter): another one in each process."""
        if type(value) is not int or value < _ADDRESS:
            return False
        if self._known is None:
            self._known = frozenset(map(id, gc.get_objects()))
        return value in self._known

    def large(self, value: Any) -> None:
        """A thing in its turn."""
        identity = getattr(value, "__dict__", {}).get("_fingerprint")  # of Hugging Face's data sets
        if isinstance(value, _GENERATORS):
            self.say("generator", type(value).__name__)
        elif isinstance(value, Set) and any(map(self._is_address, value)):
            others = {each for each in value if not self._is_address(each)}
            self.all("set with addresses", len(value), others)
        elif isinstance(value, Mapping) and any(map(self._is_address, value)):
            self.all("mapping by address", *value.values())  # in the order of insertion
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(identity, str) and not isinstance(value, type):
            self.say(identity)
        elif isinstance(value, list | tuple | Mapping | Set) and len(value) > _FILES:
            self._container(value)
        elif isinstance(value, np.ndarray) and len(value.shape) and len(value) > _ROWS:
            self.all(f"objects {value.shape}", *(value[place] for place in _places(len(value) - 1, _ROWS)))
        elif (
            isinstance(value, torch.utils.data.Dataset)
            and not hasattr(value, "packed_collate")
            and not isinstance(value, list | tuple | Mapping | Set)
        ):
            self.all("data set", type(value), dict(vars(value)))
            if slots := _slots(value):
                self.feed(slots)
        else:
            super().large(value)

    def held(self, value: Any, used: Set[str]) -> None:
        """Of settings that many functions share (`config["lr"]`, `args.lr`) only those that this one names, where it names any."""
        entries = value if isinstance(value, Mapping) else vars(value) if type(value) in _NAMESPACES else None
        own = {key: each for key, each in entries.items() if key in used} if entries is not None else {}
        self.feed(own or value)

    def text(self, text: str | bytes) -> None:
        """Text; the path of a file counts with the file's content, not with its date."""
        self.say("text", repr(text))
        name = os.fsdecode(text)
        if (os.sep in name or (name in self._here and "." in name)) and len(name) < 1024 and "\0" not in name:
            found = next((folder / name for folder in self._folders if (folder / name).is_file()), None)
            if found is not None:
                self.say(digest_file(found))

    def class_name(self, value: type) -> str:
        """The user's own without its module: `python job.py` and `echelon train job.py` call that differently."""
        return value.__qualname__ if is_own(value.__module__) else super().class_name(value)

    def _container(self, value: Any) -> None:
        """A long one: plain values at once, with some of the files that they may name; else one by one."""
        self.say(type(value).__name__, str(len(value)))
        if plain := _plain_bytes(value):
            self._bytes(np.frombuffer(plain, dtype=np.uint8), self.write)
            if isinstance(value, list | tuple):
                for place in _places(len(value) - 1, _FILES):
                    self.feed(value[place])
            return
        if len(value) <= _ROWS:
            super().large(value)
        elif isinstance(value, list | tuple):
            for place in _places(len(value) - 1, _ROWS):
                self.feed(value[place])
        elif isinstance(value, Mapping):
            for each in itertools.islice(value.items(), 0, None, len(value) // _ROWS):
                self.feed(each)

    def _array(self, value: Any) -> None:
        self.say(type(value).__name__, str(value.dtype), str(tuple(value.shape)))
        for part in _parts(value):
            self._bytes(part, self.write)

    def _parameter(self, name: str, value: Tensor) -> None:
        self.say(name, str(value.dtype), str(tuple(value.shape)), str(value.requires_grad))
        self.valued = True
        self._values(name.encode())
        for part in _parts(value):
            self._bytes(part, self._values)

    def _bytes(self, value: np.ndarray[Any, Any], write: Callable[[Any], Any]) -> None:
        """All of it while the bound allows, else blocks at fixed positions."""
        for part in _blocks(value, whole=value.nbytes <= self._left):
            write(part)
        self._left -= min(value.nbytes, self._left)

    def _module(self, value: nn.Module) -> None:
        """Classes, settings and hooks of every part. Values of parameters, and of a model all of its tensors, have their own digest."""
        for name, part in value.named_modules():
            self.say("module", name)
            self.feed(type(part))
            own = {key: each for key, each in vars(part).items() if key not in _OF_TORCH}
            self.feed({key: each for key, each in own.items() if _is_setting(each)})
            for key in _HOOKS:
                if hooks := list(vars(part).get(key, {}).values()):
                    self.all(key, *hooks)
            for key, tensor in _tensors(own):
                self._tensor(f"{name}.{key}", tensor)
        for name, tensor in value.named_parameters():
            self._parameter(name, tensor)
        for name, tensor in value.named_buffers():
            self._tensor(name, tensor)

    def _tensor(self, name: str, value: Any) -> None:
        if self._model and isinstance(value, Tensor):
            self._parameter(name, value)
        else:
            self.say(name)
            self._array(value)


#: What torch itself keeps in every module.
_OF_TORCH = frozenset(vars(nn.Module()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_setting, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype) or callable(value)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and arrays in containers, with their paths."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from _tensors(each, f"{path}.{key}" if path else str(key))


def _slots(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in _as_names(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name) for name in sorted(names) if name[:2] != "__" and hasattr(value, name)}


def _as_names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _plain_bytes(value: Any) -> bytes:
    """A container of plain values as bytes, equal in every process; empty where it holds anything else."""
    try:
        # Version 2: later ones mark objects that are used twice, which differs from process to process.
        if isinstance(value, Set):
            return b"".join(sorted(marshal.dumps(each, 2) for each in value))
        if isinstance(value, Mapping):
            return b"".join(sorted(marshal.dumps(each, 2) for each in value.items()))
        return marshal.dumps(list(value), 2) if type(value) in (list, tuple) else b""
    except (ValueError, TypeError):
        return b""


def _parts(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """What an array or a tensor of any layout holds, as arrays of plain numbers."""
    if not isinstance(value, Tensor):
        yield value
    elif value.is_meta:
        return
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
        rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from _parts(value.crow_indices() if rows else value.ccol_indices())
        yield from _parts(value.col_indices() if rows else value.row_indices())
        yield from _parts(value.values())
    elif value.layout is torch.sparse_coo:
        together = value.detach().coalesce()
        yield from _parts(together.indices())
        yield from _parts(together.values())
    elif value.is_quantized:
        yield from _parts(value.dequantize())
    else:
        strided = value.detach().resolve_conj().resolve_neg()
        large = strided.nbytes > _WHOLE and strided.dim() and not strided.is_contiguous()
        # A view of much memory is not copied: some rows of it are.
        rows_of = [strided[place] for place in _places(len(strided) - 1, _BLOCKS)] if large else [strided]
        for each in rows_of:
            yield each.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _blocks(value: np.ndarray[Any, Any], *, whole: bool) -> Iterator[bytes | memoryview]:
    if whole or value.nbytes <= _BLOCKS * _BLOCK or not value.ndim:
        yield np.ascontiguousarray(value).tobytes() if value.ndim else value.tobytes()
    elif value.flags.c_contiguous:
        flat = value.reshape(-1)
        count = max(_BLOCK // value.itemsize, 1)
        for place in _places(len(flat) - count, _BLOCKS):
            yield flat[place : place + count].tobytes()
    else:
        for place in _places(len(value) - 1, _BLOCKS):
            yield from _blocks(np.asarray(value[place]), whole=False)


def _places(last: int, count: int) -> list[int]:
    """At most `count` different positions from 0 to `last`, evenly spread."""
    return sorted({place * last // (count - 1) for place in range(count)}) if last >= count else list(range(last + 1))

"""Brief digests of a job's functions and data: equal in every process, and other ones once they do something else.

Functions count by their code, what they hold and what of the user's own code they name (data/packed/fingerprint.py). Unlike there a
digest must take milliseconds: of arrays, long lists and files only a part is read, a model counts by its classes and settings and not
by its weights, and a random generator by its type, because its state differs from launch to launch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.data.packed.fingerprint import Walk, is_own
from echelon.plan.inputs import digest_file

#: Arrays up to so many bytes are digested whole; of longer ones, as of long lists, so many rows at fixed positions.
_WHOLE, _ROWS = 1 << 20, 64
#: Entries of a mapping up to which all are digested.
_ENTRIES = 1000
#: Things are described up to this many; what lies deeper has no say.
_THINGS = 20_000
_NAMESPACES = (Namespace, SimpleNamespace)
_GENERATORS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState, torch.Generator)


def describe_code(value: Any, folder: Path | None = None) -> str:
    """What a function, a class or a model does. `folder`: where names of files in its code are looked for, besides the current one."""
    return _described(value, folder=folder)


def describe_data(value: Any) -> str:
    """What a data set holds, without reading a sample through its own code, which may draw random numbers."""
    return _described(value, length=True)


def _described(value: Any, *, length: bool = False, folder: Path | None = None) -> str:
    found = hashlib.blake2b(digest_size=8)
    if length and hasattr(value, "__len__"):
        try:
            found.update(f"{len(value)} ".encode())
        except Exception:  # a data set without a length says so where it is opened
            found.update(b"no length ")
    try:
        _Brief(found.update, [Path.cwd(), *([folder] if folder is not None else [])]).whole(value)
    except Exception:  # an object that answers no question about itself: it counts by its kind
        found.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    return found.hexdigest()


class _Brief(Walk):
    """A walk that reads little. `folders`: where files are that text may name."""

    def __init__(self, write: Callable[[Any], Any], folders: Sequence[Path]) -> None:
        super().__init__(write, frozenset(name for folder in folders for name in os.listdir(folder)))
        self._folders = folders

    def feed(self, value: Any) -> None:
        """A small value, or the number of a thing that has its turn; of an array a part."""
        if isinstance(value, np.memmap):
            self.say("memory map", str(value.dtype), str(value.shape))
            self._array(value)
        elif isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
            self._array(value)
        elif isinstance(value, bytes) and len(value) > _WHOLE:
            super().feed(value[:_WHOLE])
            self.say(str(len(value)))
        elif self.count < _THINGS or isinstance(value, str | int | float | bool | None):
            super().feed(value)

    def large(self, value: Any) -> None:
        """A thing in its turn."""
        identity = getattr(value, "__dict__", {}).get("_fingerprint")  # of Hugging Face's data sets
        if isinstance(value, _GENERATORS):
            self.say("generator", type(value).__name__)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(identity, str) and not isinstance(value, type):
            self.say(identity)
        elif isinstance(value, list | tuple) and len(value) > _ROWS:
            self.say(type(value).__name__, str(len(value)))
            for place in _places(len(value)):
                self.feed(value[place])
        elif isinstance(value, Mapping) and len(value) > _ENTRIES:
            self.say(type(value).__name__, str(len(value)))
            for each in itertools.islice(value.items(), _ROWS):
                self.feed(each)
        elif isinstance(value, Set) and len(value) > _ENTRIES:
            self.say(type(value).__name__, str(len(value)))
        elif isinstance(value, np.ndarray) and len(value.shape) and len(value) > _ROWS:
            self.all(f"objects {value.shape}", *(value[place] for place in _places(len(value))))
        elif isinstance(value, torch.utils.data.Dataset) and not hasattr(value, "packed_collate"):
            self.all("data set", type(value), dict(vars(value)))
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

    def _array(self, value: Any) -> None:
        self.say(type(value).__name__, str(value.dtype), str(tuple(value.shape)))
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.device.type != "cpu":
                return
            value = value.detach().resolve_conj().resolve_neg()
            if value.numel() * value.element_size() > _WHOLE and value.dim():
                value = value[_places(len(value))] if len(value) > _ROWS else value.reshape(-1)[:_ROWS]
            value = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        elif value.nbytes > _WHOLE and value.ndim:
            value = value[_places(len(value))] if len(value) > _ROWS else value.reshape(-1)[:_ROWS]
        self.write(np.ascontiguousarray(value).tobytes()[: 4 * _WHOLE])

    def _module(self, value: nn.Module) -> None:
        """Classes and settings of every part; shapes and not values of parameters."""
        for name, part in value.named_modules():
            self.say("module", name)
            self.feed(type(part))
            own = {key: each for key, each in vars(part).items() if key not in _OF_TORCH}
            self.feed({key: each for key, each in own.items() if _is_setting(each)})
        for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
            self.say(name, str(tensor.dtype), str(tuple(tensor.shape)), str(tensor.requires_grad))


#: What torch itself keeps in every module.
_OF_TORCH = frozenset(vars(nn.Module()))


def _is_setting(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_setting, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype) or callable(value)


def _places(length: int) -> list[int]:
    return [place * (length - 1) // (_ROWS - 1) for place in range(_ROWS)]

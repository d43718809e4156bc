"""What a function or a data set does, as one short text: equal in another process, and another one once it does something else."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from echelon.data.digest import digest


def fingerprint(value: Any) -> str:
    """Functions count by their code, what they have taken with them, and the functions, classes and values of the user's own code
    that they name; objects by their class and what they hold; arrays by their content; paths of files by size and time of change.
    Installed packages count by their version."""
    found = hashlib.blake2b(digest_size=16)
    _Walk(found.update).feed(value)
    return found.hexdigest()


class _Walk:
    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self._seen: dict[int, tuple[int, Any]] = {}  # with the thing itself, or another may get its address

    def feed(self, value: Any) -> None:
        """Write down all that `value` is."""
        if isinstance(value, str | os.PathLike):
            self._text(os.fspath(value))
        elif value is None or isinstance(value, bool | int | float | complex | bytes | np.generic):
            self._say(type(value).__name__, repr(value))
        elif isinstance(value, np.memmap) and value.filename is not None:
            self._say("memory map", str(value.dtype), str(value.shape), str(value.offset))
            self._text(os.fspath(value.filename))
        elif isinstance(value, Tensor | np.ndarray):
            self._say(digest(value))
        elif id(value) in self._seen:
            self._say("seen", str(self._seen[id(value)][0]))
        else:
            self._seen[id(value)] = len(self._seen), value
            self._large(value)

    def _large(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._all("method", value.__func__, value.__self__)
        elif isinstance(value, partial):
            self._all("partial", value.func, value.args, value.keywords)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._say("module", value.__name__, _version(value.__name__))
        elif isinstance(value, Mapping):
            self._all("mapping", *sorted(value.items(), key=lambda item: repr(item[0])))
        elif isinstance(value, Set):
            self._say("set", *sorted(map(fingerprint, value)))
        elif isinstance(value, list | tuple):
            self._all(f"{type(value).__name__} {len(value)}", *value)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        self.feed(type(value))
        if hasattr(value, "manifests"):  # a packed data set, which knows what it holds
            self._say(value.identity)
            self.feed((value.transform, value.pad))
            return
        slots = {name: getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)}
        self.feed({**slots, **getattr(value, "__dict__", {})})

    def _function(self, value: types.FunctionType) -> None:
        self._say("function", value.__qualname__)
        if not _own(value.__module__):
            self._say(str(value.__module__), _version(value.__module__))
            return
        self._code(value.__code__)
        self.feed((value.__defaults__, value.__kwdefaults__))
        for cell in value.__closure__ or ():
            try:
                self.feed(cell.cell_contents)
            except ValueError:  # not filled yet
                self._say("empty")
        names = sorted({*_names(value.__code__)})
        for name in names:
            if name in value.__globals__:
                self._global(value.__globals__[name], names)

    def _global(self, value: Any, names: list[str]) -> None:
        self.feed(value)
        if isinstance(value, types.ModuleType) and _own(value.__name__):
            for name in names:  # `tools.clean(x)`: the function named after its module
                if name in vars(value):
                    self.feed(vars(value)[name])

    def _class(self, value: type) -> None:
        self._say("class", f"{value.__module__}.{value.__qualname__}")
        if not _own(value.__module__):
            self._say(_version(value.__module__))
            return
        for name, part in sorted(vars(value).items()):
            plain = part.__func__ if isinstance(part, staticmethod | classmethod) else part
            for each in (plain.fget, plain.fset) if isinstance(plain, property) else (plain,):
                if isinstance(each, types.FunctionType | int | float | str | tuple):
                    self._say(name)
                    self.feed(each)
        for base in value.__bases__:
            self.feed(base)

    def _code(self, code: types.CodeType) -> None:
        self._write(code.co_code)
        self._say(*code.co_names)
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._code(part)
            else:
                self.feed(part)

    def _text(self, text: str | bytes) -> None:
        self._say("text", repr(text))
        name = os.fsdecode(text)
        if os.sep in name and len(name) < 4096 and "\0" not in name:
            try:
                state = os.stat(name)
            except OSError:
                return
            if Path(name).is_file():  # a folder changes by what is written beside the data
                self._say(str(state.st_size), str(state.st_mtime_ns))

    def _all(self, kind: str, *parts: Any) -> None:
        self._say(kind)
        for part in parts:
            self.feed(part)

    def _say(self, *words: str) -> None:
        for word in words:
            self._write(f"{len(word)} {word} ".encode())


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names(part)


@cache
def _own(module: str | None) -> bool:
    """Whether it is the user's code, not an installed package or Python's own library."""
    if module is None or module.partition(".")[0] == "echelon":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"
    path = Path(file).resolve()
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return not installed and not path.is_relative_to(sysconfig.get_path("stdlib"))


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))

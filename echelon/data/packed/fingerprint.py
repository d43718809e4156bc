"""What a function or a data set does, as one short text: equal in another process, and another one once it does something else."""

from __future__ import annotations

import copyreg
import dis
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from echelon.data.packed.reader import Packed
from echelon.data.sample_digest import digest


def fingerprint(value: Any) -> str:
    """Functions count by their code, what they have taken with them, and the functions, classes and values of the user's own code
    that they name; objects by their class and what they hold, as pickle would send it; arrays by their content; paths of files by size
    and time of change. Installed packages count by their version, own modules that a function imports when it runs by their file."""
    return _walked(value, frozenset(os.listdir()))


def _walked(value: Any, here: frozenset[str]) -> str:
    found = hashlib.blake2b(digest_size=16)
    Walk(found.update, here).whole(value)
    return found.hexdigest()


class Walk:
    """Writes down what a value is. `here`: the names in the current folder, which text may name as files."""

    def __init__(self, write: Callable[[Any], Any], here: frozenset[str]) -> None:
        self.write, self._here = write, here
        self._numbers: dict[int, int] = {}  # of each thing, by its address
        self._things: list[Any] = []  # held, or another may get its address

    def whole(self, value: Any) -> None:
        """Write down all that `value` is. Things come in turn, not inside of each other: functions may call each other through any depth."""
        self.feed(value)
        for thing in self._things:  # which grows meanwhile
            self.large(thing)

    @property
    def count(self) -> int:
        """Things met so far."""
        return len(self._things)

    def feed(self, value: Any) -> None:
        """Write down a small value, or the number of a thing that has its turn."""
        if isinstance(value, str | os.PathLike):
            self.text(os.fspath(value))
        elif value is None or isinstance(value, bool | int | float | complex | np.generic):
            self.say(type(value).__name__, repr(value))
        elif isinstance(value, bytes):
            self.say("bytes", str(len(value)))
            self.write(value)
        elif isinstance(value, np.memmap) and value.filename is not None:
            self.say("memory map", str(value.dtype), str(value.shape), str(value.offset))
            self.text(os.fspath(value.filename))
        elif isinstance(value, Tensor | np.ndarray) and not (isinstance(value, np.ndarray) and value.dtype.hasobject):
            self.say(digest(value))
        else:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self._things)
                self._things.append(value)
            self.say("thing", str(self._numbers[id(value)]))

    def large(self, value: Any) -> None:
        """Write down a thing, whose parts have their turn later."""
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.all("method", value.__func__, value.__self__)
        elif isinstance(value, staticmethod | classmethod):
            self.all("method", value.__func__)
        elif isinstance(value, property):
            self.all("property", value.fget, value.fset)
        elif isinstance(value, partial):
            self.all("partial", value.func, value.args, value.keywords)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self.say("module", value.__name__, _version(value.__name__))
        elif isinstance(value, np.ndarray):
            self.all(f"objects {value.shape}", *value.reshape(-1).tolist())
        elif isinstance(value, Packed):
            self.say(value.identity)
            self.all("packed", value.transform, value.pad)
        elif isinstance(value, Mapping):
            plain = all(isinstance(key, str | bytes | int | float | None) for key in value)
            items = sorted(value.items(), key=lambda item: repr(item[0])) if plain else value.items()
            self.all(f"mapping {type(value).__name__}", *items, getattr(value, "__dict__", None))
        elif isinstance(value, Set):
            self.say("set", *sorted(_walked(part, self._here) for part in value))
        elif isinstance(value, list | tuple):
            self.all(f"{type(value).__name__} {len(value)}", *value, getattr(value, "__dict__", None))
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        self.feed(type(value))
        if "__wrapped__" in getattr(value, "__dict__", {}):  # a decorated function
            self.feed(value.__dict__["__wrapped__"])
        try:
            known = copyreg.dispatch_table.get(type(value))
            parts = value.__reduce_ex__(4) if known is None else known(value)
        except Exception:
            self._handle(value)
            return
        if isinstance(parts, str):
            self.say(parts)
            return
        made, given, *rest = parts
        self.all("made", made, given)
        for part in rest:  # its state, then, as iterators, items of it
            self.feed(list(part) if isinstance(part, Iterator) else part)

    def _handle(self, value: Any) -> None:
        """What cannot be sent to another process: memory by its content, a file by its name, a lock by nothing."""
        try:
            self.write(memoryview(value).tobytes())
        except TypeError:
            names = [getattr(value, name, None) for name in ("name", "filename")]
            self.all("handle", *(name for name in names if isinstance(name, str | os.PathLike)))
            self.feed(getattr(value, "__dict__", None))

    def _function(self, value: types.FunctionType) -> None:
        self.say("function", value.__qualname__)
        if not is_own(value.__module__):
            self.say(str(value.__module__), _version(value.__module__))
            return
        self._code(value.__code__)
        self.all("holds", value.__defaults__, value.__kwdefaults__, value.__dict__)
        codes = list(_codes(value.__code__))
        names = sorted({name for code in codes for name in (*code.co_names, *code.co_freevars)})
        constants = {part for code in codes for part in code.co_consts if isinstance(part, str)}
        for cell in value.__closure__ or ():
            try:
                self.held(cell.cell_contents, constants.union(names))
            except ValueError:  # not filled yet
                self.say("empty")
        names = sorted({name for code in codes for name in code.co_names})
        for name in names:
            if name in value.__globals__:
                self._global(value.__globals__[name], names, constants.union(names), set())
        package = str(value.__globals__.get("__package__") or "")
        for name in sorted({name for code in codes for name in _imported(code, package)}):
            file = _file_of(name)
            if file is not None and _is_own(file):
                self.say("import", name)
                self.write(file.read_bytes())

    def held(self, value: Any, used: Set[str]) -> None:
        """Write down what a function has taken with it or names. `used`: names and texts in its code."""
        self.feed(value)

    def _global(self, value: Any, names: list[str], used: Set[str], entered: set[str]) -> None:
        self.held(value, used)
        if isinstance(value, types.ModuleType) and is_own(value.__name__) and value.__name__ not in entered:
            entered.add(value.__name__)
            for name in names:  # `tools.image.clean(x)`: the function named after its modules
                if name in vars(value):
                    self._global(vars(value)[name], names, used, entered)

    def class_name(self, value: type) -> str:
        """How a class is named."""
        return f"{value.__module__}.{value.__qualname__}"

    def _class(self, value: type) -> None:
        self.say("class", self.class_name(value))
        if not is_own(value.__module__):
            self.say(_version(value.__module__))
            return
        for name, part in sorted(vars(value).items()):
            # Of what Python itself puts into a class only its methods do something.
            if isinstance(part, types.FunctionType) or not (name.startswith("__") or name == "_abc_impl"):
                self.say(name)
                self.feed(part)
        for base in value.__bases__:
            self.feed(base)

    def _code(self, code: types.CodeType) -> None:
        self.write(code.co_code)
        self.say(*code.co_names)
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._code(part)
            else:
                self.feed(part)

    def text(self, text: str | bytes) -> None:
        """Write down text, and of what file it may be the path."""
        self.say("text", repr(text))
        name = os.fsdecode(text)
        if (os.sep in name or name in self._here) and len(name) < 4096 and "\0" not in name:
            try:
                state = os.stat(name)
            except OSError:
                return
            if Path(name).is_file():  # a folder changes by what is written beside the data
                self.say(str(state.st_size), str(state.st_mtime_ns))

    def all(self, kind: str, *parts: Any) -> None:
        """Write down what kind of thing it is and its parts."""
        self.say(kind)
        for part in parts:
            self.feed(part)

    def say(self, *words: str) -> None:
        """Write down words."""
        for word in words:
            self.write(f"{len(word)} {word} ".encode(errors="surrogatepass"))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def _imported(code: types.CodeType, package: str) -> Iterator[str]:
    """The modules, or what may be one, that the code imports when it runs."""
    steps = list(dis.get_instructions(code))
    for place, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = (before.argval for before in steps[place - 2 : place])
            above = package.rsplit(".", level - 1)[0] if level else ""
            module = ".".join(part for part in (above, step.argval) if part)
            yield from accumulate(module.split("."), "{}.{}".format)  # the packages that it is in
            yield from (f"{module}.{name}" for name in names or ())


def _file_of(module: str) -> Path | None:
    """The file of a module, found without running it or a package around it."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    found = [Path(spec.origin)] if spec.origin and not rest else []
    for folder in (spec.submodule_search_locations or ()) if rest else ():
        found += [Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")]
    return next((path for path in found if path.is_file()), None)


@cache
def is_own(module: str | None) -> bool:
    """Whether it is the user's code, not an installed package or Python's own library."""
    if module is None or module.partition(".")[0] == "echelon":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" if file is None else _is_own(Path(file))


def _is_own(file: Path) -> bool:
    path = file.resolve()
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return not installed and not path.is_relative_to(sysconfig.get_path("stdlib"))


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))

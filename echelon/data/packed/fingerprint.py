"""Digests what a function or a data set does: equal in another process, different once it does something else."""

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
    """Digest a value. Functions count by their code, their closure, and the functions, classes and values of the user's own code that they
    name; objects by their class and state, as pickle would send them; arrays by content; paths of files by size and modification time;
    installed packages by version; own modules that a function imports when it runs by their file."""
    return _hash_value(value, frozenset(os.listdir()))


def _hash_value(value: Any, local_names: frozenset[str]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    FingerprintWalker(hasher.update, local_names).walk(value)
    return hasher.hexdigest()


class FingerprintWalker:
    """Hashes what a value is. `local_names`: the names in the current folder, which text may name as files."""

    def __init__(self, write: Callable[[Any], Any], local_names: frozenset[str]) -> None:
        self.write, self._local_names = write, local_names
        self._object_numbers: dict[int, int] = {}  # of each object, by its address
        self._objects: list[Any] = []  # kept alive, or another could get its address

    def walk(self, value: Any) -> None:
        """Hash all of `value`. Objects are queued, not nested: functions may call each other through any depth."""
        self.visit(value)
        for visited_object in self._objects:  # grows meanwhile
            self.visit_object(visited_object)

    @property
    def object_count(self) -> int:
        return len(self._objects)

    def visit(self, value: Any) -> None:
        """Hash a small value, or the number of a queued object."""
        if isinstance(value, str | os.PathLike):
            self.write_text(os.fspath(value))
        elif value is None or isinstance(value, bool | int | float | complex | np.generic):
            self.write_words(type(value).__name__, repr(value))
        elif isinstance(value, bytes):
            self.write_words("bytes", str(len(value)))
            self.write(value)
        elif isinstance(value, np.memmap) and value.filename is not None:
            self.write_words("memory map", str(value.dtype), str(value.shape), str(value.offset))
            self.write_text(os.fspath(value.filename))
        elif isinstance(value, Tensor | np.ndarray) and not (isinstance(value, np.ndarray) and value.dtype.hasobject):
            self.write_words(digest(value))
        else:
            if id(value) not in self._object_numbers:
                self._object_numbers[id(value)] = len(self._objects)
                self._objects.append(value)
            self.write_words("thing", str(self._object_numbers[id(value)]))

    def visit_object(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self.visit_parts("method", value.__func__, value.__self__)
        elif isinstance(value, staticmethod | classmethod):
            self.visit_parts("method", value.__func__)
        elif isinstance(value, property):
            self.visit_parts("property", value.fget, value.fset)
        elif isinstance(value, partial):
            self.visit_parts("partial", value.func, value.args, value.keywords)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.ModuleType):
            self.write_words("module", value.__name__, _module_version(value.__name__))
        elif isinstance(value, np.ndarray):
            self.visit_parts(f"objects {value.shape}", *value.reshape(-1).tolist())
        elif isinstance(value, Packed):
            self.write_words(value.identity)
            self.visit_parts("packed", value.transform, value.pad)
        elif isinstance(value, Mapping):
            has_plain_keys = all(isinstance(key, str | bytes | int | float | None) for key in value)
            items = sorted(value.items(), key=lambda item: repr(item[0])) if has_plain_keys else value.items()
            self.visit_parts(f"mapping {type(value).__name__}", *items, getattr(value, "__dict__", None))
        elif isinstance(value, Set):
            self.write_words("set", *sorted(_hash_value(part, self._local_names) for part in value))
        elif isinstance(value, list | tuple):
            self.visit_parts(f"{type(value).__name__} {len(value)}", *value, getattr(value, "__dict__", None))
        else:
            self._visit_instance(value)

    def _visit_instance(self, value: Any) -> None:
        self.visit(type(value))
        if "__wrapped__" in getattr(value, "__dict__", {}):  # a decorated function
            self.visit(value.__dict__["__wrapped__"])
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception:
            self._visit_unpicklable(value)
            return
        if isinstance(reduced, str):
            self.write_words(reduced)
            return
        constructor, arguments, *rest = reduced  # the rest: its state, then, as iterators, items of it
        self.visit_parts("made", constructor, arguments)
        for part in rest:
            self.visit(list(part) if isinstance(part, Iterator) else part)

    def _visit_unpicklable(self, value: Any) -> None:
        """Hash what cannot be sent to another process: memory by its content, a file by its name, a lock by nothing."""
        try:
            self.write(memoryview(value).tobytes())
        except TypeError:
            names = [getattr(value, name, None) for name in ("name", "filename")]
            self.visit_parts("handle", *(name for name in names if isinstance(name, str | os.PathLike)))
            self.visit(getattr(value, "__dict__", None))

    def _visit_function(self, value: types.FunctionType) -> None:
        self.write_words("function", value.__qualname__)
        if not is_user_module(value.__module__):
            self.write_words(str(value.__module__), _module_version(value.__module__))
            return
        self._visit_code(value.__code__)
        self.visit_parts("holds", value.__defaults__, value.__kwdefaults__, value.__dict__)
        code_objects = list(_nested_code_objects(value.__code__))
        names = sorted({name for code in code_objects for name in (*code.co_names, *code.co_freevars)})
        constants = {part for code in code_objects for part in code.co_consts if isinstance(part, str)}
        for cell in value.__closure__ or ():
            try:
                self.visit_referenced(cell.cell_contents, constants.union(names))
            except ValueError:  # not filled yet
                self.write_words("empty")
        names = sorted({name for code in code_objects for name in code.co_names})
        for name in names:
            if name in value.__globals__:
                self._visit_global(value.__globals__[name], names, constants.union(names), set())
        package = str(value.__globals__.get("__package__") or "")
        for name in sorted({name for code in code_objects for name in _imported_modules(code, package)}):
            file = _find_module_file(name)
            if file is not None and _is_user_file(file):
                self.write_words("import", name)
                self.write(file.read_bytes())

    def visit_referenced(self, value: Any, used_names: Set[str]) -> None:
        """Hash what a function names or has in its closure. `used_names`: names and texts in its code."""
        self.visit(value)

    def _visit_global(self, value: Any, names: list[str], used_names: Set[str], visited_modules: set[str]) -> None:
        self.visit_referenced(value, used_names)
        if not isinstance(value, types.ModuleType) or value.__name__ in visited_modules:
            return
        if is_user_module(value.__name__):
            visited_modules.add(value.__name__)
            for name in names:  # `tools.image.clean(x)`: the function named after its modules
                if name in vars(value):
                    self._visit_global(vars(value)[name], names, used_names, visited_modules)

    def class_name(self, value: type) -> str:
        return f"{value.__module__}.{value.__qualname__}"

    def _visit_class(self, value: type) -> None:
        self.write_words("class", self.class_name(value))
        if not is_user_module(value.__module__):
            self.write_words(_module_version(value.__module__))
            return
        for name, part in sorted(vars(value).items()):
            # Of what Python itself puts into a class, only methods matter.
            if isinstance(part, types.FunctionType) or not (name.startswith("__") or name == "_abc_impl"):
                self.write_words(name)
                self.visit(part)
        for base in value.__bases__:
            self.visit(base)

    def _visit_code(self, code: types.CodeType) -> None:
        self.write(code.co_code)
        self.write_words(*code.co_names)
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._visit_code(part)
            else:
                self.visit(part)

    def write_text(self, text: str | bytes) -> None:
        """Hash text, and the file that it may name."""
        self.write_words("text", repr(text))
        name = os.fsdecode(text)
        if (os.sep in name or name in self._local_names) and len(name) < 4096 and "\0" not in name:
            try:
                stat = os.stat(name)
            except OSError:
                return
            if Path(name).is_file():  # a folder changes with other files than the data
                self.write_words(str(stat.st_size), str(stat.st_mtime_ns))

    def visit_parts(self, kind: str, *parts: Any) -> None:
        self.write_words(kind)
        for part in parts:
            self.visit(part)

    def write_words(self, *words: str) -> None:
        for word in words:
            self.write(f"{len(word)} {word} ".encode(errors="surrogatepass"))


def _nested_code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _nested_code_objects(part)


def _imported_modules(code: types.CodeType, package: str) -> Iterator[str]:
    """The names that the code imports when it runs, which may be modules."""
    instructions = list(dis.get_instructions(code))
    for position, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level, names = (operand.argval for operand in instructions[position - 2 : position])
            parent_package = package.rsplit(".", level - 1)[0] if level else ""
            module = ".".join(part for part in (parent_package, instruction.argval) if part)
            yield from accumulate(module.split("."), "{}.{}".format)  # with the packages that it is in
            yield from (f"{module}.{name}" for name in names or ())


def _find_module_file(module: str) -> Path | None:
    """Find the file of a module without running it or its packages."""
    top_package, *rest = module.split(".")
    try:
        spec = find_spec(top_package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    candidates = [Path(spec.origin)] if spec.origin and not rest else []
    for folder in (spec.submodule_search_locations or ()) if rest else ():
        candidates += [Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")]
    return next((path for path in candidates if path.is_file()), None)


@cache
def is_user_module(module: str | None) -> bool:
    """Whether a module is the user's code, not an installed package or Python's library."""
    if module is None or module.partition(".")[0] == "echelon":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" if file is None else _is_user_file(Path(file))


def _is_user_file(file: Path) -> bool:
    path = file.resolve()
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return not installed and not path.is_relative_to(sysconfig.get_path("stdlib"))


def _module_version(module: str) -> str:
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))

"""Which modules of this repository a test file loads; in a full run the others are out of sys.modules while it runs.

pytest has loaded every test file before it runs the first. All of them would count as the user's sources of each job that is
trained in that process (`user_files`): seconds of parsing per training, and not what is there where the file runs alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_OURS = ("tests", "bench", "examples")


def ours(name: str) -> bool:
    """Whether a module of this name belongs to the repository, but not to echelon itself."""
    return name.partition(".")[0] in _OURS


@cache
def imported(file: Path, package: str) -> tuple[frozenset[str], bool]:
    """Names that the source imports anywhere, in functions too: modules, their packages, and what may be a module of them; and
    whether it imports by names that are known only when it runs."""
    found: set[str] = set()
    dynamic = False
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call):
            dynamic |= ast.unparse(node.func).endswith("import_module")
    return frozenset(found), dynamic


def reached(roots: Iterable[str]) -> set[str]:
    """The loaded modules of ours that `roots` are, lie in, or import, at any remove."""
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        if module is None or name in found or not ours(name):
            continue
        found.add(name)
        left.append(name.rpartition(".")[0])
        if module.__file__ is not None:
            package = module.__package__ or ""
            names, dynamic = imported(Path(module.__file__), package)
            left += names
            if dynamic:  # modules beside it, which register themselves: loaded again, they would do so twice
                left += [each for each in sys.modules if each.startswith(f"{package}.")]
    return found


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Only what the module of this name needs, and the fixtures, is loaded of ours; the rest is back afterwards."""
    kept = reached([name, *(each for each in sys.modules if ours(each) and each.endswith("conftest"))])
    hidden = {each: module for each, module in sys.modules.items() if ours(each) and each not in kept}
    for each in hidden:
        del sys.modules[each]
    try:
        yield
    finally:
        sys.modules.update(hidden)

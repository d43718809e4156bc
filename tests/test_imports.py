"""No two modules of the package import each other, not even by way of others or for annotations only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import echelon

ROOT = Path(echelon.__file__).parent
#: Packages with cycles that are still to be resolved.
UNRESOLVED = {"plan", "partition"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, modules: frozenset[str]) -> Iterator[str]:
    """Also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def find_cycle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules each of which imports the next, and the last the first."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return None
        cycle = next((cycle for other in sorted(imports[name]) if (cycle := visit(other, [*trail, name]))), None)
        done.add(name)
        return cycle

    return next((cycle for name in sorted(imports) if (cycle := visit(name, []))), None)


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()))
def test_modules_do_not_import_each_other(package: str) -> None:
    paths = {module_name(path): path for path in (ROOT / package).rglob("*.py")}
    modules = frozenset(paths)
    cycle = find_cycle({name: {*imported(path, modules)} & modules - {name} for name, path in paths.items()})
    if package in UNRESOLVED:
        assert cycle is not None, f"{package} is clean: take it off the list"
    else:
        assert cycle is None, " imports ".join([*cycle, cycle[0]])

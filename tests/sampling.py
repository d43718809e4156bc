"""Tables of tests that are too long to run whole each time: a sample by default, all of them with ECHELON_ZOO=all.

Each commit draws another sample, so that all of a table has its turn; ECHELON_SEED, which pytest's header tells, draws one again.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest


def seed_of(environment: Mapping[str, str]) -> str:
    """The seed that is asked for, or where git stands; the sources may have been given without it."""
    if environment.get("ECHELON_SEED"):
        return environment["ECHELON_SEED"]
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return found.stdout.strip()


SEED = seed_of(os.environ)


def drawing(table: str, seed: str = SEED) -> random.Random:
    """What a sample of a table is drawn by."""
    return random.Random(f"{seed} {table}")


WHOLE = os.environ.get("ECHELON_ZOO") == "all"
only_whole = pytest.mark.skipif(not WHOLE, reason="ECHELON_ZOO=all runs it")

Row = TypeVar("Row")


def some(table: str, rows: Iterable[Row], count: int, seed: str = SEED) -> list[Row]:
    """So many rows, drawn by the commit; all rows where the whole table is asked for."""
    every = list(rows)
    return every if WHOLE else [every[place] for place in sorted(drawing(table, seed).sample(range(len(every)), count))]


def one_of_each(table: str, rows: Iterable[Row], kind: Callable[[Row], Hashable], seed: str = SEED) -> list[Row]:
    """A row of every kind, drawn by the commit; all rows where the whole table is asked for."""
    kinds: dict[Hashable, list[Row]] = {}
    for row in rows:
        kinds.setdefault(kind(row), []).append(row)
    draw = drawing(table, seed)
    return [row for alike in kinds.values() for row in (alike if WHOLE else [draw.choice(alike)])]


def pairs(
    rows: Iterable[str], columns: Iterable[str], *, each: int, table: str = "", seed: str = SEED
) -> list[tuple[str, str]]:
    """(row, column): every row with `each` columns, another set of them from row to row, so that every column has its turn.

    With a `table`, the commit draws where the first row begins: every pair has its turn.
    """
    names = list(columns)
    if table:
        start = drawing(table, seed).randrange(len(names))
        names = names[start:] + names[:start]
    return [
        (row, name)
        for place, row in enumerate(rows)
        for number, name in enumerate(names)
        if WHOLE or (number - place * each) % len(names) < each
    ]

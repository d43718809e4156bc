"""Tables of tests that are too long to run whole each time: a fixed sample by default, all of them with ECHELON_ZOO=all."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

WHOLE = os.environ.get("ECHELON_ZOO") == "all"
only_whole = pytest.mark.skipif(not WHOLE, reason="ECHELON_ZOO=all runs it")


def pairs(rows: Iterable[str], columns: Iterable[str], *, each: int) -> list[tuple[str, str]]:
    """(row, column): every row with `each` columns, another set of them from row to row, so that every column has its turn."""
    names = list(columns)
    return [
        (row, name)
        for place, row in enumerate(rows)
        for number, name in enumerate(names)
        if WHOLE or (number - place * each) % len(names) < each
    ]

"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echelon.testing.ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Rank processes, started on first need and shared by the whole session: `ranks.run(4, function, *args)`."""
    with Pool() as pool:
        yield pool

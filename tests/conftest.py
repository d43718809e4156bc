"""Fixtures that many tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.testing.ranks import Pool

# Small tensors on several threads are slower, and ranks inherit it: read by torch when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Rank processes, started on first need and shared by the whole session: `ranks.run(4, function, *args)`."""
    with Pool() as pool:
        yield pool


@pytest.fixture(scope="session")
def known_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder (ECHELON_CACHE) in which this machine is measured already; measured once for the session."""
    from echelon.plan.store import Store
    from echelon.profiler import measure

    folder = tmp_path_factory.mktemp("cache")
    measure(store=Store(folder))
    return folder

"""Fixtures that many tests share."""

from __future__ import annotations

import os
import subprocess
import sys
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
    from tests.machine import environment

    folder = tmp_path_factory.mktemp("cache")
    subprocess.run(
        [sys.executable, "-m", "echelon", "doctor", "--json"],
        env=environment(folder),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder

"""Fixtures that many tests share."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from echelon.testing.rank_pool import RankPool
from tests.sampling import SEED, WHOLE, drawing

# Small tensors on several threads are slower, and ranks inherit it: read by torch when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests of something else start without a proof of their plan; those of the gate say so (tests/flow/test_gate.py).
os.environ.setdefault("ECHELON_VERIFY", "0")
# Started by nohup, or behind an `&` in a script, these would be ignored here and in every process that a test starts and interrupts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes tells about the machine's other work, not about what is tested.
hypothesis.settings.register_profile("echelon", deadline=None)
hypothesis.settings.load_profile("echelon")


def pytest_report_header() -> str:
    """By what the samples of long tables are drawn."""
    return f"samples of long tables: ECHELON_SEED={SEED} draws these again"


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Whatever a test did, or had done, torch's default is as it was: proofs work in another one."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_default_dtype() is not torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail("torch's default dtype was left changed")


#: Of the tests that `make test` leaves out, the part that `--tier slice` draws by the commit.
SLICE = 0.4


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tier`: which tests run, by what they are marked with."""
    parser.addoption(
        "--tier",
        choices=("quick", "slice", "all"),
        default="all",
        help="quick: without `slow` and `extra`, but with every `journey`; slice: a part of the others, drawn by the commit; all (default)",
    )


def is_quick(item: pytest.Item) -> bool:
    """Whether `make test` runs it."""
    marks = {mark.name for mark in item.iter_markers()}
    return "journey" in marks or not marks & {"slow", "extra"}


def in_tier(item: pytest.Item, tier: str) -> bool:
    """Whether a tier has this test."""
    if tier == "slice":
        return not is_quick(item) and drawing(f"slice {item.nodeid}").random() < SLICE
    return tier == "all" or is_quick(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tier's tests. Files with many slow ones come first: begun last, one of them would leave a core idle in the end."""
    tier = config.getoption("--tier")
    kept = [item for item in items if in_tier(item, tier)]
    config.hook.pytest_deselected(items=[item for item in items if not in_tier(item, tier)])
    slow = Counter(item.path for item in kept if item.get_closest_marker("slow"))
    items[:] = sorted(kept, key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, started on first need and shared by the whole session: `ranks.run(4, function, *args)`."""
    with RankPool() as pool:
        yield pool


#: `echelon doctor` with less time for its trials: figures of this machine, for fewer operators. ECHELON_ZOO=all measures it all.
_DOCTOR = """
from echelon.cli.app import app
from echelon.hardware import measure_cluster
measure_cluster._MAX_SECONDS.update(cpu=2.0, cuda=4.0)
app(["doctor", "--json"])
"""


@pytest.fixture(scope="session")
def known_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder (ECHELON_CACHE) in which this machine is measured already; measured once for the session.

    Workers of pytest-xdist share it: their folders have one parent, and the first to hold the lock measures.
    """
    from tests.machine import environment

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "known-machine"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "measured").exists():
            doctor = [sys.executable, *(["-m", "echelon", "doctor", "--json"] if WHOLE else ["-c", _DOCTOR])]
            subprocess.run(doctor, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
            (folder / "measured").touch()
    return folder

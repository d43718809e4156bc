"""Fixtures that many tests share."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from echelon.testing.ranks import Pool

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
    from tests.whole import SEED

    return f"samples of long tables: ECHELON_SEED={SEED} draws these again"


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Whatever a test did, or had done, torch's default is as it was: proofs work in another one."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_default_dtype() is not torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail("torch's default dtype was left changed")


#: Files that take minutes, or have a few tests that each take half of one: begun last, one of them would leave a core idle in the end.
_LONG = (
    "zoo/test_zoo", "verifier/test_verifier_faults", "examples/", "faults/", "flow/test_scripts", "flow/test_gate", "cli/test_verbs", "flow/",
    "bench/", "server/test_client", "engine/test_recompute", "engine/test_axes", "engine/test_checkpoint", "data/test_packed_training", "profiler/",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; `make test` gives files to cores in this order."""
    here = Path(__file__).parent
    files = {item.path: item.path.relative_to(here).as_posix() for item in items}
    places = {
        path: next((place for place, name in enumerate(_LONG) if file.startswith(name)), len(_LONG))
        for path, file in files.items()
    }
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Rank processes, started on first need and shared by the whole session: `ranks.run(4, function, *args)`."""
    with Pool() as pool:
        yield pool


#: `echelon doctor` with less time for its trials: figures of this machine, for fewer operators. ECHELON_ZOO=all measures it all.
_DOCTOR = """
from echelon.cli.app import app
from echelon.profiler import machine
machine._SECONDS.update(cpu=2.0, cuda=4.0)
app(["doctor", "--json"])
"""


@pytest.fixture(scope="session")
def known_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder (ECHELON_CACHE) in which this machine is measured already; measured once for the session.

    Workers of pytest-xdist share it: their folders have one parent, and the first to hold the lock measures.
    """
    from tests.machine import environment
    from tests.whole import WHOLE

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

"""The public names: adding one is a decision, and each must be there."""

from __future__ import annotations

import subprocess
import sys

import echelon


def test_the_public_names_are_these() -> None:
    assert echelon.__all__ == [
        "Job", "Cluster", "Profile", "Plan", "Forecast", "Certificate", "profile", "measure", "search", "simulate", "verify",
        "train", "parallelize", "EchelonError",
    ]  # fmt: skip


def test_every_public_name_is_there_and_shown() -> None:
    for name in echelon.__all__:
        assert getattr(echelon, name).__name__ == name
    assert set(echelon.__all__) <= set(dir(echelon))


def test_importing_echelon_imports_no_torch() -> None:
    code = "import sys, echelon; echelon.Plan, echelon.search; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

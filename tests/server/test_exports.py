"""The names that `echelon.server` gives, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import echelon.server


def test_public_names_are_these():
    assert echelon.server.__all__ == ["Servers", "connect", "Client", "Table", "Dense", "Rule", "Init"]
    assert all(getattr(echelon.server, name) is not None for name in echelon.server.__all__)


def test_importing_it_loads_neither_torch_nor_numba():
    code = "import sys, echelon.server; echelon.server.Table; print({'torch', 'numba'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"

"""The public face: few names, loaded lazily, without side effects."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import echelon
from echelon.flow.settings import SETTING_TYPES, Settings

NAMES = {
    "Job", "Cluster", "Profile", "Plan", "Forecast", "Certificate", "TrainResult", "EchelonError",
    "profile", "measure", "search", "simulate", "verify", "train", "parallelize",
}  # fmt: skip


def test_every_public_name_exists_and_no_other() -> None:
    assert set(echelon.__all__) == NAMES
    assert len(echelon.__all__) == len(NAMES)
    assert all(getattr(echelon, name).__module__.startswith("echelon.") for name in NAMES)
    assert set(dir(echelon)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = echelon.trian


def test_import_loads_no_module_and_sets_no_variable() -> None:
    code = (
        "import os, sys; environment, modules = dict(os.environ), set(sys.modules); import echelon; "
        "added = {name.partition('.')[0] for name in set(sys.modules) - modules}; "
        "print(sorted(added - set(sys.stdlib_module_names)), dict(os.environ) == environment)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['echelon'] True\n"


def test_the_keywords_of_train_are_the_settings_of_the_command_line() -> None:
    keywords = inspect.signature(echelon.train).parameters
    assert set(SETTING_TYPES) - {"plan"} == set(Settings.__slots__)
    assert set(keywords) == {"job", "listeners", *SETTING_TYPES}
    assert all(f"\n        {name}: " in str(echelon.train.__doc__) for name in keywords)
    with pytest.raises(TypeError, match="unexpected keyword argument 'folder'"):
        echelon.train(lambda: None, folder="x")  # type: ignore[call-arg, arg-type, return-value]

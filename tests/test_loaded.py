"""While a test file runs, only the modules that it needs are loaded of this repository."""

from __future__ import annotations

import sys

from tests import loaded, whole


def test_what_a_file_imports_stays_and_the_rest_is_back_afterwards() -> None:
    import tests.simulator.cases
    import tests.zoo.data

    before = dict(sys.modules)
    with loaded.alone("tests.simulator.cases"):
        assert sys.modules["tests.simulator.cases"] is tests.simulator.cases
        assert "tests.conftest" in sys.modules
        assert "tests.zoo.data" not in sys.modules
    assert {name: sys.modules[name] for name in before} == before
    assert tests.zoo.data is sys.modules["tests.zoo.data"]


def test_imports_in_functions_and_of_modules_from_packages_are_found() -> None:
    found = loaded.reached([__name__])
    assert {__name__, "tests", loaded.__name__, whole.__name__} <= found


def test_no_other_test_file_is_loaded_while_this_one_runs() -> None:
    files = [name for name in sys.modules if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")]
    assert files == [__name__]


def test_modules_that_are_imported_by_a_computed_name_stay() -> None:
    from bench.adversary import spec

    names = {entry.make.__module__ for entry in spec.catalogue().values()}
    assert names
    assert names <= loaded.reached([spec.__name__])

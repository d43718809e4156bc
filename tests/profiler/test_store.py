"""Kept documents: found while they hold, remade when anything they were made from changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.plan.document_cache import DocumentCache, hash_files, installed_versions, user_source_files
from echelon.plan.plan import Plan

NOW = {"torch": "1", "echelon": "2"}


@pytest.fixture
def store(tmp_path: Path) -> DocumentCache:
    return DocumentCache(tmp_path / "cache")


def test_what_was_put_is_found_by_kind_and_key(store: DocumentCache) -> None:
    store.put("a", Plan(zero=1), versions=NOW)
    assert store.get(Plan, "a", versions=NOW) == Plan(zero=1)
    assert store.get(Plan, "b", versions=NOW) is None
    store.put("a", Plan(zero=2), versions=NOW)
    assert store.get(Plan, "a", versions=NOW) == Plan(zero=2)


def test_a_failed_write_leaves_nothing_behind(store: DocumentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.put("a", Plan(), versions=NOW)
    assert list(store.folder.iterdir()) == []


def test_another_version_is_not_used(store: DocumentCache) -> None:
    store.put("a", Plan(), versions=NOW)
    assert store.get(Plan, "a", versions=NOW | {"torch": "9"}) is None


def test_a_changed_or_missing_source_is_not_used(store: DocumentCache, tmp_path: Path) -> None:
    source = tmp_path / "job.py"
    source.write_text("one")
    store.put("a", Plan(), versions=NOW, sources=hash_files([source]))
    assert store.get(Plan, "a", versions=NOW) == Plan()
    source.write_text("two")
    assert store.get(Plan, "a", versions=NOW) is None
    source.unlink()
    assert store.get(Plan, "a", versions=NOW) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "a"}', "\x00"])
def test_a_damaged_entry_counts_as_absent(store: DocumentCache, text: str) -> None:
    path = store.put("a", Plan(), versions=NOW)
    path.write_text(text)
    assert store.get(Plan, "a", versions=NOW) is None
    assert [entry.is_valid for entry in store.list_entries(versions=NOW)] == [False]
    store.put("a", Plan(), versions=NOW)
    assert store.get(Plan, "a", versions=NOW) == Plan()


def test_a_damaged_document_inside_counts_as_absent(store: DocumentCache) -> None:
    path = store.put("a", Plan(zero=1), versions=NOW)
    path.write_text(path.read_text().replace('\\"zero\\": 1', '\\"zero\\": 7'))
    assert store.get(Plan, "a", versions=NOW) is None


def test_show_and_clear(store: DocumentCache) -> None:
    assert store.list_entries(versions=NOW) == ()
    assert store.clear() == 0
    store.put("a", Plan(), versions=NOW)
    store.put("b", Plan(), versions={"torch": "old"})
    assert sorted((entry.key, entry.is_valid) for entry in store.list_entries(versions=NOW)) == [
        ("a", True),
        ("b", False),
    ]
    assert store.clear() == 2
    assert store.get(Plan, "a", versions=NOW) is None
    assert not list(store.folder.glob("*.partial"))


def test_user_files_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net_for_store.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_net_for_store  # type: ignore[import-not-found]

    found = user_source_files(
        {"own": my_net_for_store, "json": sys.modules["json"], "pytest": pytest, "us": sys.modules["echelon.errors"]}
    )
    assert found == [(tmp_path / "my_net_for_store.py").resolve()]


def test_looking_things_up_needs_no_torch() -> None:
    code = (
        "import sys; from echelon.hardware import known_cluster; from echelon.planner import search; known_cluster(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_versions_name_torch_and_echelon() -> None:
    assert {"torch", "echelon", "python"} == set(installed_versions())
    assert installed_versions(["no-such-package"])["no-such-package"] == "missing"

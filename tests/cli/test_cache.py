"""What is kept between runs can be seen and cleared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.data.packed.remote_cache import FileCache
from echelon.plan.document_cache import DocumentCache, installed_versions
from echelon.plan.plan import Plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def cache(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["cache", *arguments])
    assert answer.exit_code == 0
    return answer.stdout


def test_show_tells_what_is_kept_and_whether_it_holds(folder: Path) -> None:
    assert ": empty" in cache("show")
    DocumentCache(folder).put("mine.py:job", Plan(), versions=installed_versions())
    DocumentCache(folder).put("old.py:job", Plan(zero=1), versions={"torch": "1.0"})
    text = cache("show")
    assert "mine.py:job" in text
    assert "stale" in text
    kept = {entry["key"]: entry["good"] for entry in json.loads(cache("show", "--json"))["entries"]}
    assert kept == {"mine.py:job": True, "old.py:job": False}


def test_copies_of_remote_data_are_shown_and_cleared_unless_somebody_reads_them(folder: Path) -> None:
    copies = FileCache(folder / "data", 100)
    copies.acquire("a", 10, lambda path: None).close()
    held = copies.acquire("b", 20, lambda path: None)
    (folder / "data/mine.txt").write_text("mine")
    assert "2 copies of remote data" in " ".join(cache("show").split())
    assert json.loads(cache("show", "--json"))["copies"] == {"folder": str(folder / "data"), "files": 2, "bytes": 30}
    assert f"1 copy of remote data deleted from {folder / 'data'}; 1 in use left there" in cache("clear")
    assert {path.name for path in (folder / "data").iterdir()} == {held.path.name, "mine.txt", "room.lock"}
    held.close()
    assert json.loads(cache("clear", "--json"))["copies"] == {"cleared": 1, "in_use": 0}


def test_clear_deletes_all_of_it(folder: Path) -> None:
    DocumentCache(folder).put("mine.py:job", Plan(), versions=installed_versions())
    assert json.loads(cache("clear", "--json"))["cleared"] == 1
    assert DocumentCache(folder).list_entries(versions=installed_versions()) == ()
    assert "0 documents" in cache("clear")

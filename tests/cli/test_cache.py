"""What is kept between runs can be seen and cleared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.plan.plan import Plan
from echelon.plan.store import Store, installed_versions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def cache(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["cache", *arguments])
    assert answer.exit_code == 0
    return answer.stdout


def test_show_tells_what_is_kept_and_whether_it_holds(folder: Path) -> None:
    assert "nothing is kept" in cache("show")
    Store(folder).put("mine.py:job", Plan(), versions=installed_versions())
    Store(folder).put("old.py:job", Plan(zero=1), versions={"torch": "1.0"})
    text = cache("show")
    assert "mine.py:job" in text
    assert "stale" in text
    kept = {entry["key"]: entry["good"] for entry in json.loads(cache("show", "--json"))["entries"]}
    assert kept == {"mine.py:job": True, "old.py:job": False}


def test_clear_deletes_all_of_it(folder: Path) -> None:
    Store(folder).put("mine.py:job", Plan(), versions=installed_versions())
    assert json.loads(cache("clear", "--json")) == {"folder": str(folder), "cleared": 1}
    assert Store(folder).show(versions=installed_versions()) == ()
    assert "0 documents" in cache("clear")

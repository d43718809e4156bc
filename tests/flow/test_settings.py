"""Command line over environment over file over default, each with where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.errors import EchelonError
from echelon.flow.settings import merge_settings


@pytest.mark.parametrize(
    ("sources", "value", "source"),
    [
        ("", 3, "default"),
        ("file", 4, "file"),
        ("file environment", 5, "environment (ECHELON_KEEP)"),
        ("file environment line", 6, "command line"),
        ("line", 6, "command line"),
    ],
)
def test_the_nearest_source_wins(tmp_path: Path, sources: str, value: int, source: str) -> None:
    file = tmp_path / "echelon.toml"
    if "file" in sources:
        file.write_text("[train]\nkeep = 4\n")
    keep = merge_settings(
        {"keep": 6 if "line" in sources else None}, {"keep": "5"} if "environment" in sources else {}, file
    )["keep"]
    assert keep.value == value
    assert keep.source.startswith(source)


def test_false_on_the_command_line_is_not_absence(tmp_path: Path) -> None:
    assert merge_settings({"resume": False}, {"resume": "yes"}, tmp_path / "none")["resume"].value is False


@pytest.mark.parametrize(
    ("environment", "text", "message"),
    [
        ({"keep": "x"}, "", "ECHELON_KEEP='x': expected an integer"),
        ({"quiet": "maybe"}, "", "ECHELON_QUIET='maybe': expected true or false"),
        ({}, "[train]\nkep = 4\n", "unknown setting train.kep; did you mean keep?"),
        ({}, "[train]\nkeep = 'four'\n", "train.keep='four': expected an integer"),
        ({}, "[train]\nresume = 1\n", "train.resume=1: expected true or false"),
        ({}, "keep = 4\n", "settings belong in the table [train]; found keep"),
        ({}, "[train\n", "invalid TOML"),
    ],
)
def test_what_cannot_be_meant_is_told(tmp_path: Path, environment: dict[str, str], text: str, message: str) -> None:
    file = tmp_path / "echelon.toml"
    file.write_text(text)
    with pytest.raises(EchelonError) as caught:
        merge_settings({}, environment, file)
    assert message in str(caught.value)


def test_the_command_shows_each_value_and_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHELON_WORKERS", "2")
    (tmp_path / "echelon.toml").write_text("[train]\nevery = 50\n")
    answer = CliRunner().invoke(app, ["train", "absent.py", "--keep", "7", "--show-settings", "--json"])
    shown = json.loads(answer.stdout)
    assert shown["keep"] == {"value": 7, "source": "command line"}
    assert shown["workers"] == {"value": 2, "source": "environment (ECHELON_WORKERS)"}
    assert shown["every"] == {"value": 50, "source": "file (echelon.toml)"}
    assert shown["plan"] == {"value": "auto", "source": "default"}
    assert "command line" in CliRunner().invoke(app, ["train", "absent.py", "--keep", "7", "--show-settings"]).stdout

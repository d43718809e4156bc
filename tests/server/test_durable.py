"""The controller's file: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import DocumentError
from echelon.server import atomic_file


def test_replaced_whole(tmp_path: Path) -> None:
    """A document is read as it was written last; a temporary that was left behind is not it."""
    path = tmp_path / "controller.json"
    assert atomic_file.read_json(path) is None
    atomic_file.write_json(path, {"map": 1})
    atomic_file.write_json(path, {"map": 2})
    path.with_name("controller.json.new").write_text('{"map": ')
    assert atomic_file.read_json(path) == {"map": 2}
    atomic_file.write_json(path, {"map": 3})
    assert atomic_file.read_json(path) == {"map": 3}
    assert [each.name for each in tmp_path.iterdir()] == ["controller.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_something_else(tmp_path: Path, text: str) -> None:
    """What no controller wrote is an error, not an empty job."""
    path = tmp_path / "controller.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"controller\.json"):
        atomic_file.read_json(path)

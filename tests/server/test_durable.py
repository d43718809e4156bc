"""The controller's file: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import DocumentError
from echelon.server import durable


def test_replaced_whole(tmp_path: Path) -> None:
    """A document is read as it was written last; a temporary that was left behind is not it."""
    path = tmp_path / "controller.json"
    assert durable.read(path) is None
    durable.write(path, {"map": 1})
    durable.write(path, {"map": 2})
    path.with_name("controller.json.new").write_text('{"map": ')
    assert durable.read(path) == {"map": 2}
    durable.write(path, {"map": 3})
    assert durable.read(path) == {"map": 3}
    assert [each.name for each in tmp_path.iterdir()] == ["controller.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_something_else(tmp_path: Path, text: str) -> None:
    """What no controller wrote is an error, not an empty job."""
    path = tmp_path / "controller.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"controller\.json"):
        durable.read(path)

"""Reading the controller's document."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.errors import DocumentError
from echelon.server.controller_process import read_document


def test_no_document(tmp_path: Path) -> None:
    """Without one a new job begins."""
    assert read_document(tmp_path / "controller.json") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_not_a_document(tmp_path: Path, text: str) -> None:
    """Another file is an error, not an empty job."""
    path = tmp_path / "controller.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"controller\.json"):
        read_document(path)

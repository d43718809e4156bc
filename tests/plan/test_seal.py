"""A sealed file is read back exactly, or refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import DocumentError
from echelon.plan.sealed_json import parse_object, read_regular, read_unsealed_format, seal, unseal

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text().filter(lambda key: key != "sha256"), PLAIN, min_size=1), st.sampled_from([None, 1]))
def test_what_was_sealed_comes_back(document: dict[str, object], indent: int | None) -> None:
    data = seal(document, indent=indent)
    assert unseal(data, "here") == document
    assert json.loads(data)["sha256"] in data.decode()  # any other reader takes it as JSON
    assert read_unsealed_format(data) is None


@given(st.data())
def test_any_changed_byte_is_refused(draw: st.DataObject) -> None:
    data = bytearray(seal({"step": 45, "rate": 0.003, "name": "x"}, indent=1))
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(DocumentError, match=r"^here: "):
        unseal(bytes(data), "here")


def test_nothing_may_be_cut_off_or_appended() -> None:
    data = seal({"step": 45})
    for other in (data[:-1], data + b"\n", data[:20], b"", data * 2):
        with pytest.raises(DocumentError):
            unseal(other, "here")


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": -Infinity}', "[1]", "{", '{"a":' + "[" * 10**5]
)
def test_json_is_read_strictly(text: str) -> None:
    with pytest.raises(DocumentError, match="here: "):
        parse_object(text.encode(), "here")
    body = text[:-1].encode()
    with pytest.raises(DocumentError):
        unseal(body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode(), "here")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "file") == b"12345"
    for name, message in (("link", "a symbolic link"), ("pipe", "not a regular file"), (".", "not a regular file")):
        with pytest.raises(DocumentError, match=message):
            read_regular(tmp_path / name)
    with pytest.raises(DocumentError, match="5 bytes, above the limit of 4"):
        read_regular(tmp_path / "file", 4)


def test_files_of_earlier_versions_are_known() -> None:
    assert read_unsealed_format(b'{"format": 2, "step": 1}') == 2
    assert read_unsealed_format(b"{") is None

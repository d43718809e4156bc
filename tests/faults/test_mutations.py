"""Damaged and crafted checkpoints; `python -m bench.mutations` tries 1,000 mutations and every payload."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from bench.mutations import Subject, mutations, server, training
from bench.payloads import CHECKPOINTS, SERVERS, WEIGHTS, Call, Made, Watch, attack

#: Of each kind of payload some that once did harm or easily could.
PAYLOADS = (
    "pickle as a listed .metadata", "pickle as data file", "format 2 with a pickled .metadata", "path with .. in the manifest",
    "part in ../outside", "data file links outside", "folder links outside", "data file is a pipe", "huge tensor", "overlapping parts",
    "nested JSON", "value of an unknown type", "state dict with code (.pt)", "index that names ../outside", "index that names itself",
    "server: shard links outside", "server: pickle as manifest",
)  # fmt: skip


@pytest.mark.parametrize("make", [training, server])
def test_damage_is_refused_by_name_or_without_effect(tmp_path: Path, make: object) -> None:
    subject: Subject = make(tmp_path / "whole")  # type: ignore[operator]
    found = mutations(subject, 60, 7, tmp_path)
    assert not {each: count for each, count in found.items() if each not in ("refused", "no effect")}
    assert found["refused"] > 50


def test_crafted_files_do_nothing(tmp_path: Path) -> None:
    assert set(PAYLOADS) <= {*CHECKPOINTS, *WEIGHTS, *SERVERS}
    came = attack(tmp_path, PAYLOADS)
    assert not [f"{name}: {outcome}" for name, outcome in came.items() if outcome.startswith("UNSAFE")]
    assert all("refused" in outcome for name, outcome in came.items() if name != "pickle as a listed .metadata"), came


def test_harm_would_be_seen(tmp_path: Path) -> None:
    """What the payloads hold does run where it is unpickled, and the watch sees that and files outside."""
    (tmp_path / "good").mkdir()
    made, watch = Made(tmp_path / "made", tmp_path / "good"), Watch()
    watch.outside = made.outside
    (made.outside / "secret.bin").read_bytes()
    pickle.loads(pickle.dumps(Call(made.mark)))
    watch.outside = None
    assert made.mark.exists()
    assert any(each.startswith("opened") for each in watch.seen)
    assert any("os.system" in each for each in watch.seen)
    (tmp_path / "link").symlink_to(made.outside / "secret.bin")
    watch.outside, watch.seen = made.outside, []
    with pytest.raises(OSError, match="symbolic"):
        os.open(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
    watch.outside = None
    assert watch.seen == []

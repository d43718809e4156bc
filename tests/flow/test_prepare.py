"""What is known of a job, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.flow.prepare import Prepared, Subject, receive
from echelon.plan.text import from_text
from tests.flow.jobs import FILE
from tests.simulator.cases import make_cluster, make_profile


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "kept.py").write_text(FILE)
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "file" / "cache"))
    subject = Subject(str(tmp_path / "kept.py"))
    assert subject.profile().elements == 9
    (warning,) = subject.warnings
    assert "the profile could not be kept there" in warning
    assert "ECHELON_CACHE" in warning


def test_a_profile_is_kept_for_a_file_that_alone_describes_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "again.py").write_text(FILE)
    Subject(str(tmp_path / "again.py")).profile()
    (kept,) = (tmp_path / "cache").glob("profile-*.json")
    before = kept.stat().st_mtime_ns
    Subject(str(tmp_path / "again.py")).profile()
    assert kept.stat().st_mtime_ns == before


def test_ranks_get_all_that_is_known(tmp_path: Path) -> None:
    prepared = Prepared(plan=from_text("dp=2"), profile=make_profile(), cluster=make_cluster(cores=2))
    received = receive(prepared.hand_over(tmp_path))
    assert (received.plan, received.profile, received.cluster) == (prepared.plan, prepared.profile, prepared.cluster)
    assert received.forecast is not None
    (tmp_path / "bare").mkdir()
    assert receive(Prepared(plan=from_text("dp=2")).hand_over(tmp_path / "bare")).profile is None

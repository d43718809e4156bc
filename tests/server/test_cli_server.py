"""`echelon server`, as one types it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.server import Rule, Table, connect
from echelon.server.protocol.auth import read_secret
from echelon.server.status import fetch_status


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """`echelon server start` in that folder; the controller's address and the secret's file."""
    command = [sys.executable, "-m", "echelon", "server", "start", "--json", "--folder", str(folder), *options]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, "it ended"
                text += line
            said = json.loads(text)
            yield said["controller"], Path(said["secret_file"])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A controller and a server, by the command; the controller's address and the secret's file."""
    folder = tmp_path_factory.mktemp("served") / "job"
    with serving(folder, "--servers", "1", "--replicas", "1", "--shards", "4") as running:
        yield running


def server(*arguments: str, code: int = 0) -> str:
    """Run `echelon server ...`."""
    answer = CliRunner().invoke(app, ["server", *arguments])
    assert answer.exit_code == code, answer.output
    return answer.output


@pytest.mark.slow
def test_a_job_by_hand(served: tuple[str, Path], tmp_path: Path) -> None:
    """Train, look, checkpoint, export."""
    address, secret = served
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    here = ["--controller", address, "--secret-file", str(secret)]
    with connect(address, secret=read_secret(secret)) as client:
        client.declare(Table(name="emb", dim=4, rule=Rule(kind="sgd", lr=1.0)))
        before = client.pull({"emb": np.arange(10)})["emb"]
        client.push({"emb": (np.arange(10), np.ones((10, 4), np.float32))})
        client.flush()
        shown = server("status", *here)
        assert "s1" in shown
        assert "4 shards, 1 replicas wanted" in shown
        found = json.loads(server("status", *here, "--json"))
        assert found["workers"]["0"]["here"]
        assert found["servers"]["s1"]["heads"] == 4
        assert "holds nothing" not in server("drain", "s1", *here, code=1)
        assert "no server of that name" in server("drain", "s9", *here, code=1)
        server("checkpoint", str(tmp_path / "kept"), *here)
        output = tmp_path / "emb.safetensors"
        assert "10 rows" in server("export", str(tmp_path / "kept"), "emb", str(output))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").touch()
        assert "checkpoint" in server("checkpoint", str(tmp_path / "mine"), *here, code=1)
        assert (tmp_path / "mine" / "thesis.txt").exists()
        server("expire", "emb", "0", *here)
        assert np.array_equal(client.pull({"emb": np.arange(10)})["emb"], before)
        assert "no table" in server("expire", "nope", "3", *here, code=1)


def test_strangers(served: tuple[str, Path], tmp_path: Path) -> None:
    """Another secret, an open file, no controller: each says what to do."""
    address, secret = served
    other = tmp_path / "other"
    other.write_text("ab" * 32)
    assert "chmod 600" in server("status", "--controller", address, "--secret-file", str(other), code=1)
    os.chmod(other, 0o600)
    assert "secret" in server("status", "--controller", address, "--secret-file", str(other), code=1)
    assert "is it running" in server("status", "--controller", "127.0.0.1:1", "--secret-file", str(secret), code=1)
    answer = CliRunner().invoke(app, ["server", "start", "--controller", address])
    assert answer.exit_code == 1
    assert "--secret-file" in answer.output
    os.chmod(other, 0o600)
    answer = CliRunner().invoke(app, ["server", "start", "--controller", address, "--secret-file", str(other)])
    assert answer.exit_code == 1
    assert "does not hold this job's secret" in answer.output


def test_adding_up_needs_workers_in_step(tmp_path: Path) -> None:
    answer = CliRunner().invoke(
        app, ["server", "start", "--aggregate", "--staleness", "2", "--folder", str(tmp_path / "job")]
    )
    assert answer.exit_code == 2
    assert "add --staleness 0" in answer.output


@pytest.mark.slow
def test_a_job_has_its_settings_for_life(tmp_path: Path) -> None:
    """Started again without them it goes on with its own; others, and another beginning, are refused with both sides."""
    folder = tmp_path / "job"
    with serving(folder, "--replicas", "1", "--shards", "4", "--staleness", "3"):
        pass
    with serving(folder) as (address, secret):
        found = fetch_status(address, read_secret(secret))
        assert (found["shards"], found["replicas"], found["settings"]["staleness"]) == (4, 1, 3)
        assert found["version"] > 1
    for options, message in (
        (
            ["--shards", "8", "--staleness", "0"],
            "a job with shards=4, staleness=3, but shards=8, staleness=0 was requested",
        ),
        (["--servers", "2", "--replicas", "2"], "a job with replicas=1, but replicas=2 was requested"),
        (["--restore", str(tmp_path)], f"{folder}: holds a job already, which cannot begin from"),
    ):
        answer = CliRunner().invoke(app, ["server", "start", "--folder", str(folder), *options])
        assert answer.exit_code == 1
        assert message in answer.output


def test_a_controller_alone_tells_where_its_secret_is(tmp_path: Path) -> None:
    with serving(tmp_path / "job", "--servers", "0", "--secret-file", str(tmp_path / "mine")) as (address, secret):
        assert secret == tmp_path / "mine"
        assert fetch_status(address, read_secret(secret))["servers"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "nan"], "--memory nan: expected a finite number of GiB above 0"),
        (["--memory", "0"], "--memory 0: expected"),
        (["--memory", "inf"], "--memory inf: expected"),
        (
            ["--controller", "127.0.0.1:1", "--replicas", "2", "--staleness", "0", "--restore", "kept"],
            "--replicas, --restore, --staleness: not an option of one server that joins --controller; leave it out",
        ),
        (["--expect", "4"], "--expect: not an option of a controller with servers"),
        (["--name", "s7"], "--name: not an option of a controller with servers"),
        (["--servers", "0", "--memory", "2"], "--memory: not an option of a controller alone"),
        (["--controller", "127.0.0.1:1", "--servers", "2"], "--servers: not an option of one server that joins"),
    ],
)
def test_what_would_be_ignored_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["server", "start", *options, "--secret-file", str(tmp_path / "none")])
    assert answer.exit_code == 2
    assert message in answer.output
    assert list(tmp_path.iterdir()) == []

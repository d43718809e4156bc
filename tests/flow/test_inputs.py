"""What a job is made from: recorded, named, and decisive for what is kept of it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from echelon.errors import VerificationError
from echelon.flow import gate
from echelon.flow.job_code import digest_value
from echelon.flow.job_identity import JobIdentity
from echelon.flow.job_inputs import RecordedInputs, record_inputs
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import resolve_plan
from echelon.flow.settings import Settings, merge_settings
from echelon.flow.train import train
from echelon.flow.verify import verify
from echelon.plan.input_digests import describe_differences, digest_arguments, digest_file
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.world import World
from tests.flow.jobs import make

#: Reads a file beside it, a folder, a variable, a module of its own, and data by a library.
READING = """
import json, os
from pathlib import Path
import numpy, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import echelon, helper_of_reading

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())
RATE = float(os.environ.get("READING_RATE", "0.05"))
NAMES = sorted(os.listdir(HERE / "parts"))

def loss(output, batch):
    if CONFIG["loss"] == "contrastive":
        output = F.normalize(output, dim=-1)
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))
    return F.mse_loss(output, batch[-1])

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

def job():
    values = torch.from_numpy(numpy.load(HERE / "values.npy"))
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=RATE)
    data = TensorDataset(values, values.sum(1, keepdim=True))
    return echelon.Job(model=model, loss=loss, optimizer=optimizer, data=data, batch_size=8, epochs=1)
"""


def write_reading(folder: Path) -> Path:
    """The job file and all that it reads."""
    (folder / "parts").mkdir()
    (folder / "parts" / "a.txt").write_text("a")
    (folder / "config.json").write_text('{"loss": "mse"}')
    (folder / "helper_of_reading.py").write_text("FACTOR = 1\n")
    np.save(folder / "values.npy", np.random.default_rng(0).standard_normal((32, 8)).astype("float32"))
    (folder / "reading.py").write_text(READING)
    return folder / "reading.py"


def identity_of(file: Path) -> JobIdentity:
    """In this process, as if it were a fresh one."""
    for name in ("reading", "helper_of_reading"):
        sys.modules.pop(name, None)
    return JobSource(str(file)).identity


def changed(before: JobIdentity, now: JobIdentity) -> set[str]:
    """Names of the parts that differ."""
    return {line.partition(":")[0] for line in describe_differences(before.digests, now.digests)}


@pytest.mark.slow
def test_every_input_is_named_and_only_what_changed_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_reading(tmp_path)
    monkeypatch.delenv("READING_RATE", raising=False)
    first = identity_of(file)
    names = {"file config.json", "file values.npy", "folder parts", "environment READING_RATE", "source reading.py"}
    assert names | {"source helper_of_reading.py", "data", "code loss", "version torch", "setting batch_size"} <= set(
        first.digests
    )
    assert not any("site-packages" in name or "RANK" in name for name in first.digests)
    assert identity_of(file).digest == first.digest

    (tmp_path / "config.json").write_text('{"loss": "contrastive"}')
    second = identity_of(file)
    assert changed(first, second) == {"file config.json", "code loss"}
    assert second.digest != first.digest

    monkeypatch.setenv("READING_RATE", "0.5")
    third = identity_of(file)
    assert changed(second, third) == {"environment READING_RATE", "code optimizer"}
    assert third.digests["environment READING_RATE"] == "0.5"

    (tmp_path / "parts" / "b.txt").write_text("b")
    assert "folder parts" in changed(third, identity_of(file))
    (tmp_path / "helper_of_reading.py").write_text("FACTOR = 2\n")
    assert "source helper_of_reading.py" in changed(third, identity_of(file))
    values = np.load(tmp_path / "values.npy")
    values[5, 5] += 1
    np.save(tmp_path / "values.npy", values)
    assert {"file values.npy", "data"} <= changed(third, identity_of(file))


@pytest.mark.slow
def test_other_processes_find_the_same_identity(tmp_path: Path) -> None:
    file = write_reading(tmp_path)
    code = f"from echelon.flow.job_source import JobSource; print(JobSource({str(file)!r}).identity.digest)"
    found = set()
    for rank in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": rank, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        found.add(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
    assert len(found) == 1


def test_scratch_files_system_files_and_secrets_are_no_inputs(tmp_path: Path) -> None:
    reads = RecordedInputs()
    with record_inputs(reads):
        scratch = tmp_path / "scratch"
        scratch.write_text("x")
        scratch.read_text()
        scratch.unlink()
        Path("/proc/self/status").read_text()
        os.environ.get("HOME"), os.environ.get("RANK"), os.getenv("MY_API_KEY"), os.environ.get("SLURM_JOB_ID")
        assert "INPUT_OF_MINE" not in os.environ
        (tmp_path / "kept").write_text("y")
        (tmp_path / "kept").read_text()
    (tmp_path / "later").write_text("")
    (tmp_path / "later").read_text()
    assert reads.digest_inputs() == {
        f"file {tmp_path / 'kept'}": digest_file(tmp_path / "kept"),
        "environment INPUT_OF_MINE": "absent",
    }


def test_the_middle_of_a_large_file_counts_where_it_is_sampled(tmp_path: Path) -> None:
    file = tmp_path / "large"
    content = bytearray(20 << 20)
    file.write_bytes(content)
    before = digest_file(file)
    content[-1] = 1
    file.write_bytes(content)
    assert digest_file(file) != before
    file.write_bytes(content[:-1])
    assert digest_file(file) != before


def test_arguments_have_names() -> None:
    assert digest_arguments(["--lr", "-0.5", "data.csv", "--fast", "--name=x"]) == {
        "argument --lr": "-0.5 data.csv", "argument --fast": "given", "argument --name": "x",
    }  # fmt: skip
    assert describe_differences({"argument --lr": "1"}, {"argument --lr": "2"}) == ["argument --lr: 1 then, 2 now"]


class Drawing(Dataset[Any]):
    """Draws random numbers for each sample from a generator of its own."""

    def __init__(self, scale: float) -> None:
        self.generator, self.scale = np.random.default_rng(), scale

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> Any:
        return self.generator.random() * self.scale


class Scaled(nn.Module):
    """A number decides what it computes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.layer = scale, nn.Linear(8, 1)


def _weighed(weight: float) -> Any:
    return lambda output, batch: output.mean() * weight


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (_weighed(1.0), _weighed(1.0), _weighed(2.0)),
        (partial(nn.Linear, 8, 1), partial(nn.Linear, 8, 1), partial(nn.Linear, 8, 2)),
        (Scaled(1.0), Scaled(1.0), Scaled(2.0)),
    ],
)
def test_functions_and_models_count_by_what_they_do(one: Any, same: Any, other: Any) -> None:
    assert digest_value(one, is_model=True).code == digest_value(same, is_model=True).code
    assert digest_value(one, is_model=True).code != digest_value(other, is_model=True).code


def test_data_is_described_without_reading_a_sample() -> None:
    data = Drawing(1.0)
    before = data.generator.bit_generator.state
    assert digest_value(data, include_length=True).code == digest_value(Drawing(1.0), include_length=True).code
    assert data.generator.bit_generator.state == before
    assert digest_value(data, include_length=True).code != digest_value(Drawing(2.0), include_length=True).code
    values = torch.arange(4096 * 256, dtype=torch.float32).reshape(4096, 256)
    assert digest_value(values, include_length=True).code != digest_value(values * 2, include_length=True).code
    assert digest_value(values, include_length=True).code != digest_value(values[:-1], include_length=True).code


def test_a_script_without_a_file_has_an_identity_too() -> None:
    assert JobSource(make(batch_size=4)).identity.digest != JobSource(make(batch_size=8)).identity.digest
    assert JobSource(make()).identity.digest == JobSource(make()).identity.digest


def test_override_and_verify_are_settings_everywhere(tmp_path: Path) -> None:
    assert Settings(override=["optimizer.lr"]).override == ("optimizer.lr",)
    with pytest.raises(Exception, match="a list of setting names"):
        Settings(override="optimizer.lr")
    with pytest.raises(Exception, match="verify="):
        Settings(verify=1)
    file = tmp_path / "echelon.toml"
    file.write_text('[train]\nverify = false\noverride = ["clip_norm"]\n')
    stored = merge_settings({}, {}, file)
    assert (stored["verify"].value, stored["override"].value) == (False, ["clip_norm"])
    told = merge_settings({}, {"verify": "1", "override": "clip_norm, optimizer.lr"}, file)
    assert (told["verify"].value, told["override"].value) == (True, ["clip_norm", "optimizer.lr"])


@pytest.mark.slow
def test_a_changed_config_makes_the_profile_the_cuts_and_the_certificate_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job file reads config.json, which changes from a mean over samples to a contrastive loss."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    file, wide = write_reading(tmp_path), from_text("tp=2")
    subject = JobSource(str(file))
    before = subject.profile()
    assert before.samples_coupled is False
    cut = subject.complete_plan(wide)
    certificate = verify(str(file), "dp=1", out=tmp_path / "certificate.json")
    assert certificate.verified
    assert certificate.graph_hash == before.graph_hash
    again = JobSource(str(file))
    assert again.cached_profile() == before
    assert again.load_cached(Plan, f"{again.cache_key} {wide.digest}") == cut
    assert resolve_plan(again, "dp=2").plan == from_text("dp=2")
    train(str(file), "dp=1", require_certificate=tmp_path / "certificate.json", quiet=True)

    (tmp_path / "config.json").write_text('{"loss": "contrastive"}')
    later = JobSource(str(file))
    assert later.cached_profile() is None
    assert later.load_cached(Plan, f"{later.cache_key} {wide.digest}") is None
    assert later.profile().samples_coupled is True
    assert later.profile().graph_hash != before.graph_hash
    with pytest.raises(VerificationError, match=r"file config\.json: \w+ then, \w+ now"):
        train(str(file), "dp=1", require_certificate=tmp_path / "certificate.json", quiet=True, resume=False)
    prepared = resolve_plan(later, "dp=2")
    assert prepared.plan == Plan()
    assert "dp=2: a sample's loss depends on the others of its batch" in prepared.fallback


def test_a_variable_that_was_read_makes_the_profile_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    file = write_reading(tmp_path)
    JobSource(str(file)).profile()
    assert JobSource(str(file)).cached_profile() is not None
    monkeypatch.setenv("READING_RATE", "0.5")
    assert JobSource(str(file)).cached_profile() is None
    monkeypatch.delenv("READING_RATE")
    monkeypatch.setenv("READING_OTHER", "not read")
    assert JobSource(str(file)).cached_profile() is not None


BUILDING = """
import json, torch
from pathlib import Path
from torch import nn
import echelon
from tests.flow.jobs import make

class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, json.loads((Path(__file__).parent / "wide.json").read_text()))

def job():
    return make(model=Net, loss=lambda output, batch: (output - batch[-1]).square().mean())
"""


def test_a_file_that_the_model_reads_makes_the_profile_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "building.py").write_text(BUILDING)
    (tmp_path / "wide.json").write_text("1")
    subject = JobSource(str(tmp_path / "building.py"))
    subject.profile()
    first = subject.identity
    assert JobSource(str(tmp_path / "building.py")).cached_profile() is not None
    (tmp_path / "wide.json").write_text("2")
    later = JobSource(str(tmp_path / "building.py"))
    assert later.cached_profile() is None
    assert changed(first, later.identity) == {"code model"}


@pytest.mark.slow
def test_a_proof_is_kept_until_a_file_that_the_model_reads_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose name no code spells out, and which no certificate can therefore name."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "building.py").write_text(BUILDING.replace('"wide.json"', '("wi" + "de".lower() + ".json")'))
    (tmp_path / "wide.json").write_text("1")

    def proofs() -> int:
        verdict = gate.require_proof(
            subject := JobSource("building.py"),
            gate.resolve_plan(subject, "dp=1 micro=4"),
            World(),
            verify=True,
            quiet=True,
        )
        assert verdict.certificate is not None
        return int(verdict.seconds > 0)

    assert [proofs(), proofs()] == [1, 0]
    (tmp_path / "wide.json").write_text("2")
    assert [proofs(), proofs()] == [1, 0]

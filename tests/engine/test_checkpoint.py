"""A checkpoint is whole or absent, reads under any plan, and a bad one is named."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.engine.run import Run
from echelon.engine.stored import MANIFEST
from echelon.errors import CheckpointError, ForeignCheckpoint
from echelon.plan.plan import Plan
from echelon.testing.ranks import Pool
from echelon.world import World
from tests.engine.jobs import JOBS, resumed, saved, trained
from tests.whole import pairs

STEPS = 2


@pytest.fixture(scope="module")
def place(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint made at 4 ranks, zero=3."""
    folder = tmp_path_factory.mktemp("checkpoints") / "four"
    ranks.run(4, "tests.engine.jobs:saved", "tied", "dp=4 zero=3", str(folder), STEPS)
    return folder


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3 micro=2", "dp=3 zero=2"])
def test_what_four_ranks_saved_any_plan_loads_exactly(ranks: Pool, place: Path, plan: str) -> None:
    count = int(plan[3])
    four = ranks.run(4, "tests.engine.jobs:resumed", "tied", "dp=4 zero=3", str(place))[0]
    found = (
        resumed(World(), "tied", plan, str(place))
        if count == 1
        else ranks.run(count, "tests.engine.jobs:resumed", "tied", plan, str(place))[0]
    )
    assert found["begin"] == STEPS
    for kind in ("parameters", "buffers", "optimizer"):
        here, there = getattr(found["first"], kind), getattr(four["first"], kind)
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)
    assert found["losses"] == pytest.approx(four["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "name"),
    pairs(
        ["dp=1 micro=4", "dp=2", "dp=4 zero=1 micro=2", "dp=3 zero=2", "dp=4 zero=3 micro=2"],
        ["two", "groups", "schedule", "lora", "norm", "clip", "tokens", "dropout", "stream", "averages", "tensor rate"],
        each=2,
    ),
)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(ranks: Pool, tmp_path: Path, name: str, plan: str) -> None:
    count, folder = int(plan[3]), str(tmp_path / "here")
    if torch.cuda.is_available() and name == "averages" and count > 1:
        pytest.skip("saved in the very step in which a buffer first changes: docs/train.md")

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        if count == 1:
            return function(World(), name, plan, *arguments, **keywords)
        return ranks.run(count, f"tests.engine.jobs:{function.__name__}", name, plan, *arguments, **keywords)[0]

    unbroken = call(trained, double=False)
    before = call(saved, folder, STEPS)
    after = call(resumed, folder)
    assert before + after["losses"] == unbroken["losses"]
    last = after["last"]
    for kind in ("parameters", "buffers", "optimizer"):
        assert all(torch.equal(value, getattr(last, kind)[name]) for name, value in unbroken[kind].items())


def damaged(place: Path, tmp_path: Path, how: str) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(place, folder)
    data = folder / "__0_0.distcp"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "corrupt":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "missing":
        data.unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "half a manifest":
        (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:50])
    elif how == "escape":
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"]["../outside"] = {"bytes": 0, "sha256": ""}
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "cut short; use an older checkpoint"),
        ("corrupt", "its content changed since it was written"),
        ("missing", "__0_0.distcp: missing"),
        ("no manifest", "no checkpoint.json in it"),
        ("half a manifest", "checkpoint.json: damaged"),
        ("escape", "leaves the folder"),
    ],
)
def test_a_bad_checkpoint_is_named_on_every_rank(
    ranks: Pool, place: Path, tmp_path: Path, how: str, message: str
) -> None:
    folder = damaged(place, tmp_path, how)
    found = ranks.run(2, "tests.engine.jobs:load_failure", "tied", "dp=2", str(folder))
    assert all("CheckpointError" in each and message in each for each in found), found


def test_a_foreign_checkpoint_is_named(ranks: Pool, place: Path) -> None:
    found = ranks.run(2, "tests.engine.jobs:load_failure", "mlp", "dp=2", str(place))
    assert all("made by another model: 0.weight is absent there and [12, 8] here" in each for each in found), found
    assert all(each.startswith("ForeignCheckpoint: ") for each in found), found


def test_another_order_of_samples_is_refused(place: Path) -> None:
    run = Run(replace(JOBS["tied"](), batch=6), Plan(), World())
    with pytest.raises(ForeignCheckpoint, match="made with batch=8, the job now has 6"):
        run.load(place)


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    Run(JOBS["mlp"](), Plan(), World()).save(tmp_path / "here")
    with pytest.raises(ForeignCheckpoint, match="made with 0 schedules, the job now has 1"):
        Run(JOBS["schedule"](), Plan(), World()).load(tmp_path / "here")


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    job = JOBS["lora"]()
    Run(job, Plan(), World()).save(tmp_path / "here")
    model = job.model()
    model.register_buffer("average", torch.zeros(2))
    with pytest.raises(ForeignCheckpoint, match="lacks 1 tensors of the model, the first is model/average"):
        Run(replace(job, model=model), Plan(), World()).load(tmp_path / "here")


def test_a_buffer_that_one_stage_lacks_is_named_on_every_rank(ranks: Pool, tmp_path: Path) -> None:
    saved(World(), "layers", "dp=1", str(tmp_path / "here"), 1)
    found = ranks.run(2, "tests.engine.jobs:load_failure", "layers counted", "pp=2 micro=2", str(tmp_path / "here"))
    assert all("lacks 1 tensors of the model, the first is model/6.seen" in each for each in found), found


def test_another_format_is_foreign(tmp_path: Path) -> None:
    run = Run(JOBS["mlp"](), Plan(), World())
    run.save(tmp_path / "here")
    manifest = json.loads((tmp_path / "here" / MANIFEST).read_text())
    assert manifest["job"] == "job"  # a job without a name
    (tmp_path / "here" / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ForeignCheckpoint, match="format 99, this echelon reads 2"):
        run.load(tmp_path / "here")


@pytest.mark.parametrize(("before", "after"), [("dp=1", "dp=2 zero=1"), ("dp=2 zero=1", "dp=1")])
def test_the_kernels_of_the_optimizer_are_the_running_plans(
    ranks: Pool, tmp_path: Path, before: str, after: str
) -> None:
    """torch has fused SGD for whole parameters only: a choice that comes back from a checkpoint would fail, or slow down."""

    def call(plan: str, function: Any, *arguments: Any) -> Any:
        if plan == "dp=1":
            return function(World(), "tokens", plan, *arguments)
        return ranks.run(2, f"tests.engine.jobs:{function.__name__}", "tokens", plan, *arguments)[0]

    folder = str(tmp_path / "here")
    unbroken = call(before, trained)["losses"]
    call(before, saved, folder, STEPS)
    assert call(after, resumed, folder)["losses"] == pytest.approx(unbroken[STEPS:], rel=1e-4)
    if after == "dp=1":
        run = Run(JOBS["tokens"](), Plan(), World())
        run.load(folder)
        assert run.optimizers[0].param_groups[0]["fused"] is True


class Evil:
    def __reduce__(self) -> Any:
        return print, ("a checkpoint must not run code",)


def test_metadata_cannot_run_code(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(place, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    del manifest["files"][".metadata"]  # whoever can change the file can change its checksum too
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"builtins\.print has no place in a checkpoint"):
        Run(JOBS["tied"](), Plan(), World()).load(folder)
    assert "must not" not in capsys.readouterr().out


def calling(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument); in protocol 4 a name may walk on by dots."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, argument)]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


@pytest.mark.parametrize("module", ["filesystem", "metadata"])
@pytest.mark.parametrize("name", ["os.system", "os.getcwd", "Metadata.__init__.__globals__.get"])
def test_metadata_cannot_walk_to_code(place: Path, tmp_path: Path, module: str, name: str) -> None:
    folder, mark = tmp_path / "evil", tmp_path / "ran"
    shutil.copytree(place, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / ".metadata").write_bytes(calling(f"torch.distributed.checkpoint.{module}", name, f"touch {mark}"))
    del manifest["files"][".metadata"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"{module}\.{name} has no place in a checkpoint"):
        Run(JOBS["tied"](), Plan(), World()).load(folder)
    assert not mark.exists()


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(JOBS["tied"](), Plan(), World())
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystem.create_stream", _full_stream)
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.save(tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def _full_stream(self: Any, path: Any, mode: str) -> Any:
    """The real device that is always full stands in for the disk: every write ends in ENOSPC."""
    with open("/dev/full", mode) as stream:
        yield stream


def test_saving_twice_is_refused(tmp_path: Path) -> None:
    run = Run(JOBS["mlp"](), Plan(), World())
    run.save(tmp_path / "here")
    with pytest.raises(CheckpointError, match="there is a checkpoint already"):
        run.save(tmp_path / "here")

"""A checkpoint is whole or absent, reads under any plan, and a bad one is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.checkpoint_files.checkpoint_reader import CHECKPOINT_FORMAT, MANIFEST_FILE, read_manifest
from echelon.checkpoint_files.tensor_files import INDEX_FILE
from echelon.engine.run import Run
from echelon.errors import CheckpointError, IncompatibleCheckpointError
from echelon.plan.plan import Plan
from echelon.plan.sealed_json import seal
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import JOBS, resumed, saved, trained
from tests.sampling import pairs, some

STEPS = 2


@pytest.fixture(scope="module")
def place(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint made at 4 ranks, zero=3."""
    folder = tmp_path_factory.mktemp("checkpoints") / "four"
    ranks.run(4, "tests.engine.jobs:saved", "tied", "dp=4 zero=3", str(folder), STEPS)
    return folder


@pytest.mark.journey
@pytest.mark.parametrize(
    "plan", some("saved by four", ["dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3 micro=2", "dp=3 zero=2"], 3)
)
def test_what_four_ranks_saved_any_plan_loads_exactly(ranks: RankPool, place: Path, plan: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "name"),
    pairs(
        ["dp=1 micro=4", "dp=2", "dp=4 zero=1 micro=2", "dp=3 zero=2", "dp=4 zero=3 micro=2"],
        [
            "two",
            "groups",
            "schedule",
            "lora",
            "norm",
            "clip",
            "tokens",
            "dropout",
            "stream",
            "kept averages",
            "tensor rate",
        ],
        each=1,
        table="resumed",
    ),
)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(ranks: RankPool, tmp_path: Path, name: str, plan: str) -> None:
    count, folder = int(plan[3]), str(tmp_path / "here")
    if torch.cuda.is_available() and name == "kept averages" and count > 1:
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


def resealed(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest as one would who can compute hashes."""
    (folder / MANIFEST_FILE).write_bytes(seal({key: value for key, value in manifest.items() if key != "sha256"}))


def damaged(place: Path, tmp_path: Path, how: str) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(place, folder)
    data = folder / "rank-00000.bin"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "corrupt":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "missing":
        data.unlink()
    elif how == "no manifest":
        (folder / MANIFEST_FILE).unlink()
    elif how == "half a manifest":
        (folder / MANIFEST_FILE).write_text((folder / MANIFEST_FILE).read_text()[:50])
    elif how == "escape":
        manifest = read_manifest(folder)
        manifest["files"]["../outside"] = {"bytes": 0, "sha256": "0" * 64}
        resealed(folder, manifest)
    elif how == "one digit":
        text = (folder / MANIFEST_FILE).read_text()
        (folder / MANIFEST_FILE).write_text(text.replace('"step": 2', '"step": 3'))
    elif how == "appended":
        data.write_bytes(data.read_bytes() + b"!")
    elif how == "missing index":
        (folder / INDEX_FILE).unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "cut short; use an older checkpoint"),
        ("corrupt", "its content changed since it was written"),
        ("missing", "rank-00000.bin: missing"),
        ("no manifest", "no checkpoint.json in it"),
        ("half a manifest", "checkpoint.json: does not end in its SHA-256: cut short"),
        ("one digit", "checkpoint.json: its content hashes to"),
        ("appended", "were written: something was appended"),
        ("missing index", "tensors.json: missing"),
        ("escape", "leaves the folder"),
    ],
)
def test_a_bad_checkpoint_is_named_on_every_rank(
    ranks: RankPool, place: Path, tmp_path: Path, how: str, message: str
) -> None:
    folder = damaged(place, tmp_path, how)
    found = ranks.run(2, "tests.engine.jobs:load_failure", "tied", "dp=2", str(folder))
    assert all("CheckpointError" in each and message in each for each in found), found


def test_a_foreign_checkpoint_is_named(ranks: RankPool, place: Path) -> None:
    found = ranks.run(2, "tests.engine.jobs:load_failure", "mlp", "dp=2", str(place))
    assert all("made by another model: 0.weight is absent there and [12, 8] here" in each for each in found), found
    assert all(each.startswith("IncompatibleCheckpointError: ") for each in found), found


def test_another_order_of_samples_is_refused(place: Path) -> None:
    run = Run(replace(JOBS["tied"](), batch_size=6), Plan(), World())
    with pytest.raises(IncompatibleCheckpointError, match="made with batch=8, the job now has 6"):
        run.load(place)


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    Run(JOBS["mlp"](), Plan(), World()).save(tmp_path / "here")
    with pytest.raises(IncompatibleCheckpointError, match="made with 0 schedules, the job now has 1"):
        Run(JOBS["schedule"](), Plan(), World()).load(tmp_path / "here")


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    job = JOBS["lora"]()
    Run(job, Plan(), World()).save(tmp_path / "here")
    model = job.model()
    model.register_buffer("average", torch.zeros(2))
    with pytest.raises(IncompatibleCheckpointError, match="lacks 1 tensors of the model, the first is model/average"):
        Run(replace(job, model=model), Plan(), World()).load(tmp_path / "here")


def test_a_buffer_that_one_stage_lacks_is_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    saved(World(), "layers", "dp=1", str(tmp_path / "here"), 1)
    found = ranks.run(2, "tests.engine.jobs:load_failure", "layers counted", "pp=2 micro=2", str(tmp_path / "here"))
    assert all("lacks 1 tensors of the model, the first is model/6.seen" in each for each in found), found


def test_another_format_is_foreign(tmp_path: Path) -> None:
    run = Run(JOBS["mlp"](), Plan(), World())
    run.save(tmp_path / "here")
    manifest = read_manifest(tmp_path / "here")
    assert manifest["job"] == "job"  # a job without a name
    resealed(tmp_path / "here", manifest | {"format": 99})
    with pytest.raises(IncompatibleCheckpointError, match=f"format 99, this echelon reads {CHECKPOINT_FORMAT}"):
        run.load(tmp_path / "here")
    (tmp_path / "here" / MANIFEST_FILE).write_text(json.dumps({"format": 2, "step": 7}))  # as versions before wrote it
    with pytest.raises(
        IncompatibleCheckpointError, match=r"format 2, which contains pickled data, .* export it with the echelon that"
    ):
        run.load(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("dp=1", "dp=2 zero=1"), ("dp=2 zero=1", "dp=1")])
def test_the_kernels_of_the_optimizer_are_the_running_plans(
    ranks: RankPool, tmp_path: Path, before: str, after: str
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


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(JOBS["tied"](), Plan(), World())
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    # The real device that is always full stands in for the disk: every write ends in ENOSPC.
    real_open: Any = Path.open

    def open_full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real_open(Path("/dev/full"), "wb") if mode == "xb" else real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.save(tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_saving_twice_is_refused(tmp_path: Path) -> None:
    run = Run(JOBS["mlp"](), Plan(), World())
    run.save(tmp_path / "here")
    with pytest.raises(CheckpointError, match="a checkpoint exists there"):
        run.save(tmp_path / "here")

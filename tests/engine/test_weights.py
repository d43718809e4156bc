"""Pretrained weights go straight into the shards, and weights of another model are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from echelon.engine.run import Run
from echelon.engine.weights import find_checkpoint
from echelon.errors import CheckpointError, JobError
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.models import GPT, MLP
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import mlp, tokens
from tests.sampling import some

MODEL = {"vocab": 32, "context": 9, "width": 16, "layers": 2, "heads": 2}


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(77)
    return GPT(**MODEL, tied=tied)


def started(world: World, path: str, plan: str, tied: bool = False) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
    said: list[str] = []
    job = tokens(model=lambda: GPT(**MODEL, tied=tied), weights=path)
    wanted = from_text(plan)
    run = Run(job, complete(wanted, job) if wanted.incomplete else wanted, world, warn=said.append)
    state = run.gather_full_state()
    run.close()
    # That the ranks of this test share a GPU, where there is one, is no news.
    return (state.parameters if state else None), [text for text in said if "share a GPU" not in text]


def written(folder: Path, how: str) -> str:
    state = {name: value.clone() for name, value in gpt().state_dict().items()}
    if how == "safetensors":
        save_file(state, folder / "model.safetensors")
        return str(folder / "model.safetensors")
    if how == "torch":
        torch.save(state, folder / "model.pt")
        return str(folder / "model.pt")
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: file for file, keys in parts.items() for key in keys}}))
    return str(index)


@pytest.mark.parametrize(
    ("plan", "how"),
    some("weights", [
        *((plan, how) for plan in ("dp=1", "dp=3 zero=3") for how in ("safetensors", "torch", "index")),
        ("dp=2", "torch"),
        ("tp=2", "safetensors"),
        ("pp=2", "index"),
        ("dp=2 tp=2 zero=3", "safetensors"),
    ], 4),
)  # fmt: skip
def test_weights_arrive_whole(ranks: RankPool, tmp_path: Path, how: str, plan: str) -> None:
    path, count = written(tmp_path, how), from_text(plan).ranks
    found, said = (
        started(World(), path, plan)
        if count == 1
        else ranks.run(count, "tests.engine.test_weights:started", path, plan)[0]
    )
    assert found is not None
    assert all(torch.equal(found[name], value) for name, value in gpt().state_dict().items())
    assert said == []


def test_a_tied_weight_is_held_once(ranks: RankPool, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in gpt(tied=True).state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "tied.safetensors")
    found, said = ranks.run(
        2, "tests.engine.test_weights:started", str(tmp_path / "tied.safetensors"), "dp=2 zero=3", True
    )[0]
    assert torch.equal(found["tokens.weight"], state["tokens.weight"])
    assert said == []


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    state = gpt().state_dict()
    save_file({name: value.clone() for name, value in state.items() if "head" not in name}, tmp_path / "m.safetensors")
    _, said = started(World(), str(tmp_path / "m.safetensors"), "dp=1")
    assert "lacks 1 of" in said[0]
    assert "head.weight" in said[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state | {"extra": torch.ones(2)}, "1 tensor that the model does not have, the first is extra"),
        (lambda state: state | {"norm.weight": torch.ones(3)}, r"norm.weight is \(3,\) there and \(16,\) in the model"),
    ],
)
def test_weights_of_another_model_are_named(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    save_file(change({name: value.clone() for name, value in gpt().state_dict().items()}), tmp_path / "m.safetensors")
    with pytest.raises(JobError, match=message):
        started(World(), str(tmp_path / "m.safetensors"), "dp=1")


def test_a_file_that_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"nonsense")
    with pytest.raises(JobError, match="cannot be read as weights"):
        started(World(), str(tmp_path / "m.safetensors"), "dp=1")
    index = tmp_path / "m.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(JobError, match="leaves the folder"):
        started(World(), str(index), "dp=1")


def meta_mlp() -> nn.Module:
    with torch.device("meta"):
        return MLP(width=12, layers=3, inputs=8, classes=4)


def begun(world: World, plan: str, meta: bool) -> dict[str, torch.Tensor] | None:
    run = Run(mlp(model=meta_mlp) if meta else mlp(), from_text(plan), world)
    state = run.gather_full_state()
    run.close()
    return state.parameters if state else None


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "dp=4 zero=1"])
def test_every_plan_starts_from_the_values_of_one_process(ranks: RankPool, plan: str) -> None:
    torch.manual_seed(0)
    reference = MLP(width=12, layers=3, inputs=8, classes=4).state_dict()
    for meta in (False, True):
        found = ranks.run(int(plan[3]), "tests.engine.test_weights:begun", plan, meta)[0]
        assert all(torch.equal(found[name], value) for name, value in reference.items())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))


def test_meta_parameters_that_nobody_can_initialise_are_named() -> None:
    job = replace(mlp(), model=lambda: nn.Sequential(nn.Linear(8, 4), Bare()))
    with pytest.raises(JobError, match=r"1 \(Bare\) is on the meta device and has no reset_parameters"):
        Run(job, Plan(), World())


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose one checkpoint two sharded ranks saved."""
    made = tmp_path_factory.mktemp("run")
    place = made / "checkpoints" / "step-00000002"
    ranks.run(2, "tests.engine.jobs:saved", "tokens", "dp=2 zero=3", str(place), 2)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=3 zero=3", "pp=2"])
@pytest.mark.parametrize("what", ["", "checkpoints/step-00000002"])
def test_weights_come_from_a_checkpoint_or_a_run(ranks: RankPool, folder: Path, what: str, plan: str) -> None:
    with Run(tokens(), Plan(), World()) as run:
        run.load(folder / "checkpoints" / "step-00000002")
        trained = {name: value.cpu().clone() for name, value in run.model.state_dict().items()}
    path, count = str(folder / what), from_text(plan).ranks
    found, said = (
        started(World(), path, plan)
        if count == 1
        else ranks.run(count, "tests.engine.test_weights:started", path, plan)[0]
    )
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    assert said == []


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder without a checkpoint; give a run"):
        started(World(), str(tmp_path), "dp=1")
    with pytest.raises(JobError, match=r"tensors that the model does not have.*is it another model's"):
        Run(mlp(weights=folder), Plan(), World())


def test_the_last_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    for step, whole in ((9, True), (120, True), (130, False)):
        place = tmp_path / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        if whole:
            (place / "checkpoint.json").write_text("{}")
    partial = tmp_path / "checkpoints" / "step-00000140.partial"
    partial.mkdir()
    (partial / "checkpoint.json").write_text("{}")
    assert find_checkpoint(tmp_path).name == "step-00000120"


def quantized(value: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.to_sparse(), "is sparse_coo; save dense"),
        (quantized, "is quantized; save dense"),
        (lambda value: value.to("meta"), "is on the meta device"),
        (lambda value: (value * 100).to(torch.int8), "is int8 there and float32 in the model"),
        (lambda value: value > 0, "is bool there and float32"),
        (lambda value: torch.complex(value, value), "is complex64 there and float32"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_weights_are_named(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    state = gpt().state_dict()
    torch.save(state | {"norm.weight": change(state["norm.weight"])}, tmp_path / "m.pt")
    with pytest.raises(JobError, match=f"norm.weight {message}"):
        started(World(), str(tmp_path / "m.pt"), "dp=1")


def test_integers_of_a_safetensors_file_and_no_tensors_at_all_are_refused(tmp_path: Path) -> None:
    save_file({name: value.to(torch.int8) for name, value in gpt().state_dict().items()}, tmp_path / "m.safetensors")
    with pytest.raises(JobError, match="is int8 there"):
        started(World(), str(tmp_path / "m.safetensors"), "dp=1")
    torch.save({}, tmp_path / "m.pt")
    with pytest.raises(JobError, match="holds no tensors"):
        started(World(), str(tmp_path / "m.pt"), "dp=1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_old_torch_files_and_other_floats_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) for name, value in gpt().state_dict().items()}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    found, said = started(World(), str(tmp_path / "m.bin"), "dp=1")
    assert found is not None
    assert all(torch.equal(found[name], value.float()) for name, value in state.items())
    assert said == []

"""A checkpoint goes on in its own order of its own data: in another, samples would be repeated and left out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import echelon
from echelon.checkpoint_files.checkpoint_reader import MANIFEST_FILE
from echelon.data import Packed
from echelon.data import order as orders
from echelon.data.order import BucketedOrder, Order
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.pack import pack
from echelon.errors import IncompatibleCheckpointError, JobError
from tests.flow.jobs import make


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


#: What a run says that was started with other data.
CHANGED = r"because the job changed:\n  - data: [0-9a-f]{16} then, [0-9a-f]{16} now"


def packed(folder: Path, shards: int, *, shift: int = 0) -> Path:
    rows = [(torch.full((8,), (number + shift) / 100), torch.ones(1)) for number in range(64)]
    pack(SamplePackingSource(rows, {"source": f"cut into {shards}"}), folder, shards=shards)
    return folder


def train(folder: Path, data: Any, epochs: int) -> None:
    echelon.train(make(data=data, epochs=epochs, batch_size=8), "dp=1", out=folder, quiet=True)


@pytest.mark.parametrize(
    ("shards", "options", "message"),
    [
        (8, {}, "were shuffled in lanes=4, the job's are shuffled in lanes=8: the order would differ"),
        (4, {"window": 1, "lanes": 2}, "the job's are shuffled in lanes=2, window=1 of files=4: the order"),
        (4, {"lanes": 1}, "the job's are shuffled whole: the order would differ"),
    ],
)
def test_data_packed_or_read_in_another_way_is_refused_by_train(
    tmp_path: Path, shards: int, options: dict[str, Any], message: str
) -> None:
    train(tmp_path / "run", str(packed(tmp_path / "one", 4)), 1)
    with pytest.raises((IncompatibleCheckpointError, JobError), match=f"{message}|{CHANGED}"):
        train(tmp_path / "run", Packed(packed(tmp_path / "two", shards), **options), 2)


def test_other_samples_are_refused_and_the_same_ones_from_elsewhere_are_not(tmp_path: Path) -> None:
    train(tmp_path / "run", str(packed(tmp_path / "one", 4)), 1)
    with pytest.raises(JobError, match=CHANGED):
        train(tmp_path / "run", str(packed(tmp_path / "two", 4, shift=1)), 2)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    train(tmp_path / "run", str(tmp_path / "moved"), 2)


@pytest.mark.parametrize("transform", [None, lambda sample: sample])
def test_another_part_of_the_same_data_and_the_same_part_of_others_are_refused(tmp_path: Path, transform: Any) -> None:
    def part(folder: str, first: int, **how: Any) -> Any:
        return Subset(
            Subset(Packed(packed(tmp_path / folder, 4, **how), transform=transform), range(64)),
            range(first, first + 32),
        )

    train(tmp_path / "run", part("one", 0), 1)
    with pytest.raises(JobError, match=CHANGED):
        train(tmp_path / "run", part("one", 8), 2)
    with pytest.raises(JobError, match=CHANGED):
        train(tmp_path / "run", part("two", 0, shift=1), 2)
    train(tmp_path / "run", part("one", 0), 2)


def test_another_way_of_shuffling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = TensorDataset(torch.randn(64, 8), torch.ones(64, 1))
    train(tmp_path / "run", rows, 1)
    path = next((tmp_path / "run" / "checkpoints").glob(f"*/{MANIFEST_FILE}"))
    assert json.loads(path.read_text())["order"] == "shuffled whole"
    with monkeypatch.context() as patch:
        patch.setattr(orders, "_MAX_TABLE_SAMPLES", 50)
        with pytest.raises(IncompatibleCheckpointError, match="the job's are shuffled whole, by formula 1"):
            train(tmp_path / "run", rows, 2)
    train(tmp_path / "run", rows, 2)


def test_a_rule_tells_what_decides_the_order() -> None:
    def rule(**more: Any) -> str:
        return Order(samples=64, batch=8, **more).rule

    assert rule(lanes=3) == rule(files=7) == "shuffled whole"  # three lanes do not divide the batch
    assert rule(drop_last=True) == "shuffled whole, without short batches"
    assert rule(shuffle=False, lanes=4) == "in their own order"
    by_length = BucketedOrder(samples=64, batch=8, lanes=2, lengths=torch.arange(64).numpy())
    lengths = re.fullmatch(r"shuffled in lanes=2, alike in length \((\w{16})\) in pools of 32 batches", by_length.rule)
    assert lengths is not None
    other = BucketedOrder(samples=64, batch=8, lanes=2, lengths=torch.arange(64).flip(0).numpy())
    assert other.rule != by_length.rule  # samples alike in another column's length
    assert lengths[1] in BucketedOrder(samples=64, batch=8, lengths=torch.arange(64, dtype=torch.int32).numpy()).rule
    assert Order(samples=2**23, batch=8, lanes=2).rule == "shuffled in lanes=2, by formula 1"


def test_a_run_does_not_go_on_by_the_lengths_of_another_column(tmp_path: Path) -> None:
    rows = [(torch.ones(1 + n % 5), torch.ones(1 + n % 7), torch.randn(8), torch.ones(1)) for n in range(64)]
    pack(SamplePackingSource(rows, {}), tmp_path / "packed")
    columns = Packed(tmp_path / "packed").columns

    def train(column: int, epochs: int) -> None:
        job = make(
            data=Packed(tmp_path / "packed", pad=0, bucket=columns[column].name),
            inputs=lambda batch: ((batch[2],), {}),
            epochs=epochs,
            batch_size=8,
        )
        echelon.train(job, "dp=1", out=tmp_path / "run", quiet=True)

    train(0, 1)
    with pytest.raises(IncompatibleCheckpointError, match="alike in length"):
        train(1, 2)
    train(0, 2)

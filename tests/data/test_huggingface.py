"""Hugging Face data sets are read as they are: by index, batch-wise, in an order that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.data import Loader, Order, Packed, Stream, is_stream, open_source, prepare_dataset
from echelon.data.packed.detect_format import open_packing_source
from echelon.data.packed.pack import pack
from echelon.errors import DataError
from tests.data.test_source import same

datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
IDS = np.array([3, 1])


def tokens() -> Any:
    rows = range(50)
    return datasets.Dataset.from_dict(
        {"ids": [[n, n + 1] for n in rows], "text": [str(n) for n in rows], "y": list(rows)}
    )


def test_a_map_style_set_is_read_in_order_and_resumes() -> None:
    source = open_source(tokens())
    order = Order(samples=50, batch=8, seed=1)

    def labels(rank: int, ranks: int, start: int) -> list[list[int]]:
        loader = Loader(source, order, dp_rank=rank, dp_size=ranks, micro_batch_size=None)
        return [step.micro_batches[0].batch["y"].tolist() for step in loader.steps(start, 7)]

    whole = labels(0, 1, 0)
    assert whole == [order.ids(step, 0, order.batch_size(step)).tolist() for step in range(7)]
    assert [first + second for first, second in zip(labels(0, 2, 3), labels(1, 2, 3), strict=True)] == whole[3:]


def test_lists_and_pictures_become_tensors() -> None:
    batch = open_source(tokens()).read_batch(IDS, 0)
    assert same(batch, {"ids": torch.tensor([[3, 4], [1, 2]]), "text": ["3", "1"], "y": torch.tensor([3, 1])})
    pictures = datasets.Dataset.from_dict({"image": [Image.new("RGB", (4, 5), (n, 0, 0)) for n in range(4)]})
    pixels = open_source(pictures.cast_column("image", datasets.Image())).read_batch(IDS, 0)["image"]
    assert (pixels.shape, pixels.dtype, pixels[0, 0, 0, 0].item()) == ((2, 3, 5, 4), torch.uint8, 3)


def test_a_format_or_collate_of_its_own_stays() -> None:
    assert open_source(tokens().with_format("numpy")).read_sample(3)["ids"].dtype == np.int64
    assert open_source(tokens(), collate=lambda samples: samples).read_batch(IDS, 0)[0]["ids"] == [3, 4]
    assert open_source(tokens().with_transform(lambda rows: {"n": rows["y"]})).read_batch(IDS, 0)["n"].tolist() == [
        3,
        1,
    ]


def test_a_stream_is_recognized() -> None:
    stream = tokens().to_iterable_dataset()
    assert is_stream(stream)
    reader = Stream(stream).make_reader()
    reader.start_next_epoch()
    assert [sample["ids"].tolist() for sample in reader.read(3)] == [[0, 1], [1, 2], [2, 3]]


def test_a_dict_of_sets_is_refused() -> None:
    with pytest.raises(DataError, match="data is a DatasetDict with the keys 'train': give one of its data sets"):
        open_source(datasets.DatasetDict({"train": tokens()}))


def test_it_is_packed_from_disk_and_from_memory(tmp_path: Path) -> None:
    tokens().save_to_disk(tmp_path / "saved")
    pack(open_packing_source(tmp_path / "saved", work_folder=tmp_path / "work"), tmp_path / "packed")
    prepared = prepare_dataset(
        tokens(), tmp_path / "prepared", lambda sample: {"ids": [number + 1 for number in sample["ids"]]}
    )
    assert Packed(tmp_path / "packed", pad=0).read_batch(IDS)["ids"].tolist() == [[3, 4], [1, 2]]
    assert prepared[3]["ids"].tolist() == [4, 5]

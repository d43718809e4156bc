"""HF data sets are read as they are: by number, batch-wise, in an order that resumes."""

from __future__ import annotations

import pytest

from echelon.data import Loader, Order, Stream, is_stream, open_source

datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_a_map_style_set_is_read_in_order_and_resumes() -> None:
    data = datasets.Dataset.from_dict({"x": [[float(n)] * 3 for n in range(50)], "y": list(range(50))}).with_format(
        "torch"
    )
    source = open_source(data)
    order = Order(samples=50, batch=8, seed=1)
    whole = [
        step.micro_batches[0].batch["y"].tolist()
        for step in Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=None).steps(0, 7)
    ]
    assert whole == [order.ids(step, 0, order.batch_size(step)).tolist() for step in range(7)]
    parts = [Loader(source, order, dp_rank=rank, dp_size=2, micro_batch_size=None).steps(3, 7) for rank in range(2)]
    tail = [
        [y for each in both for y in each.micro_batches[0].batch["y"].tolist()] for both in zip(*parts, strict=True)
    ]
    assert tail == whole[3:]


def test_a_stream_is_told_by_its_kind() -> None:
    stream = datasets.Dataset.from_dict({"y": list(range(10))}).to_iterable_dataset()
    assert is_stream(stream)
    reader = Stream(stream).make_reader()
    reader.start_next_epoch()
    assert [sample["y"] for sample in reader.read(3)] == [0, 1, 2]

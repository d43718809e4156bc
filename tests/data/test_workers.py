"""Processes that read ahead."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from echelon.data.open_data import open_source
from echelon.data.workers import BatchRequest, prefetch_in_process, read_with_workers


class Left:
    """Of an earlier run, in a cycle: as what belongs to a GPU, it must end in the process that made it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.me, self.maker = folder, self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.maker:
            (self.folder / str(os.getpid())).touch()


class Collecting(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor([float(index)])


class CollectingStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for index in range(4):
            yield Collecting()[index]


def test_a_stream_that_has_begun_is_read_ahead_where_processes_are_spawned_otherwise() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert list(prefetch_in_process((number * 2 for number in range(4)), pin=False)) == [0, 2, 4, 6]
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "stream"])
def test_a_worker_leaves_alone_what_is_left_of_an_earlier_run(tmp_path: Path, kind: str) -> None:
    gc.collect()
    gc.disable()
    try:
        Left(tmp_path)
        if kind == "stream":
            found = list(prefetch_in_process(iter(CollectingStream()), pin=False))
        else:
            request = BatchRequest(np.arange(4), [4], 0)
            found = list(read_with_workers(open_source(Collecting()), iter([request]), pin=False, workers=2))
    finally:
        gc.enable()
    assert len(found) == (4 if kind == "stream" else 1)
    assert list(tmp_path.iterdir()) == []
    assert gc.get_freeze_count() == 0
    assert gc.collect() > 0  # here it ends

"""Batches on their way to the device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from echelon.engine.data_setup import BatchMover


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def test_containers_keep_their_kind() -> None:
    batch = {"pair": Pair(torch.ones(2), 3), "list": [torch.ones(1, dtype=torch.int64)], "text": "as it is"}
    found = BatchMover(torch.device("cpu"), torch.float64)(batch)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["list"], list)
    assert found["pair"].image.dtype == torch.float64
    assert found["list"][0].dtype == torch.int64
    assert (found["pair"].label, found["text"]) == (3, "as it is")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_does_not_wait_for_what_computes_and_what_computes_waits_for_the_copy() -> None:
    move, size = BatchMover(torch.device("cuda")), 2**20
    batches = [torch.full((size,), number, dtype=torch.float32).pin_memory() for number in range(20)]
    sums = []
    for batch in batches:
        torch.cuda._sleep(20_000_000)  # some ten milliseconds in which the next copies are made already
        there = move({"x": batch})["x"]
        sums.append(there.sum())
        del there  # its memory may be given to the next copy only after the sum
    assert [float(each) for each in sums] == [float(number * size) for number in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_is_made_while_the_device_computes() -> None:
    move, batch = BatchMover(torch.device("cuda")), torch.ones(2**20).pin_memory()
    move(batch)  # memory and stream are there
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    before = torch.cuda.Event()
    before.record()
    move(batch)
    move._copy_stream.synchronize()
    assert not before.query()  # the copy is done and the device is not

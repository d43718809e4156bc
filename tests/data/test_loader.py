"""What the ranks get: together exactly the batch, on any number of them, from any step, by any way of reading."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from echelon.data.column_gather import make_column_gather
from echelon.data.loader import Loader, MicroBatch, StepBatch, _nearest_valid_batch, evaluation_batches
from echelon.data.open_data import open_source
from echelon.data.order import Order
from echelon.data.source import GatherSource, SampleSource, Source
from echelon.errors import DataError
from echelon.plan.batch_split import split_batch

QUICK = settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy

pytestmark = [  # what torch says of worker processes on a small machine, and Python 3.12 of fork
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def columns(samples: int) -> Source:
    return open_source(TensorDataset(torch.arange(samples), torch.arange(samples) * 10))


def values(micros: Any) -> list[int]:
    return [value for micro in micros for value in micro.batch[0].tolist()]


def run(
    source: Source, order: Order, ranks: int, micro: int | None, start: int, stop: int, **how: Any
) -> list[list[int]]:
    """The samples of each step, from all ranks in turn."""
    loaders = [
        Loader(source, order, dp_rank=rank, dp_size=ranks, micro_batch_size=micro, **how).steps(start, stop)
        for rank in range(ranks)
    ]
    steps = []
    for batches in zip(*loaders, strict=True):
        assert len({(batch.step, batch.epoch, batch.samples, len(batch.micro_batches)) for batch in batches}) == 1
        assert sum(micro.samples for batch in batches for micro in batch.micro_batches) == batches[0].samples
        steps.append([value for batch in batches for value in values(batch.micro_batches)])
    return steps


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Order, int, int | None]:
    """An order, and ranks that even its shortest batch can feed."""
    order = Order(
        samples=draw(st.integers(1, 120)),
        batch=draw(st.integers(1, 150)),
        seed=draw(st.integers(0, 9)),
        shuffle=draw(st.booleans()),
    )
    least = min(order.batch_size(0), order.batch_size(order.steps_per_epoch - 1))
    return order, draw(st.integers(1, min(least, 64))), draw(st.none() | st.integers(1, 40))


@QUICK
@given(trainings())
def test_all_ranks_together_are_one_rank(training: tuple[Order, int, int | None]) -> None:
    order, ranks, micro = training
    steps, source = 2 * order.steps_per_epoch, columns(order.samples)
    together = run(source, order, ranks, micro, 0, steps)
    assert together == run(source, order, 1, None, 0, steps)
    assert together == [order.ids(step, 0, order.batch_size(step)).tolist() for step in range(steps)]
    for epoch in range(2):
        parts = together[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert sorted(itertools.chain(*parts)) == list(range(order.samples))


@QUICK
@given(trainings(), st.data())
def test_a_resumed_run_on_other_ranks_is_the_tail(training: tuple[Order, int, int | None], data: st.DataObject) -> None:
    order, ranks, micro = training
    steps, source = 3 * order.steps_per_epoch, columns(order.samples)
    start = data.draw(st.integers(0, steps))
    fresh = Order(samples=order.samples, batch=order.batch, seed=order.seed, shuffle=order.shuffle)
    whole = run(source, order, 1, None, 0, steps)
    assert run(source, fresh, ranks, micro, start, steps) == whole[start:]


@QUICK
@given(trainings())
def test_micros_are_those_of_split(training: tuple[Order, int, int | None]) -> None:
    order, ranks, micro = training
    for rank in range(ranks):
        loader = Loader(columns(order.samples), order, dp_rank=rank, dp_size=ranks, micro_batch_size=micro)
        for batch in loader.steps(0, order.steps_per_epoch):
            sizes = [part.size for part in split_batch(batch.samples, ranks, micro)[rank]]
            assert [m.samples for m in batch.micro_batches] == sizes
            assert [len(m.batch[0]) for m in batch.micro_batches] == sizes


@QUICK
@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 50))
def test_evaluation_counts_each_sample_once(samples: int, ranks: int, size: int) -> None:
    source = columns(samples)
    by_rank = [list(evaluation_batches(source, dp_rank=rank, dp_size=ranks, batch_size=size)) for rank in range(ranks)]
    assert len({len(micros) for micros in by_rank}) == 1
    counted = [value for micros in by_rank for m in micros for value in m.batch[0].tolist()[: m.samples]]
    assert counted == list(range(samples))
    for m in itertools.chain(*by_rank):
        assert len(m.batch[0]) == max(m.samples, 1)
        assert m.samples <= size


def test_a_step_batch_says_what_it_is() -> None:
    order = Order(samples=10, batch=4)
    first, *_, last = Loader(columns(10), order, dp_rank=1, dp_size=2, micro_batch_size=1).steps(1, 6)
    assert isinstance(first, StepBatch)
    assert isinstance(first.micro_batches[0], MicroBatch)
    assert (first.step, first.epoch, first.samples, len(first.micro_batches)) == (1, 0, 4, 2)
    assert (last.step, last.epoch, last.samples, len(last.micro_batches)) == (5, 1, 2, 1)
    assert 0 < first.wait_seconds < 1


def test_no_steps_are_none() -> None:
    assert (
        list(Loader(columns(4), Order(samples=4, batch=2), dp_rank=0, dp_size=1, micro_batch_size=None).steps(3, 3))
        == []
    )


# Worker processes


class Augmented(Dataset[Any]):
    """Draws from every generator, so that a worker that differs shows."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if index == 22 and getattr(self, "broken", False):
            raise OSError("truncated")
        return index + torch.rand(()).double().item() / 4 + random.random() / 4 + np.random.rand() / 4, index


def augmented(workers: int, start: int = 0, ranks: int = 2) -> list[list[int]]:
    source, order = open_source(Augmented(), seed=3), Order(samples=23, batch=5, seed=3)
    return run(source, order, ranks, 2, start, 2 * order.steps_per_epoch, workers=workers)


def test_workers_change_nothing() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    alone = augmented(0, ranks=1)
    assert augmented(1) == alone
    assert augmented(2, start=4) == alone[4:]
    assert torch.equal(torch.rand(3), want)


def test_workers_evaluate() -> None:
    source = open_source(Augmented())
    micros = [
        m for rank in range(3) for m in evaluation_batches(source, dp_rank=rank, dp_size=3, batch_size=4, workers=1)
    ]
    assert [v for m in micros for v in m.batch[1].tolist()[: m.samples]] == list(range(23))


def test_workers_end_with_the_loop() -> None:
    others = psutil.Process().children()  # the session's ranks
    steps = Loader(
        open_source(Augmented()), Order(samples=23, batch=5), dp_rank=0, dp_size=1, micro_batch_size=None, workers=2
    ).steps(0, 50)
    next(steps)
    started = [child for child in psutil.Process().children() if child not in others]
    assert len(started) >= 2
    steps.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


def test_columns_in_memory_need_no_workers() -> None:
    before = len(psutil.Process().children())
    steps = Loader(columns(9), Order(samples=9, batch=3), dp_rank=0, dp_size=1, micro_batch_size=None, workers=2).steps(
        0, 3
    )
    next(steps)
    assert len(psutil.Process().children()) == before


def test_a_sample_that_fails_in_a_worker_is_named() -> None:
    data = Augmented()
    data.broken = True
    steps = Loader(
        open_source(data), Order(samples=23, batch=5), dp_rank=0, dp_size=1, micro_batch_size=None, workers=1
    ).steps(0, 5)
    with pytest.raises(
        DataError, match=r"^Augmented: sample 22 of 23 could not be read: OSError: truncated; repair it"
    ):
        list(steps)


DEADLY = """
import os, signal
from echelon.data import Loader, Order, open_source
from echelon.errors import DataError

class Deadly(list):
    def __getitem__(self, index):
        if index == 22:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

try:
    list(Loader(open_source(Deadly(range(23))), Order(samples=23, batch=5), dp_rank=0, dp_size=1, micro_batch_size=None, workers=1).steps(0, 5))
except DataError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_worker_that_dies_is_named() -> None:
    # In a process of its own: torch reports a dead worker from a signal handler, which may strike again later.
    said = subprocess.run([sys.executable, "-c", DEADLY], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("a data worker process died: ")
    assert said.endswith("; workers=0 reads in the training process and shows why\n")


# The thread that gathers ahead (for pinned memory; pinning itself needs a device)


def test_the_thread_gives_the_same() -> None:
    class Unpinned(GatherSource):
        def read_micro_batches(self, ids: Any, sizes: Any, epoch: int, *, pin: bool = False) -> Any:
            assert pin
            return super().read_micro_batches(ids, sizes, epoch)

    order, gather = Order(samples=50, batch=7), make_column_gather(torch.arange(50))
    assert gather is not None
    source = Unpinned(lambda ids, pin: [gather(ids, pin)], list, 50)
    assert run(source, order, 1, 2, 3, 20, pin=True) == run(columns(50), order, 1, 2, 3, 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["columns", "samples"])
def test_pinned_steps(kind: str, workers: int) -> None:
    order = Order(samples=23, batch=5)
    source = columns(23) if kind == "columns" else open_source([(index, index) for index in range(23)])
    steps = Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=2, pin=True, workers=workers).steps(0, 9)
    assert all(m.batch[0].is_pinned() for batch in steps for m in batch.micro_batches)
    assert run(source, order, 2, 2, 0, 9, pin=True, workers=workers) == run(columns(23), order, 1, None, 0, 9)


# What cannot be


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(
        DataError, match=r"3 samples cannot feed 4 data ranks: each needs at least one; use dp=3 or less"
    ):
        Loader(columns(3), Order(samples=3, batch=8), dp_rank=0, dp_size=4, micro_batch_size=None)


def test_a_batch_smaller_than_the_ranks() -> None:
    with pytest.raises(DataError, match=r"a batch of 2 cannot feed 4 data ranks: use batch=4 or more"):
        Loader(columns(30), Order(samples=30, batch=2), dp_rank=0, dp_size=4, micro_batch_size=None)


def test_an_order_of_other_data() -> None:
    with pytest.raises(DataError, match=r"the order is over 5 samples but the data set has 30"):
        Loader(columns(30), Order(samples=5, batch=2), dp_rank=0, dp_size=1, micro_batch_size=None)


def test_a_last_batch_too_short_for_the_ranks_is_refused_before_the_first_step() -> None:
    loader = Loader(columns(66), Order(samples=66, batch=16), dp_rank=0, dp_size=3, micro_batch_size=None)
    message = r"step 9 is the last of epoch 1 and has 2 of 66 samples left for 3 data ranks.*dp=2 or less.*\(batch=15\)"
    with pytest.raises(DataError, match=message):
        loader.steps(5, 40)
    assert len(list(loader.steps(5, 9))) == 4  # a training that does not reach it is not refused
    list(Loader(columns(66), Order(samples=66, batch=15), dp_rank=0, dp_size=3, micro_batch_size=None).steps(0, 9))
    list(
        Loader(
            columns(66), Order(samples=66, batch=16, drop_last=True), dp_rank=0, dp_size=3, micro_batch_size=None
        ).steps(0, 9)
    )


@QUICK
@given(st.integers(2, 60), st.integers(2, 60), st.integers(2, 20))
def test_the_batch_that_is_recommended_works(samples: int, batch: int, ranks: int) -> None:
    order = Order(samples=samples, batch=batch)
    if samples < ranks or batch < ranks:
        return
    try:
        Loader(columns(samples), order, dp_rank=0, dp_size=ranks, micro_batch_size=None).steps(0, 99)
    except DataError as error:
        better = Order(samples=samples, batch=int(str(error).rpartition("batch=")[2].rstrip(")")))
        last = samples - (better.steps_per_epoch - 1) * better.batch
        assert min(better.batch, last) >= ranks
        Loader(columns(samples), better, dp_rank=0, dp_size=ranks, micro_batch_size=None).steps(0, 99)


def test_samples_are_read_once() -> None:
    """Reading ahead or in parts must not read a sample twice: that would be half the speed."""
    read: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    source = open_source(Counted((index, index) for index in range(20)))
    assert isinstance(source, SampleSource)
    list(Loader(source, Order(samples=20, batch=6), dp_rank=0, dp_size=1, micro_batch_size=2).steps(0, 4))
    assert sorted(read) == list(range(20))


@QUICK
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 12))
def test_the_batch_that_is_proposed_is_the_nearest_that_fits(samples: int, batch: int, ranks: int) -> None:
    samples, batch = max(samples, ranks), max(batch, ranks)
    fitting = [each for each in range(ranks, samples + 1) if not 0 < samples % each < ranks]
    wanted = min(fitting, key=lambda each: abs(each - batch))
    assert _nearest_valid_batch(Order(samples=samples, batch=batch), ranks) == wanted


def test_the_proposal_is_found_at_once_in_a_large_data_set() -> None:
    samples = 10**15 + 1
    assert _nearest_valid_batch(Order(samples=samples, batch=1000), 4) == 1001

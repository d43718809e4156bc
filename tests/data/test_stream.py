"""Streams: right at any number of ranks, and an early end on one rank stops all of them with a message."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from echelon.data.loader import MicroBatch, StepBatch
from echelon.data.stream import Stream, StreamLoader, evaluation_stream
from echelon.errors import DataError

# What torch says of worker processes on a small machine, and Python 3.12 of fork.
WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*use of fork:DeprecationWarning")
QUICK = settings(deadline=None, max_examples=40)  # no deadline: the machine may be busy


class Numbers(IterableDataset[Any]):
    """0, 1, 2, ... each epoch; `fails`: the sample at which reading breaks."""

    def __init__(self, samples: int, fails: int | None = None) -> None:
        self.samples, self.fails = samples, fails

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            if number == self.fails:
                raise OSError("connection lost")
            yield number, torch.tensor([number])


class Shuffled(IterableDataset[Any]):
    """Shuffles by all three global generators, differently in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(30).tolist()
        for _ in range(7):
            yield random.random()
            yield np.random.rand()
            yield torch.rand(()).item()


class OnlyOnce(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.rest = iter(range(samples))

    def __iter__(self) -> Iterator[Any]:
        return self.rest


def alone(ranks: int) -> Callable[[int], list[int]]:
    """What a rank hears when all others read the same."""
    return lambda place: [place] * ranks


def steps(
    data: Any, *, batch: int, ranks: int = 1, micro: int | None = None, start: int = 0, stop: int, **how: Any
) -> Any:
    """Steps as (epoch, samples, values), the values from all ranks in turn."""
    loaders = [
        StreamLoader(
            Stream(data, **how),
            batch=batch,
            dp_rank=rank,
            dp_size=ranks,
            micro_batch_size=micro,
            all_gather=alone(ranks),
        )
        for rank in range(ranks)
    ]
    by_rank = [list(loader.steps(start, stop)) for loader in loaders]
    return [
        (
            parts[0].epoch,
            parts[0].samples,
            [value for part in parts for micro in part.micro_batches for value in read(micro)],
        )
        for parts in zip(*by_rank, strict=True)
    ]


def read(micro: MicroBatch) -> list[float]:
    batch = micro.batch
    values = (batch[0] if isinstance(batch, list) else batch).tolist()
    assert len(values) == max(micro.samples, 1)
    return values


def in_turn(ranks: int, work: Callable[[int, Callable[[int], list[int]]], Any]) -> list[Any]:
    """`work(rank, agree)` on `ranks` threads with a real `agree`: the results, or the errors."""
    places, barrier = [0] * ranks, Barrier(ranks, timeout=20)

    def agree_as(rank: int) -> Callable[[int], list[int]]:
        def agree(place: int) -> list[int]:
            places[rank] = place
            barrier.wait()
            seen = list(places)
            barrier.wait()
            return seen

        return agree

    with ThreadPoolExecutor(ranks) as threads:
        done = [threads.submit(work, rank, agree_as(rank)) for rank in range(ranks)]
    return [future.exception() or future.result() for future in done]


def train(data: Callable[[int], Any], *, ranks: int, batch: int, stop: int) -> list[Any]:
    def work(rank: int, agree: Callable[[int], list[int]]) -> list[StepBatch]:
        return list(
            StreamLoader(
                Stream(data(rank)), batch=batch, dp_rank=rank, dp_size=ranks, micro_batch_size=None, all_gather=agree
            ).steps(0, stop)
        )

    return in_turn(ranks, work)


@QUICK
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 5), st.none() | st.integers(2, 9), st.integers(0, 6))
def test_ranks_together_are_the_stream_and_a_resumed_run_its_tail(
    samples: int, batch: int, ranks: int, micro: int | None, start: int
) -> None:
    ranks = min(ranks, batch, samples, samples % batch or batch)
    got = steps(Numbers(samples), batch=batch, ranks=ranks, micro=micro, start=start, stop=6)
    want = [
        (epoch, len(part), list(part))
        for epoch in range(7)
        for part in (range(first, min(first + batch, samples)) for first in range(0, samples, batch))
    ]
    assert got == want[start:6]


def test_drop_last() -> None:
    loader = StreamLoader(
        Stream(Numbers(10)), batch=4, dp_rank=0, dp_size=1, micro_batch_size=None, all_gather=alone(1), drop_last=True
    )
    assert [(b.epoch, read(b.micro_batches[0])) for b in loader.steps(1, 3)] == [(0, [4, 5, 6, 7]), (1, [0, 1, 2, 3])]


def test_unequal_shares_of_a_stream_are_dealt_out_to_its_end() -> None:
    def dealt(rank: int, workers: int) -> list[list[int]]:
        loader = StreamLoader(
            Stream(Numbers(11)),
            batch=8,
            dp_rank=rank,
            dp_size=2,
            micro_batch_size=None,
            all_gather=alone(2),
            shares=(3, 1),
            workers=workers,
        )
        return [read(step.micro_batches[0]) for step in loader.steps(0, 2)]

    for workers in (0, 1):
        assert dealt(0, workers) == [[0, 1, 2, 3, 4, 5], [8, 9]]
        assert dealt(1, workers) == [[6, 7], [10]]


def test_a_stream_draws_the_same_on_any_ranks_and_disturbs_nobody() -> None:
    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    def mask(samples: list[Any]) -> Any:  # a collate that draws must not change what comes next
        return torch.tensor(samples) + 0 * torch.rand(()).item() * random.random() * np.random.rand()

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    want = drawn()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    one = steps(Shuffled(), batch=8, stop=14, collate=mask)
    assert steps(Shuffled(), batch=8, ranks=3, micro=1, start=2, stop=14, collate=mask) == one[2:]
    assert drawn() == want
    epochs = [[value for epoch, _, values in one if epoch == number for value in values] for number in (0, 1)]
    assert sorted(epochs[0][:30]) == list(range(30))
    assert len(set(epochs[0] + epochs[1])) == 30 + 2 * 21
    assert epochs[0][:30] != epochs[1][:30]
    assert steps(Shuffled(), batch=8, stop=1, seed=5) != one[:1]


@WORKERS
def test_a_stream_is_read_ahead_by_a_process_to_the_same_end() -> None:
    def read_by(data: Any, workers: int, start: int = 0) -> list[Any]:
        loader = StreamLoader(
            Stream(data, seed=3),
            batch=8,
            dp_rank=1,
            dp_size=2,
            micro_batch_size=3,
            all_gather=alone(2),
            workers=workers,
        )
        return [
            (step.epoch, step.samples, [read(micro) for micro in step.micro_batches])
            for step in loader.steps(start, 13)
        ]

    assert read_by(Shuffled(), 1) == read_by(Shuffled(), 0)
    assert read_by(Shuffled(), 2, start=5) == read_by(Shuffled(), 0)[5:]
    with pytest.raises(DataError, match=r"Numbers: sample 17 of epoch 0 could not be read: OSError: connection lost"):
        read_by(Numbers(40, fails=17), 1)
    with pytest.raises(DataError, match=r"epoch 1 ends after 0 samples, before the first batch"):
        read_by(OnlyOnce(40), 1)


def test_a_stream_that_shuffles_by_set_epoch_hears_of_it() -> None:
    class Announced(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return (100 * self.epoch + number for number in range(3))

    assert [values for _, _, values in steps(Announced(3), batch=3, stop=3)] == [
        [0, 1, 2],
        [100, 101, 102],
        [200, 201, 202],
    ]


@pytest.mark.parametrize("short", [0, 1, 5, 8, 9, 15, 16, 20])
def test_a_stream_that_ends_early_on_one_rank_stops_all(short: int) -> None:
    errors = train(lambda rank: Numbers(short if rank == 2 else 24), ranks=3, batch=8, stop=9)
    step = short // 8
    if short:
        counts = "8 of epoch 1" if short % 8 == 0 else f"{short} of epoch 0"
        read = (step + 1) * 8
        message = f"the stream ended early on rank 2: at step {step} ranks 0 to 2 have read {read} of epoch 0, {read} of epoch 0, {counts}"
    else:
        message = "the stream ended early on rank 2: at step 0 ranks 0 to 2 have read 8 of epoch 0, 8 of epoch 0, 0 of epoch 0"
    for error in errors:
        assert isinstance(error, DataError)
        assert message in str(error)
        assert "give every rank the same whole stream" in str(error)


def test_a_stream_that_fails_on_one_rank_stops_all() -> None:
    errors = train(lambda rank: Numbers(24, fails=11 if rank == 1 else None), ranks=3, batch=8, stop=9)
    assert all(isinstance(error, DataError) for error in errors)
    assert "Numbers: sample 11 of epoch 0 could not be read: OSError: connection lost; repair the stream" in str(
        errors[1]
    )
    assert "rank 1 could not read its part of step 1; its own message says why" in str(errors[0])
    assert str(errors[0]) == str(errors[2])


def test_equal_streams_agree() -> None:
    results = train(lambda rank: Numbers(20), ranks=3, batch=8, stop=7)
    values = [
        [value for micro in batch.micro_batches for value in read(micro)]
        for batch in itertools.chain(*zip(*results, strict=True))
    ]
    assert list(itertools.chain(*values)) == [*range(20), *range(20), *range(8)]


@QUICK
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 20))
def test_evaluation_counts_each_sample_once(samples: int, ranks: int, size: int) -> None:
    by_rank = [
        list(
            evaluation_stream(
                Stream(Numbers(samples)), dp_rank=rank, dp_size=ranks, batch_size=size, all_gather=alone(ranks)
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(micros) for micros in by_rank}) == 1
    counted = [value for turn in zip(*by_rank, strict=True) for micro in turn for value in read(micro)[: micro.samples]]
    assert counted == list(range(samples))
    assert all(micro.samples <= size for micros in by_rank for micro in micros)


def test_evaluation_of_unequal_streams_stops_all() -> None:
    def work(rank: int, agree: Callable[[int], list[int]]) -> list[MicroBatch]:
        return list(
            evaluation_stream(Stream(Numbers(12 + 6 * rank)), dp_rank=rank, dp_size=2, batch_size=3, all_gather=agree)
        )

    for error in in_turn(2, work):
        assert isinstance(error, DataError)
        assert "ended early on rank 0: at evaluation ranks 0 to 1 have read 12 of epoch 0, 18 of epoch 0" in str(error)


# What cannot be


class NoBeginning(Numbers):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("no route")


class Ragged(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.zeros(2)])


@pytest.mark.parametrize(
    ("data", "ranks", "message"),
    [
        (
            Numbers(0),
            1,
            r"Numbers: epoch 0 ends after 0 samples, before the first batch of 4; give a stream with more samples",
        ),
        (OnlyOnce(8), 1, r"OnlyOnce: epoch 1 ends after 0 samples.*starts again each time it is iterated"),
        (Numbers(9), 2, r"Numbers: epoch 0 ends at step 2 with 1 sample for 2 data ranks: each needs at least one"),
        (NoBeginning(9), 1, r"NoBeginning: epoch 0 could not start: OSError: no route; repair its `__iter__`"),
        (
            Ragged(9),
            1,
            r"samples 0 and 2 cannot be put into one batch as torch does.*float32\[2\], sample 2 is float32\[3\]",
        ),
    ],
)
def test_streams_that_feed_no_training(data: Any, ranks: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        steps(data, batch=4, ranks=ranks, stop=9)


def test_an_empty_evaluation() -> None:
    with pytest.raises(DataError, match=r"Numbers: the stream is empty: an evaluation needs at least one sample"):
        list(evaluation_stream(Stream(Numbers(0)), dp_rank=0, dp_size=1, batch_size=3, all_gather=alone(1)))


def test_a_batch_smaller_than_the_ranks() -> None:
    with pytest.raises(DataError, match=r"a batch of 2 cannot feed 4 data ranks: use batch=4 or more"):
        StreamLoader(Stream(Numbers(9)), batch=2, dp_rank=0, dp_size=4, micro_batch_size=None, all_gather=alone(4))


def test_what_is_no_stream() -> None:
    with pytest.raises(DataError, match=r"list is not a stream \(torch IterableDataset\)"):
        Stream([1, 2, 3])

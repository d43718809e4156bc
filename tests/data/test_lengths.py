"""Samples that differ in length: batches of similar ones, and rows filled with several."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data import Loader, Packed, open_source
from echelon.data.order import BucketedOrder
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.pack import pack
from echelon.data.packed.sequence_packing import pack_best_fit
from echelon.errors import DataError

QUICK = settings(deadline=None, max_examples=60)


@QUICK
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 6), st.sampled_from([1, 4]), st.data())
def test_bucketed_batches_hold_each_sample_once_from_any_step(
    samples: int, batch: int, pool: int, lanes: int, data: st.DataObject
) -> None:
    lengths = np.random.default_rng(samples).integers(0, 50, samples)

    def made() -> BucketedOrder:
        return BucketedOrder(samples=samples, batch=batch, lanes=lanes, lengths=lengths, pool_size=pool)

    order = made()
    whole = [order.ids(step, 0, order.batch_size(step)).tolist() for step in range(2 * order.steps_per_epoch)]
    assert sorted(itertools.chain(*whole[: order.steps_per_epoch])) == list(range(samples))
    start = data.draw(st.integers(0, len(whole) - 1))
    fresh = made()
    assert [fresh.ids(step, 0, fresh.batch_size(step)).tolist() for step in range(start, len(whole))] == whole[start:]


def test_bucketed_batches_hold_samples_of_similar_length() -> None:
    lengths = np.random.default_rng(0).integers(0, 1000, 6400)
    order = BucketedOrder(samples=6400, batch=32, lengths=lengths)
    spread = [np.ptp(lengths[order.ids(step, 0, 32)]) for step in range(200)]
    assert np.mean(spread) < 100  # by chance it would be about 940
    first = [int(lengths[order.ids(step, 0, 1)][0]) for step in range(32)]
    assert first != sorted(first)


@QUICK
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 30))
def test_filled_rows_hold_each_token_once(lengths: list[int], row: int) -> None:
    if not sum(lengths):
        with pytest.raises(DataError, match="no sample holds a token"):
            pack_best_fit(np.array(lengths), row)
        return
    found = pack_best_fit(np.array(lengths), row)
    each = zip(found.samples.tolist(), found.starts.tolist(), found.sizes.tolist(), strict=True)
    tokens = sorted((sample, start + place) for sample, start, size in each for place in range(size))
    assert tokens == [(sample, place) for sample, length in enumerate(lengths) for place in range(length)]
    used = np.add.reduceat(found.sizes, found.rows[:-1])
    assert 0 < used.min() <= used.max() <= row
    assert found.rows[-1] == len(found.samples)
    assert sorted(used.tolist()) == sorted(best_fit(found.sizes.tolist(), row))


def best_fit(sizes: list[int], row: int) -> list[int]:
    """One by one, the longest first, into the fullest row that has room: tokens in each row."""
    rows: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, used in enumerate(rows) if used + size <= row]
        if not fitting:
            rows.append(size)
        else:
            rows[max(fitting, key=lambda number: rows[number])] += size
    return rows


def test_many_samples_are_laid_out_in_little_memory() -> None:
    lengths = np.random.default_rng(0).integers(1, 3000, 500_000)
    tracemalloc.start()
    found = pack_best_fit(lengths, 2048)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120 * len(found.samples)
    assert (len(found.rows) - 1) * 2048 < 1.01 * lengths.sum()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [{"tokens": list(range(1, 1 + number % 13)), "label": number} for number in range(100)]
    pack(SamplePackingSource(rows, {}), tmp_path / "set", shards=4)
    return tmp_path / "set"


def test_a_bucketed_training_pads_little(texts: Path) -> None:
    def padded(**how: str) -> int:
        source = open_source(Packed(texts, pad=0, **how))
        loader = Loader(source, source.make_order(batch=5, seed=0), dp_rank=0, dp_size=1, micro_batch_size=None)
        batches = [step.micro_batches[0].batch for step in loader.steps(0, 20)]
        assert sorted(label for batch in batches for label in batch["label"].tolist()) == list(range(100))
        return sum(int((batch["tokens"] == 0).sum()) for batch in batches)

    assert padded(bucket="tokens") < padded() / 4


def test_a_transform_of_rows_that_differ_in_length_is_padded_too(texts: Path) -> None:
    source = open_source(Packed(texts, pad=-1, transform=lambda sample: (sample["tokens"] * 2, {"y": sample["label"]})))
    assert not source.supports_gather
    tokens, rest = source.read_batch(np.array([2, 0, 3]), 0)
    assert tokens.tolist() == [[2, 4, -1], [-1, -1, -1], [2, 4, 6]]
    assert rest["y"].tolist() == [2, 0, 3]


def test_filled_rows_come_back_as_they_were(texts: Path) -> None:
    rows = Packed(texts).pack_sequences(16)
    found = [rows[number] for number in range(len(rows))]
    assert len(rows) == -(-sum(number % 13 for number in range(100)) // 16)  # not one row more than needed
    lengths = []
    for row in found:
        for segment in range(1, int(row["segments"].max()) + 1):
            here = row["segments"] == segment
            assert torch.equal(row["tokens"][here], row["positions"][here] + 1)
            lengths.append(int(here.sum()))
    assert sorted(lengths) == sorted(number % 13 for number in range(100) if number % 13)
    batch = open_source(rows).read_batch(np.array([2, 0]), 0)
    assert torch.equal(batch["tokens"][0], found[2]["tokens"])


@pytest.mark.parametrize("far", [False, True])
def test_lengths_are_read_without_the_content(texts: Path, far: bool) -> None:
    """Damage in the tokens does not show in their lengths, and none of these files comes to the cache; damage in the offsets does show."""
    how = {"cache": texts.parent / "cache"} if far else {}
    where = f"file://{texts}" if far else str(texts)
    right = [number % 13 for number in range(100)]
    shard = Packed(texts).manifests[0].shards[1]
    offsets, content, _ = shard.buffers[0]

    def flip(place: int) -> None:
        raw = bytearray((texts / shard.file).read_bytes())
        raw[place] ^= 1
        (texts / shard.file).write_bytes(raw)

    flip(content)
    assert Packed(where, bucket="tokens", **how).lengths("tokens").tolist() == right
    assert len(Packed(where, **how).pack_sequences(16)) > 1
    assert not list((texts.parent / "cache").glob("*.arrow"))
    flip(content)
    flip(offsets + 8 * 7)
    with pytest.raises(DataError, match=r"shard-00001.arrow.* damaged"):
        Packed(where, **how).lengths("tokens")


def test_a_column_that_is_not_ragged_has_no_lengths(texts: Path) -> None:
    with pytest.raises(
        DataError, match=r"'label' is not a column of rows that differ in length; the columns are tokens: int64\[any\]"
    ):
        Packed(texts).pack_sequences(8, "label")


def test_which_of_several_columns_is_laid_out_must_be_said(tmp_path: Path) -> None:
    pack(SamplePackingSource([{"x": [1] * n, "y": [2] * n} for n in range(1, 5)], {}), tmp_path)
    with pytest.raises(
        DataError, match=r"pack_sequences\(8\) takes one of x, y: choose one, as pack_sequences\(8, 'x'\)"
    ):
        Packed(tmp_path).pack_sequences(8)
    assert Packed(tmp_path).pack_sequences(8, "y")[0]["tokens"].max() == 2


def test_filled_rows_of_other_data_or_another_length_have_another_identity(texts: Path, tmp_path: Path) -> None:
    pack(SamplePackingSource([{"x": [1] * n} for n in range(1, 5)], {}), tmp_path / "other")
    data, other = Packed(texts), Packed(tmp_path / "other")
    held = [
        open_source(rows).identity
        for rows in (data.pack_sequences(16), data.pack_sequences(8), other.pack_sequences(16), data.pack_sequences(16))
    ]
    assert len({*held}) == 3
    assert held[0] == held[3] == f"{data.identity}, {data.columns[0].name!r} in rows of 16"

"""A packed data set gives what was packed, sample by sample and batch by batch, and any Arrow reader finds it too."""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from echelon.data import Loader, Packed, evaluation_batches, open_source
from echelon.data.packed import row_reader
from echelon.data.packed.from_arrays import ArrayPackingSource
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.manifest import Manifest
from echelon.data.packed.mmap_region import HUGE_PAGE_BYTES, find_aligned_gaps
from echelon.data.packed.pack import pack
from echelon.errors import DataError
from echelon.trials.example_batch import ExampleBatches
from tests.flow.jobs import make

pytestmark = [  # what torch says of worker processes on a small machine, and Python 3.12 of fork
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

PIXELS = np.random.default_rng(0).integers(0, 256, (500, 3, 8, 8), dtype=np.uint8)


def images(folder: Path, shards: int = 1, samples: int = 500, **how: Any) -> Manifest:
    arrays = {"image": PIXELS[:samples], "label": np.arange(samples)}
    return pack(
        ArrayPackingSource(arrays, {"tuple": ["image", "label"]}, {"source": "test"}), folder, shards=shards, **how
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("shards", [1, 7])
def test_batches_are_what_torch_would_collate(tmp_path: Path, shards: int) -> None:
    images(tmp_path / "set", shards)
    data = Packed(tmp_path / "set")
    ids = np.random.default_rng(1).permutation(500)[:64]
    pixels, labels = data.read_batch(ids)
    assert torch.equal(pixels, torch.from_numpy(PIXELS[ids]))
    assert labels.tolist() == ids.tolist()
    assert same(data.read_batch(ids), default_collate([data[number] for number in ids.tolist()]))
    assert data[-1][1].item() == 499
    with pytest.raises(IndexError):
        data[500]
    for outside in ([-1, 3], [3, 500]):
        with pytest.raises(IndexError, match="of 500: they count from 0"):
            data.read_batch(np.array(outside))


NESTED = [
    {
        "words": "grün" * (number % 3),
        "ids": list(range(number % 5)),
        "pair": (torch.full((2, 3), float(number)), number % 2 == 0),
        "half": torch.tensor([number, 1.5], dtype=torch.bfloat16),
        "raw": bytes([number]),
        "boxes": np.ones((1 + number % 2, 4), np.float32) * number,
        "score": number / 7,
    }
    for number in range(40)
]


@pytest.mark.parametrize("shards", [1, 3])
def test_nested_samples_of_any_length_come_back(tmp_path: Path, shards: int) -> None:
    pack(SamplePackingSource(NESTED, {}), tmp_path / "set", shards=shards)
    data = Packed(tmp_path / "set", pad=-1)
    for number in (0, 7, 39):
        want, got = NESTED[number], data[number]
        assert (got["words"], got["raw"], got["ids"].tolist()) == (want["words"], want["raw"], want["ids"])
        assert got["pair"][0].equal(want["pair"][0])
        assert got["pair"][1].item() is want["pair"][1]
        assert got["half"].equal(want["half"])
        assert np.array_equal(got["boxes"].numpy(), want["boxes"])
        assert got["score"].item() == want["score"]
    batch = data.read_batch(np.array([3, 9, 1]))
    assert batch["ids"].tolist() == [[0, 1, 2, -1], [0, 1, 2, 3], [0, -1, -1, -1]]
    assert batch["words"] == ["", "", "grün"]
    assert batch["boxes"].shape == (3, 2, 4)
    assert data.lengths("ids").tolist() == [number % 5 for number in range(40)]


@pytest.mark.parametrize("first", ["label", "image"])
def test_rows_are_gathered_whether_or_not_files_can_be_laid_in_step(tmp_path: Path, first: str) -> None:
    """Rows of 256 bytes lie a multiple of 64 bytes behind labels: files of other lengths cannot be mapped in step with each other."""
    rows = {"image": np.arange(100 * 256).reshape(100, 256).astype(np.uint8), "label": np.arange(100)}
    names = [first, *({*rows} - {first})]
    pack(
        ArrayPackingSource({name: rows[name] for name in names}, {"dict": {n: n for n in names}}, {}),
        tmp_path / "set",
        shards=7,
    )
    data = Packed(tmp_path / "set")
    ids = np.random.default_rng(0).permutation(100)
    batch = data.read_batch(ids)
    assert np.array_equal(batch["image"].numpy(), rows["image"][ids])
    assert batch["label"].tolist() == ids.tolist()
    kinds = {type(gather).__name__ for gather in data._rows._gathers}  # type: ignore[attr-defined]
    assert kinds == ({"ContiguousGather"} if first == "image" else {"ContiguousGather", "AddressGather"})


@given(
    st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 100)), min_size=1, max_size=6),
    st.integers(1, 5000),
    st.sampled_from([4096, HUGE_PAGE_BYTES]),
)
def test_gaps_lay_files_in_step(files: list[tuple[int, int]], item: int, page: int) -> None:
    sizes, offsets = [size for size, _ in files], [64 * offset for _, offset in files]
    gaps = find_aligned_gaps(sizes, offsets, item, page)
    if gaps is None:
        assert len({offset % math.gcd(page, item) for offset in offsets}) > 1
        return
    place = 0
    for size, offset, gap in zip(sizes, offsets, gaps, strict=True):
        assert gap % page == 0
        assert (place + gap + offset - offsets[0]) % item == 0
        place += gap + -(-size // page) * page


@pytest.mark.parametrize("memory", [2**40, 2**22])
def test_files_larger_than_a_huge_page_are_read_the_same_where_they_fit_into_memory_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(row_reader, "usable_memory", lambda: memory)
    values = np.random.default_rng(0).integers(0, 256, (3001, 3, 32, 32), dtype=np.uint8)
    pack(
        ArrayPackingSource({"image": values, "label": np.arange(3001)}, {"tuple": ["image", "label"]}, {}),
        tmp_path / "set",
        shards=3,
    )
    data, ids = Packed(tmp_path / "set"), np.random.default_rng(1).permutation(3001)
    image, label = data.read_batch(ids)
    assert np.array_equal(image.numpy(), values[ids])
    assert label.tolist() == ids.tolist()
    mapped = [mapping.starts for mapping in data._rows._maps]  # type: ignore[attr-defined]
    assert all(not (starts % HUGE_PAGE_BYTES).any() for starts in mapped) == (memory == 2**40)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("far", [False, True])
def test_pinned_batches_are_the_same(tmp_path: Path, shards: int, far: bool) -> None:
    pack(SamplePackingSource(NESTED, {}), tmp_path / "set", shards=shards)
    where = f"file://{tmp_path / 'set'}" if far else str(tmp_path / "set")
    source = open_source(Packed(where, pad=-1, cache=tmp_path / "cache"))
    loaders = [
        Loader(source, source.make_order(batch=6, seed=0), dp_rank=0, dp_size=1, micro_batch_size=4, pin=pin).steps(
            0, 12
        )
        for pin in (False, True)
    ]
    for plain, pinned in zip(*loaders, strict=True):
        assert same([micro.batch for micro in plain.micro_batches], [micro.batch for micro in pinned.micro_batches])
        assert all(
            micro.batch[name].is_pinned()
            for micro in pinned.micro_batches
            for name in ("half", "ids", "boxes", "score")
        )


def test_files_that_cannot_be_mapped_are_told_with_what_to_do(tmp_path: Path) -> None:
    pack(ArrayPackingSource({"x": np.zeros(2**24, np.uint8)}, {"tuple": ["x"]}, {}), tmp_path / "set", shards=1)

    def read(answer: Any) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**23, resource.RLIM_INFINITY))
        try:
            Packed(tmp_path / "set")
        except DataError as error:
            answer.send(str(error))

    here, there = multiprocessing.Pipe()
    helper = multiprocessing.get_context("fork").Process(target=read, args=(there,))
    helper.start()
    helper.join(20)
    assert here.poll()
    assert "set: the packed files cannot be mapped" in (told := here.recv())
    assert "pack the data into fewer files (--shards)" in told


def test_any_arrow_reader_finds_the_samples(tmp_path: Path) -> None:
    images(tmp_path / "set", 3)
    tables = [pa.ipc.open_file(str(path)).read_all() for path in sorted((tmp_path / "set").glob("*.arrow"))]
    table = pa.concat_tables(tables)
    assert np.array_equal(table["image"].combine_chunks().to_numpy_ndarray(), PIXELS)
    assert table["label"].to_pylist() == list(range(500))


def test_rows_that_differ_in_length_need_a_way_to_make_a_batch(tmp_path: Path) -> None:
    pack(SamplePackingSource([{"ids": [1] * number} for number in range(1, 9)], {}), tmp_path / "set")
    data = Packed(tmp_path / "set")
    with pytest.raises(DataError, match=r"'ids' differs in length from sample to sample: give Packed\(..., pad=0\)"):
        data.read_batch(np.array([1, 2]))
    batch = open_source(data, collate=lambda samples: [len(sample["ids"]) for sample in samples]).read_batch(
        np.array([2, 5]), 0
    )
    assert batch == [3, 6]


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 40), st.integers(1, 8), st.data())
def test_ranks_together_read_each_sample_once_and_resume_is_the_tail(
    tmp_path_factory: pytest.TempPathFactory, samples: int, shards: int, batch: int, ranks: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("packed") / "set"
    images(folder, min(shards, samples), samples)
    source = open_source(str(folder))
    order = source.make_order(batch=batch, seed=3)
    assert order.lanes == min(shards, samples)
    least = min(order.batch_size(0), order.batch_size(order.steps_per_epoch - 1))
    total = 2 * order.steps_per_epoch

    def read(ranks: int, start: int) -> list[list[int]]:
        ranks = min(ranks, least)
        loaders = [
            Loader(source, order, dp_rank=rank, dp_size=ranks, micro_batch_size=3).steps(start, total)
            for rank in range(ranks)
        ]
        return [
            [label for each in together for micro in each.micro_batches for label in micro.batch[1].tolist()]
            for together in zip(*loaders, strict=True)
        ]

    whole = read(1, 0)
    assert sorted(label for step in whole[: order.steps_per_epoch] for label in step) == list(range(samples))
    start = data.draw(st.integers(0, total - 1))
    assert read(ranks, start) == whole[start:]


def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    images(tmp_path / "set", 4, 103)
    source = open_source(tmp_path / "set")
    seen: list[int] = []
    for rank in range(4):
        for micro in evaluation_batches(source, dp_rank=rank, dp_size=4, batch_size=10):
            seen += micro.batch[1].tolist()[: micro.samples]
    assert sorted(seen) == list(range(103))


def test_ranks_evaluate_their_own_files(tmp_path: Path) -> None:
    """Also where files differ by a sample, and where a rank that has run out only keeps step."""
    images(tmp_path / "set", 4, 103)
    source = open_source(tmp_path / "set")
    bounds = [file * 103 // 4 for file in range(5)]
    for rank in range(4):
        batches = list(evaluation_batches(source, dp_rank=rank, dp_size=4, batch_size=5))
        read = {label for micro in batches for label in micro.batch[1].tolist()}
        assert read == set(range(bounds[rank], bounds[rank + 1]))
        assert (batches[-1].samples == 0) == (bounds[rank + 1] - bounds[rank] == 25)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32", "bool", "bfloat16"])
@pytest.mark.parametrize("far", [False, True])
def test_padded_batches_are_what_torch_pads(tmp_path: Path, dtype: str, far: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 2, (n * 7 % 5, 3), generator=draw).to(getattr(torch, dtype)) for n in range(40)]
    pack(
        SamplePackingSource([{"x": row, "n": n, "words": "a" * n} for n, row in enumerate(rows)], {}),
        tmp_path / "set",
        shards=3,
    )
    where = f"file://{tmp_path / 'set'}" if far else str(tmp_path / "set")
    data = Packed(where, pad=1, cache=tmp_path / "cache")
    for ids in (np.array([7, 0, 39, 13]), np.array([5]), np.array([0, 5])):  # the last two hold nothing
        batch = data.read_batch(ids)
        wanted = torch.nn.utils.rnn.pad_sequence([rows[n] for n in ids], batch_first=True, padding_value=1)
        assert batch["x"].dtype == wanted.dtype
        assert torch.equal(batch["x"], wanted)
        assert batch["words"] == ["a" * n for n in ids]


def test_workers_that_are_spawned_can_pad(tmp_path: Path) -> None:
    pack(SamplePackingSource([{"tokens": list(range(n))} for n in range(4)], {}), tmp_path / "set")
    collate = pickle.loads(pickle.dumps(Packed(tmp_path / "set", pad=7).packed_collate))
    assert collate([{"tokens": torch.tensor([1])}, {"tokens": torch.tensor([1, 2])}])["tokens"].tolist() == [
        [1, 7],
        [1, 2],
    ]


def test_several_folders_are_one_data_set(tmp_path: Path) -> None:
    images(tmp_path / "a", 2, 100)
    images(tmp_path / "b", 3, 50)
    data = Packed(tmp_path / "a", tmp_path / "b")
    assert len(data) == 150
    source = open_source(data)
    loader = Loader(source, source.make_order(batch=10, seed=0), dp_rank=1, dp_size=5, micro_batch_size=None)
    labels = [label for step in loader.steps(0, 15) for label in step.micro_batches[0].batch[1].tolist()]
    assert sorted(labels) == list(range(30, 60))  # its part of all, though the files hold 50, 50, 16, 17 and 17
    assert data.read_batch(np.array([99, 100, 149, 0]))[1].tolist() == [99, 0, 49, 0]
    pack(SamplePackingSource([1, 2], {}), tmp_path / "c")
    with pytest.raises(
        DataError,
        match=r"c holds value: int64 and .*a image: uint8\[3, 8, 8\], label: int64: pack them with the same columns",
    ):
        Packed(tmp_path / "a", tmp_path / "c")


def test_a_subset_is_gathered_too(tmp_path: Path) -> None:
    images(tmp_path / "set", 2)
    source = open_source(Subset(Packed(tmp_path / "set"), [5, -1, 300]))
    assert source.supports_gather
    assert source.read_batch(np.array([2, 1, 0]), 0)[1].tolist() == [300, 499, 5]


@pytest.mark.parametrize("transform", [None, lambda sample: sample])
def test_a_subset_is_padded_and_put_together_by_length_as_the_whole_is(tmp_path: Path, transform: Any) -> None:
    pack(SamplePackingSource([{"tokens": [1] * (n % 4)} for n in range(8)], {}), tmp_path / "set")
    data = Packed(tmp_path / "set", pad=7, bucket="tokens", transform=transform)
    source = open_source(Subset(data, [3, 1, 6]))
    assert source.read_batch(np.array([0, 1]), 0)["tokens"].tolist() == [[1, 1, 1], [1, 7, 7]]
    assert source.lengths is not None
    assert source.lengths.tolist() == [3, 1, 2]
    example = ExampleBatches(make(data=Subset(data, [3, 1]), batch_size=2))
    assert example.batch(2)["tokens"].tolist() == [[1, 1, 1], [1, 7, 7]]


def test_padding_that_fails_is_not_blamed_on_a_collate_that_the_job_has_not(tmp_path: Path) -> None:
    pack(SamplePackingSource([{"tokens": [1] * (n % 4)} for n in range(8)], {}), tmp_path / "set")
    data = Packed(tmp_path / "set", pad=7, transform=lambda sample: object())
    with pytest.raises(DataError, match=r"cannot be put into one batch as torch does .* or give the job collate="):
        open_source(data).read_batch(np.arange(4), 0)


def test_a_transform_draws_the_same_at_any_number_of_workers(tmp_path: Path) -> None:
    images(tmp_path / "set", 2, 64)
    source = open_source(Packed(tmp_path / "set", transform=_noisy))
    order = source.make_order(batch=16, seed=5)
    assert (source.supports_gather, order.lanes) == (False, 2)

    def read(workers: int) -> list[float]:
        loader = Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=None, workers=workers)
        return [value for step in loader.steps(0, 4) for micro in step.micro_batches for value in micro.batch.tolist()]

    alone = read(0)
    assert read(2) == alone
    assert len(set(alone)) == 64


def _noisy(sample: Any) -> torch.Tensor:
    return sample[0].float().mean() + torch.rand(())


def test_it_travels_to_a_worker_by_its_path(tmp_path: Path) -> None:
    images(tmp_path / "set", 2)
    copy = pickle.loads(pickle.dumps(Packed(tmp_path / "set")))
    assert copy[7][1].item() == 7


def test_a_packing_that_is_done_is_used_again(tmp_path: Path) -> None:
    images(tmp_path / "set", 2)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    images(tmp_path / "set", 2)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()} == before
    with pytest.raises(DataError, match=r"holds another packed data set: .*--overwrite` replaces what is there"):
        images(tmp_path / "set", 3)
    images(tmp_path / "set", 3, overwrite=True)
    assert len(Packed(tmp_path / "set").manifests[0].shards) == 3


def test_a_file_that_is_gone_or_cut_off_is_made_anew_and_no_other(tmp_path: Path) -> None:
    """What the message about a damaged file says: delete it, pack again."""
    images(tmp_path / "set", 4)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "set").glob("*.*")}
    (tmp_path / "set/shard-00001.arrow").unlink()
    (tmp_path / "set/shard-00002.arrow").write_bytes(b"half")
    images(tmp_path / "set", 4)
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "set").glob("*.*")}
    assert {name: content for name, (content, _) in after.items()} == {
        name: content for name, (content, _) in before.items()
    }
    same = sorted(name for name in before if before[name][1] == after[name][1] and name.startswith("shard"))
    assert same == ["shard-00000.arrow", "shard-00003.arrow"]


def test_a_packing_in_so_many_files_is_mended_and_gone_on_with_without_that_number(tmp_path: Path) -> None:
    rows, sample = {"x": np.arange(40)}, {"tuple": ["x"]}
    pack(ArrayPackingSource(rows, sample, {"source": "a"}), tmp_path / "set", shards=6)
    (tmp_path / "set/shard-00003.arrow").unlink()
    assert len(pack(ArrayPackingSource(rows, sample, {"source": "a"}), tmp_path / "set").shards) == 6
    with pytest.raises(OSError, match="on fire"):
        pack(Burning(rows, sample, {"source": "a"}), tmp_path / "begun", shards=5)
    assert len(pack(ArrayPackingSource(rows, sample, {"source": "a"}), tmp_path / "begun").shards) == 5


def test_another_packing_is_refused_with_what_differs(tmp_path: Path) -> None:
    rows, sample = {"x": np.arange(40)}, {"tuple": ["x"]}
    pack(ArrayPackingSource(rows, sample, {"source": "a", "stamp": "1"}), tmp_path / "set", shards=4)
    with pytest.raises(DataError, match="holds another packed data set: shards 4 there, 2 here; choose"):
        pack(ArrayPackingSource(rows, sample, {"source": "a", "stamp": "1"}), tmp_path / "set", shards=2)
    with pytest.raises(DataError, match="holds another packed data set: stamp 1 there, 2 here; choose"):
        pack(ArrayPackingSource(rows, sample, {"source": "a", "stamp": "2"}), tmp_path / "set", shards=4)
    with pytest.raises(DataError, match="holds another packed data set: samples or columns other than here"):
        pack(
            ArrayPackingSource({"x": np.arange(44)}, sample, {"source": "a", "stamp": "1"}), tmp_path / "set", shards=4
        )
    with pytest.raises(OSError, match="on fire"):
        pack(Burning(rows, sample, {"source": "a"}), tmp_path / "begun", shards=2)
    with pytest.raises(DataError, match="holds a part of another packing: source a there, b here; choose"):
        pack(ArrayPackingSource(rows, sample, {"source": "b"}), tmp_path / "begun", shards=2)


def test_a_disk_without_room_is_named_and_the_packing_goes_on_later(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))
    try:
        with pytest.raises(
            DataError, match=r"shard-00000.arrow cannot be written: File too large; once there is space"
        ):
            images(tmp_path / "set")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "set").glob(".shard-*.arrow.*"))
    images(tmp_path / "set")
    assert len(Packed(tmp_path / "set")) == 500


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "set").write_text("mine")
    with pytest.raises(DataError, match="set is a file, and a packed data set is a folder"):
        images(tmp_path / "set")


def test_what_a_packing_left_that_was_killed_at_its_very_end_is_tidied(tmp_path: Path) -> None:
    images(tmp_path / "set", 2)
    for name in ("packing.json", "shard-00001.json", ".shard-00000.lock"):
        (tmp_path / "set" / name).write_text("{}")
    images(tmp_path / "set", 2)
    left = {path.name for path in (tmp_path / "set").iterdir() if not path.name.endswith(".lock")}
    assert left == {"manifest.json", "shard-00000.arrow", "shard-00001.arrow"}


def test_files_of_similar_names_are_not_taken_away(tmp_path: Path) -> None:
    images(tmp_path / "set", 2)
    for name in ("shard-notes.json", "shard-1.arrow"):
        (tmp_path / "set" / name).write_text("mine")
    images(tmp_path / "set", 3, overwrite=True)
    assert {path.read_text() for path in (tmp_path / "set").glob("shard-?*[!0-9].*o*")} == {"mine"}
    assert (tmp_path / "set/shard-1.arrow").read_text() == "mine"


class Waiting(ArrayPackingSource):
    """A source that stops in its second shard until somebody says go on."""

    def read(self, start: int, stop: int) -> Any:
        if start >= 20:
            open(self.provenance["at"] + ".there", "w").close()
            while not Path(self.provenance["at"]).exists():
                time.sleep(0.01)
        return super().read(start, stop)


@pytest.mark.slow
def test_two_packings_of_different_sources_never_mix_in_a_folder(tmp_path: Path) -> None:
    sample = {"tuple": ["x"]}
    slow = Waiting({"x": np.zeros(40, np.int64)}, sample, {"at": str(tmp_path / "go")})
    other = ArrayPackingSource({"x": np.ones(40, np.int64)}, sample, {"source": "other"})
    first = multiprocessing.get_context("fork").Process(
        target=pack, args=(slow, tmp_path / "set"), kwargs={"shards": 2}
    )
    first.start()
    try:
        while not (tmp_path / "go.there").exists():
            time.sleep(0.01)
        with pytest.raises(
            DataError, match=rf"set: process {first.pid} on .* is packing something else there: wait until it is done"
        ):
            pack(other, tmp_path / "set", shards=2, overwrite=True)
    finally:
        (tmp_path / "go").touch()
        first.join()
    assert first.exitcode == 0
    assert [int(row[0]) for row in Packed(tmp_path / "set")] == [0] * 40  # type: ignore[attr-defined]
    pack(other, tmp_path / "set", shards=2, overwrite=True)
    assert [int(row[0]) for row in Packed(tmp_path / "set")] == [1] * 40  # type: ignore[attr-defined]


def test_one_who_waits_long_for_another_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.packed.locked_tasks._WARN_AFTER_SECONDS", 0.2)
    slow = Waiting({"x": np.zeros(40, np.int64)}, {"tuple": ["x"]}, {"at": str(tmp_path / "go")})
    first = multiprocessing.get_context("fork").Process(
        target=pack, args=(slow, tmp_path / "set"), kwargs={"shards": 2}
    )
    first.start()
    while not (tmp_path / "go.there").exists():
        time.sleep(0.01)
    threading.Timer(1, (tmp_path / "go").touch).start()
    with pytest.warns(UserWarning, match=rf"still waiting for process {first.pid} on .*, which makes shard-00001"):
        pack(slow, tmp_path / "set", shards=2)
    first.join()
    assert first.exitcode == 0


def test_a_shard_that_another_packing_left_is_not_taken(tmp_path: Path) -> None:
    sample = {"tuple": ["x"]}
    for number in range(2):
        whole = ArrayPackingSource({"x": np.full(40, number)}, sample, {"source": str(number)})
        with pytest.raises(OSError, match="on fire"):
            pack(Burning({"x": np.full(40, number)}, sample, {"source": str(number)}), tmp_path / str(number), shards=2)
    for name in ("shard-00000.arrow", "shard-00000.json"):
        (tmp_path / "0" / name).replace(tmp_path / "1" / name)
    pack(whole, tmp_path / "1", shards=2)
    assert [int(row[0]) for row in Packed(tmp_path / "1")] == [1] * 40  # type: ignore[attr-defined]


class Burning(ArrayPackingSource):
    """A source of which the second half cannot be read."""

    def read(self, start: int, stop: int) -> Any:
        if start >= 20:
            raise OSError("disk on fire")
        return super().read(start, stop)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match="is not empty and not a packed data set"):
        images(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_several_processes_write_the_same_bytes(tmp_path: Path) -> None:
    images(tmp_path / "one", 5)
    images(tmp_path / "three", 5, processes=3)
    for path in (tmp_path / "one").glob("*.arrow"):
        assert path.read_bytes() == (tmp_path / "three" / path.name).read_bytes()
    assert json.loads((tmp_path / "one/manifest.json").read_bytes()) == json.loads(
        (tmp_path / "three/manifest.json").read_bytes()
    )


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> Any:
        if number == 61:
            raise OSError("disk on fire")
        return torch.zeros(3), number


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sample_that_fails_is_named(tmp_path: Path, processes: int) -> None:
    with pytest.raises(DataError, match=r"Failing: sample 61 of 100 could not be read: OSError: disk on fire"):
        pack(SamplePackingSource(Failing(), {}), tmp_path / "set", shards=4, processes=processes)
    with pytest.raises(DataError, match="its packing was not finished; run the same `echelon pack` again"):
        open_source(str(tmp_path / "set"))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(torch.zeros(3), 1)] * 41 + [(torch.zeros(4), 1)] + [(torch.zeros(3), 1)] * 60, r"'0' of sample 41 is float32\[4\], and float32\[3\]"),
        ([{"a": 1}] * 41 + [{"b": 1}] + [{"a": 1}] * 60, r"sample 41 is \{b: int\}, sample 0 is \{a: int\}: all samples"),
        ([None, None], r"'value' of sample 0 is a NoneType: only numbers"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"'value' has shape \[2, 3\] in sample 0 and \[2, 4\] in sample 1"),
        ([{1: 2}], r"a sample has the key 1: the keys of a packed sample must be text"),
        ([{"a.b": 1, "a": {"b": 2}}], r"two parts of a sample would have the same name"),
        ([torch.zeros(2, dtype=torch.complex64)], "which cannot be packed: make it bool"),
        ("data/train", "data/train"),
        ((torch.zeros(3), torch.zeros(3)), "data is a tuple of 2 tensors, which is columns, not samples"),
        (Dataset, "no length"),
        (Endless(), "Endless"),
        ([], "is empty"),
        ([1, 2, 2**63], "'value' of sample 2 has the integer 9223372036854775808, which does not fit into 64 bits"),
        ([{"id": [1, -(2**70)]}], "'id' of sample 0 has the integer -1180591620717411303424"),
        ([1] * 41 + [10**9999] + [1] * 60, "'value' of sample 41 has the integer of 33,216 bits"),
        ([torch.zeros(2).to(torch.float8_e4m3fn)], r"'value' of sample 0 is a tensor \(float8_e4m3fn, strided\)"),
        ([torch.eye(2).to_sparse()], r"'value' of sample 0 is a tensor \(float32, sparse_coo\)"),
        ([[True], [1]], "'value' has bool and int64 in different samples"),
        ([{}], r"sample 0 is \{\}: it holds nothing"),
        ([1, "2.5"], "'value' of sample 1 is a str, and a int in sample 0: give them one type"),
        ([1] * 41 + [None] + [1] * 60, "'value' of sample 41 is a NoneType"),
    ],
)  # fmt: skip
def test_samples_that_are_not_alike_are_named(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack(SamplePackingSource(data, {}), tmp_path / "set")


def test_lists_of_truth_stay_so_also_where_the_first_is_empty(tmp_path: Path) -> None:
    pack(SamplePackingSource([[], [True, False], [False]], {}), tmp_path / "set")
    found = Packed(tmp_path / "set").__getitems__(range(3))
    assert [row.tolist() for row in found] == [[], [True, False], [False]]
    assert {row.dtype for row in found} == {torch.bool}


@pytest.mark.slow
def test_reading_needs_no_pyarrow(tmp_path: Path) -> None:
    import subprocess
    import sys

    images(tmp_path / "set", 2)
    code = f"import sys; from echelon.data import open_source; open_source({str(tmp_path / 'set')!r}).read_sample(3); sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

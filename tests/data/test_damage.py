"""Damaged files: a message that names the place, or the right data; never a crash, never wrong data."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.damage import mutated
from bench.sample_dataset import WAYS, make, outcome
from echelon.data import Packed, open_source
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.inspect import find_damage
from echelon.data.packed.manifest import hash_document
from echelon.data.packed.pack import pack
from echelon.data.packed.shard_file import ShardFile, fold_crc
from echelon.errors import DataError
from tests.data.test_packed import images


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    images(tmp_path / "set", 4, 400)
    return tmp_path / "set"


def test_a_missing_file_is_named(whole: Path) -> None:
    (whole / "shard-00002.arrow").unlink()
    with pytest.raises(
        DataError, match=r"shard-00002.arrow \(samples 200 to 299\) cannot be read: No such file.*damaged='skip'"
    ):
        open_source(str(whole))


def test_a_file_that_is_cut_off_is_named(whole: Path) -> None:
    os.truncate(whole / "shard-00001.arrow", 5000)
    with pytest.raises(
        DataError,
        match=r"shard-00001.arrow \(samples 100 to 199\) is truncated: it has 5,000 bytes of [0-9,]+; restore",
    ):
        Packed(whole)


def damage(folder: Path, shard: int, row: int) -> None:
    found = Packed(folder).manifests[0]
    place = found.shards[shard].buffers[0][0] + row * found.columns[0].item_bytes
    with (folder / found.shards[shard].file).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 64]))


def test_a_damaged_block_is_named_when_it_is_first_touched(whole: Path) -> None:
    damage(whole, 3, 5)
    data = Packed(whole)
    data.read_batch(np.arange(300))
    with pytest.raises(
        DataError,
        match=r"shard-00003.arrow, block 0 \(samples 300 to 399\) is damaged: its checksum is [0-9a-f]{8}, not",
    ):
        data.read_batch(np.array([3, 307]))
    assert Packed(whole, check=False).read_batch(np.array([306]))[1].item() == 306


def test_two_threads_that_meet_in_a_block_leave_no_other_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and evaluation may read parts of one data set at the same time."""
    images(tmp_path / "set", 2, 200)
    data, meeting = Packed(tmp_path / "set"), threading.Barrier(2)
    find_block_damage = ShardFile.find_block_damage

    def together(*arguments: Any) -> str | None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return find_block_damage(*arguments)

    monkeypatch.setattr(ShardFile, "find_block_damage", together)
    threads = [threading.Thread(target=data.read_batch, args=(np.arange(50),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    damage(tmp_path / "set", 1, 5)
    with pytest.raises(DataError, match=r"shard-00001.arrow, block 0"):
        data.read_batch(np.array([105]))


def test_damaged_parts_are_skipped_and_counted_if_asked(whole: Path) -> None:
    damage(whole, 3, 5)
    (whole / "shard-00000.arrow").unlink()
    with pytest.warns(
        UserWarning, match=r"200 of 400 samples are skipped in 2 damaged parts, the first: .*shard-00000.arrow"
    ):
        data = Packed(whole, damaged="skip")
    assert (len(data), data.skipped) == (200, 200)
    assert data.read_batch(np.arange(200))[1].tolist() == list(range(100, 300))
    assert open_source(data).make_order(batch=10, seed=0).lanes == 1


def test_a_file_that_comes_back_while_damage_is_looked_for_is_left_out_all_the_same(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole / "shard-00001.arrow").rename(whole / "gone")
    looks: list[ShardFile] = []
    find_problem = ShardFile.find_problem

    def find_problem_once(file: ShardFile) -> str | None:
        looks.append(file)
        if len(looks) == 3:
            (whole / "gone").rename(whole / "shard-00001.arrow")
        return find_problem(file)

    monkeypatch.setattr(ShardFile, "find_problem", find_problem_once)
    with pytest.warns(UserWarning, match="100 of 400 samples are skipped in 1 damaged part, "):
        data = Packed(whole, damaged="skip")
    assert data.read_batch(np.arange(300))[1].tolist() == [*range(100), *range(200, 400)]


def test_nothing_left_is_an_error(whole: Path) -> None:
    for path in whole.glob("*.arrow"):
        path.unlink()
    with pytest.raises(DataError, match=r"no sample is left: .*shard-00000"):
        Packed(whole, damaged="skip")


def rewritten(folder: Path, change: Callable[[Any], Any]) -> None:
    """Another manifest, with the right hash, which anybody can make."""
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("hash")
    change(document)
    (folder / "manifest.json").write_text(json.dumps({**document, "hash": hash_document(document)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["shards"][1].update(file="../shard-0001.arrow"),
        lambda told: told["shards"][1].update(file="shard-00000.arrow"),
        lambda told: told["columns"][0].update(dtype="object"),
        lambda told: told["columns"][0].update(ragged=0),
        lambda told: told["columns"][0].update(kind="text"),
        lambda told: told["columns"][0].update(shape=[0, 3]),
        lambda told: told["columns"][1].update(name="image"),
        lambda told: told["columns"][1].update(name=7),
        lambda told: told["shards"][0]["buffers"][1].__setitem__(0, told["shards"][0]["buffers"][1][0] + 1),
        lambda told: told["shards"][0]["buffers"].__setitem__(1, []),
        lambda told: told.update(columns=[], sample={"tuple": []}, shards=[]),
        lambda told: told.update(sample={"thing": ["image", "label"]}),
        lambda told: told.update(sample={"tuple": {"a": "image", "b": "label"}}),
        lambda told: told.update(provenance=[]),
        lambda told: told.update(provenance={"source": 3}),
        lambda told: told.update(block=0),
        lambda told: (
            told.update(block=2**63),
            [each.update(checksums=each["checksums"][:1]) for each in told["shards"]],
        ),
        lambda told: told.update(shards=[]),
    ],
)
def test_a_manifest_that_was_made_to_lead_astray_is_refused(whole: Path, change: Callable[[Any], Any]) -> None:
    rewritten(whole, change)
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        Packed(whole)


def test_offsets_that_were_made_to_lead_astray_are_refused(tmp_path: Path) -> None:
    """Also under the right checksum, which anybody can make: a row in front of its predecessor would be another column's."""
    pack(SamplePackingSource([{"a": [1, 2, 3], "b": [4, 5]}] * 8, {}), tmp_path, shards=1)
    (shard,) = Packed(tmp_path).manifests[0].shards
    content = np.fromfile(tmp_path / shard.file, np.uint8)
    content[shard.buffers[1][0] :][:72].view(np.int64)[3] = -20
    content.tofile(tmp_path / shard.file)
    found = 0
    for (offsets, values, _), count in zip(shard.buffers, (24, 16), strict=True):
        found = zlib.crc32(content[offsets : offsets + 72], found)
        found = zlib.crc32(content[values : values + 8 * count], found)
    rewritten(tmp_path, lambda told: told["shards"][0].update(checksums=[found]))
    with pytest.raises(DataError, match=r"shard-00000.arrow, block 0 .* is damaged: its offsets"):
        Packed(tmp_path, pad=0).read_batch(np.arange(8))


def test_text_that_is_none_is_named(tmp_path: Path) -> None:
    pack(SamplePackingSource([b"abc", b"\xff\xfe"], {}), tmp_path, shards=1)
    rewritten(tmp_path, lambda told: told["columns"][0].update(kind="text"))
    assert Packed(tmp_path)[0] == "abc"
    with pytest.raises(DataError, match="sample 1 has text that is not UTF-8"):
        Packed(tmp_path)[1]


def test_another_version_is_told(whole: Path) -> None:
    (whole / "manifest.json").write_text((whole / "manifest.json").read_text().replace('"version":1', '"version":9'))
    with pytest.raises(DataError, match="has version 9, this echelon reads 1"):
        Packed(whole)


def test_damage_outside_of_the_samples_is_found_by_verify(whole: Path) -> None:
    with (whole / "shard-00001.arrow").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"?")
    assert [problem.rpartition("/")[2] for problem in find_damage(whole)] == [
        "shard-00001.arrow: its Arrow metadata is damaged (its samples are not): other programs may fail to read it"
    ]
    assert Packed(whole)[150][1].item() == 150


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(WAYS))
def test_mutated_files_give_a_named_error_or_the_right_data(tmp_path: Path, way: str) -> None:
    """A sample of what `python -m bench.damage` does ten thousand times."""
    right = make(tmp_path / "good")
    assert min(len(shard.checksums) for shard in Packed(tmp_path / "good").manifests[0].shards) > 2
    draw = random.Random(int(os.environ.get("ECHELON_FUZZ_SEED", "0")))
    outcomes = []
    for _ in range(40):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        mutated(tmp_path / "bad", draw)
        outcomes.append(outcome(way, tmp_path / "bad", right))
        shutil.rmtree(tmp_path / "bad")
    assert set(outcomes) <= {"right", "named"}
    assert outcomes.count("named") >= 5


CONTENT = np.random.default_rng(0).integers(0, 256, 5 * 4096 + 100, np.uint8)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.integers(0, len(CONTENT) // 8), st.integers(1, 2**64 - 1), min_size=1, max_size=3))
def test_up_to_three_changed_words_change_a_checksum(changes: dict[int, int]) -> None:
    changed = np.append(CONTENT, np.zeros(-len(CONTENT) % 8 + 8, np.uint8))
    for word, by in changes.items():
        changed.view("<u8")[word] ^= np.uint64(by)
    changed = changed[: len(CONTENT)]
    assert np.array_equal(changed, CONTENT) == (fold_crc(changed, 0) == fold_crc(CONTENT, 0))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pieces_that_change_places_change_a_checksum(data: st.DataObject) -> None:
    """Also whole pages and whole rows of the table."""
    size = data.draw(st.sampled_from([1, 8, 512, 4096, 8192]))
    step = data.draw(st.sampled_from([1, 8, 512, 4096]))
    most = (len(CONTENT) - size) // step
    one, other = (step * data.draw(st.integers(0, most)) for _ in range(2))
    changed = CONTENT.copy()
    changed[one : one + size], changed[other : other + size] = CONTENT[other : other + size], CONTENT[one : one + size]
    assert np.array_equal(changed, CONTENT) == (fold_crc(changed, 0) == fold_crc(CONTENT, 0))


def test_pieces_that_change_places_show_even_where_their_sums_are_equal() -> None:
    """As when a disk gives one page for another: rows of 0 and 1 have few sums."""
    content = np.zeros(2**18, np.uint8)
    words = content.view("<u8").reshape(-1, 512)  # a page each
    words[:] = np.random.default_rng(0).permuted(np.tile(np.arange(512) % 2, (len(words), 1)), axis=1)
    right = fold_crc(content, 0)
    for one, other in ((0, 1), (3, 40), (62, 63)):
        words[[one, other]] = words[[other, one]]
        assert fold_crc(content, 0) != right
        words[[one, other]] = words[[other, one]]
    assert fold_crc(content, 0) == right

"""Data on remote stores: through a cache that is never too large, that ranks share, and that nothing can spoil."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.data import Loader, Packed, evaluation_batches, open_source
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.locked_tasks import lock_file
from echelon.data.packed.pack import pack
from echelon.data.packed.remote_cache import FileCache
from echelon.data.packed.remote_store import RemoteStore
from echelon.errors import CacheFullError, DataError
from echelon.files import acquire_lock
from tests.data.test_damage import rewritten
from tests.data.test_packed import PIXELS, images


class Stalling(LocalFileSystem):
    """A store on which files do not begin to come, until `GO` is set."""

    protocol = "stalling"
    which = "*.arrow"

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        if Path(path).match(Stalling.which):
            GO.wait(30)
        return super().open(path, mode, **how)


class Halting(LocalFileSystem):
    """A store on which a file stops to come after its first 4,000 bytes."""

    protocol = "halting"

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        file = super().open(path, mode, **how)
        return HaltingFile(file) if path.endswith(".arrow") else file


class HaltingFile:
    def __init__(self, file: Any) -> None:
        self._file, self._turns = file, 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        self._turns += 1
        if self._turns > 1:
            GO.wait(30)
        content: bytes = self._file.read(4000)
        return content


class Dripping(LocalFileSystem):
    """A store on which each file comes in small pieces, slowly."""

    protocol = "dripping"

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        file = super().open(path, mode, **how)
        return DrippingFile(file) if path.endswith(".arrow") else file


class DrippingFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        time.sleep(0.02)
        content: bytes = self._file.read(8000)
        return content


class Slow(LocalFileSystem):
    """A store on which each file takes half a second; it counts how many come at once."""

    protocol = "slow"
    now = most = 0

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        if path.endswith(".arrow"):
            Slow.now += 1
            Slow.most = max(Slow.most, Slow.now)
            time.sleep(0.5)
            Slow.now -= 1
        return super().open(path, mode, **how)


class Hanging(LocalFileSystem):
    """A store to which no connection is made until `GO` is set."""

    protocol = "hanging"

    def __init__(self, *given: Any, **how: Any) -> None:
        GO.wait(30)
        super().__init__(*given, **how)


class Noting(AbstractFileSystem):
    """A store as fsspec's own ones are, with the buffers that fsspec puts before them; it notes how much they ask for at once."""

    protocol = "noting"
    asked: ClassVar[list[int]] = []

    def info(self, path: str, **how: Any) -> Any:
        return {"name": path, "size": os.stat(path).st_size, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        return NotingFile(self, path, mode, **how)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("noting://")


class NotingFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        Noting.asked.append(end - start)
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


class Private(LocalFileSystem):
    """A store whose address holds a password."""

    protocol = "private"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.partition("@host")[2] or path


class Refusing(LocalFileSystem):
    """A store that does not answer for one file; it tells so as fsspec's HTTP does."""

    protocol = "refusing"

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        if path.endswith("00003.arrow"):
            raise FileNotFoundError(path) from ConnectionRefusedError(111, "Connection refused")
        return super().open(path, mode, **how)


GO = threading.Event()
for store_ in (Private, Refusing, Stalling, Halting, Dripping, Slow, Hanging, Noting):
    fsspec.register_implementation(store_.protocol, store_, clobber=True)


@pytest.fixture
def store(tmp_path: Path) -> str:
    images(tmp_path / "far", 8, 400)
    return f"file://{tmp_path / 'far'}"


def cached(folder: Path) -> int:
    return sum(_size(path) for path in folder.iterdir() if path.suffix == ".arrow")


def test_remote_batches_are_the_same(store: str, tmp_path: Path) -> None:
    data = Packed(store, cache=tmp_path / "cache")
    ids = np.random.default_rng(0).permutation(400)[:100]
    pixels, labels = data.read_batch(ids)
    assert np.array_equal(pixels.numpy(), PIXELS[ids])
    assert labels.tolist() == ids.tolist()
    assert (len(data), data.lanes) == (400, 8)


def test_a_rank_fetches_only_its_own_files(store: str, tmp_path: Path) -> None:
    source = open_source(Packed(store, cache=tmp_path / "cache"))
    list(Loader(source, source.make_order(batch=16, seed=0), dp_rank=1, dp_size=4, micro_batch_size=None).steps(0, 25))
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 2


def test_the_cache_stays_within_its_bound(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    data = Packed(store, cache=tmp_path / "cache", cache_bytes=3 * size + 100, window=1)
    order = open_source(data).make_order(batch=8, seed=0)
    assert order.window == 1
    for first in (0, 350, 60, 200, 120, 399, 0):
        assert data.read_batch(np.array([first]))[1].item() == first
        assert cached(tmp_path / "cache") <= 3 * size + 100


def test_the_cache_stays_within_its_bound_while_files_come_together(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    data = Packed(store.replace("file://", "dripping://"), cache=tmp_path / "cache", cache_bytes=3 * size + 100)
    data.prefetch(np.arange(0, 400, 50))  # all eight files
    most = 0
    until = time.monotonic() + 20
    while cached(tmp_path / "cache") < 3 * size and time.monotonic() < until:
        most = max(most, sum(_size(path) for path in (tmp_path / "cache").glob("*.arrow*")))
        time.sleep(0.002)
    assert 3 * size == cached(tmp_path / "cache")
    assert most <= 3 * size + 100


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it got another name just now
        return 0


def test_a_cache_that_is_too_small_says_so(store: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a cache of 1.00 kB cannot hold a file of"):
        Packed(store, cache=tmp_path / "cache", cache_bytes=1000).read_batch(np.array([0]))
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    small = Packed(store, cache=tmp_path / "cache", cache_bytes=2 * size + 50, timeout=0.1)
    with pytest.raises(DataError, match=r"of the cache are in use, .* more is needed"):
        small.read_batch(np.array([0, 100, 200, 300]))


def test_a_copy_that_is_in_use_is_not_deleted(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 25)
    held = cache.acquire("a", 10, lambda path: path.write_bytes(b"a" * 10) and None)
    cache.acquire("b", 10, lambda path: path.write_bytes(b"b" * 10) and None).close()
    cache.acquire("c", 10, lambda path: path.write_bytes(b"c" * 10) and None)
    assert sorted(path.read_bytes()[:1] for path in tmp_path.glob("*.arrow")) == [b"a", b"c"]
    held.close()


def test_a_copy_is_held_as_soon_as_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made, replace = FileCache(tmp_path, 10), [], Path.replace

    def fill(path: Path) -> None:
        made.append(path.write_bytes(b"a" * 10))

    def renamed(part: Path, path: Path) -> Path:
        found = replace(part, path)
        with pytest.raises(CacheFullError):  # another process that wants the room at this very moment
            FileCache(tmp_path, 10).acquire("b", 10, fill)
        return found

    monkeypatch.setattr(Path, "replace", renamed)
    assert cache.acquire("a", 10, fill).path.read_bytes() == b"a" * 10
    assert made == [10]


def test_a_disk_without_room_is_named_and_old_copies_make_room_first(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 2**62)
    cache.acquire("a", 10, lambda path: None).close()
    with pytest.raises(CacheFullError, match=rf"^{tmp_path}: its disk has .* left, .* is needed: .* give cache= "):
        cache.acquire("b", 2**61, lambda path: None)
    assert not list(tmp_path.glob("*.arrow"))


def test_a_file_that_cannot_be_written_is_not_blamed_on_the_store(tmp_path: Path) -> None:
    (tmp_path / "far").write_bytes(bytes(2**21))
    with (tmp_path / "copy").open("wb") as copy:
        copy.truncate(2**21)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(DataError, match=rf"^{tmp_path}/copy cannot be written: File too large"):
            RemoteStore(f"file://{tmp_path}", 5).copy_file("far", tmp_path / "copy")
        with pytest.raises(DataError, match=rf"^{tmp_path}/cache: cannot hold a copy of .*: File too large"):
            FileCache(tmp_path / "cache", 2**30).acquire("a", 2**21, lambda path: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache").glob("*.arrow*"))
    with pytest.raises(DataError, match=rf"^{tmp_path}/far: cannot hold copies: .*; give cache= another folder"):
        FileCache(tmp_path / "far", 2**30)


def test_files_in_the_folder_that_are_no_copies_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("thesis.pdf", "table.arrow", ".0123.arrow.part", "photos/cat.jpg"):
        (tmp_path / name).write_bytes(b"mine" * 100)
    cache = FileCache(tmp_path, 25)
    for key in "abcdef":
        cache.acquire(key, 10, lambda path: path.write_bytes(b"a" * 10) and None).close()
    assert (tmp_path / "photos/cat.jpg").read_bytes() == b"mine" * 100
    assert {path.name for path in tmp_path.iterdir()} > {"thesis.pdf", "table.arrow", ".0123.arrow.part"}
    assert cached(tmp_path) == 400 + 20


def test_a_copy_that_is_deleted_just_as_it_is_opened_is_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    cache = FileCache(tmp_path, 100)
    fill = lambda path: path.write_bytes(b"a" * 10) and None  # noqa: E731
    cache.acquire("a", 10, fill).close()
    (copy,) = tmp_path.glob("*.arrow")
    found, utime = [copy], os.utime
    monkeypatch.setattr(os, "utime", lambda *given: (found and found.pop().unlink(), utime(*given)))
    assert cache.acquire("a", 10, fill).path.read_bytes() == b"a" * 10


def test_a_process_that_is_forked_while_a_copy_is_made_keeps_no_lock(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))

    def fill(path: Path) -> None:
        helper.start()
        path.write_bytes(b"a" * 10)

    try:
        cache.acquire("a", 10, fill).close()
        next(tmp_path.glob("*.arrow")).unlink()
        again = ThreadPoolExecutor(1).submit(cache.acquire, "a", 10, lambda path: path.write_bytes(b"a" * 10) and None)
        assert again.result(timeout=20).path.read_bytes() == b"a" * 10
    finally:
        helper.kill()
        helper.join()


def test_a_store_that_fails_leaves_no_copy(store: str, tmp_path: Path) -> None:
    path = tmp_path / "far/shard-00003.arrow"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    data = Packed(store, cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"file://.*/far/shard-00003.arrow, block 0 \(samples 150 to 199\) is damaged"):
        data.read_batch(np.array([160]))
    assert not list((tmp_path / "cache").glob("*.arrow"))
    path.unlink()
    with pytest.raises(DataError, match=r"file://.*/far/shard-00003.arrow cannot be read: FileNotFoundError"):
        data.read_batch(np.array([160]))
    assert data.read_batch(np.array([10]))[1].item() == 10


@pytest.mark.parametrize(("kind", "came"), [("stalling", "0"), ("halting", "4,000")])
def test_a_read_that_stalls_ends_with_a_message(store: str, tmp_path: Path, kind: str, came: str) -> None:
    GO.clear()
    data = Packed(store.replace("file://", f"{kind}://"), cache=tmp_path / "cache", timeout=0.2)
    began = time.monotonic()
    with pytest.raises(
        DataError, match=rf"{kind}://.*shard-00000.arrow: received nothing for 0.2 s \(after {came} bytes\); try again"
    ):
        data.read_batch(np.array([0]))
    assert time.monotonic() - began < 10
    GO.set()


def test_a_read_that_comes_to_life_after_it_was_given_up_spoils_nothing(store: str, tmp_path: Path) -> None:
    GO.clear()
    url = store.replace("file://", "stalling://")
    with pytest.raises(DataError, match="received nothing"):
        Packed(url, cache=tmp_path / "cache", timeout=0.1).read_batch(np.array([0]))
    data = Packed(url, cache=tmp_path / "cache", timeout=20)
    with ThreadPoolExecutor(1) as other:
        again = other.submit(data.read_batch, np.arange(50))
        time.sleep(0.1)  # a second attempt waits at the same place as the first; then both go on
        GO.set()
        assert again.result()[1].tolist() == list(range(50))
    assert cached(tmp_path / "cache") == data.manifests[0].shards[0].bytes


@pytest.mark.parametrize("how", ["bit", "cut"])
def test_a_copy_that_is_damaged_later_is_made_anew(store: str, tmp_path: Path, how: str) -> None:
    data = Packed(store, cache=tmp_path / "cache")
    assert data[60][1].item() == 60
    (copy,) = (tmp_path / "cache").glob("*.arrow")
    right = copy.read_bytes()
    if how == "cut":
        os.truncate(copy, 1000)
    else:
        place = data.manifests[0].shards[1].buffers[0][0] + 700
        copy.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
    again = Packed(store, cache=tmp_path / "cache")
    assert np.array_equal(again.read_batch(np.arange(50, 100))[0].numpy(), PIXELS[50:100])
    assert copy.read_bytes() == right


def test_a_text_that_is_none_is_no_reason_to_fetch_a_file_again(tmp_path: Path) -> None:
    pack(SamplePackingSource([b"abc", b"\xff\xfe"], {}), tmp_path / "far", shards=1)
    rewritten(tmp_path / "far", lambda told: told["columns"][0].update(kind="text"))
    data = Packed(f"file://{tmp_path / 'far'}", cache=tmp_path / "cache")
    assert data[0] == "abc"
    (tmp_path / "far/shard-00000.arrow").unlink()
    with pytest.raises(DataError, match="sample 1 has text that is not UTF-8"):
        data[1]


def test_remote_files_that_cannot_be_had_are_skipped_and_counted_if_asked(store: str, tmp_path: Path) -> None:
    (tmp_path / "far/shard-00003.arrow").unlink()
    os.truncate(tmp_path / "far/shard-00005.arrow", 700)
    with pytest.warns(
        UserWarning, match=r"100 of 400 samples are skipped in 2 damaged parts, the first: file://.*-00003"
    ):
        data = Packed(store, cache=tmp_path / "cache", damaged="skip")
    assert (len(data), data.skipped) == (300, 100)
    left = [*range(150), *range(200, 250), *range(300, 400)]
    assert data.read_batch(np.arange(300))[1].tolist() == left
    with pytest.raises(DataError, match=r"shard-00003.arrow cannot be read"):
        Packed(store, cache=tmp_path / "cache").read_batch(np.array([160]))


def test_show_and_verify_take_a_url(store: str, tmp_path: Path) -> None:
    def said(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["data", *words], env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
        assert done.exit_code == code, done.output
        return done.output

    assert "far: 400 samples" in " ".join(said("show", store).split())
    assert f"{store}: good; 8 blocks in 8 files" in said("verify", store)
    (tmp_path / "far/shard-00003.arrow").unlink()
    os.truncate(tmp_path / "far/shard-00005.arrow", 700)
    told = said("verify", store, code=1)
    assert "shard-00003.arrow cannot be read" in told
    assert "shard-00005.arrow (samples 250 to 299) is truncated" in told
    done = CliRunner().invoke(app, ["pack", str(tmp_path / "far"), "s3://bucket/set"])
    assert "DST must be a local folder" in done.output


def test_files_come_together_and_ahead_of_their_batch(store: str, tmp_path: Path) -> None:
    url = store.replace("file://", "slow://")
    data = Packed(url, cache=tmp_path / "cache")
    data.read_batch(np.array([0, 60, 110, 160]))
    assert Slow.most == 4  # at once, not one after the other
    source = open_source(Packed(url, cache=tmp_path / "other", lanes=2, window=1))
    order = source.make_order(batch=2, seed=0)
    steps = Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=None).steps(0, 100)
    next(steps)
    time.sleep(1.5)
    # The first two files last for fifty steps, and the next ones are there already.
    assert len(list((tmp_path / "other").glob("*.arrow"))) >= 4
    labels = [label for step in steps for label in step.micro_batches[0].batch[1].tolist()]
    assert len({*labels}) == 198


def test_a_rank_that_copies_ahead_never_fills_a_cache_that_another_needs(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    both = [
        open_source(Packed(store, cache=tmp_path / "cache", cache_bytes=4 * size + 50, window=1, lanes=4, timeout=5))
        for _ in range(2)
    ]
    loaders = [
        Loader(source, source.make_order(batch=4, seed=0), dp_rank=rank, dp_size=2, micro_batch_size=None).steps(0, 100)
        for rank, source in enumerate(both)
    ]
    seen = [
        label
        for pair in zip(*loaders, strict=True)
        for step in pair
        for label in step.micro_batches[0].batch[1].tolist()
    ]
    assert sorted(seen) == list(range(400))
    assert cached(tmp_path / "cache") <= 4 * size + 50


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*use of fork:DeprecationWarning")
def test_workers_read_remote_files_for_a_transform(store: str, tmp_path: Path) -> None:
    data = Packed(store, cache=tmp_path / "cache", transform=lambda sample: sample[1] * 2)
    assert data[3].item() == 6  # the store was used before the workers are born
    source = open_source(data)
    loader = Loader(source, source.make_order(batch=40, seed=0), dp_rank=0, dp_size=1, micro_batch_size=None, workers=2)
    seen = [label for step in loader.steps(0, 10) for label in step.micro_batches[0].batch.tolist()]
    assert sorted(seen) == list(range(0, 800, 2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*use of fork:DeprecationWarning")
def test_what_was_read_before_the_workers_were_born_keeps_no_room_from_them(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    data = Packed(store, cache=tmp_path / "cache", cache_bytes=3 * size + 100, transform=_label, timeout=2)
    assert [data[number] for number in (3, 60, 110)] == [3, 60, 110]
    source = open_source(data)
    loader = Loader(source, source.make_order(batch=8, seed=0), dp_rank=0, dp_size=1, micro_batch_size=1, workers=2)
    seen = [micro.batch.item() for step in loader.steps(0, 5) for micro in step.micro_batches]
    assert len({*seen}) == 40


def _label(sample: Any) -> int:
    return int(sample[1])


def test_an_evaluation_takes_the_room_that_the_training_needs_later(store: str, tmp_path: Path) -> None:
    images(tmp_path / "other", 8, 400)
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    how: dict[str, Any] = {"cache": tmp_path / "cache", "cache_bytes": 8 * size + 100, "timeout": 1}
    source = open_source(Packed(store, **how))
    steps = Loader(source, source.make_order(batch=16, seed=0), dp_rank=0, dp_size=1, micro_batch_size=None).steps(
        0, 50
    )
    seen = next(steps).micro_batches[0].batch[1].tolist()
    for _ in range(2):
        other = open_source(Packed(f"file://{tmp_path / 'other'}", **how))
        batches = list(evaluation_batches(other, dp_rank=0, dp_size=1, batch_size=40))
        assert [label for micro in batches for label in micro.batch[1].tolist()] == list(range(400))
        seen += next(steps).micro_batches[0].batch[1].tolist()
    assert len({*seen}) == 48
    # A process that reads through the same cache finds room: between two batches nothing is held that no batch to come needs.
    steps.close()
    assert Packed(store, **how).read_batch(np.arange(400))[1].tolist() == list(range(400))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_leaves_the_holds_of_its_parent_alone(store: str, tmp_path: Path) -> None:
    images(tmp_path / "other", 8, 400)
    data = Packed(store, cache=tmp_path / "cache")
    for ids in (np.arange(10), np.arange(10, 20)):
        data.prefetch(ids)
    data.read_batch(np.arange(10))  # the next batch needs the same file: its copy stays held
    other = Packed(f"file://{tmp_path / 'other'}", cache=tmp_path / "cache")
    helper = multiprocessing.get_context("fork").Process(target=read_as_a_worker, args=(other,))
    before = held(tmp_path / "cache")
    helper.start()
    helper.join(20)
    assert helper.exitcode == 0
    assert before == held(tmp_path / "cache")
    assert len(before) == 1


def read_as_a_worker(data: Packed) -> None:
    torch.set_num_threads(1)  # as torch's own workers do: threads of OpenMP do not outlive a fork
    data.read_batch(np.arange(400))


def held(folder: Path) -> list[str]:
    """The copies that somebody has locked."""
    found = []
    for path in sorted(folder.glob("*.arrow")):
        with path.open() as copy:
            try:
                fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name)
    return found


def test_batches_that_were_told_of_and_given_up_hold_nothing(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    data = Packed(store, cache=tmp_path / "cache", cache_bytes=8 * size + 100)
    source = open_source(data)
    for _ in range(2):
        steps = Loader(source, source.make_order(batch=16, seed=0), dp_rank=0, dp_size=1, micro_batch_size=None).steps(
            0, 25
        )
        next(steps)
        steps.close()
    assert len(list(evaluation_batches(source, dp_rank=0, dp_size=1, batch_size=40))) == 10
    for path in (tmp_path / "cache").glob("*.arrow"):
        with path.open() as copy:
            fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it


def test_a_slow_store_and_a_full_cache_are_no_damage_that_is_skipped(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GO.clear()
    monkeypatch.setattr(Stalling, "which", "shard-00003.arrow")
    with pytest.raises(DataError, match=r"^stalling://.*shard-00003.arrow: received nothing for 0.2 s"):
        Packed(store.replace("file", "stalling"), cache=tmp_path / "cache", timeout=0.2, damaged="skip")
    GO.set()
    held = FileCache(tmp_path / "full", 10**5).acquire("another's", 9 * 10**4, lambda path: None)
    with pytest.raises(DataError, match=r"^/.*/full: all 100 kB of the cache are in use"):
        Packed(store, cache=tmp_path / "full", cache_bytes=10**5, timeout=0.2, damaged="skip")
    held.close()


def test_a_store_that_does_not_answer_is_no_file_that_is_lost(store: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^refusing://.*-00003.arrow cannot be read: ConnectionRefusedError: .* refused$"
    ):
        Packed(store.replace("file", "refusing"), cache=tmp_path / "cache", damaged="skip")


def test_a_reader_that_is_sent_to_another_process_finds_the_same_samples_or_says_so(store: str, tmp_path: Path) -> None:
    (tmp_path / "far/shard-00003.arrow").rename(tmp_path / "gone")
    with pytest.warns(UserWarning, match="50 of 400 samples are skipped"):
        sent = pickle.dumps(Packed(store, cache=tmp_path / "cache", damaged="skip"))
    with pytest.warns(UserWarning, match="50 of 400 samples are skipped"):
        again = pickle.loads(sent)
    assert again[150][1].item() == 200
    (tmp_path / "gone").rename(tmp_path / "far/shard-00003.arrow")
    with pytest.raises(
        DataError, match=r"far holds other samples than when it was opened: .* without \[\(150, 200\)\]"
    ):
        pickle.loads(sent)


def test_a_stopped_process_that_makes_a_copy_is_named(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)

    def stop(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    helper = multiprocessing.get_context("fork").Process(target=cache.acquire, args=("a", 10, stop))
    helper.start()
    try:
        assert helper.pid is not None
        os.waitpid(helper.pid, os.WUNTRACED)
        with pytest.raises(
            DataError, match=rf"is locked by process {helper.pid} on .*, which made no progress for 0.3 s"
        ):
            cache.acquire("a", 10, lambda path: None, fill_timeout=0.3)
    finally:
        helper.kill()
        helper.join()


def test_a_store_that_hangs_while_it_connects_ends_with_a_message(store: str, tmp_path: Path) -> None:
    GO.clear()
    began = time.monotonic()
    with pytest.raises(DataError, match=r"hanging://.*manifest.json: received nothing for 0.2 s"):
        Packed(store.replace("file", "hanging"), cache=tmp_path / "cache", timeout=0.2)
    assert time.monotonic() - began < 10
    GO.set()


def test_a_large_file_shows_that_it_comes_before_it_is_there(tmp_path: Path) -> None:
    size = 3 * 2**22
    (tmp_path / "big").write_bytes(bytes(size))
    (tmp_path / "copy").write_bytes(bytes(size))
    RemoteStore(f"noting://{tmp_path}", 5).copy_file("big", tmp_path / "copy")
    assert max(Noting.asked) <= 2**22
    assert (tmp_path / "copy").stat().st_size == size


def test_threads_may_read_the_same_remote_data(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    data = Packed(store, cache=tmp_path / "cache", cache_bytes=4 * size + 100)

    def read(seed: int) -> bool:
        draw = np.random.default_rng(seed)
        batches = [draw.integers(0, 100, 8) + 100 * draw.integers(0, 4) for _ in range(60)]
        return all(data.read_batch(ids)[1].tolist() == ids.tolist() for ids in batches)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))


def test_a_password_in_an_address_is_in_no_message(store: str, tmp_path: Path) -> None:
    far, how = f"private://me:secret@host{tmp_path}", {"cache": tmp_path / "cache"}
    pack(SamplePackingSource([1, 2], {}), tmp_path / "numbers")
    told = []
    with pytest.raises(DataError, match=r"^private://\*\*\*@host/.*/numbers holds value: int64") as caught:
        Packed(f"{far}/far", f"{far}/numbers", **how)
    told.append(caught.value)
    sent = pickle.dumps(Packed(f"{far}/far", **how))
    content = (tmp_path / "far/shard-00003.arrow").read_bytes()
    (tmp_path / "far/shard-00003.arrow").write_bytes(bytes(len(content)))
    with pytest.raises(DataError, match=r"^private://\*\*\*@host/.*shard-00003.arrow, block 0 .* is damaged") as caught:
        Packed(f"{far}/far", **how).read_batch(np.array([160]))
    told.append(caught.value)
    (tmp_path / "far/shard-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"^private://\*\*\*@host/.*shard-00003.arrow cannot be read") as caught:
        Packed(f"{far}/far", **how).read_batch(np.array([160]))
    told.append(caught.value)
    images(tmp_path / "far", 4, 400, overwrite=True)
    with pytest.raises(DataError, match=r"^private://\*\*\*@host/.* holds other samples") as caught:
        pickle.loads(sent)
    told.append(caught.value)
    with pytest.raises(DataError, match=r"^private://\*\*\*@host/.*/manifest.json cannot be read") as caught:
        open_source(f"{far}/nothing")
    assert not [error for error in (*told, caught.value) if "secret" in str(error)]


@pytest.mark.parametrize(
    "wrong",
    [{"cache_bytes": "1GB"}, {"cache_bytes": 0}, {"timeout": -1}, {"timeout": None}, {"window": 0}, {"window": 1.5}],
)
def test_numbers_that_are_none_are_refused(store: str, tmp_path: Path, wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(DataError, match=rf"^{name}={value!r}: expected "):
        Packed(store, cache=tmp_path / "cache", **wrong)


def test_one_who_waits_for_a_lock_is_patient_while_its_holder_works(tmp_path: Path) -> None:
    began, done = threading.Event(), threading.Event()

    def work() -> None:
        with lock_file(tmp_path / "lock"):
            began.set()
            for number in range(8):
                time.sleep(0.1)
                (tmp_path / str(number)).touch()
            done.set()

    with ThreadPoolExecutor(1) as other:
        other.submit(work)
        began.wait(5)
        with lock_file(tmp_path / "lock", timeout=0.4):
            assert done.is_set()


def test_one_who_waits_for_an_idle_holder_names_it(tmp_path: Path) -> None:
    with (
        acquire_lock(tmp_path / "lock"),
        pytest.raises(
            DataError, match=rf"lock is locked by process {os.getpid()} on .*, which made no progress for 0.1 s"
        ),
    ):
        lock_file(tmp_path / "lock", timeout=0.1)


def test_no_such_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere://x/manifest.json cannot be read: .*nowhere"):
        Packed("nowhere://x")
    with pytest.raises(DataError, match=r"far/manifest.json cannot be read: FileNotFoundError"):
        open_source(f"file://{tmp_path}/far")

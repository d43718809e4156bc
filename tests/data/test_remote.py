"""Data on remote stores: through a cache that is never too large, that ranks share, and that nothing can spoil."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from echelon.data import Packed, open_source
from echelon.data.packed.cache import Cache
from echelon.errors import DataError
from tests.data.test_packed import PIXELS, images


class Stalling(LocalFileSystem):
    """A store on which files stop to come after a while."""

    protocol = "stalling"

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        file = super().open(path.removeprefix("stalling://"), mode, **how)
        if not path.endswith(".arrow"):
            return file
        time.sleep(30)
        return file


fsspec.register_implementation("stalling", Stalling, clobber=True)


@pytest.fixture
def store(tmp_path: Path) -> str:
    images(tmp_path / "far", 8, 400)
    return f"file://{tmp_path / 'far'}"


def cached(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".arrow")


def test_remote_batches_are_the_same(store: str, tmp_path: Path) -> None:
    data = Packed(store, cache=tmp_path / "cache")
    ids = np.random.default_rng(0).permutation(400)[:100]
    pixels, labels = data.batch(ids)
    assert np.array_equal(pixels.numpy(), PIXELS[ids])
    assert labels.tolist() == ids.tolist()
    assert (len(data), data.lanes) == (400, 8)


def test_a_rank_fetches_only_its_own_files(store: str, tmp_path: Path) -> None:
    from echelon.data import Loader

    source = open_source(Packed(store, cache=tmp_path / "cache"))
    list(Loader(source, source.order(batch=16, seed=0), rank=1, ranks=4, micro=None).steps(0, 25))
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 2


def test_the_cache_stays_within_its_bound(store: str, tmp_path: Path) -> None:
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    data = Packed(store, cache=tmp_path / "cache", cache_bytes=3 * size + 100, window=1)
    order = open_source(data).order(batch=8, seed=0)
    assert order.window == 1
    for first in (0, 350, 60, 200, 120, 399, 0):
        assert data.batch(np.array([first]))[1].item() == first
        assert cached(tmp_path / "cache") <= 3 * size + 100


def test_a_cache_that_is_too_small_says_so(store: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a cache of 1.00 kB cannot hold one file of"):
        Packed(store, cache=tmp_path / "cache", cache_bytes=1000).batch(np.array([0]))
    size = Packed(store, cache=tmp_path / "cache").manifests[0].shards[0].bytes
    small = Packed(store, cache=tmp_path / "cache", cache_bytes=2 * size + 50, timeout=0.1)
    with pytest.raises(DataError, match=r"of the cache are in use, .* more are needed"):
        small.batch(np.array([0, 100, 200, 300]))


def test_a_copy_that_is_in_use_is_not_deleted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 25)
    held = cache.hold("a", 10, lambda path: path.write_bytes(b"a" * 10) and None)
    cache.hold("b", 10, lambda path: path.write_bytes(b"b" * 10) and None).release()
    cache.hold("c", 10, lambda path: path.write_bytes(b"c" * 10) and None)
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {"a", "c"}
    held.release()


def test_a_store_that_fails_leaves_no_copy(store: str, tmp_path: Path) -> None:
    path = tmp_path / "far/shard-00003.arrow"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    data = Packed(store, cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"file://.*/far/shard-00003.arrow, block 0 \(samples 150 to 199\) is damaged"):
        data.batch(np.array([160]))
    assert not list((tmp_path / "cache").glob("*.arrow"))
    path.unlink()
    with pytest.raises(DataError, match=r"file://.*/far/shard-00003.arrow cannot be read: FileNotFoundError"):
        data.batch(np.array([160]))
    assert data.batch(np.array([10]))[1].item() == 10


def test_a_read_that_stalls_ends_with_a_message(store: str, tmp_path: Path) -> None:
    data = Packed(store.replace("file://", "stalling://"), cache=tmp_path / "cache", timeout=0.2)
    began = time.monotonic()
    with pytest.raises(
        DataError, match=r"stalling://.*shard-00000.arrow: no byte came for 0.2 s \(after 0\); try again"
    ):
        data.batch(np.array([0]))
    assert time.monotonic() - began < 10


def test_no_such_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere://x cannot be reached: .*nowhere"):
        Packed("nowhere://x")
    with pytest.raises(DataError, match=r"far/manifest.json cannot be read: FileNotFoundError"):
        open_source(f"file://{tmp_path}/far")

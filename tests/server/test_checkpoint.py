"""Checkpoints of servers: written while they serve, restored on any number of them, and never over anything else."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon import files
from echelon.errors import CheckpointError, ServerError
from echelon.plan.sealed_json import seal
from echelon.server import Init, Rule, Servers, Table, connect
from echelon.server.protocol import wire
from echelon.server.protocol.event_loop import Connection, EventLoop
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.shard_map import ServerEntry, ShardMap
from echelon.server.replica import events
from echelon.server.replica.shard_state import ShardState
from echelon.server.replica.state import ReplicaState
from echelon.server.server_process import snapshot_if_ready
from echelon.server.store import shard_checkpoint
from tests.sampling import only_whole
from tests.server.fake_store import TinyStore

TABLE = Table(name="t", dim=4, rule=Rule(kind="adagrad", lr=0.1))
IDS = np.arange(64, dtype=np.int64)


def grads(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(IDS), 4)).astype(np.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A checkpoint after two pushes, the rows then, and after a third push that is not in it."""
    folder = tmp_path_factory.mktemp("servers") / "checkpoint"
    with Servers(2, replicas=2, shards=16) as servers, connect(servers.address, secret=servers.secret) as client:
        client.declare(TABLE)
        for seed in (1, 2):
            client.push({"t": (IDS, grads(seed))})
        other = folder.parent / "run"
        other.mkdir()
        (other / "log.txt").write_text("dear")
        with pytest.raises(ServerError, match="holds other things than a checkpoint"):
            client.checkpoint(other)
        other.rename(other.with_name("run.partial"))
        with pytest.raises(ServerError, match=r"run\.partial: holds other things than an unfinished checkpoint"):
            client.checkpoint(other)
        assert (folder.parent / "run.partial" / "log.txt").read_text() == "dear"
        client.checkpoint(folder)
        client.checkpoint(folder)  # over an older one
        then = client.pull({"t": IDS})["t"]
        client.push({"t": (IDS, grads(3))})
        client.flush()
        after = client.pull({"t": IDS})["t"]
    assert [path.name for path in folder.parent.glob("*checkpoint*")] == ["checkpoint"]
    return folder, then, after


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_goes_on_from_it(count: int, written: tuple[Path, np.ndarray, np.ndarray]) -> None:
    folder, then, after = written
    with (
        Servers(count, replicas=min(count, 2), restore=folder) as servers,
        connect(servers.address, secret=servers.secret) as client,
    ):
        assert np.array_equal(client.pull({"t": IDS})["t"], then)
        servers.restart_controller()  # goes on from its file, not from the checkpoint again
        client.push({"t": (IDS, grads(3))})
        client.flush()
        assert np.array_equal(
            client.pull({"t": IDS})["t"], after
        )  # with the optimizer's state, and applied although its number is old


@only_whole
def test_shards_that_went_back_to_it_while_the_job_went_on_are_told_of(
    written: tuple[Path, np.ndarray, np.ndarray],
) -> None:
    folder, then, _ = written
    with (
        Servers(2, replicas=1, restore=folder) as servers,
        connect(servers.address, secret=servers.secret) as client,
    ):
        client.push({"t": (IDS, grads(3))})
        client.flush()
        assert client.rolled_back_shards == {}
        gone = [shard for shard, head in enumerate(client.map.heads) if head == "s1"]
        servers.servers["s1"].process.kill()

        def rows_after() -> np.ndarray:
            while not client.rolled_back_shards:
                client.last_acknowledged()
            return client.pull({"t": IDS})["t"]

        with pytest.warns(
            UserWarning, match=r"went back to the checkpoint .*checkpoint: what was pushed to them since is lost"
        ):
            rows = rows_after()
        assert client.rolled_back_shards == dict.fromkeys(gone, str(folder.resolve()))
        back = np.isin(shard_of(IDS, client.map.num_shards), gone)
        assert np.array_equal(rows[back], then[back])
        assert not np.array_equal(rows[~back], then[~back])


def test_damage_is_named(written: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    folder = written[0]
    manifest = json.loads((folder / shard_checkpoint.MANIFEST_NAME).read_text())
    copy = tmp_path / "copy"
    copy.mkdir()
    data = bytearray((folder / manifest["files"]["3"]["file"]).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "3.safetensors").write_bytes(bytes(data))
    (tmp_path / "outside.safetensors").write_bytes(bytes(data))
    for name, message in (("3.safetensors", "damaged"), ("../outside.safetensors", "outside this folder")):
        manifest["files"]["3"]["file"] = name
        (copy / shard_checkpoint.MANIFEST_NAME).write_bytes(seal({k: v for k, v in manifest.items() if k != "sha256"}))
        with pytest.raises(CheckpointError, match=message):
            shard_checkpoint.load_shard(copy, 3)
    with pytest.raises(CheckpointError, match=r"shard-00004.*older checkpoint"):
        shard_checkpoint.load_shard(copy, 4)


def test_a_damaged_checkpoint_is_found_before_a_controller_listens(tmp_path: Path) -> None:
    """In the words of `echelon server export`."""
    place, folder = shard_checkpoint.partial_folder(tmp_path / "kept"), tmp_path / "kept"
    files = {
        str(shard): shard_checkpoint.write_shard(place, shard, [({"lsn": 0}, [np.arange(9)])]) for shard in range(4)
    }
    shard_checkpoint.complete_checkpoint(folder, {"shards": 4, "specs": [], "settings": {}, "count": 0, "files": files})
    assert shard_checkpoint.verify_checkpoint(folder)["shards"] == 4
    path = folder / files["3"]["file"]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"^{path}: damaged, its SHA-256 is not .* use an older checkpoint$"):
        shard_checkpoint.verify_checkpoint(folder)


def test_a_manifest_with_one_changed_byte_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "kept", 1)
    path = tmp_path / "kept" / shard_checkpoint.MANIFEST_NAME
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=rf"{path}: .*use an older checkpoint"):
            shard_checkpoint.load_shard(tmp_path / "kept", 0)
    path.write_bytes(whole + b" ")
    with pytest.raises(CheckpointError, match="does not end in its SHA-256"):
        shard_checkpoint.read_manifest(tmp_path / "kept")
    path.write_text(json.dumps({"format": 1, "shards": 1}))
    with pytest.raises(
        CheckpointError, match=r"format 1, whose manifest has no hash; export its tables with the echelon"
    ):
        shard_checkpoint.read_manifest(tmp_path / "kept")


def test_a_link_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "kept", 1)
    (path,) = (tmp_path / "kept").glob("shard-*")
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=rf"{path}: a symbolic link; only regular files are read"):
        shard_checkpoint.load_shard(tmp_path / "kept", 0)


def test_a_shard_that_is_still_to_be_read_is_not_written() -> None:
    """It is empty until then, and the next loss would go back to that."""
    (front, _), *rest = ShardState(TinyStore(1), num_shards=1).snapshot(0)
    kept = [(front | {"lsn": 5}, []), *rest]
    replica = ReplicaState(
        name="a", incarnation=1, shards=ShardState(TinyStore(1), 1), load_shard=lambda folder, shard: kept
    )
    known = ShardMap(
        version=1,
        servers={"a": ServerEntry(address="", host="a", incarnation=1)},
        chains=(("a",),),
        epochs=(1,),
        learners=((),),
        workers={},
        restored_from={0: ("folder", 1)},
    )
    events.on_map(replica, 0.0, known, [])
    assert replica.is_head[0]
    assert snapshot_if_ready(replica, 0) is None
    events.load_next_shard(replica, 0.0)
    parts = snapshot_if_ready(replica, 0)
    assert parts is not None
    assert parts[0][0]["lsn"] == 5


def write(folder: Path, lsn: int) -> None:
    """A checkpoint of one shard, as a controller has it written."""
    shard_checkpoint.check_target_folder(folder)
    entry = shard_checkpoint.write_shard(shard_checkpoint.partial_folder(folder), 0, [({"lsn": lsn}, [])])
    manifest = {"shards": 1, "specs": [], "settings": {}, "count": 0, "files": {"0": entry}}
    shard_checkpoint.complete_checkpoint(folder, manifest)


def test_a_crash_while_a_checkpoint_takes_the_place_of_another_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is whole by then: whoever looks for it next, or writes over it, finds it."""
    folder, rename = tmp_path / "kept", os.rename

    def crash(lsn: int) -> None:
        def stop(old: Path, new: Path) -> None:
            if new == folder:
                raise InterruptedError("the power failed")
            rename(old, new)

        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", stop)
            with pytest.raises(InterruptedError):
                write(folder, lsn)
        assert not folder.exists()

    write(folder, 1)
    crash(2)
    assert shard_checkpoint.load_shard(folder, 0)[0][0]["lsn"] == 2
    crash(3)
    shard_checkpoint.check_target_folder(folder)  # another is asked for
    assert (folder / shard_checkpoint.MANIFEST_NAME).is_file()
    write(folder, 4)
    assert shard_checkpoint.load_shard(folder, 0)[0][0]["lsn"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / ".kept.old").mkdir()
    (tmp_path / ".kept.old" / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match=r"\.kept\.old: holds other things"):
        write(folder, 5)


@pytest.mark.parametrize("before", [0, 1])
def test_who_looks_for_a_checkpoint_in_the_moment_that_it_is_whole_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Whoever finds a whole one without its name gives it that, beside the one who writes it."""
    folder, durably = tmp_path / "kept", files.atomic_write
    for lsn in range(before):
        write(folder, lsn)

    def looked_at(path: Path, data: bytes) -> None:
        durably(path, data)
        shard_checkpoint.read_manifest(folder)

    monkeypatch.setattr(files, "atomic_write", looked_at)
    write(folder, 7)
    assert shard_checkpoint.load_shard(folder, 0)[0][0]["lsn"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
def test_servers_started_again_in_their_folder_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """New servers have nothing, so all shards go back to it: a worker goes on where the furthest was."""
    ones = np.ones((len(IDS), 4), np.float32)
    table = Table(name="t", dim=4, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="zeros"))
    for life in range(2):
        servers = Servers(2, replicas=2, shards=16, staleness=1, folder=tmp_path / "job")
        told = pytest.warns(UserWarning, match="went back to the checkpoint") if life else nullcontext()
        with told, servers, connect(servers.address, secret=servers.secret, timeout=30.0) as client:
            client.declare(table)
            assert client.step == client.clock()[0] == 3 * life
            for _ in range(3):
                client.push({"t": (IDS, ones)})
            client.flush()
            assert (client.pull({"t": IDS})["t"] == -3 * (life + 1)).all()
            assert client.clock() == (3 * (life + 1),) * 2
            client.checkpoint(tmp_path / "kept")


def test_a_checkpoint_without_all_that_it_lists_is_none(tmp_path: Path) -> None:
    write(tmp_path / "kept", 1)
    manifest = shard_checkpoint.read_manifest(tmp_path / "kept")
    shard_checkpoint.partial_folder(tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="1 of 1 shards were not written there"):
        shard_checkpoint.complete_checkpoint(tmp_path / "other", manifest)


class Owner:
    """Nobody calls here."""

    def on_open(self, connection: Connection) -> None: ...
    def on_frame(self, connection: Connection, frame: wire.Frame) -> None: ...
    def on_close(self, connection: Connection) -> None: ...
    def on_tick(self, now: float) -> None: ...


def test_a_shard_that_cannot_be_written_is_told_of_and_the_next_one_is_written(tmp_path: Path) -> None:
    """Whatever the reason: here numbers that the format does not have."""
    loop, told = EventLoop(Owner(), bytes(32)), []

    def tell(details: dict[str, Any]) -> None:
        told.append(details)
        loop.running = len(told) < 2

    arrays = {0: np.array([object()]), 1: np.arange(3)}
    writer = shard_checkpoint.CheckpointWriter(loop, lambda shard: [({"lsn": 4}, [arrays[shard]])], tell)
    writer.write(7, tmp_path / "kept", [0, 1])
    deadline = threading.Timer(20.0, lambda: setattr(loop, "running", False))
    deadline.start()
    loop.run()
    deadline.cancel()
    assert told[0]["id"] == 7
    assert f"{tmp_path / 'kept.partial'}: shard 0 cannot be written" in told[0]["error"]
    assert (told[1]["shard"], told[1]["lsn"]) == (1, 4)
    (path,) = (tmp_path / "kept.partial").glob("shard-00001*")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == told[1]["sha256"]
    assert path.stat().st_size == told[1]["bytes"]


def test_a_shard_is_a_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    """Of all kinds of number, empty arrays too; and with the rights that new files have here."""
    kinds = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u2", "u1")
    arrays = [np.arange(count * 2).reshape(count, 2).astype(kind) for kind in kinds for count in (3, 0)]
    parts = [({"lsn": 4}, arrays[:7]), ({"kind": "rows"}, arrays[7:]), ({"kind": "none"}, [])]
    entry = shard_checkpoint.write_shard(tmp_path / "kept.partial", 0, parts)
    manifest = {"shards": 1, "specs": [], "settings": {}, "count": 0, "files": {"0": entry}}
    shard_checkpoint.complete_checkpoint(tmp_path / "kept", manifest)
    found = shard_checkpoint.load_shard(tmp_path / "kept", 0)
    assert [meta for meta, _ in found] == [meta for meta, _ in parts]
    for mine, theirs in zip(arrays, (array for _, part in found for array in part), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    (tmp_path / "new").touch()
    assert (tmp_path / "kept" / entry["file"]).stat().st_mode == (tmp_path / "new").stat().st_mode

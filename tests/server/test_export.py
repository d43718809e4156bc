"""Tables as files: readable by others, found again by id, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file

from echelon.errors import CheckpointError, DocumentError
from echelon.plan.sealed_json import seal
from echelon.server.protocol.specs import BLOCK_SIZE, Dense, Init, Rule, StoreError, Table, spec_to_plain
from echelon.server.protocol.wire_dtypes import dequantize
from echelon.server.store import shard_checkpoint, table_export
from echelon.server.store.store import ParameterStore
from echelon.verifier.job_reader import _load_server_tables

SHARDS = 8
IDS = np.arange(-300, 700) * 7919
LSN = np.ones(SHARDS, np.int64)


def filled(**spec: object) -> ParameterStore:
    store = ParameterStore(num_shards=SHARDS, memory=64 << 20)
    store.declare(Table(name="emb", dim=5, rule=Rule(kind="adam"), init=Init(kind="normal"), **spec))
    store.declare(Table(name="other", dim=2, admit=2))
    store.declare(
        Dense(name="w", size=BLOCK_SIZE + 9, rule=Rule(kind="sgd", lr=1.0), init=Init(kind="constant", value=2.0))
    )
    store.apply("emb", IDS, np.random.default_rng(0).standard_normal((len(IDS), 5)), lsn=LSN)
    store.apply("other", IDS[:50], np.ones((50, 2)), lsn=LSN)
    store.apply("w", np.array([1]), [np.ones(9)], lsn=LSN)
    return store


def checkpointed(store: ParameterStore, folder) -> None:
    files = {
        str(s): shard_checkpoint.write_shard(
            shard_checkpoint.partial_folder(folder), s, [({"lsn": 1}, []), *store.snapshot(s)]
        )
        for s in range(SHARDS)
    }
    specs = [spec_to_plain(spec) for spec in store.specs.values()]
    shard_checkpoint.complete_checkpoint(
        folder, {"shards": SHARDS, "specs": specs, "settings": {}, "count": 0, "files": files}
    )


def exported(store: ParameterStore, path, wire: str) -> int:
    """Write its table, as people do: out of a checkpoint."""
    with TemporaryDirectory() as place:
        checkpointed(store, Path(place) / "saved")
        return table_export.export_from_checkpoint(Path(place) / "saved", "emb", path, wire)


@pytest.mark.parametrize("suffix", [".arrow", ".safetensors"])
@pytest.mark.parametrize(("stored", "wire"), [("f4", "f4"), ("f4", "f2"), ("f4", "i1"), ("i2", "i2"), ("i1", "f8")])
def test_rows_come_back_by_id(tmp_path, suffix, stored, wire):
    store = filled(stored=stored)
    path = tmp_path / "deep" / f"emb{suffix}"
    assert exported(store, path, wire) == len(IDS)
    served = table_export.ExportedTable(path)
    asked = np.random.default_rng(1).permutation(np.concatenate([IDS, IDS[:9], [1, 2, 3, -(2**63), 2**63 - 1]]))
    here = np.isin(asked, IDS)
    assert (len(served), served.wire_dtype) == (len(IDS), wire)
    rows = served.read_rows(asked)
    exact = dequantize(store.read("emb", asked, wire))
    np.testing.assert_array_equal(rows[here], exact[here])
    np.testing.assert_allclose(rows[~here], store.read("emb", asked, "f4")[0][~here], atol=5e-4)
    assert len(served.read_rows(np.empty(0, np.int64))) == 0
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".arrow", ".safetensors"])
def test_rows_that_all_move_are_exported_as_they_are_by_now(tmp_path, suffix):
    rule = Rule(kind="adam", lr=0.1, weight_decay=0.1, every=True)
    store = ParameterStore(num_shards=SHARDS, memory=64 << 20)
    store.declare(Table(name="emb", dim=5, rule=rule, init=Init(kind="normal")))
    store.apply("emb", IDS, np.random.default_rng(0).standard_normal((len(IDS), 5)), lsn=LSN)
    for step in range(30):
        store.advance_lazy_table("emb", np.arange(SHARDS), 0.1 / (1 + step // 10))
    store.advance_lazy_table("emb", np.arange(3), 0.2)
    asked = np.append(IDS, [1, 2, 3, 4, 5, 6])
    exact = store.read("emb", asked)[0]
    checkpointed(store, tmp_path / "saved")
    table_export.export_from_checkpoint(tmp_path / "saved", "emb", tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(table_export.ExportedTable(tmp_path / f"a{suffix}").read_rows(asked), exact)


def test_others_can_read_it(tmp_path):
    store = filled()
    exported(store, tmp_path / "emb.safetensors", "i2")
    tensors = load_file(tmp_path / "emb.safetensors")
    assert {name: (t.dtype.str, t.shape) for name, t in tensors.items()} == {
        "id": ("<i8", (1000,)), "row": ("<i2", (1000, 5)), "scale": ("<f4", (1000,)),
    }  # fmt: skip
    np.testing.assert_allclose(
        tensors["row"] * tensors["scale"][:, None], store.read("emb", tensors["id"])[0], atol=1e-4
    )
    exported(store, tmp_path / "emb.arrow", "f2")
    table = pa.ipc.open_file(tmp_path / "emb.arrow").read_all()
    assert table.schema.field("row").type == pa.list_(pa.float16(), 5)
    assert sorted(table["id"].to_pylist()) == sorted(IDS.tolist())


@pytest.mark.parametrize("stored", ["f4", "i1"])
def test_out_of_a_checkpoint(tmp_path, stored):
    store = filled(stored=stored)
    folder = tmp_path / "checkpoint"
    checkpointed(store, folder)
    assert table_export.export_from_checkpoint(folder, "emb", tmp_path / "emb.safetensors", "i1") == len(IDS)
    np.testing.assert_array_equal(
        table_export.ExportedTable(tmp_path / "emb.safetensors").read_rows(IDS),
        dequantize(store.read("emb", IDS, "i1")),
    )
    for ids, rows in table_export.iterate_complete_rows(folder, "emb", len(IDS)):
        np.testing.assert_array_equal(rows, store.read("emb", ids)[0])
    assert table_export.export_from_checkpoint(folder, "other", tmp_path / "none.arrow") == 0
    assert len(table_export.ExportedTable(tmp_path / "none.arrow")) == 0
    assert table_export.ExportedTable(tmp_path / "none.arrow").read_rows(IDS[:2]).shape == (2, 2)
    with pytest.raises(StoreError, match="no table 'w' in it; it has emb, other"):
        next(table_export.iterate_complete_rows(folder, "w", 1))


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    store = filled()
    spec = store.specs["emb"]
    path = tmp_path / "emb.safetensors"

    def half():
        yield IDS[:1], store.read("emb", IDS[:1])
        raise OSError("disk full")

    with pytest.raises(StoreError, match=r"emb\.safetensors: the table cannot be written \(disk full\)"):
        table_export.write_table(path, spec, half(), wire="f4", count=2)
    one = [(IDS[:1], store.read("emb", IDS[:1]))]
    with pytest.raises(StoreError, match="expected 2 rows, got 1"):
        table_export.write_table(path, spec, one, wire="f4", count=2)
    with pytest.raises(StoreError, match="ids are duplicated or out of order"):
        table_export.write_table(path, spec, one * 2, wire="f4", count=2)
    with pytest.raises(StoreError, match="unknown format"):
        table_export.write_table(tmp_path / "emb.csv", spec, one, wire="f4", count=1)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"\0" * 100)
    with pytest.raises(DocumentError, match="cannot be read as an exported table"):
        table_export.ExportedTable(path)
    path.write_bytes((20).to_bytes(8, "little") + json.dumps({"a": 1}).encode())
    with pytest.raises(DocumentError, match="cannot be read as an exported table"):
        table_export.ExportedTable(path)
    (tmp_path / "emb.arrow").write_bytes(b"x" * 50)
    with pytest.raises(DocumentError, match="cannot be read as an exported table"):
        table_export.ExportedTable(tmp_path / "emb.arrow")


def test_a_damaged_checkpoint_is_told_in_words(tmp_path):
    """A file that was cut short or is gone, a manifest that lacks something, a file where a folder should be."""
    every = Rule(kind="adam", every=True)
    store = ParameterStore(num_shards=SHARDS, memory=64 << 20)
    store.declare(Table(name="emb", dim=5, rule=every))
    store.apply("emb", IDS, np.ones((len(IDS), 5)), lsn=LSN)
    store.advance_lazy_table("emb", np.arange(SHARDS), 0.1)
    folder, output = tmp_path / "checkpoint", tmp_path / "emb.arrow"
    checkpointed(store, folder)
    manifest = shard_checkpoint.read_manifest(folder)
    path = folder / manifest["files"]["3"]["file"]
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 5, 100, head, head + 4, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"{path}: .*use an older checkpoint"):
            table_export.export_from_checkpoint(folder, "emb", output)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path}: .*No such file.*use an older checkpoint"):
        table_export.export_from_checkpoint(folder, "emb", output)
    path.write_bytes(whole)
    assert not output.exists()
    for name in ("shards", "specs", "settings", "count", "files"):
        lacking = {key: value for key, value in manifest.items() if key != name}
        (folder / shard_checkpoint.MANIFEST_NAME).write_bytes(seal(lacking))
        with pytest.raises(CheckpointError, match=rf"manifest\.json: {name} missing"):
            next(table_export.iterate_complete_rows(folder, "emb", 1))
    del manifest["files"]["3"]["file"]
    (folder / shard_checkpoint.MANIFEST_NAME).write_bytes(seal(manifest))
    with pytest.raises(CheckpointError, match="shard 3 is missing"):
        table_export.export_from_checkpoint(folder, "emb", output)
    with pytest.raises(CheckpointError, match=r"not a checkpoint of servers \(manifest\.json: Not a directory\); give"):
        shard_checkpoint.read_manifest(path)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_verify_begins_with_is_a_whole_table(tmp_path, dtype):
    """In its own numbers; rows that were never pushed to are not made up of memory that nobody wrote."""
    store = ParameterStore(num_shards=SHARDS, memory=64 << 20)
    store.declare(Table(name="emb", dim=2, dtype=dtype, rule=Rule(kind="sgd")))
    store.apply("emb", np.arange(99), np.full((99, 2), 1 / 3), lsn=LSN)
    for count in (99, 100):
        folder = tmp_path / str(count)
        checkpointed(store, folder / "server")
    table = _load_server_tables(tmp_path / "99", {"emb": [99, 2]})["emb"]
    np.testing.assert_array_equal(table.numpy(), store.read("emb", np.arange(99), dtype)[0])
    assert table.numpy().dtype == np.dtype(dtype)
    with pytest.raises(CheckpointError, match="emb has 99 of 100 rows, the others were never trained"):
        _load_server_tables(tmp_path / "100", {"emb": [100, 2]})

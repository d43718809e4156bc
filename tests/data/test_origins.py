"""What can be packed, from the command line: each kind of source comes back as it was."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import resource
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv, feather, orc
from typer.testing import CliRunner

from echelon.cli import pack as cli
from echelon.cli.app import app
from echelon.data import Loader, Packed, open_source
from echelon.data.packed import from_text
from echelon.data.packed.detect_format import open_packing_source
from echelon.data.packed.packing_source import PackingSource

MNIST = Path(__file__).parents[3] / "shared/data/mnist"


def echelon(*words: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def packed(tmp_path: Path, source: Any, *options: Any) -> Packed:
    echelon("pack", source, tmp_path / "packed", "--processes", 1, *options)
    return Packed(tmp_path / "packed")


def idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()) if path.suffix == ".gz" else head + array.tobytes())


def test_idx_files(tmp_path: Path) -> None:
    folder = tmp_path / "idx"
    folder.mkdir()
    pixels = np.arange(10 * 4 * 5, dtype=np.uint8).reshape(10, 4, 5)
    idx(folder / "train-images-idx3-ubyte.gz", pixels)
    idx(folder / "train-labels-idx1-ubyte.gz", np.arange(10, dtype=np.uint8))
    idx(folder / "t10k-images-idx3-ubyte", pixels[:3])
    idx(folder / "t10k-labels-idx1-ubyte", np.arange(3, dtype=np.uint8))
    data = packed(tmp_path, folder)
    assert np.array_equal(data.read_batch(np.arange(10))[0].numpy(), pixels)
    assert data[4][1].item() == 4
    echelon("pack", folder, tmp_path / "test", "--split", "t10k")
    assert len(Packed(tmp_path / "test")) == 3
    assert "has no split 'dev'; it has t10k, train" in echelon("pack", folder, tmp_path / "x", "--split", "dev", code=2)


def test_idx_that_is_cut_off_is_named(tmp_path: Path) -> None:
    idx(tmp_path / "train-images-idx3-ubyte", np.zeros((3, 2, 2), np.uint8))
    idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    assert "has 11 bytes of values, but its header declares (3, 2, 2)" in echelon(
        "pack", tmp_path, tmp_path / "p", code=2
    )


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_numpy(tmp_path: Path, ending: str) -> None:
    rows = np.random.default_rng(0).normal(size=(30, 2, 3)).astype(">f4")
    if ending == "npy":
        np.save(tmp_path / "x.npy", rows)
        batch = packed(tmp_path, tmp_path / "x.npy").read_batch(np.array([3, 1]))
    else:
        np.savez(tmp_path / "x.npz", rows=rows, flag=np.arange(30) > 3)
        found = packed(tmp_path, tmp_path / "x.npz").read_batch(np.array([3, 1]))
        batch = found["rows"]
        assert found["flag"].tolist() == [False, False]
    assert np.array_equal(batch.numpy(), rows[[3, 1]])


def test_numpy_never_unpickles(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}, None]), allow_pickle=True)
    assert "cannot be read as a NumPy file of numbers" in echelon("pack", tmp_path / "x.npy", tmp_path / "p", code=2)


TABLE = {"number": [1, 2, 3], "name": ["a", "", "ccc"], "weight": [0.5, 1.5, -1.0], "good": [True, False, True]}


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "arrow", "feather", "orc", "folder"])
def test_tables(tmp_path: Path, kind: str) -> None:
    table = pa.table(TABLE)
    if kind in ("csv", "tsv"):
        csv.write_csv(table, tmp_path / f"t.{kind}", csv.WriteOptions(delimiter="," if kind == "csv" else "\t"))
    elif kind == "feather":
        feather.write_feather(table, tmp_path / "t.feather", compression="zstd")
    elif kind == "orc":
        orc.write_table(table, tmp_path / "t.orc")
    elif kind == "parquet":
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    elif kind == "arrow":
        with pa.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as writer:
            writer.write_table(table)
    else:
        (tmp_path / "t.folder").mkdir()
        for part in range(3):
            pq.write_table(table.slice(part, 1), tmp_path / f"t.folder/{part}.parquet")
    data = packed(tmp_path, tmp_path / f"t.{kind}", "--shards", 2)
    batch = data.read_batch(np.array([2, 0, 1]))
    assert batch["number"].tolist() == [3, 1, 2]
    assert batch["name"] == ["ccc", "a", ""]
    assert batch["weight"].tolist() == [-1.0, 0.5, 1.5]
    assert batch["good"].tolist() == [True, True, False]


def test_lists_in_tables(tmp_path: Path) -> None:
    columns = {
        "any": pa.array([[1, 2], [], [3]], pa.list_(pa.int16())),
        "two": pa.array([[1.0, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
        "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = packed(tmp_path, tmp_path / "t.parquet")
    assert [data[row]["any"].tolist() for row in range(3)] == [[1, 2], [], [3]]
    assert data[1]["two"].tolist() == [3, 4]
    assert data[1]["kind"] == "y"


def test_rows_are_read_from_anywhere_in_a_file(tmp_path: Path) -> None:
    """Text, bytes, lists and truths that begin in the middle of a row group, and files of several."""
    rows = 1000
    columns = {
        "text": [f"row {number}" for number in range(rows)],
        "bytes": [bytes([number % 256]) * (number % 5) for number in range(rows)],
        "ids": [[number] * (number % 3) for number in range(rows)],
        "good": [number % 7 == 0 for number in range(rows)],
    }
    (tmp_path / "in").mkdir()
    for part in range(2):
        table = pa.table(columns).slice(part * 600, 600)
        pq.write_table(table, tmp_path / f"in/{part}.parquet", row_group_size=130, use_dictionary=part == 0)
    source = open_packing_source(tmp_path / "in", work_folder=tmp_path / "kept")
    source.prepare()
    assert source.samples == rows
    for start, stop in ((0, 1000), (125, 135), (599, 601), (999, 1000), (3, 4)):
        text, content, ids, good = source.read(start, stop)
        assert [bytes(value).decode() for value in text] == columns["text"][start:stop]
        assert [bytes(value) for value in content] == columns["bytes"][start:stop]
        assert [value.tolist() for value in ids] == columns["ids"][start:stop]
        assert good.tolist() == columns["good"][start:stop]


def test_a_table_that_is_damaged_is_named(tmp_path: Path) -> None:
    for name, kind in (("t.parquet", "Parquet"), ("t.arrow", "Arrow"), ("t.orc", "ORC")):
        (tmp_path / name).write_bytes(b"PAR1 or not")
        told = " ".join(echelon("pack", tmp_path / name, tmp_path / "p", code=2).split())
        assert f"{name} cannot be read as {kind}: " in told


def test_a_place_without_a_value_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, None]}), tmp_path / "t.parquet")
    assert "column 'a' has no value in row 2" in echelon("pack", tmp_path / "t.parquet", tmp_path / "p", code=2)


def test_json_lines(tmp_path: Path) -> None:
    rows = [
        {"text": f"line {number}", "ids": [number] * (number % 3), "meta": {"score": number / 2}} for number in range(9)
    ]
    (tmp_path / "x.jsonl").write_text(
        "\n".join(map(json.dumps, rows[:4])) + "\n\n" + "\n".join(map(json.dumps, rows[4:]))
    )
    data = packed(tmp_path, tmp_path / "x.jsonl", "--shards", 2)
    assert len(data) == 9
    assert (data[8]["text"], data[8]["ids"].tolist(), data[8]["meta"]["score"].item()) == ("line 8", [8, 8], 4.0)
    (tmp_path / "y.jsonl").write_text('{"a": 1}\n{"a": \n')
    assert "y.jsonl: value 1 is not valid JSON" in echelon("pack", tmp_path / "y.jsonl", tmp_path / "p", code=2)


def test_text_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a.txt").write_text("hello ")
    (tmp_path / "t/b.txt").write_text("world!!")
    rows = packed(tmp_path, tmp_path / "t", "--tokens", "byte", "--length", 4).read_batch(np.arange(3))
    assert bytes(rows.reshape(-1).tolist()) == b"hello world!"
    echelon("pack", tmp_path / "t", tmp_path / "whole", "--tokens", "byte", "--dtype", "uint8")
    assert bytes(Packed(tmp_path / "whole")[1].tolist()) == b"world!!"
    assert "is text: choose how it becomes tokens" in echelon("pack", tmp_path / "t/a.txt", tmp_path / "p", code=2)


def test_a_header_that_names_two_columns_alike_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,a\n1,2,3\n")
    assert "has two columns 'a': rename one" in echelon("pack", tmp_path / "x.csv", tmp_path / "p", code=2)


def test_a_disk_without_room_for_the_copy_of_a_csv_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n" + "1\n" * 5000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))
    try:
        told = echelon("pack", tmp_path / "x.csv", tmp_path / "far/p", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{tmp_path / 'far'} has no space for the copy of" in " ".join(told.split())


def test_data_of_another_kind_beside_tables_is_not_left_out_silently(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("a\n1\n")
    (tmp_path / "in/b.jsonl").write_text('{"a": 2}\n')
    told = echelon("pack", tmp_path / "in", tmp_path / "p", code=2)
    assert "holds tables, and b.jsonl as well" in " ".join(told.split())


def test_csv_whose_kinds_show_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.packed.from_tables._CSV_BLOCK_BYTES", 1000)
    (tmp_path / "x.csv").write_text("a,b\n" + "".join(f"{n},{n if n < 900 else n + 0.5}\n" for n in range(1000)))
    batch = packed(tmp_path, tmp_path / "x.csv").read_batch(np.array([5, 950]))
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([5, 950], [5.0, 950.5])
    (tmp_path / "y.csv").write_text("a\n" + "".join(f"{n}\n" for n in range(1000)))
    echelon("pack", tmp_path / "y.csv", tmp_path / "y", "--shards", 4, "--processes", 2)
    assert Packed(tmp_path / "y").read_batch(np.arange(1000))["a"].tolist() == list(range(1000))


def test_csv_that_is_packed_already_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.packed.from_tables._CSV_BLOCK_BYTES", 1000)
    (tmp_path / "x.csv").write_text("a\n" + "".join(f"{n if n < 900 else n + 0.5}\n" for n in range(1000)))
    packed(tmp_path, tmp_path / "x.csv")

    def refuse(*given: Any) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr("echelon.data.packed.from_tables._read_csv", refuse)
    assert len(packed(tmp_path, tmp_path / "x.csv")) == 1000


def test_numbers_in_json_that_are_not_all_whole_are_floats(tmp_path: Path) -> None:
    lines = [{"score": n if n % 3 else n + 0.5, "ids": [n]} for n in range(300)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    packed(tmp_path, tmp_path / "x.jsonl")
    assert Packed(tmp_path / "packed", pad=0).read_batch(np.arange(5))["score"].tolist() == [0.5, 1.0, 2.0, 3.5, 4.0]


def test_parquet_in_many_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(2000))}), tmp_path / "x.parquet", row_group_size=700)
    echelon("pack", tmp_path / "x.parquet", tmp_path / "packed", "--shards", 3, "--processes", 2)
    assert [sample["n"].item() for sample in Packed(tmp_path / "packed").__getitems__(range(2000))] == list(range(2000))


def test_text_by_a_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b c a b")
    data = packed(tmp_path, tmp_path / "a.txt", "--tokens", tmp_path / "tokenizer.json", "--length", 2)
    assert data.read_batch(np.arange(2)).tolist() == [[0, 1], [2, 0]]
    assert data.manifests[0].provenance["left out"] == "1"


def test_text_that_is_packed_already_is_not_tokenized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a")
    options = "--tokens", tmp_path / "tokenizer.json"
    packed(tmp_path, tmp_path / "a.txt", *options)

    def refuse(*given: Any) -> Any:
        raise AssertionError("tokenized again")

    monkeypatch.setattr("echelon.data.packed.from_text._tokenize_file", refuse)
    assert len(packed(tmp_path, tmp_path / "a.txt", *options)) == 1


def test_the_size_of_rows_is_that_of_what_is_packed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.zeros(10000), "t": ["abcd"] * 10000}), tmp_path / "x.parquet")
    origin = open_packing_source(tmp_path / "x.parquet", work_folder=tmp_path / "kept")
    origin.prepare()
    assert origin.row_bytes == 12
    assert (tmp_path / "x.parquet").stat().st_size < 20000


def test_lines_of_json_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(f"{number}\n" for number in range(0, 3000, 7)))
    assert [int(value) for value in packed(tmp_path, tmp_path / "x.jsonl").__getitems__(range(429))] == list(
        range(0, 3000, 7)
    )


def test_many_texts_by_several_processes_that_go_on_after_a_kill(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(500)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t").mkdir()
    count = 300  # many more than are made until the parent hears of eight
    for number in range(count):
        (tmp_path / f"t/{number:03}.txt").write_text(" ".join(map(str, range(number * 17 % 23))))
    said: list[int] = []

    def open_texts(stop: int | None) -> PackingSource:
        def told(done: int, total: int) -> None:
            said.append(done)
            if len(said) == stop:
                raise KeyboardInterrupt

        how = {"tokens": str(tmp_path / "tokenizer.json"), "work_folder": tmp_path / "kept", "progress": told}
        origin = open_packing_source(tmp_path / "t", **how, processes=2)
        origin.prepare()
        return origin

    with pytest.raises(KeyboardInterrupt):
        open_texts(8)
    found = len(list((tmp_path / "kept").glob("*.int32")))
    assert 7 <= found < count
    said.clear()
    origin = open_texts(None)
    assert said[0] > 0
    assert len(said) <= count + 1 - found
    assert [row.tolist() for row in origin.read(0, count)[0]] == [
        list(range(number * 17 % 23)) for number in range(count)
    ]
    data = packed(tmp_path, tmp_path / "t", "--tokens", tmp_path / "tokenizer.json", "--length", 7, "--shards", 3)
    whole = [token for number in range(count) for token in range(number * 17 % 23)]
    assert data.read_batch(np.arange(len(data))).flatten().tolist() == whole[: len(data) * 7]
    assert not (tmp_path / ".packed.tokens").exists()


def framed(folder: Path) -> Path:
    """A tokenizer of words that puts a begin before each document and an end behind it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"?": 0, "<begin>": 1, "<end>": 2, **{str(number): number + 3 for number in range(500)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = [("<begin>", 1), ("<end>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=frame)
    tokenizer.enable_truncation(100)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("between", ["\n", "\n\n", " "])
def test_a_large_text_is_tokenized_in_pieces_as_if_it_were_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    (tmp_path / "a.txt").write_text(between.join(f"{number:03}" for number in range(100, 500)))
    how = "--tokens", framed(tmp_path)
    whole = packed(tmp_path, tmp_path / "a.txt", *how)[0].tolist()
    assert whole == [1, *range(103, 503), 2]
    monkeypatch.setattr("echelon.data.packed.from_text._CHUNK_CHARS", 4 * 50)
    echelon("pack", tmp_path / "a.txt", tmp_path / "pieces", *how)
    assert Packed(tmp_path / "pieces")[0].tolist() == whole


def test_a_process_that_dies_while_it_tokenizes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    for number in range(4):
        (tmp_path / f"t/{number}.txt").write_text(str(number))
    monkeypatch.setattr("echelon.data.packed.from_text._split_text", lambda text: os.kill(os.getpid(), signal.SIGKILL))
    how = "--tokens", framed(tmp_path), "--processes", 2
    assert "a packing process died (exit code -9)" in echelon("pack", tmp_path / "t", tmp_path / "p", *how, code=2)


def test_commands_that_tokenize_the_same_share_it_and_the_last_takes_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    for number in range(12):
        (tmp_path / f"t/{number:02}.txt").write_text(str(number))
    encode = from_text._tokenize_file

    def slowly(path: Path, *given: Any) -> Any:
        with (tmp_path / "calls").open("a") as calls:
            calls.write(f"{path}\n")
        time.sleep(0.02)
        return encode(path, *given)

    monkeypatch.setattr(from_text, "_tokenize_file", slowly)
    tokens = str(framed(tmp_path))
    one, other = (open_packing_source(tmp_path / "t", tokens=tokens, work_folder=tmp_path / "kept") for _ in range(2))
    helper = multiprocessing.get_context("fork").Process(target=one.prepare)
    helper.start()
    other.prepare()
    helper.join()
    assert len((tmp_path / "calls").read_text().split()) == 12
    one.prepare()
    one.finish()
    assert [row.tolist() for row in other.read(0, 12)[0]] == [[1, number + 3, 2] for number in range(12)]
    other.finish()
    assert not (tmp_path / "kept").exists()


def test_pictures_by_class(tmp_path: Path) -> None:
    for name, shade in (("cat", 10), ("dog", 200)):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (6 + number, 5), (shade, number, 0)).save(tmp_path / "in" / name / f"{number}.png")
    raw = packed(tmp_path, tmp_path / "in", "--shuffle", "no")
    assert raw[4][0].shape == (3, 5, 7)
    assert (raw[4][0][:, 0, 0].tolist(), raw[4][1].item()) == ([200, 1, 0], 1)
    echelon("pack", tmp_path / "in", tmp_path / "sized", "--size", "4x3")
    assert Packed(tmp_path / "sized").read_batch(np.array([0, 5]))[0].shape == (2, 3, 4, 3)
    (tmp_path / "in/dog/1.png").write_bytes(b"no picture")
    assert "dog/1.png cannot be read as an image" in echelon("pack", tmp_path / "in", tmp_path / "p", code=2)


def test_pictures_by_class_are_packed_in_random_order(tmp_path: Path) -> None:
    """Else each file, and with it each rank's share and each micro-batch, would hold one class or two."""
    for label in range(4):
        (tmp_path / "in" / f"class {label}").mkdir(parents=True)
        for number in range(16):
            Image.new("RGB", (4, 4), (label, number, 0)).save(tmp_path / "in" / f"class {label}" / f"{number:02}.png")
    data = packed(tmp_path, tmp_path / "in", "--size", "4x4", "--shards", 4)
    pixels, labels = data.read_batch(np.arange(64))
    assert sorted(zip(pixels[:, 0, 0, 0].tolist(), pixels[:, 1, 0, 0].tolist(), strict=True)) == [
        (label, number) for label in range(4) for number in range(16)
    ]
    assert pixels[:, 0, 0, 0].tolist() == labels.tolist()
    source = open_source(str(tmp_path / "packed"))
    order = source.make_order(batch=16, seed=0)
    assert order.rule == "shuffled in lanes=4"
    micros = [
        len(set(micro.batch[1].tolist()))
        for step in Loader(source, order, dp_rank=0, dp_size=1, micro_batch_size=4).steps(0, 40)
        for micro in step.micro_batches
    ]
    assert np.mean(micros) > 2  # of 4 samples drawn from 4 classes 2.7 classes are expected, of a sorted file 1
    assert data.manifests[0].provenance["shuffled"] == "seed 0"


@pytest.mark.parametrize("kind", ["npy", "jsonl", "text"])
def test_other_sources_are_shuffled_if_asked(tmp_path: Path, kind: str) -> None:
    how: list[Any] = ["--shuffle", 3]
    if kind == "npy":
        np.save(tmp_path / "x.npy", np.arange(50))
    elif kind == "jsonl":
        (tmp_path / "x.jsonl").write_text("".join(f"{number}\n" for number in range(50)))
    else:
        (tmp_path / "x.txt").write_bytes(bytes(range(50)))
        how += ["--tokens", "byte", "--length", 1]
    source = next(path for path in tmp_path.iterdir())
    found = packed(tmp_path, source, *how).read_batch(np.arange(50)).reshape(-1).tolist()
    assert sorted(found) == list(range(50))
    assert found != list(range(50))
    echelon("pack", source, tmp_path / "packed", *how)  # the same again is nothing to do
    assert "holds another packed data set" in echelon(
        "pack", source, tmp_path / "packed", *how[2:], "--shuffle", 4, code=2
    )


def test_of_text_that_is_tokenized_and_shuffled_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(50))))
    packed(tmp_path, tmp_path / "a.txt", "--tokens", framed(tmp_path), "--length", 1, "--shuffle", 1)
    assert not (tmp_path / ".packed.tokens").exists()


def test_what_cannot_be_shuffled_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n1\n2\n")
    told = echelon("pack", tmp_path / "x.csv", tmp_path / "p", "--shuffle", 0, code=2)
    assert "rows of a table are read many at a time" in " ".join(told.split())
    assert "a seed, as 0, or no" in echelon("pack", tmp_path / "x.csv", tmp_path / "p", "--shuffle", "yes", code=2)


def test_show_tells_names_and_kinds_as_they_are(tmp_path: Path) -> None:
    """Square brackets are markup to rich."""
    (tmp_path / "x.jsonl").write_text('{"[/x]": [1, 2], "[red]y": "[b]"}\n{"[/x]": [3], "[red]y": ""}\n')
    packed(tmp_path, tmp_path / "x.jsonl")
    shown = echelon("data", "show", tmp_path / "packed")
    for words in ("[/x]", "int64[any]", "[red]y", "'[b]'"):
        assert words in shown


def test_packing_into_the_folder_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.arange(5))
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path / "set")
    echelon("pack", tmp_path / "x.npy", ".", "--processes", 1)
    assert len(Packed(tmp_path / "set")) == 5


def test_as_many_processes_pack_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr("echelon.world.usable_cores", lambda: 8)
    monkeypatch.setattr("echelon.world.usable_memory", lambda: 2**40)
    assert cli._default_processes() == 8
    monkeypatch.setattr("echelon.world.usable_memory", lambda: 2**30)
    assert cli._default_processes() == 2


def test_a_torch_data_set_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "numbers_set.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def squares():\n    return TensorDataset(torch.arange(50.0), torch.arange(50) ** 2)\n"
    )
    data = packed(tmp_path, f"{tmp_path / 'numbers_set.py'}:squares", "--shards", 4)
    assert data.read_batch(np.array([7, 49]))[1].tolist() == [49, 2401]
    assert "no `cubes` in it" in echelon("pack", f"{tmp_path / 'numbers_set.py'}:cubes", tmp_path / "p", code=2)


def test_show_and_verify(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(60.0).reshape(20, 3), y=np.arange(20))
    packed(tmp_path, tmp_path / "x.npz", "--shards", 3)
    shown = echelon("data", "show", tmp_path / "packed")
    assert "20 samples" in shown
    assert "float64[3]" in shown
    assert "6 to 7" in shown
    assert "sample 1: {x: float64[3] [3, 4, 5], y: 1}" in shown
    assert json.loads(echelon("data", "show", tmp_path / "packed", "--json"))["shards"]["lanes"] == 3
    assert "good; 3 blocks in 3 files" in echelon("data", "verify", tmp_path / "packed")
    path = tmp_path / "packed/shard-00001.arrow"
    content = bytearray(path.read_bytes())
    content[Packed(tmp_path / "packed").manifests[0].shards[1].buffers[0][0]] ^= 1
    path.write_bytes(content)
    told = echelon("data", "verify", tmp_path / "packed", code=1)
    assert "shard-00001.arrow, block 0 (samples 6 to 12) is damaged: its checksum is" in told
    assert "no such folder" in echelon("data", "verify", tmp_path / "nothing", code=2)


def test_of_a_set_with_a_file_missing_what_the_manifest_says_is_shown(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(60.0).reshape(20, 3), y=np.arange(20))
    packed(tmp_path, tmp_path / "x.npz", "--shards", 3)
    (tmp_path / "packed/shard-00001.arrow").unlink()
    shown = echelon("data", "show", tmp_path / "packed")
    assert "float64[3]" in shown
    assert "6 to 7" in shown
    assert "samples cannot be shown:" in shown
    assert "shard-00001.arrow" in shown
    assert "shard-00001.arrow" in json.loads(echelon("data", "show", tmp_path / "packed", "--json"))["problem"]


def test_verify_answers_no_to_a_damaged_manifest(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(5))
    packed(tmp_path, tmp_path / "x.npy")
    path = tmp_path / "packed/manifest.json"
    path.write_bytes(path.read_bytes().replace(b"int64", b"int32"))
    assert "manifest.json is damaged" in echelon("data", "verify", tmp_path / "packed", code=1)
    told = json.loads(echelon("data", "verify", f"file://{tmp_path / 'packed'}", "--json", code=1))
    assert "manifest.json is damaged" in told["damages"][0]
    assert not told["good"]


@pytest.mark.skipif(not MNIST.is_dir(), reason="no MNIST beside the checkout")
def test_mnist(tmp_path: Path) -> None:
    data = packed(tmp_path, MNIST, "--split", "t10k")
    assert len(data) == 10_000
    assert data.read_batch(np.arange(10_000))[1].bincount().tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]

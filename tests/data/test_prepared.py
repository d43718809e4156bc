"""Preprocessing once: stored, used again, made anew when the function or the data change, shared by those who do it together."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.data import prepare_dataset
from echelon.data.packed.fingerprint import fingerprint
from echelon.data.packed.from_samples import SamplePackingSource
from echelon.data.packed.pack import pack
from echelon.errors import DataError

DATA = TensorDataset(torch.arange(40.0), torch.arange(40))


def counting(folder: Path, factor: float = 2.0) -> Any:
    def transform(sample: Any) -> Any:
        with (folder / "calls").open("a") as file:
            file.write(f"{sample[1].item()}\n")
        return sample[0] * factor, sample[1]

    return transform


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().split())


def test_a_path_is_the_packed_data_set_there(tmp_path: Path) -> None:
    pack(SamplePackingSource(DATA, {}), tmp_path / "raw")
    made = prepare_dataset(str(tmp_path / "raw"), tmp_path / "set", lambda sample: sample[0] * 2)
    assert [value.item() for value in made.__getitems__(range(40))] == [2.0 * number for number in range(40)]
    with pytest.raises(DataError, match="nowhere"):
        prepare_dataset(str(tmp_path / "nowhere"), tmp_path / "other")


def test_files_are_so_many_that_none_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.data.packed.pack.SHARD_BYTES", 256)
    assert len(prepare_dataset(torch.zeros(100, 64), tmp_path / "large").manifests[0].shards) == 100
    assert len(prepare_dataset(torch.zeros(100, 8), tmp_path / "middle").manifests[0].shards) == 16
    assert len(prepare_dataset(torch.zeros(100, 16), tmp_path / "more").manifests[0].shards) == 32


def test_a_second_run_finds_it_done(tmp_path: Path) -> None:
    assert prepare_dataset(DATA, tmp_path / "set", counting(tmp_path))[7][0].item() == 14.0
    first = calls(tmp_path)
    assert prepare_dataset(DATA, tmp_path / "set", counting(tmp_path))[7][0].item() == 14.0
    assert calls(tmp_path) - first <= 40  # the few that are looked at to learn the columns, none that is stored


def test_another_function_or_other_data_make_it_anew(tmp_path: Path) -> None:
    prepare_dataset(DATA, tmp_path / "set", counting(tmp_path))
    with pytest.warns(
        UserWarning, match=r"set is packed again: transform [0-9a-f]{32} there, [0-9a-f]{32} here; content"
    ):
        assert prepare_dataset(DATA, tmp_path / "set", counting(tmp_path, 3.0))[7][0].item() == 21.0
    other = TensorDataset(torch.arange(40.0) + 1, torch.arange(40))
    with pytest.warns(UserWarning, match=r"set is packed again: data [0-9a-f]{32} there, [0-9a-f]{32} here; content"):
        assert prepare_dataset(other, tmp_path / "set", counting(tmp_path, 3.0))[7][0].item() == 24.0


def test_a_data_set_that_was_packed_otherwise_is_left_alone(tmp_path: Path) -> None:
    pack(SamplePackingSource(DATA, {"source": "hours of work", "kind": "text"}), tmp_path / "set", shards=4)
    before = (tmp_path / "set/manifest.json").read_bytes()
    with pytest.raises(
        DataError,
        match=r"holds another packed data set: .*source hours of work there, TensorDataset here.*; choose another folder",
    ):
        prepare_dataset(DATA, tmp_path / "set", counting(tmp_path))
    assert (tmp_path / "set/manifest.json").read_bytes() == before
    told = {"identity": "x", "kind": "text", "shards": 4, "block": 1, "version": 1, "from": {"source": "hours of work"}}
    (tmp_path / "set/packing.json").write_text(json.dumps(told))
    (tmp_path / "set/manifest.json").unlink()
    with pytest.raises(
        DataError, match=r"holds a part of another packing: .*source hours of work there, TensorDataset here"
    ):
        prepare_dataset(DATA, tmp_path / "set", counting(tmp_path))
    assert len(list((tmp_path / "set").glob("shard-*.arrow"))) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/shard-00000.arrow").write_text("mine")
    with pytest.raises(DataError, match="is not empty and not a packed data set"):
        prepare_dataset(DATA, tmp_path / "mine", counting(tmp_path))
    assert (tmp_path / "mine/shard-00000.arrow").read_text() == "mine"


def test_one_that_was_killed_while_it_cleared_the_folder_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_dataset(DATA, tmp_path / "set", counting(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("echelon.data.packed.pack._remove_work_files", lambda folder: os._exit(9))
        helper = multiprocessing.get_context("fork").Process(
            target=prepare_dataset, args=(DATA, tmp_path / "set", counting(tmp_path, 3.0))
        )
        with warnings.catch_warnings(action="ignore"):
            helper.start()
        helper.join()
        assert helper.exitcode == 9
    with pytest.warns(UserWarning, match="is packed again"):
        assert prepare_dataset(DATA, tmp_path / "set", counting(tmp_path, 3.0))[7][0].item() == 21.0


def test_those_who_prepare_together_share_the_work(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(1000.0), torch.arange(1000))
    context = multiprocessing.get_context("fork")
    helpers = [
        context.Process(target=prepare_dataset, args=(data, tmp_path / "set", counting(tmp_path))) for _ in range(3)
    ]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
        assert helper.exitcode == 0
    assert calls(tmp_path) < 1500  # each once, and by each process the few that are looked at
    samples = prepare_dataset(data, tmp_path / "set", counting(tmp_path)).__getitems__(range(1000))
    assert [int(sample[1]) for sample in samples] == list(range(1000))


def test_a_fingerprint_tells_functions_apart() -> None:
    def plus(number: int) -> Any:
        return lambda value: value + number

    assert fingerprint(plus(1)) == fingerprint(plus(1))
    assert fingerprint(plus(1)) != fingerprint(plus(2))
    assert fingerprint(lambda value: value * 2) != fingerprint(lambda value: value * 3)
    assert fingerprint(torch.nn.ReLU()) != fingerprint(torch.nn.Tanh())
    assert fingerprint(partial(pow, 2)) != fingerprint(partial(pow, 3))


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules of a test's own folder are gone after it: others have a `job` too."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{tmp_path}/"):
            del sys.modules[name]


def told(folder: Path, **files: str) -> str:
    """The fingerprint of what job.py says."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    for name in ("job", "helper"):
        sys.modules.pop(name, None)
    return fingerprint(import_module("job").it)


HELPER = "SCALE = 2\ndef scaled(x): return x * SCALE\n"
JOB = """
import helper
from helper import scaled
class Step:
    def __init__(self): self.path = "{path}"
    def twice(self, x): return helper.scaled(x) + 1
    def __call__(self, x): return self.twice(scaled(x))
it = Step()
"""


def test_a_fingerprint_sees_what_a_function_calls_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "list.txt").write_text("one")
    job = JOB.format(path=tmp_path / "list.txt")
    first = told(tmp_path, job=job, helper=HELPER)
    assert told(tmp_path) == first
    code = "import job; from echelon.data.packed.fingerprint import fingerprint; print(fingerprint(job.it), end='')"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert other.stdout == first
    assert told(tmp_path, helper=HELPER.replace("x * SCALE", "x + SCALE")) != first
    assert told(tmp_path, helper=HELPER.replace("SCALE = 2", "SCALE = 3")) != first
    assert told(tmp_path, helper=HELPER, job=job.replace("+ 1", "+ 2")) != first
    assert told(tmp_path, job=job) == first
    (tmp_path / "list.txt").write_text("other")
    assert told(tmp_path) != first


def test_functions_may_call_each_other_through_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    chain = "".join(f"def f{number}(x): return f{number + 1}(x)\n" for number in range(2000))
    job = chain + "def f2000(x): return x + 1\nit = f0\n"
    assert told(tmp_path, job=job, helper="") != told(tmp_path, job=job.replace("x + 1", "x + 2"))


PARTS = """
import functools, tools
class Step:
    table = [1, 2]
    @functools.lru_cache
    def slow(self, x): return x + 1
    def __call__(self, x):
        from late import more
        return more(self.bright(self.slow(x)))
    def bright(self, x): return tools.image.bright(x)
    def red(self, x):
        import tools.color
it = Step()
"""
FILES = {
    "job": PARTS,
    "late": "def more(x): return x + 1",
    "tools/__init__": "from tools import image",
    "tools/image": "def bright(x): return x * 2",
    "tools/color": "RED = 1",
}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("job", "[1, 2]", "[1, 3]"),
        ("job", "x + 1", "x + 2"),
        ("late", "x + 1", "x + 2"),
        ("tools/image", "x * 2", "x * 3"),
        ("tools/color", "RED = 1", "RED = 2"),
    ],
)
def test_a_fingerprint_sees_class_attributes_decorated_methods_and_what_is_imported_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "tools").mkdir()
    found = []
    for text in (FILES[name], FILES[name], FILES[name].replace(old, new)):
        for module in ("late", "tools", "tools.image", "tools.color"):
            sys.modules.pop(module, None)
        found.append(told(tmp_path, **{**FILES, name: text}))
    assert found[0] == found[1]
    assert found[1] != found[2]


class Holder:
    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize(
    "made",
    [
        lambda number: bytearray([1, number]),
        lambda number: deque([1, number]),
        lambda number: array("i", [1, number]),
        lambda number: memoryview(bytes([1, number])),
        lambda number: pyarrow.table({"x": [1, number]}),
        lambda number: Image.new("L", (2, 2), number),
        lambda number: np.array([{"x": number}, "text"], object),
        lambda number: defaultdict(list, x=number),
        lambda number: re.compile(f"a{{{number}}}"),
        lambda number: torch.nn.Dropout(number / 10),
    ],
)
def test_a_fingerprint_sees_what_any_object_holds(made: Any) -> None:
    assert fingerprint(Holder(made(2))) == fingerprint(Holder(made(2)))
    assert fingerprint(Holder(made(2))) != fingerprint(Holder(made(3)))


def test_a_fingerprint_sees_files_that_are_named_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text("1")
    with open("train.csv") as file:
        first = fingerprint(Holder("train.csv")), fingerprint(Holder(file))
        Path("train.csv").write_text("22")
        second = fingerprint(Holder("train.csv")), fingerprint(Holder(file))
    assert not {*first} & {*second}


class Hidden:
    """Adds what stands in a file whose name is put together on the way, which no fingerprint sees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> int:
        return number + int((self.folder / f"{'n' * 3}.txt").read_text())


def test_samples_that_come_out_differently_make_it_anew(tmp_path: Path) -> None:
    (tmp_path / "nnn.txt").write_text("1")
    assert prepare_dataset(range(10), tmp_path / "set", Hidden(tmp_path))[3].item() == 4
    (tmp_path / "nnn.txt").write_text("5")
    with pytest.warns(UserWarning, match="is packed again: content"):
        assert prepare_dataset(range(10), tmp_path / "set", Hidden(tmp_path))[3].item() == 8


def test_a_data_set_in_python_whose_helper_has_changed_is_not_taken_for_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "theirs.py").write_text("def value(n): return n")
    (tmp_path / "source.py").write_text(
        "import theirs\nclass Some:\n    def __len__(self): return 1000\n    def __getitem__(self, n): return theirs.value(n)\ndata = Some()\n"
    )
    words = ["pack", f"{tmp_path / 'source.py'}:data", str(tmp_path / "set"), "--processes", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert CliRunner().invoke(app, words).exit_code == 0
    sys.modules.pop("theirs")
    (tmp_path / "theirs.py").write_text(
        "def value(n): return n if n != 500 else -1"
    )  # none of those that are looked at
    again = CliRunner().invoke(app, words)
    assert "holds another packed data set" in str(again.output)
    assert again.exit_code == 2


def test_any_sample_that_changes_makes_it_anew(tmp_path: Path) -> None:
    values = list(range(1000))
    prepare_dataset(values, tmp_path / "set")
    values[333] = -1  # none of those that are looked at
    with pytest.warns(UserWarning, match="is packed again: data"):
        assert prepare_dataset(values, tmp_path / "set")[333].item() == -1

"""Preprocessing once: stored, used again, made anew when the function or the data change, shared by those who do it together."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from echelon.data import prepared
from echelon.data.packed.prepare import fingerprint

DATA = TensorDataset(torch.arange(40.0), torch.arange(40))


def counting(folder: Path, factor: float = 2.0) -> Any:
    def transform(sample: Any) -> Any:
        with (folder / "calls").open("a") as file:
            file.write(f"{sample[1].item()}\n")
        return sample[0] * factor, sample[1]

    return transform


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().split())


def test_a_second_run_finds_it_done(tmp_path: Path) -> None:
    assert prepared(DATA, tmp_path / "set", counting(tmp_path))[7][0].item() == 14.0
    first = calls(tmp_path)
    assert prepared(DATA, tmp_path / "set", counting(tmp_path))[7][0].item() == 14.0
    assert calls(tmp_path) - first <= 40  # the few that are looked at to learn the columns, none that is stored


def test_another_function_or_other_data_make_it_anew(tmp_path: Path) -> None:
    prepared(DATA, tmp_path / "set", counting(tmp_path))
    assert prepared(DATA, tmp_path / "set", counting(tmp_path, 3.0))[7][0].item() == 21.0
    other = TensorDataset(torch.arange(40.0) + 1, torch.arange(40))
    assert prepared(other, tmp_path / "set", counting(tmp_path, 3.0))[7][0].item() == 24.0


def test_those_who_prepare_together_share_the_work(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    helpers = [context.Process(target=prepared, args=(DATA, tmp_path / "set", counting(tmp_path))) for _ in range(3)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
        assert helper.exitcode == 0
    assert [int(sample[1]) for sample in prepared(DATA, tmp_path / "set", counting(tmp_path))] == list(range(40))  # type: ignore[attr-defined]


def test_a_fingerprint_tells_functions_apart() -> None:
    def plus(number: int) -> Any:
        return lambda value: value + number

    assert fingerprint(plus(1)) == fingerprint(plus(1))
    assert fingerprint(plus(1)) != fingerprint(plus(2))
    assert fingerprint(lambda value: value * 2) != fingerprint(lambda value: value * 3)
    assert fingerprint(torch.nn.ReLU()) != fingerprint(torch.nn.Tanh())

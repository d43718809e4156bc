"""The cases of all rows: models are profiled once each, on every core."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.published.cases import Case, cases
from bench.published.rows import Row
from echelon.errors import EchelonError
from echelon.simulator.model_summary import ModelSummary
from echelon.world import usable_cores

Found = list[Case] | EchelonError
#: Fewer models than this are profiled here: a new process takes as long to import torch.
_FEW = 4


def prepared(rows: Sequence[Row]) -> dict[str, Found]:
    """By row, in their order: its cases, or why it has none."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row.model | {"name": None, "layers": None}, sort_keys=True), []).append(row)
    found = {name: each for part in _told(_each(list(groups.values())), len(groups)) for name, each in part}
    return {row.id: found[row.id] for row in rows}


def worker(model: dict[str, Any], *, core: str, half: bool, fused_norm: bool, layers: int) -> ModelSummary:
    """What the simulator needs of a row's model."""
    from bench.published.profiles import key_of, work  # torch is needed from here on

    return work(key_of(model, core=core, half=half, fused_norm=fused_norm), layers)


def _each(groups: list[list[Row]]) -> Iterable[list[tuple[str, Found]]]:
    cores = usable_cores()
    if cores < 2 or len(groups) < _FEW:
        yield from map(_of_one_model, groups)
        return
    # Rows of one model stay together, so that its profile is made once and shared by their cases.
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_of_one_model, rows) for rows in groups]):
            yield done.result()


def _of_one_model(rows: list[Row]) -> list[tuple[str, Found]]:
    return [(row.id, _found(row)) for row in rows]


def _found(row: Row) -> Found:
    try:
        return cases(row, worker)
    except EchelonError as error:
        return error
    except (RuntimeError, ValueError) as error:  # of a model that cannot be built
        return EchelonError(f"no model can be made of it ({error})")


def _told(parts: Iterable[Any], count: int) -> Iterable[Any]:
    screen = Console(stderr=True)
    return track(parts, "profiling models", count, console=screen, transient=True, disable=not sys.stderr.isatty())

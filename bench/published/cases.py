"""A row as the simulator takes it: the model's profile, the cluster, the plan, the stack. Facts that a row lacks are tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from bench.published.assumed import CORES, cluster_of, is_half, kernels, plan_of, stack_of, usual_length
from bench.published.rows import TRANSFORMERS, Row
from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster
from echelon.simulator.fitted import Fitted
from echelon.simulator.layout import Layout, lay_out
from echelon.simulator.sheet_memory import fullest, reserved
from echelon.simulator.sheet_step import Placed, step_time
from echelon.simulator.work import Work

#: (model, core, half, fused norm, layers) -> what the simulator needs of the model.
Worker = Callable[..., Work]
#: Plausible values of facts that a row lacks. Rates of a network in GB/s per node; samples of a micro-batch of images and of text;
#: micro-batches of a step.
_RANGES: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "attention", "full"),
    "inter": (25, 50, 100, 200, 400),
    "micro_batch": (32, 64, 128, 256),
    "attention": ("flash", "fused-softmax"),
    "zero_stage": (0, 1, 3),
    "sequence_parallel": (True, False),
    "vp": (1, 2, 4),
    "fp8_recipe": ("delayed", "current"),
}
_TEXTS = (1, 2, 4, 8)
_ROUNDS = (1, 8, 64)
#: Of the rate that the catalogue has of links inside nodes.
_INSIDE = (0.5, 1.0)
#: Samples from which on sequences are cut over devices, in tokens.
_LONG = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row under one assumption about what it lacks."""

    layout: Layout
    cluster: Cluster
    #: With samples of the usual length, where that is not the longest: decides the time, as the longest decides the memory.
    usual: Layout | None = None

    def seconds(self, constants: Fitted) -> float:
        """Of one step."""
        return step_time([Placed(self.usual or self.layout, self.cluster)], constants).step


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is forecast of a row: the median of its cases, and their range."""

    seconds: float
    gib: float
    fits: bool
    seconds_range: tuple[float, float]
    gib_range: tuple[float, float]
    samples: float  #: samples per step, for rows that print samples per second


def outcome(row: Row, cases: list[Case], constants: Fitted) -> Outcome:
    """The forecast of a row. Of several cases those that fit count, where some do: a run that was printed has run."""
    found = []
    for case in cases:
        held, _ = fullest(case.layout, constants)
        on_card = row.measured.get("mem_kind") != "reserved"
        shown = reserved(held, case.layout.capacity, constants)
        size = (shown + held.framework * on_card) / 2**30
        fits = held.high + held.framework <= case.layout.capacity
        found.append((case.seconds(constants), size, fits, case.layout.batch))
    rows = [each for each in found if each[2]] or found
    seconds, sizes = [each[0] for each in rows], [each[1] for each in rows]
    return Outcome(
        seconds=median(seconds),
        gib=median(sizes),
        fits=rows[0][2],
        seconds_range=(min(seconds), max(seconds)),
        gib_range=(min(sizes), max(sizes)),
        samples=median(each[3] for each in rows),
    )


def cases(row: Row, worker: Worker) -> list[Case]:
    """Every case of a row; one where nothing is unknown."""
    found, refused = [], None
    for plan, hardware in _variants(row):
        try:
            found.append(_case(row, plan, hardware, worker))
        except PlanError as error:
            refused = error
    if not found:
        raise PlanError(f"{row.id}: {refused}")
    return found


def _variants(row: Row) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The row's plan and hardware with every combination of plausible values for what it lacks."""
    unknown = set(row.unknown)
    if row.plan["recompute"] in ("some", "unknown", None):
        unknown.add("recompute")
    if row.plan["fp8_recipe"] == "unknown":
        unknown.add("fp8_recipe")
    choices: dict[str, tuple[Any, ...]] = {name: values for name, values in _RANGES.items() if name in unknown}
    if row.plan["recompute"] == "some":
        choices["recompute"] = ("none", "alternate", "full")
    if row.gpus <= row.hardware["gpus_per_node"]:
        choices.pop("inter", None)
    if "intra" in unknown:
        wire = catalogue.inside(row.hardware["gpu"])
        choices["intra"] = tuple(share * wire.rate / 1e9 for share in _INSIDE) if wire else (None,)
    if "micro_batch" in choices and row.plan["micro_batch"] is not None:
        choices.pop("micro_batch")
    if row.model["arch"] in TRANSFORMERS and "micro_batch" in choices:
        local = row.plan.get("local_batch")
        choices["micro_batch"] = tuple(size for size in _TEXTS if not local or local % size == 0)
    if row.plan["global_batch"] is None and "global_batch" in unknown and row.model["arch"] in TRANSFORMERS:
        choices["rounds"] = _ROUNDS
    axes = _axes(row) if "axes" in unknown else [{}]
    for axis, values in product(axes, product(*choices.values())):
        given = dict(zip(choices, values, strict=True))
        plan, hardware = row.plan | axis, dict(row.hardware)
        for name, value in given.items():
            if name in ("inter", "intra"):
                hardware[name] = row.hardware[name] | {"gb_s": value}
            elif name != "rounds":
                plan[name] = value
        if "rounds" in given:
            plan["global_batch"] = (plan["dp"] or 1) * (plan["micro_batch"] or 1) * given["rounds"]
        yield plan, hardware


def _axes(row: Row) -> list[dict[str, int]]:
    """Ways to lay the devices out where the row does not say: tp inside a node, long sequences cut, the rest pipelines and copies."""
    found = []
    for tp, pp, cp in product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4) if row.model.get("seq_len", 0) >= _LONG else (1,)
    ):
        if row.gpus % (tp * pp * cp) == 0 and tp <= row.hardware["gpus_per_node"]:
            found.append({"tp": tp, "pp": pp, "cp": cp, "ep": 1, "dp": row.gpus // (tp * pp * cp)})
    return found


def _case(row: Row, given: dict[str, Any], hardware: dict[str, Any], worker: Worker) -> Case:
    model = row.model
    lengths = dict.fromkeys((model["seq_len"], usual_length(model))) if model["arch"] in TRANSFORMERS else {None: None}
    works = [
        worker(
            model | ({"seq_len": length} if length else {}),
            core=CORES[given["attention"]],
            half=is_half(given),
            fused_norm=given["fused_norm"] is True or kernels(given),
            layers=model.get("layers") or 0,
        )
        for length in lengths
    ]
    plan, batch = plan_of(given)
    machine, stack = cluster_of(row, hardware), stack_of(given)
    layout, *usual = (lay_out(work, batch, machine, plan, stack) for work in works)
    return Case(layout=layout, cluster=machine, usual=usual[0] if usual else None)

"""A row as the simulator takes it: the model's profile, the cluster, the plan, the stack. Facts that a row lacks are tried out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from bench.published.assumed import (
    CORES,
    cluster_of,
    is_half,
    kernels,
    plan_of,
    stack_of,
    usual_length,
    usual_node,
)
from bench.published.rows import TRANSFORMERS, Row
from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster
from echelon.simulator.calibration import FittedConstants, load_constants
from echelon.simulator.compute import PassCache, PlacedPlan
from echelon.simulator.cost.roofline import RooflineCosts, reserved_bytes
from echelon.simulator.memory import fullest_rank_memory
from echelon.simulator.model_summary import ModelSummary
from echelon.simulator.plan_layout import PlanLayout, lay_out_plan
from echelon.simulator.step import step_time

#: (model, core, half, fused norm, layers) -> what the simulator needs of the model.
Worker = Callable[..., ModelSummary]
#: Plausible values of facts that a row lacks.
_RANGES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp32"),
    "recompute": ("none", "attention", "full"),
    "attention": ("flash2", "fused-softmax"),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (True, False),
    "fp8_recipe": ("delayed", "current"),
}
_SOME = ("none", "alternate", "full")
#: Chunks of a rank by the schedule.
_CHUNKS = {"interleaved": (2, 4), None: (1, 2, 4)}
#: Rates of a network in GB/s per node; of the rate that the catalogue has of links inside nodes.
_BETWEEN, _INSIDE = (25, 50, 100, 200, 400), (0.5, 1.0)
#: Samples of a micro-batch of images and of text; micro-batches of a step.
_IMAGES, _TEXTS, _ROUNDS = (32, 64, 128, 256), (1, 2, 4, 8), (1, 8, 64)
#: So many cases of a row are forecast at most; where combinations are more, facts are tried out one after the other.
_CASES = 100
#: Samples from which on sequences are cut over devices, in tokens.
_LONG = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row under one assumption about what it lacks."""

    layout: PlanLayout
    cluster: Cluster
    #: With samples of the usual length, where that is not the longest: decides the time, as the longest decides the memory.
    usual: PlanLayout | None = None
    #: What of the row's plan is otherwise here, because it cannot be laid out as it stands.
    note: str = ""

    def seconds(self, constants: FittedConstants, known: dict[object, PassCache] | None = None) -> float:
        """Of one step. `known`: what was priced before with the same constants, by all that decides it."""
        layout = self.usual or self.layout
        alike = id(layout.model.block), repr(self.cluster.nodes[0].devices[0].sheet), layout.stack.attention_kernel
        priced = {} if known is None else known.setdefault(alike, {})
        return step_time([PlacedPlan(layout, self.costs(constants), priced)]).step

    def costs(self, constants: FittedConstants) -> RooflineCosts:
        """Prices on the row's machines."""
        return RooflineCosts(self.cluster, constants, self.layout.stack.attention_kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is forecast of a row: the median of its cases, and their range."""

    seconds: float
    gib: float
    fits: bool
    seconds_range: tuple[float, float]
    gib_range: tuple[float, float]
    samples: float  #: samples per step, for rows that print samples per second
    every: bool = True  #: whether all cases agree on what fits
    notes: tuple[str, ...] = ()


def outcome(row: Row, cases: Sequence[Case], constants: FittedConstants) -> Outcome:
    """The forecast of a row. Of several cases those that fit count, where some do: a run that was printed has run."""
    found = []
    for case in cases:
        costs = case.costs(constants)
        held, _ = fullest_rank_memory(case.layout, costs)
        on_card = row.measured.get("mem_kind") != "reserved"
        shown = reserved_bytes(held, costs.capacity, constants)
        size = (shown + held.framework * on_card) / 2**30
        fits = held.required <= costs.capacity
        found.append((case.seconds(constants), size, fits, case.layout.batch))
    rows = [each for each in found if each[2]] or found
    seconds, sizes = [each[0] for each in rows], [each[1] for each in rows]
    return Outcome(
        seconds=median(seconds),
        gib=median(sizes),
        fits=rows[0][2],
        every=len({each[2] for each in found}) == 1,
        seconds_range=(min(seconds), max(seconds)),
        gib_range=(min(sizes), max(sizes)),
        samples=median(each[3] for each in rows),
        notes=tuple(dict.fromkeys(case.note for case in cases if case.note)),
    )


def cases(row: Row, worker: Worker) -> list[Case]:
    """Every case of a row; one where nothing is unknown. Where no plan of the row can be laid out, those nearest to it that can."""
    refused: Exception | None = None
    ways = list(_variants(row))
    for nearer in (_as_it_is, _without_experts, _fewer_chunks, _fewer_stages, _fed):
        found = []
        changed = [(*nearer(row, plan, note), hardware) for plan, note, hardware in ways]
        ways = changed
        for plan, note, hardware in ways:
            try:
                found.append(_case(row, plan, hardware, worker, note))
            except (PlanError, ValueError) as error:  # the latter: axes that make no mesh
                refused = refused or error
        if found:
            return found
    raise PlanError(str(refused))


_Changed = tuple[dict[str, Any], str]


def _as_it_is(row: Row, plan: dict[str, Any], note: str) -> _Changed:
    return plan, note


def _without_experts(row: Row, plan: dict[str, Any], note: str) -> _Changed:
    """No model of the vocabulary has experts."""
    if (plan["ep"] or 1) == 1:
        return plan, note
    return plan | {"ep": 1}, f"{note}ep={plan['ep']}: the model has no experts, forecast with ep=1; "


def _fewer_chunks(row: Row, plan: dict[str, Any], note: str) -> _Changed:
    """As many chunks as there are blocks for."""
    pp, most = plan["pp"] or 1, row.model.get("layers") or 1
    if pp * (plan["vp"] or 1) <= most:
        return plan, note
    chunks = max(most // pp, 1)
    return plan | {
        "vp": chunks
    }, f"{note}pp={pp} vp={plan['vp']}: {most} blocks make no such chunks, forecast with vp={chunks}; "


def _fewer_stages(row: Row, plan: dict[str, Any], note: str) -> _Changed:
    """As many stages as there are blocks for; the ranks that are over have samples of their own."""
    pp, most = plan["pp"] or 1, row.model.get("layers") or 1
    if pp <= most:
        return plan, note
    fewer = max(stages for stages in range(1, most + 1) if pp % stages == 0)
    return plan | {
        "pp": fewer,
        "dp": (plan["dp"] or 1) * pp // fewer,
    }, f"{note}pp={pp}: {most} blocks make no such stages, forecast with pp={fewer}; "


def _fed(row: Row, plan: dict[str, Any], note: str) -> _Changed:
    """As many samples as feed every rank once."""
    dp, micro = plan["dp"] or 1, plan["micro_batch"] or 1
    batch = plan["global_batch"]
    if batch is None or batch >= dp * micro:
        return plan, note
    micro = max(batch // dp, 1)
    return plan | {"micro_batch": micro, "global_batch": max(batch, dp * micro)}, (
        f"{note}global_batch={batch} does not feed dp={dp} micro_batch={plan['micro_batch']}, forecast with {max(batch, dp * micro)} and {micro}; "
    )


def _variants(row: Row) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """The row's plan and hardware with plausible values for what it lacks: every combination, or where these are too many each fact by
    itself with the others in their middle, and all of them at their first and at their last."""
    axes = _axes(row)
    each = [(row.plan | axis, _choices(row, row.plan | axis)) for axis in axes]
    every = sum(math.prod(len(values) for values in choices.values()) for _, choices in each) <= _CASES
    for plan, choices in each:
        for given in _combined(choices) if every else _by_themselves(choices, alone=len(each) * 2 > _CASES):
            hardware, made = dict(row.hardware), dict(plan)
            for name, value in given.items():
                if name in ("inter", "intra"):
                    hardware[name] = row.hardware[name] | {"gb_s": value}
                elif name != "rounds":
                    made[name] = value
            if "rounds" in given:
                made["global_batch"] = (made["dp"] or 1) * (made["micro_batch"] or 1) * given["rounds"]
            yield made, "", hardware


def _combined(choices: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _by_themselves(choices: dict[str, tuple[Any, ...]], *, alone: bool) -> Iterator[dict[str, Any]]:
    middle = {name: values[len(values) // 2] for name, values in choices.items()}
    yield middle
    if alone:
        return
    yield {name: values[0] for name, values in choices.items()}
    yield {name: values[-1] for name, values in choices.items()}
    for name, values in choices.items():
        for value in values:
            if value != middle[name]:
                yield middle | {name: value}


def _choices(row: Row, plan: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What a row with these axes lacks, and what it may be: what the row says that its source does not say, and what is null."""
    text = row.model["arch"] in TRANSFORMERS
    silent = {name for name in _RANGES if name in row.unknown or plan[name] in (None, "unknown")}
    silent |= {"recompute"} if plan["recompute"] == "some" else set()
    # Facts that decide nothing in this row are not tried out.
    if not text:
        silent -= {"attention", "sequence_parallel", "recompute"}
    if (plan["tp"] or 1) == 1:
        silent.discard("sequence_parallel")
    if plan["precision"] not in ("fp8", "nvfp4"):
        silent.discard("fp8_recipe")
    if (plan["dp"] or 1) * (plan["cp"] or 1) == 1:
        silent.discard("zero_stage")
    choices = {name: values for name, values in _RANGES.items() if name in silent}
    if plan["recompute"] == "some":
        choices["recompute"] = _SOME
    if (plan["pp"] or 1) > 1 and (plan["vp"] is None or "vp" in row.unknown):
        choices["vp"] = _CHUNKS.get(plan["schedule"], (1,))
    choices |= _samples(row, plan, _TEXTS if text else _IMAGES)
    if row.gpus > _per_node(row.hardware) and _unknown(row, "inter"):
        choices["inter"] = _BETWEEN
    if row.gpus > 1 and _unknown(row, "intra"):
        wire = catalogue.intra_node_link(row.hardware["gpu"])
        choices["intra"] = tuple(share * wire.rate / 1e9 for share in _INSIDE) if wire else (None,)
    return choices


def _unknown(row: Row, link: str) -> bool:
    said = row.hardware[link]
    return link in row.unknown or said["gb_s"] is None or said["known"] == "unknown"


def _samples(row: Row, plan: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    """Of the micro-batch and the batch, those that the row does not say."""
    choices: dict[str, tuple[Any, ...]] = {}
    batch, local = plan["global_batch"], plan["local_batch"]
    share = local or (batch // (plan["dp"] or 1) if batch else None)
    if plan["micro_batch"] is None:
        fitting = tuple(size for size in sizes if not share or share % size == 0)
        choices["micro_batch"] = fitting or (1,)
    if batch is None and local is None:
        rounds = (1,) if sizes is _IMAGES else _ROUNDS
        choices["rounds"] = (plan["grad_accum"],) if plan["grad_accum"] else rounds
    return choices


def _axes(row: Row) -> list[dict[str, int]]:
    """Ways to lay the devices out where the row does not say: tp inside a node, long sequences cut, the rest pipelines and copies."""
    names = ("tp", "pp", "cp")
    if "axes" not in row.unknown and None not in (row.plan[axis] for axis in (*names, "dp")):
        return [{}]
    free = ((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4) if (row.model.get("seq_len") or 0) >= _LONG else (1,))
    if row.model["arch"] not in TRANSFORMERS:
        free = ((1,), (1,), (1,))
    said = {} if "axes" in row.unknown else {name: (row.plan[name],) for name in names if row.plan[name]}
    found = []
    for tp, pp, cp in product(*(said.get(name, values) for name, values in zip(names, free, strict=True))):
        dp = row.gpus // (tp * pp * cp)
        whole = row.gpus % (tp * pp * cp) == 0 and (said == {} or row.plan["dp"] in (None, dp))
        if whole and (tp <= _per_node(row.hardware) or "tp" in said):
            found.append({"tp": tp, "pp": pp, "cp": cp, "ep": row.plan["ep"] or 1, "dp": dp})
    return found or [{"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": row.gpus}]


def _per_node(hardware: dict[str, Any]) -> int:
    return int(hardware["gpus_per_node"] or usual_node(hardware))


def _case(row: Row, given: dict[str, Any], hardware: dict[str, Any], worker: Worker, note: str) -> Case:
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
    machine, stack = cluster_of(row, hardware), stack_of(given, hardware)
    RooflineCosts(machine, load_constants()).require(plan)
    layout, *usual = (lay_out_plan(work, batch, plan, stack) for work in works)
    return Case(layout=layout, cluster=machine, usual=usual[0] if usual else None, note=note.removesuffix("; "))

"""A row as the simulator takes it: the model's profile, the cluster, the plan, the stack. Facts that a row lacks are tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bench.published.rows import TRANSFORMERS, Row
from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster, Wire
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.simulator.fitted import Fitted
from echelon.simulator.layout import Layout, lay_out
from echelon.simulator.sheet_memory import memory, reserved
from echelon.simulator.sheet_step import time
from echelon.simulator.stack import Stack
from echelon.simulator.work import Work

#: (model, core, half, fused norm, layers) -> what the simulator needs of the model.
Worker = Callable[..., Work]
_GIGA, _TERA = 1e9, 1e12
_CORES = {
    "flash1": "flash", "flash2": "flash", "flash": "flash", "cudnn": "flash", "fused-softmax": "fused", "no-flash": "fused", "eager": "eager",
    "none": "flash", "unknown": "flash", None: "flash",
}  # fmt: skip
#: A version that is not said is taken as the first: who says nothing of it ran what their stack had for longest.
_KERNELS = {"flash1": "flash1", "flash": "flash1", "cudnn": "cudnn"}
#: Tokens of a bin of samples alike in length, and the longest samples that are not binned.
_BIN, _UNBINNED = 64, 128
#: Plausible values of facts that a row lacks. Rates of a network in GB/s per node; batches in samples per device.
_RANGES: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "attention", "full"),
    "inter": (25, 50, 100, 200, 400),
    "intra": (150, 300, 450),
    "micro_batch": (32, 64, 128, 256),
    "attention": ("flash", "fused-softmax"),
    "zero_stage": (0, 1, 3),
    "sequence_parallel": (True, False),
    "vp": (1, 2, 4),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row under one assumption about what it lacks."""

    layout: Layout
    cluster: Cluster
    #: With samples of the usual length, where that is not the longest: decides the time, as the longest decides the memory.
    usual: Layout | None = None

    def seconds(self, constants: Fitted) -> float:
        """Of one step."""
        return time(self.usual or self.layout, self.cluster, constants).step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is forecast of a row: the middle of its cases, and their range."""

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
        held, _ = memory(case.layout, constants)
        on_card = row.measured.get("mem_kind") != "reserved"
        shown = reserved(held, case.layout.capacity, constants)
        size = (shown + held.framework * on_card) / 2**30
        fits = held.high + held.framework <= case.layout.capacity
        found.append((case.seconds(constants), size, fits, case.layout.batch))
    rows = [each for each in found if each[2]] or found
    rows.sort()
    middle = rows[len(rows) // 2]
    return Outcome(
        middle[0],
        middle[1],
        middle[2],
        (rows[0][0], rows[-1][0]),
        (min(each[1] for each in rows), max(each[1] for each in rows)),
        middle[3],
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
    choices: dict[str, tuple[Any, ...]] = {name: values for name, values in _RANGES.items() if name in unknown}
    if row.plan["recompute"] == "some":
        choices["recompute"] = ("none", "alternate", "full")
    if row.gpus <= row.hardware["gpus_per_node"]:
        choices.pop("inter", None)
    if "micro_batch" in choices and row.plan["micro_batch"] is not None:
        choices.pop("micro_batch")
    if row.model["arch"] in TRANSFORMERS and "micro_batch" in choices:
        local = row.plan.get("local_batch")
        choices["micro_batch"] = tuple(size for size in (1, 2, 4, 8) if not local or local % size == 0)
    axes = _axes(row) if "axes" in unknown else [{}]
    for axis, values in product(axes, product(*choices.values())):
        given = dict(zip(choices, values, strict=True))
        plan, hardware = row.plan | axis, dict(row.hardware)
        for name, value in given.items():
            if name in ("inter", "intra"):
                hardware[name] = row.hardware[name] | {"gb_s": value}
            else:
                plan[name] = value
        yield plan, hardware


def _axes(row: Row) -> list[dict[str, int]]:
    """Ways to lay the devices out where the row does not say: tp inside a node, the rest pipelines and copies."""
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            if row.gpus % (tp * pp) == 0 and tp <= row.hardware["gpus_per_node"]:
                found.append({"tp": tp, "pp": pp, "cp": 1, "ep": 1, "dp": row.gpus // (tp * pp)})
    return found


def _case(row: Row, given: dict[str, Any], hardware: dict[str, Any], worker: Worker) -> Case:
    model = row.model
    dp, tp, pp, cp = (given[axis] or 1 for axis in ("dp", "tp", "pp", "cp"))
    precision, recompute = given["precision"], given["recompute"]
    # cuDNN's attention comes with stacks whose norms, positions and activations are fused kernels too (Transformer Engine).
    kernels = given["attention"] == "cudnn"
    half = precision in ("fp16", "bf16", "fp8", "nvfp4")
    lengths = dict.fromkeys((model["seq_len"], usual_length(model))) if model["arch"] in TRANSFORMERS else {None: None}
    works = [
        worker(
            model | ({"seq_len": length} if length else {}),
            core=_CORES[given["attention"]],
            half=half,
            fused_norm=given["fused_norm"] is True or kernels,
            layers=model.get("layers") or 0,
        )
        for length in lengths
    ]
    micro = given["micro_batch"] or 1
    batch = given["global_batch"] or dp * (given.get("local_batch") or micro)
    chunks = (given["vp"] or 1) if pp > 1 else 1
    plan = Plan(
        mesh=Mesh(dp=dp, tp=tp, pp=pp, cp=cp, ep=given["ep"] or 1),
        zero=given["zero_stage"] or 0,
        micro=min(micro, max(batch // dp, 1)),
        # Models of 2-byte numbers are built so.
        precision="tf32" if precision == "tf32" else None,
        recompute="block" if recompute == "full" else "none",
        compile=given["compile"] is True or kernels,
        sequence=given["sequence_parallel"] is True,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )
    stack = Stack(
        scope=given["zero_scope"],
        recompute=recompute if recompute in ("attention", "ops", "alternate") else "plan",
        narrow={"fp8": "fp8", "nvfp4": "fp4"}.get(precision),  # type: ignore[arg-type]
        chunks=chunks,
        attention=_KERNELS.get(given["attention"], "flash2"),  # type: ignore[arg-type]
        # Who says whether it was compiled ran plain PyTorch; other stacks bring kernels of their own.
        fused_loss=given["compile"] is None and given["zero_stage"] == 3,
        master=True,
        gradients=gradient_bytes(given, half=half),
        message=4 if not half or given["grad_reduce"] == "fp32" else 2,
        overlap=given["overlap"] is not False,
        # Transformer Engine's products run beside the collectives of tp.
        overlap_tensor=given["async_tp"] is True or (kernels and given["async_tp"] is None),
    )
    machine = cluster(row, hardware)
    layout, *usual = (lay_out(work, max(batch, dp), machine, plan, stack) for work in works)
    return Case(layout, machine, *usual)


def usual_length(model: dict[str, Any]) -> int:
    """Tokens that are computed of a sample. BERT's are documents, not a stream: of 512 tokens half are padding (Kosec et al. 2021), and
    samples alike in length by bins of 64 are batched together (NVIDIA's LDDL); up to 128 tokens nothing is binned."""
    length: int = model["seq_len"]
    return length // 2 + _BIN // 2 if model["arch"] == "bert" and length > _UNBINNED else length


def gradient_bytes(given: dict[str, Any], *, half: bool) -> int:
    """Of one number of the gradients: as said; else as wide as the parameters, which under zero=3 rest in fp32."""
    if not half or given["zero_stage"] == 3:
        return 4
    return 4 if given["grad_reduce"] == "fp32" else 2


def cluster(row: Row, hardware: dict[str, Any]) -> Cluster:
    """The machines of a row, by the figures that it gives; what it does not give is the catalogue's."""
    device = catalogue.device(hardware["gpu"])
    assert device.sheet is not None
    peaks = dict(device.sheet.peaks)
    for name, field in (("half", "16bit"), ("fp8", "fp8"), ("fp4", "fp4"), ("tf32", "tf32"), ("fp32", "fp32")):
        value = hardware.get(f"peak_tflops_dense_{field}")
        if value:
            peaks[name] = value * _TERA
    power = hardware["power_cap_w"] / catalogue.watts(hardware["gpu"]) if hardware["power_cap_w"] else 1.0
    sheet = replace(device.sheet, peaks=peaks, bandwidth=hardware["hbm_gb_s"] * _GIGA, power=min(power, 1.0))
    device = replace(device, sheet=sheet, memory=int(hardware["mem_gb"] * catalogue.SEEN * 2**30))
    per_node = hardware["gpus_per_node"]
    nodes = -(-row.gpus // per_node)
    inside, between = hardware["intra"], hardware["inter"]
    return catalogue.build(
        row.id,
        device,
        per_node,
        nodes,
        inside=Wire(kind=inside["kind"] or "", rate=inside["gb_s"] * _GIGA, domain=inside["domain"] or 0) if inside["gb_s"] else catalogue.inside(hardware["gpu"]),
        between=Wire(kind=between["kind"] or "", rate=between["gb_s"] * _GIGA, share=catalogue.SHARES.get(between["kind"])) if between["gb_s"] else catalogue.between(hardware["gpu"]),
    )  # fmt: skip

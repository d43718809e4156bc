"""What a row says of its plan, stack and machines as the simulator takes it, and what is assumed where it says nothing.

Every rule here goes by a field of the row, the same for all rows. docs/published-internals.md lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.published.rows import Row
from echelon.errors import PlanError
from echelon.plan import catalogue
from echelon.plan.cluster import Cluster, Interconnect
from echelon.plan.mesh import Mesh
from echelon.plan.plan import PipelinePlan, Plan, TensorPlan
from echelon.simulator.training_stack import TrainingStack

_GIGA, _TERA = 1e9, 1e12
#: Devices of a usual node.
_NODE = 8
#: How attention is built in the model. Flash attention of no version is that of the flash-attn package, before torch had one of its own; with
#: it comes the package's cross entropy.
CORES = {
    "flash1": "flash", "flash2": "flash", "flash": "package", "cudnn": "native", "fused-softmax": "fused", "no-flash": "fused", "eager": "eager",
    "none": "flash", "unknown": "flash", None: "flash",
}  # fmt: skip
#: Before there was a second version nobody said which: where it is not said it is the first.
_KERNELS = {"flash1": "flash1", "flash": "flash1", "cudnn": "cudnn"}


def _kernel(given: dict[str, Any], hardware: dict[str, Any]) -> str:
    """Which kernel a fused attention is. Devices that compute in 4 bits came after the second version."""
    sheet = catalogue.catalogue_device(hardware["gpu"]).sheet
    later = sheet is not None and "fp4" in sheet.peaks
    return "flash2" if later and given["attention"] == "flash" else _KERNELS.get(given["attention"], "flash2")


#: Tokens of a bin of samples alike in length, and the longest samples that are not binned.
_BIN, _UNBINNED = 64, 128


def is_half(given: dict[str, Any]) -> bool:
    """Whether parameters are 2-byte numbers."""
    return given["precision"] in ("fp16", "bf16", "fp8", "nvfp4")


def kernels(given: dict[str, Any]) -> bool:
    """cuDNN's attention comes with stacks whose norms, positions and activations are fused kernels too (Transformer Engine)."""
    return bool(given["attention"] == "cudnn")


def usual_length(model: dict[str, Any]) -> int:
    """Tokens that are computed of a sample. BERT's are documents, not a stream: of 512 tokens half are padding (Kosec et al. 2021), and
    samples alike in length by bins of 64 are batched together (NVIDIA's LDDL); up to 128 tokens nothing is binned."""
    length: int = model["seq_len"]
    return length // 2 + _BIN // 2 if model["arch"] == "bert" and length > _UNBINNED else length


def plan_of(given: dict[str, Any]) -> tuple[Plan, int]:
    """(plan, samples of a step)."""
    dp, tp, pp, cp, ep = (given[axis] or 1 for axis in ("dp", "tp", "pp", "cp", "ep"))
    micro = given["micro_batch"] or 1
    batch = given["global_batch"] or dp * (given.get("local_batch") or micro)
    if batch < dp * micro:
        raise PlanError(f"dp={dp} micro={micro}: {batch} samples do not feed so many ranks with such micro-batches")
    plan = Plan(
        mesh=Mesh(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep),
        zero=given["zero_stage"] or 0,
        micro=micro,
        # Models of 2-byte numbers are built so.
        precision={"tf32": "tf32", "fp16": "fp16"}.get(given["precision"]),  # type: ignore[arg-type]
        recompute="block" if given["recompute"] == "full" else "none",
        compile=given["compile"] is True or kernels(given),
        tensor=TensorPlan(sequence=given["sequence_parallel"] is True),
        pipeline=PipelinePlan(schedule="interleaved" if _chunks(given) > 1 else "1f1b"),
    )
    return plan, batch


def _chunks(given: dict[str, Any]) -> int:
    """Of the model on each rank of pp: where the row says no number, one, or two that are interleaved."""
    if (given["pp"] or 1) == 1:
        return 1
    return given["vp"] or (2 if given["schedule"] == "interleaved" else 1)


def stack_of(given: dict[str, Any], hardware: dict[str, Any]) -> TrainingStack:
    """How others than echelon's engine execute the plan."""
    half, recompute = is_half(given), given["recompute"]
    narrow = {"fp8": "fp8", "nvfp4": "fp4"}.get(given["precision"])
    return TrainingStack(
        shard_group_size=given["zero_scope"],
        recompute=recompute if recompute in ("attention", "ops", "alternate") else "plan",
        block_precision=narrow,  # type: ignore[arg-type]
        # These find the largest number of a tensor before they narrow it; the others know it from steps before, or by rows.
        scans_for_scale=given["fp8_recipe"] in ("current", "tensorwise"),
        gather_width=1 if given["fp8_all_gather"] or given["fp8_params"] else None,
        parameter_width=1 if given["fp8_params"] else None,
        chunks=_chunks(given),
        attention_kernel=_kernel(given, hardware),  # type: ignore[arg-type]
        master_weights=True,
        keeps_shards=False,
        stops_recompute_early=False,
        frees_gradients=False,
        gradient_copies=1,
        gradient_width=_gradient_bytes(given, half=half),
        message_width=4 if not half or given["grad_reduce"] == "fp32" else 2,
        overlaps_data_parallel=given["overlap"] is not False,
        # Pipelines exchange gradients when all micro-batches are done, unless they say otherwise.
        overlaps_in_pipeline=given["overlap"] is True,
        # Transformer Engine's products run beside the collectives of tp.
        overlaps_tensor_parallel=given["async_tp"] is True or (kernels(given) and given["async_tp"] is None),
    )


def _gradient_bytes(given: dict[str, Any], *, half: bool) -> int:
    """Of one number of the gradients: as said; else as wide as the parameters, which under zero=3 rest in fp32."""
    if not half or given["zero_stage"] == 3:
        return 4
    return 4 if given["grad_reduce"] == "fp32" else 2


def cluster_of(row: Row, hardware: dict[str, Any]) -> Cluster:
    """The machines of a row, by the figures that it gives; what it does not give is the catalogue's."""
    name = hardware["gpu"]
    device = catalogue.catalogue_device(name)
    assert device.sheet is not None
    peaks = dict(device.sheet.peaks)
    for key, field in (("half", "16bit"), ("fp8", "fp8"), ("fp4", "fp4"), ("tf32", "tf32"), ("fp32", "fp32")):
        value = hardware.get(f"peak_tflops_dense_{field}")
        if value:
            peaks[key] = value * _TERA
    power = min(hardware["power_cap_w"] / catalogue.rated_watts(name), 1.0) if hardware["power_cap_w"] else 1.0
    bandwidth = hardware["hbm_gb_s"] * _GIGA if hardware["hbm_gb_s"] else device.sheet.bandwidth
    # The name-plate of later cards is of what is built in, and the catalogue has what can be used.
    printed = (
        int(hardware["mem_gb"] * catalogue.VISIBLE_MEMORY_FRACTION * 2**30) if hardware["mem_gb"] else device.memory
    )
    memory = min(printed, device.memory)
    device = replace(device, sheet=replace(device.sheet, peaks=peaks, bandwidth=bandwidth, power=power), memory=memory)
    per_node = hardware["gpus_per_node"] or usual_node(hardware)
    inside = _wire(name, hardware["intra"], inside=True) or catalogue.intra_node_link(name)
    between = _wire(name, hardware["inter"], inside=False) or catalogue.inter_node_link(name)
    made = catalogue.build_cluster(
        row.id, device, per_node, -(-row.gpus // per_node), intra_node=inside, inter_node=between
    )
    # Domains of one node talk over its network too.
    return replace(made, network=made.network or between) if inside and 0 < inside.domain < per_node else made


def usual_node(hardware: dict[str, Any]) -> int:
    """Devices of a node where a row does not say: trays of four where domains are larger than nodes, eight in all others."""
    wire = catalogue.intra_node_link(hardware["gpu"])
    return 4 if wire and wire.domain > _NODE else _NODE


def _wire(name: str, link: dict[str, Any], *, inside: bool) -> Interconnect | None:
    if not link["gb_s"]:
        return None
    usual = catalogue.intra_node_link(name)
    domain = link.get("domain") or (usual.domain if usual and inside else 0)
    return Interconnect(
        kind=link["kind"] or (usual.kind if usual and inside else ""), rate=link["gb_s"] * _GIGA, domain=domain
    )

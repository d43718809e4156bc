"""Models and machines for tests of the simulator and the planner, drawn by Hypothesis; no torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from hypothesis import strategies as st

from echelon.plan.cluster import Cluster, CollectiveTiming, Device, Node, RateCurve, RatePoint
from echelon.plan.mesh import Mesh
from echelon.plan.placement import Placement, TensorSlice
from echelon.plan.plan import Plan
from echelon.plan.profile import (
    Amount,
    MemorySnapshot,
    ModuleProfile,
    Operator,
    OptimizerProfile,
    ParameterProfile,
    PipelineUnit,
    Profile,
)
from echelon.plan.stages import find_stages


def make_profile(
    *, blocks: int = 4, width: int = 256, batch: int = 16, length: int = 32, samples: int = 0, clip: bool = False
) -> Profile:
    """A stack of square linear layers, as the profiler would describe it."""
    parameters = tuple(ParameterProfile(name=f"blocks.{i}.weight", shape=(width, width)) for i in range(blocks))
    size = width * width * 4
    rows = Amount(0.0, float(length))
    product = Amount(0.0, 2.0 * length * width * width)
    moved = Amount(float(size), 8.0 * length * width)
    kept = Amount(0.0, 4.0 * length * width * blocks)
    square = (Amount(1.0), rows, Amount(float(width)), Amount(float(width)))

    def operator(name: str, phase: str, count: int) -> Operator:
        return Operator(
            name=name, kind="matmul", phase=phase, module="blocks.*", count=count, dims=square, flops=product, moved=moved,
        )  # fmt: skip

    return Profile(
        model="test",
        name="Stack",
        batch=batch,
        precision="fp32",
        device="cpu",
        parameters=parameters,
        modules=(ModuleProfile(path="blocks.*", kind="Linear", count=blocks, parameters=size, flops=product, saved=kept * (1 / blocks)),),
        operators=(
            operator("addmm:nt", "forward", blocks),
            operator("mm:nn", "backward", blocks),
            operator("mm:tn", "backward", blocks),
            Operator(name="relu", kind="stream", phase="forward", module="", count=blocks, moved=Amount(0.0, 8.0 * length * width)),
        ),
        moments=(
            MemorySnapshot(module="loss", phase="backward", alive=kept * 1.25, saved=kept, gradients=0.0, blocks=blocks),
            MemorySnapshot(
                module="blocks.*", phase="backward", alive=kept * (1 / blocks) + Amount(float(size)), saved=kept * (1 / blocks),
                gradients=float(size * (blocks - 1)), blocks=2,
            ),
        ),
        optimizers=(OptimizerProfile(name="AdamW", state_bytes=2 * size * blocks, temporary_bytes=size, trainable_elements=width * width * blocks, fused=True, fused_sharded=True),),
        fsdp_units=tuple(f"blocks.{i}" for i in range(blocks)),
        fsdp_unit_bytes=(size,) * blocks,
        input_bytes=4 * length,
        samples=samples,
        clips_gradients=clip,
    )  # fmt: skip


def make_stack(*, blocks: int = 4, width: int = 256, batch: int = 16, length: int = 32) -> Profile:
    """Blocks of two linear layers with an activation between them, four times as wide inside, as the profiler would describe them."""
    inner, size = 4 * width, 4 * length
    names = {"up": (inner, width), "down": (width, inner)}
    parameters = tuple(
        ParameterProfile(name=f"blocks.{i}.{name}.weight", shape=shape)
        for i in range(blocks)
        for name, shape in names.items()
    )
    bytes_in = 2 * 4 * width * inner
    product = Amount(0.0, 2.0 * length * width * inner)
    elements = sum(parameter.elements for parameter in parameters)
    kept = Amount(0.0, float(size * (width + 2 * inner)))

    def module(path: str, kind: str, parts: int, keeps: float, gives: int) -> ModuleProfile:
        return ModuleProfile(
            path=path, kind=kind, count=blocks, parameters=parts, saved=Amount(0.0, size * keeps), output=Amount(0.0, float(size * gives)),
        )  # fmt: skip

    def operator(name: str, phase: str, layer: str) -> Operator:
        outer, deep = names[layer]
        return Operator(
            name=name, kind="matmul", phase=phase, module=f"blocks.*.{layer}", count=blocks, flops=product,
            dims=(Amount(1.0), Amount(0.0, float(length)), Amount(float(outer)), Amount(float(deep))),
        )  # fmt: skip

    calls = (("addmm:nt", "forward"), ("mm:nn", "backward"), ("mm:tn", "backward"))
    return Profile(
        model="stack", name="Stack", batch=batch, precision="fp32", device="cpu", parameters=parameters,
        modules=(
            module("blocks.*", "Block", bytes_in, width + 2 * inner, width),
            module("blocks.*.up", "Linear", bytes_in // 2, width, inner),
            module("blocks.*.act", "GELU", 0, inner, inner),
            module("blocks.*.down", "Linear", bytes_in // 2, inner, width),
        ),
        operators=tuple(operator(name, phase, layer) for name, phase in calls for layer in names),
        moments=(MemorySnapshot(module="loss", phase="backward", alive=kept * blocks, saved=kept * blocks, gradients=0.0),),
        optimizers=(OptimizerProfile(name="AdamW", state_bytes=8 * elements, temporary_bytes=0, trainable_elements=elements, fused=True, fused_sharded=True),),
        fsdp_units=tuple(f"blocks.{i}" for i in range(blocks)),
        fsdp_unit_bytes=(bytes_in,) * blocks,
        pipeline_units=tuple(PipelineUnit(path=f"blocks.{i}", cost=1.0, boundary_bytes=Amount(0.0, float(size * width) * (i > 0))) for i in range(blocks)),
        input_bytes=size,
    )  # fmt: skip


def make_language(
    *,
    blocks: int = 4,
    width: int = 256,
    batch: int = 16,
    length: int = 64,
    vocab: int = 1024,
    tied: bool = False,
    norms: int = 8,
) -> Profile:
    """A language model in 2-byte numbers: a table, blocks with norms of so many operators, and a head whose logits are large."""
    plain = make_stack(blocks=blocks, width=width, batch=batch, length=length)
    size, logits = 2.0 * length * width, 2.0 * length * vocab
    table = ParameterProfile(name="embed.weight", shape=(vocab, width), aliases=("head.weight",) if tied else ())
    head = () if tied else (ParameterProfile(name="head.weight", shape=(vocab, width)),)
    product = Amount(0.0, 2.0 * length * width * vocab)
    dims = (Amount(1.0), Amount(0.0, float(length)), Amount(float(vocab)), Amount(float(width)))

    def norm(phase: str) -> Operator:
        return Operator(
            name="norm",
            kind="stream",
            phase=phase,
            module="blocks.*.norm",
            count=norms * blocks,
            moved=Amount(0.0, 4 * size),
        )  # type: ignore[arg-type]

    def last(name: str, phase: str) -> Operator:
        return Operator(
            name=name,
            kind="matmul",
            phase=phase,
            module="head",
            dims=dims,
            flops=product,
            moved=Amount(2.0 * vocab * width, logits),
        )  # type: ignore[arg-type]

    (moment,) = plain.moments
    first = Operator(name="embedding", kind="stream", phase="forward", module="embed", moved=Amount(0.0, 2 * size))
    forward = [operator for operator in plain.operators if operator.phase == "forward"]
    backward = [operator for operator in plain.operators if operator.phase == "backward"]
    operators = (
        first, *forward, norm("forward"), last("mm:nt", "forward"), last("mm:nn", "backward"), last("mm:tn", "backward"), norm("backward"),
        *backward,
    )  # fmt: skip
    parameters = (table, *plain.parameters, *head)
    elements = sum(each.elements for each in parameters)
    modules = (
        ModuleProfile(path="embed", kind="Embedding", output=Amount(0.0, size)),
        *plain.modules,
        ModuleProfile(
            path="blocks.*.norm", kind="Norm", count=blocks, saved=Amount(0.0, size), output=Amount(0.0, size)
        ),
        ModuleProfile(path="head", kind="Linear", saved=Amount(0.0, size), output=Amount(0.0, logits)),
    )
    crossing = Amount(0.0, size)
    inner = [replace(visit, cost=3.0, boundary_bytes=crossing) for visit in plain.pipeline_units]
    return replace(
        plain,
        name="Language",
        parameters=tuple(replace(each, dtype="bfloat16") for each in parameters),
        operators=tuple(replace(each, dtype="bfloat16") for each in operators),
        modules=modules,
        moments=(replace(moment, alive=moment.alive * 0.5 + Amount(0.0, 7 * logits), saved=moment.saved * 0.5),),
        optimizers=(OptimizerProfile(name="AdamW", state_bytes=4 * elements, temporary_bytes=0, trainable_elements=elements, fused=True, fused_sharded=True),),
        pipeline_units=(PipelineUnit(path="embed", cost=1.0), *inner, PipelineUnit(path="head", cost=2.0, boundary_bytes=crossing)),
    )  # fmt: skip


def cut(plan: Plan, profile: Profile) -> Plan:
    """`plan` completed for a model of `make_stack`."""
    pairs = [
        (
            Placement(path=f"{unit}.up", cut="column", slices=(TensorSlice("weight", 0), TensorSlice("bias", 0)), source="pair"),
            Placement(path=f"{unit}.down", cut="row", slices=(TensorSlice("weight", 1),), source="pair"),
        )
        for unit in profile.fsdp_units
    ]  # fmt: skip
    if plan.mesh.tp > 1:
        plan = plan.replace(placements=tuple(chain.from_iterable(pairs)))
    if plan.mesh.pp > 1:
        plan = plan.replace(stages=find_stages(plan, profile.pipeline_units) or ())
    return plan


def make_cluster(
    *, cores: int = 4, memory: float = 64e9, flops: float = 4e10, bandwidth: float = 1e10, link: float = 2e9,
    overlap: float = 0.0,
) -> Cluster:  # fmt: skip
    """A CPU machine whose cores scale perfectly."""
    curves = []
    for ranks in (1, 2, 4):
        if ranks > cores:
            continue
        threads = cores // ranks
        for name in ("mm:nn", "addmm:nt", "mm:tn"):
            points = tuple(
                RatePoint((float(s), float(s), float(s)), flops * threads * share)
                for s, share in ((64, 0.3), (512, 0.8), (2048, 1.0))
            )
            curves.append(RateCurve(operation=name, ranks=ranks, threads=threads, points=points))
        for name in ("add", "copy_", "add_", "mul"):
            curves.append(
                RateCurve(
                    operation=name, ranks=ranks, threads=threads, points=(RatePoint((2.0**20,), bandwidth / ranks),)
                )
            )
        for name in ("AdamW:fused", "AdamW"):
            curves.append(
                RateCurve(
                    operation=name,
                    ranks=ranks,
                    threads=threads,
                    points=(RatePoint((2.0**22,), bandwidth / 28 / ranks),),
                )
            )
    links = tuple(
        CollectiveTiming(
            operation=operation, backend="gloo", ranks=ranks, points=((4096.0, 1e-4), (2.0**25, 1e-4 + 2**25 / link)), overlap=overlap
        )
        for operation in ("all_reduce", "reduce_scatter", "all_gather")
        for ranks in (2, 4)
    )  # fmt: skip
    device = Device(
        kind="cpu", name="test", memory=int(memory), cores=cores, curves=tuple(curves), overhead=1e-5, framework=int(3e8),
        block_padding=2.0**21, retained=0.3,
    )  # fmt: skip
    node = Node(name="here", cores=cores, memory=int(memory), devices=(device,), links=links)
    return Cluster(name="test", nodes=(node,), versions={})


def make_gpus(count: int, memory: float) -> Cluster:
    """A node of GPUs as fast as that machine, with memory of their own."""
    node = make_cluster().nodes[0]
    device = replace(node.devices[0], kind="cuda", memory=int(memory), cores=1)
    return Cluster(name="gpus", nodes=(replace(node, devices=(device,) * count),), versions={})


def plan(dp: int = 1, zero: int = 0, micro: int | None = None, threads: int | None = None, **fields: object) -> Plan:
    """A plan of the data axis."""
    return Plan(mesh=Mesh(dp=dp), zero=zero, micro=micro, threads=threads).replace(**fields)


profiles = st.builds(
    make_profile,
    blocks=st.integers(1, 12),
    width=st.sampled_from([64, 256, 1024]),
    batch=st.integers(4, 64),
    length=st.sampled_from([1, 16, 256]),
    clip=st.booleans(),
)
plans = st.builds(
    plan, dp=st.sampled_from([1, 2, 3, 4]), zero=st.integers(0, 3), micro=st.one_of(st.none(), st.integers(1, 16))
)

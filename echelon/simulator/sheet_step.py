"""A step on a cluster that is known by its data sheets: what each stage computes and sends, and the longest path through it all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster, Sheet
from echelon.plan.forecast import Time
from echelon.plan.plan import Plan
from echelon.plan.split import largest_share, rounds
from echelon.plan.stages import INTERLEAVING, VIRTUAL, stage_ranges
from echelon.simulator.fitted import Fitted
from echelon.simulator.order import least, length
from echelon.simulator.sheet import attention_seconds, precision_of, product_seconds, stream_seconds
from echelon.simulator.stack import Stack
from echelon.simulator.wires import Wires, wires_of
from echelon.simulator.work import Op, Work

#: Bytes that an optimizer step reads and writes per parameter: master copy and two states both ways, gradient, parameter.
_OPTIMIZER = 30
#: Bytes/s at which samples come from the host while the device computes: PCIe 3.0 x16, the slowest of the catalogue's machines.
_HOST = 12e9
#: Collectives of tp per block and pass: one behind attention, one behind the feed-forward part.
_PAIRS = 2
#: How far a step may lie from the forecast.
SPREAD = 0.25


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan on a cluster: what never depends on fitted constants."""

    work: Work
    sheet: Sheet
    plan: Plan
    stack: Stack
    batch: int
    micro: int
    count: int  #: micro-batches
    stages: tuple[int, ...]  #: blocks of each stage; stage `n` is on rank `n % pp`
    capacity: float
    nodes: int
    #: What was priced before, for those who price many plans of one model with the same constants; None: nothing is kept.
    known: dict[tuple[object, ...], Pass] | None = field(default=None, compare=False, repr=False)

    @property
    def samples(self) -> float:
        """Samples of a micro-batch as one rank computes them: cp parts each."""
        return self.micro / self.plan.mesh.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO divides."""
        return min(self.stack.scope or self.plan.mesh.dp * self.plan.mesh.cp, self.plan.mesh.dp * self.plan.mesh.cp)

    @property
    def along(self) -> int:
        """Parts into which what tp does not cut is divided."""
        return self.plan.mesh.tp if self.plan.sequence else 1

    def elements(self, rank: int, *, divided: bool = True) -> float:
        """Parameters on a rank of pp (of tp: one of its ranks). `divided`: experts are parted over ep."""
        pp = self.plan.mesh.pp
        before, block, after = self.work.elements
        if divided:
            block -= self.work.experts * (1 - 1 / self.plan.mesh.ep)
        held = block * sum(self.stages[rank::pp])
        held += before * (rank == 0) + (after + self.work.tied * (pp > 1)) * (rank == (len(self.stages) - 1) % pp)
        return held / self.plan.mesh.tp


def lay_out(
    work: Work,
    batch: int,
    cluster: Cluster,
    plan: Plan,
    stack: Stack,
    known: dict[tuple[object, ...], Pass] | None = None,
) -> Layout:
    """`plan` on `cluster`; refuses what cannot be."""
    device = cluster.nodes[0].devices[0]
    assert device.sheet is not None
    mesh = plan.mesh
    if batch < mesh.dp:
        raise PlanError(f"dp={mesh.dp}: a batch of {batch} cannot feed so many ranks; use dp={batch} or less")
    # Who prices many plans knows how many devices there are.
    if known is None and device.kind == "cuda":
        have = sum(len(node.devices) for node in cluster.nodes)
        if plan.ranks > have:
            raise PlanError(f'"{plan}" needs {plan.ranks} devices, {cluster.name} has {have}')
    if mesh.ep > 1 and not work.experts:
        raise PlanError(f"ep={mesh.ep}: no block of the model has experts side by side in a list; use ep=1")
    chunks = stack.chunks or (VIRTUAL if plan.schedule in INTERLEAVING else 1)
    if plan.schedule == "zero-bubble":
        chunks = 1
    if plan.stages and work.visits:
        stages = tuple(sum(work.visits[at] for at in places) for places in stage_ranges(plan, len(work.visits)))
    else:
        stages = _dealt(work.layers, mesh.pp * chunks)
    count = rounds(batch, mesh.dp, plan.micro, plan.shares)
    # Where shares are not alike the largest decides.
    micro = -(-largest_share(batch, mesh.dp, plan.shares) // count)
    return Layout(
        work,
        device.sheet,
        plan,
        stack,
        batch,
        micro,
        count,
        stages,
        float(device.memory),
        -(-plan.ranks // len(cluster.nodes[0].devices)),
        known,
    )


def _dealt(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage: alike, and what is left over to those in the middle, which have nothing besides."""
    base, more = divmod(layers, stages)
    if not base:
        raise PlanError(f"{layers} blocks cannot make {stages} stages; use a smaller pp")
    first = (stages - more) // 2
    return tuple(base + (first <= stage < first + more) for stage in range(stages))


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass through a part of the model, by what it is."""

    products: float = 0.0
    core: float = 0.0
    rest: float = 0.0

    @property
    def all(self) -> float:
        return self.products + self.core + self.rest


@dataclass(frozen=True, slots=True)
class _Stages:
    """Seconds of each stage for one micro-batch: forward and backward, computing and talking; `hidden`: talk behind compute, of a block."""

    compute: tuple[list[float], list[float]]
    talk: tuple[list[float], list[float]]
    hidden: float

    def rank(self, rank: int, ranks: int) -> list[float]:
        """What the stages of one rank of pp take: compute forward and backward, talk forward and backward."""
        return [sum(side[rank::ranks]) for side in (*self.compute, *self.talk)]


def time(layout: Layout, cluster: Cluster, fitted: Fitted, *, walked: bool = True) -> Time:
    """Seconds of a step, by cause. `walked`: the pipeline event by event; otherwise what no schedule can be faster than."""
    plan, mesh, count = layout.plan, layout.plan.mesh, layout.count
    wires = wires_of(cluster, plan.ranks, fitted)
    stages = _stages(layout, wires, fitted)
    sides = _sides(layout, stages, fitted)
    chunks = len(layout.stages) // mesh.pp
    schedule = "interleaved" if chunks > 1 and plan.schedule == "1f1b" else plan.schedule
    pace = length if walked else least
    path = pace(schedule, sides[0], sides[1], ranks=mesh.pp, count=count)
    mine = [count * each for each in max((stages.rank(rank, mesh.pp) for rank in range(mesh.pp)), key=sum)]
    exchange, behind = _exchange(layout, wires, fitted, sides[1][-1])
    whole = [layout.elements(rank, divided=not plan.zero) for rank in range(mesh.pp)]
    updated = max(whole) / (layout.shards if plan.zero else 1)
    causes = {
        "forward": mine[0],
        "backward": mine[1],
        "bubble": max(path - sum(mine) - count * fitted.micro, 0.0),
        "exchange": mine[2] + mine[3] + exchange,
        "optimizer": stream_seconds(layout.sheet, fitted, _OPTIMIZER * updated),
        "input": max(layout.micro * count * layout.work.inputs / _HOST - mine[0] - mine[1], 0.0),
        "overhead": fitted.step + count * fitted.micro,
    }
    # The slowest of many nodes holds up all.
    causes["overhead"] += fitted.straggling * math.log2(layout.nodes) * sum(causes.values())
    step = sum(causes.values())
    hidden = stages.hidden * count * max(layout.stages) + behind
    return Time(**causes, hidden=hidden, low=step * (1 - SPREAD), high=step * (1 + SPREAD))


def stage_seconds(layout: Layout, cluster: Cluster, fitted: Fitted) -> tuple[list[float], list[float], float]:
    """Seconds of each stage for one micro-batch, forward and backward with all that it says; and of what is exchanged once a step."""
    wires = wires_of(cluster, layout.plan.ranks, fitted)
    forward, backward = _sides(layout, _stages(layout, wires, fitted), fitted)
    return forward, backward, _exchange(layout, wires, fitted, backward[-1])[0]


def _sides(layout: Layout, stages: _Stages, fitted: Fitted) -> list[list[float]]:
    """Forward and backward of each stage: what it computes, says, and what the host does between micro-batches."""
    host = fitted.micro / 2 / (len(layout.stages) // layout.plan.mesh.pp)
    return [
        [c + t + host for c, t in zip(*pair, strict=True)] for pair in zip(stages.compute, stages.talk, strict=True)
    ]


def passes(layout: Layout, fitted: Fitted) -> tuple[float, float, float]:
    """Seconds that a micro-batch computes before the blocks, in one block and after them, there and back."""
    work = layout.work
    found: list[float] = []
    for ops in (work.before, work.block, work.after):
        forward, backward = (_pass(layout, ops, phase, fitted) for phase in ("forward", "backward"))
        again = _again(layout.plan, layout.stack, forward) if ops is work.block else 0.0
        found.append(forward.all + backward.all + again)
    return found[0], found[1], found[2]


def _stages(layout: Layout, wires: Wires, fitted: Fitted) -> _Stages:
    plan, stack, work, mesh = layout.plan, layout.stack, layout.work, layout.plan.mesh
    forward, backward = (_pass(layout, work.block, phase, fitted) for phase in ("forward", "backward"))
    again = _again(plan, stack, forward)
    compute = [forward.all, backward.all + again + _accumulate(layout, fitted)]
    tensor = _tensor(layout, wires, fitted, forward.products)
    context = _context(layout, wires, fitted, forward.core)
    full = plan.recompute == "block" and stack.recompute == "plan"
    # Tokens go to their experts and come back, in each pass.
    routed = 2 * wires.swap(work.routed * layout.samples / layout.along, wires.group(mesh.ep, mesh.tp))
    talk = [tensor + context + routed, (tensor + routed) * (2 if full else 1) + 2 * context]
    hidden = 0.0
    for phase, said in enumerate(_sharded(layout, wires)):
        behind = min(said, compute[phase] * fitted.overlap) if stack.overlap else 0.0
        talk[phase] += said - behind
        hidden += behind
    last = len(layout.stages) - 1
    send = 0.0
    if mesh.pp > 1:
        # Ranks of tp hold the same between blocks, unless each has its part of the sequence.
        alike = 1 if plan.sequence else mesh.tp
        send = wires.send(work.given * layout.samples / layout.along, mesh.dp * mesh.cp * mesh.tp, mesh.pp, parts=alike)
        if len(layout.stages) > mesh.pp:
            # Between two chunks of its own a rank has others to compute: what it sends is under way meanwhile.
            send = max(send - fitted.overlap * min(layout.stages) * compute[0], 0.0)
    computing = ([count * compute[0] for count in layout.stages], [count * compute[1] for count in layout.stages])
    for ops, stage in ((work.before, 0), (work.after, last)):
        for side, way in zip(computing, ("forward", "backward"), strict=True):
            side[stage] += _pass(layout, ops, way, fitted).all + tensor / _PAIRS
    talking = (
        [count * talk[0] + send * (stage < last) for stage, count in enumerate(layout.stages)],
        [count * talk[1] + send * (stage > 0) for stage, count in enumerate(layout.stages)],
    )
    return _Stages(computing, talking, hidden)


def _pass(layout: Layout, ops: tuple[Op, ...], phase: str, fitted: Fitted) -> Pass:
    """One micro-batch through these operators on one rank."""
    if layout.known is None:
        return _priced(layout, ops, phase, fitted)
    plan = layout.plan
    key = (id(ops), phase, layout.samples, plan.mesh.tp, layout.along, plan.compile, plan.precision)
    if key not in layout.known:
        layout.known[key] = _priced(layout, ops, phase, fitted)
    return layout.known[key]


def _priced(layout: Layout, ops: tuple[Op, ...], phase: str, fitted: Fitted) -> Pass:
    sheet, stack, tp = layout.sheet, layout.stack, layout.plan.mesh.tp
    samples, tf32 = layout.samples, layout.plan.precision == "tf32"
    fused = fitted.compiled if layout.plan.compile else 1.0
    products = core = rest = 0.0
    for op in ops:
        if op.phase != phase:
            continue
        share = tp if op.cut else layout.along
        if op.kind == "stream":
            moved = (op.moved[0] + op.moved[1] * samples) / share
            seconds = op.count * fused * (moved / (sheet.bandwidth * fitted.stream) + fitted.launch)
            if op.core:
                core += seconds
            else:
                rest += seconds
            continue
        precision = precision_of(op.dtype, tf32=tf32)
        flops = (op.flops[0] + op.flops[1] * samples) / share
        dims = [fixed + per * samples for fixed, per in op.dims]
        moved = (op.moved[0] + op.moved[1] * samples) / share
        if op.kind == "attention":
            # Forward computes 4 FLOPs for each number of a head and score; backward 10, and its scores twice (again, and their gradients).
            scores = flops / dims[3] / 4 if phase == "forward" else flops / dims[3] / 5
            core += op.count * (
                attention_seconds(sheet, fitted, precision, stack.attention, scores, flops) + fitted.launch
            )
        elif op.kind == "inner":
            shape = (dims[0] / share, dims[1], dims[2], dims[3])
            core += op.count * (product_seconds(sheet, fitted, precision, shape, flops, moved) + fitted.launch)
        elif op.kind == "convolution":
            count, inner, outer, kernel, spatial, groups = dims
            shape = (1.0, count * spatial, outer, inner / groups * kernel)
            products += op.count * (product_seconds(sheet, fitted, precision, shape, flops, moved) + fitted.launch)
        else:
            if stack.narrow and ops is layout.work.block:
                precision = stack.narrow
                # Both factors are read once more and written narrow before.
                rest += op.count * fused * stream_seconds(sheet, fitted, 0.75 * moved)
            shape = _cut(dims, op, share)
            products += op.count * (product_seconds(sheet, fitted, precision, shape, flops, moved) + fitted.launch)
    return Pass(products, core, rest)


def _cut(dims: list[float], op: Op, share: int) -> tuple[float, float, float, float]:
    """The shape that one rank of tp has: of the two sides of the weight the longer is divided."""
    if share == 1:
        return dims[0], dims[1], dims[2], dims[3]
    sides = [place for place in (1, 2, 3) if not op.dims[place][1]]
    longest = max(sides, key=lambda place: dims[place])
    cut = [dim / share if place == longest else dim for place, dim in enumerate(dims)]
    return cut[0], cut[1], cut[2], cut[3]


def _again(plan: Plan, stack: Stack, forward: Pass) -> float:
    """Seconds of what one block computes again in backward."""
    if stack.recompute == "attention":
        return forward.core
    if stack.recompute == "ops":
        return forward.products / 2 + forward.rest
    if stack.recompute == "alternate":
        return forward.all / 2
    if plan.recompute == "block":
        return forward.all
    return forward.rest if plan.recompute == "selective" else 0.0


def _tensor(layout: Layout, wires: Wires, fitted: Fitted, products: float) -> float:
    """What the ranks of tp say to each other in one pass of a block."""
    mesh = layout.plan.mesh
    if mesh.tp == 1:
        return 0.0
    said = _PAIRS * wires.reduce(layout.work.given * layout.samples, wires.group(mesh.tp, 1))
    return max(said - fitted.overlap * min(said, products), 0.0) if layout.stack.overlap_tensor else said


def _context(layout: Layout, wires: Wires, fitted: Fitted, core: float) -> float:
    """What the ranks of cp say to each other in one pass of a block: keys and values go round while attention runs."""
    mesh = layout.plan.mesh
    if mesh.cp == 1:
        return 0.0
    said = wires.gather(2 * layout.work.given * layout.micro / mesh.tp, wires.group(mesh.cp, mesh.tp))
    return max(said - fitted.overlap * core, 0.0)


def _sharded(layout: Layout, wires: Wires) -> tuple[float, float]:
    """Seconds to fetch the parameters of one block for forward; and for backward, with giving its gradients away."""
    plan, work = layout.plan, layout.work
    if plan.zero < 3 or layout.shards < 2:
        return 0.0, 0.0
    size, group = work.elements[1] / plan.mesh.tp, wires.group(layout.shards, plan.mesh.tp)
    fetch = wires.gather(work.width * size, group)
    return fetch, fetch + wires.gather(layout.stack.message * size, group)


def _accumulate(layout: Layout, fitted: Fitted) -> float:
    """Seconds in which one block's gradients are added to those of earlier micro-batches."""
    if layout.count == 1:
        return 0.0
    plan, size = layout.plan, layout.work.elements[1] / layout.plan.mesh.tp
    if plan.zero == 3:
        size /= layout.shards
    return stream_seconds(layout.sheet, fitted, size * (2 * layout.stack.gradients + layout.work.width))


def _exchange(layout: Layout, wires: Wires, fitted: Fitted, last: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of what the data ranks exchange once a step; `last`: of the last stage's backward of a micro-batch."""
    plan, mesh, work, stack = layout.plan, layout.plan.mesh, layout.work, layout.stack
    data = mesh.dp * mesh.cp
    if data == 1:
        return 0.0, 0.0
    size = max(layout.elements(rank) for rank in range(mesh.pp))
    width = stack.message
    everyone = wires.group(data, mesh.tp)
    if plan.zero == 3:
        copies = data // layout.shards
        if copies == 1:
            return 0.0, 0.0
        said = wires.reduce(width * size / layout.shards, wires.group(copies, mesh.tp * layout.shards))
    elif plan.zero == 0:
        said = wires.reduce(width * size, everyone)
    else:
        shards = wires.group(layout.shards, mesh.tp)
        said = wires.gather(width * size, shards)
        if layout.shards < data:
            said += wires.reduce(
                width * size / layout.shards, wires.group(data // layout.shards, mesh.tp * layout.shards)
            )
        fetched = wires.gather(work.width * size, shards)
        hidden = min(said, last * fitted.overlap) if stack.overlap and mesh.pp == 1 else 0.0
        return said - hidden + fetched, hidden
    hidden = min(said, last * fitted.overlap) if stack.overlap and mesh.pp == 1 else 0.0
    return said - hidden, hidden

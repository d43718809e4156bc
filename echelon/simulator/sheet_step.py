"""A step on a cluster that is known by its data sheets: what each stage computes and sends, and the longest path through it all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Time
from echelon.plan.plan import Plan
from echelon.plan.profile import WIDTH
from echelon.simulator.calibration import Fitted
from echelon.simulator.cost.network import Wires, wires_of
from echelon.simulator.cost.roofline import (
    NARROW,
    attention_seconds,
    lines_of,
    precision_of,
    product_seconds,
    stream_seconds,
)
from echelon.simulator.model_summary import Op
from echelon.simulator.pipeline_order import least, length
from echelon.simulator.plan_layout import Layout
from echelon.simulator.training_stack import Stack
from echelon.simulator.whole_tensor_cost import MESSAGES, owned

#: Bytes/s at which samples come from the host while the device computes: PCIe 3.0 x16, the slowest of the catalogue's machines.
_HOST = 12e9
#: How far a step may lie from the forecast.
SPREAD = 0.25

#: What was priced before, for those who price many plans of one model on one device with the same constants.
Known = dict[tuple[object, ...], "Pass"]


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

    def stage(self, stage: int) -> list[float]:
        """What one stage takes: compute forward and backward, talk forward and backward."""
        return [side[stage] for side in (*self.compute, *self.talk)]

    def rank(self, rank: int, ranks: int) -> list[float]:
        """What the stages of one rank of pp take: compute forward and backward, talk forward and backward."""
        return [sum(side[rank::ranks]) for side in (*self.compute, *self.talk)]


@dataclass(frozen=True, slots=True)
class Placed:
    """A plan on devices of one kind, which some of its ranks are on."""

    layout: Layout
    cluster: Cluster  #: as it would be with that kind alone
    known: Known | None = None


def step_time(placed: Sequence[Placed], fitted: Fitted, *, walked: bool = True) -> Time:
    """Seconds of a step, by cause: each stage as it is on the slowest devices that it is on.

    `walked`: the pipeline event by event; otherwise what no schedule can be faster than.
    """
    layout = placed[0].layout
    mesh, count = layout.plan.mesh, layout.count
    stages = _slowest([_stages(each, fitted) for each in placed], placed)
    sides = _sides(layout, stages, fitted)
    pace = length if walked else least
    path = pace(layout.schedule, sides[0], sides[1], ranks=mesh.pp, count=count)
    # What the host does between steps and micro-batches it does for each parameter.
    held = max(layout.tensors(rank) for rank in range(mesh.pp))
    micro = fitted.micro * held
    mine = [count * each for each in max((stages.rank(rank, mesh.pp) for rank in range(mesh.pp)), key=sum)]
    exchange, behind = max(_exchange(each.layout, _wires(each, fitted), fitted, sides[1][-1]) for each in placed)
    causes = {
        "forward": mine[0],
        "backward": mine[1],
        "bubble": max(path - sum(mine) - count * micro, 0.0),
        "exchange": mine[2] + mine[3] + exchange,
        "optimizer": max(_optimizer(each.layout, fitted) for each in placed),
        "input": max(layout.micro * count * layout.work.inputs / _HOST - mine[0] - mine[1], 0.0),
        "overhead": fitted.step * held + count * micro,
    }
    # The slowest of many nodes holds up all.
    causes["overhead"] += fitted.straggling * math.log2(layout.nodes) * sum(causes.values())
    step = sum(causes.values())
    hidden = stages.hidden * count * max(layout.stages) + behind
    return Time(**causes, hidden=hidden, low=step * (1 - SPREAD), high=step * (1 + SPREAD))


def stage_seconds(placed: Sequence[Placed], fitted: Fitted) -> tuple[list[float], list[float], float]:
    """Seconds of each stage for one micro-batch, forward and backward with all that it says; and of what is exchanged once a step."""
    stages = _slowest([_stages(each, fitted) for each in placed], placed)
    forward, backward = _sides(placed[0].layout, stages, fitted)
    exchange = max(_exchange(each.layout, _wires(each, fitted), fitted, backward[-1])[0] for each in placed)
    return forward, backward, exchange


def _wires(placed: Placed, fitted: Fitted) -> Wires:
    return wires_of(placed.cluster, placed.layout.plan.ranks, fitted)


def _slowest(found: Sequence[_Stages], placed: Sequence[Placed]) -> _Stages:
    """Of each stage what it takes on the devices that it is on and that take longest."""
    if len(found) == 1:
        return found[0]
    ranks = placed[0].layout.plan.mesh.pp
    sides: list[list[float]] = [[], [], [], []]
    for stage in range(len(placed[0].layout.stages)):
        on = (
            stages.stage(stage) for stages, each in zip(found, placed, strict=True) if stage % ranks in each.layout.here
        )
        for side, seconds in zip(sides, max(on, key=sum), strict=True):
            side.append(seconds)
    return _Stages((sides[0], sides[1]), (sides[2], sides[3]), max(each.hidden for each in found))


def _sides(layout: Layout, stages: _Stages, fitted: Fitted) -> list[list[float]]:
    """Forward and backward of each stage: what it computes, says, and what the host does between micro-batches."""
    pp = layout.plan.mesh.pp
    host = [fitted.micro / 2 / layout.chunks * layout.tensors(stage % pp) for stage in range(len(layout.stages))]
    return [
        [c + t + h for c, t, h in zip(*pair, host, strict=True)]
        for pair in zip(stages.compute, stages.talk, strict=True)
    ]


def passes(layout: Layout, fitted: Fitted, known: Known | None = None) -> tuple[float, float, float]:
    """Seconds that a micro-batch computes before the blocks, in one block and after them, there and back."""
    found: list[float] = []
    for part in ("before", "block", "after"):
        forward, backward = (_pass(layout, part, phase, fitted, known) for phase in ("forward", "backward"))
        again = _again(layout.plan, layout.stack, forward) if part == "block" else 0.0
        found.append(forward.all + backward.all + again)
    return found[0], found[1], found[2]


def _stages(placed: Placed, fitted: Fitted) -> _Stages:
    layout, known, wires = placed.layout, placed.known, _wires(placed, fitted)
    plan, stack, work, mesh = layout.plan, layout.stack, layout.work, layout.plan.mesh
    forward, backward = (_pass(layout, "block", phase, fitted, known) for phase in ("forward", "backward"))
    again = _again(plan, stack, forward)
    compute = [forward.all, backward.all + again + _accumulate(layout, fitted)]
    tensor = _tensor(layout, wires, fitted, forward.products)
    context = _context(layout, wires, fitted, forward.core)
    full = plan.recompute == "block" and stack.recompute == "plan"
    # Tokens go to their experts and come back, in each pass.
    routed = 2 * wires.swap(work.routed * layout.samples / layout.along, wires.group(mesh.ep, mesh.tp))
    talk = [tensor + context + routed, (tensor + routed) * (2 if full else 1) + 2 * context]
    talk[1] += _columns_again(layout, wires, fitted, backward.products)
    hidden = 0.0
    for phase, said in enumerate(_sharded(layout, wires)):
        behind = min(said, compute[phase] * fitted.overlap) if stack.overlap else 0.0
        talk[phase] += said - behind
        hidden += behind
    last = len(layout.stages) - 1
    computing = [[blocks * each for blocks in layout.stages] for each in compute]
    talking = [[blocks * each for blocks in layout.stages] for each in talk]
    # What is outside of blocks is summed up once by tp, and gathered and reduced by zero=3 where nothing is computed yet, or any more.
    once = _sum(layout, wires)
    for part, stage in (("before", 0), ("after", last)):
        for side, way in enumerate(("forward", "backward")):
            computing[side][stage] += _pass(layout, part, way, fitted, known).all
            talking[side][stage] += once
    for stage in range(mesh.pp) if plan.whole else {0, last}:
        root = _root(layout, wires, stage % mesh.pp)
        for side in range(2):
            talking[side][stage] += root[side]
    for stage in range(1, len(layout.stages)):
        send = _send(layout, wires, fitted, stage, compute[0])
        # Forward the stage before sends, backward this one.
        talking[0][stage - 1] += send
        talking[1][stage] += send
    return _Stages((computing[0], computing[1]), (talking[0], talking[1]), hidden)


def _send(layout: Layout, wires: Wires, fitted: Fitted, stage: int, forward: float) -> float:
    """Seconds in which a stage gets what the one before gives; `forward`: of one block."""
    mesh = layout.plan.mesh
    if mesh.pp == 1:
        return 0.0
    # Ranks of tp hold the same between blocks, unless each has its part of the sequence.
    alike = 1 if layout.plan.sequence else mesh.tp
    size = layout.crossing[stage] * layout.samples / layout.along
    send = wires.send(size, mesh.dp * mesh.cp * mesh.tp, mesh.pp, parts=alike)
    if layout.chunks > 1:
        # Between two chunks of its own a rank has others to compute: what it sends is under way meanwhile.
        send = max(send - fitted.overlap * min(layout.stages) * forward, 0.0)
    return send


def _pass(layout: Layout, part: str, phase: str, fitted: Fitted, known: Known | None) -> Pass:
    """One micro-batch through a part of the model on one rank."""
    if known is None:
        return _priced(layout, part, phase, fitted)
    plan = layout.plan
    cuts = plan.mesh.tp, layout.along, plan.placements, plan.uncut
    key = (part, phase, layout.samples, cuts, plan.mesh.ep, plan.compile, layout.work.precision)
    if key not in known:
        known[key] = _priced(layout, part, phase, fitted)
    return known[key]


def _priced(layout: Layout, part: str, phase: str, fitted: Fitted) -> Pass:
    sheet, stack, tp, ep = layout.sheet, layout.stack, layout.plan.mesh.tp, layout.plan.mesh.ep
    narrow, scanned = stack.narrow, stack.scanned
    if layout.work.precision == "fp8" and "fp8" in sheet.peaks and not narrow:
        narrow, scanned = "fp8", True  # by scales of each tensor as it is: what has no such units computes in 2 bytes
    fused = fitted.compiled if layout.plan.compile else 1.0
    products = core = rest = 0.0
    ops: tuple[Op, ...] = getattr(layout.work, part)
    for op in ops:
        if op.phase != phase:
            continue
        share = tp if op.cut else layout.along
        # A rank has its part of the experts, and each of these the tokens of all ranks of ep.
        samples, count = (layout.samples * ep, op.count / ep) if op.expert else (layout.samples, op.count)
        moved = (op.moved[0] + op.moved[1] * samples) / share
        if op.kind == "stream":
            seconds = count * fused * (stream_seconds(sheet, fitted, moved) + fitted.launch)
            if op.core:
                core += seconds
            else:
                rest += seconds
            continue
        precision = precision_of(op.dtype, layout.work.precision)
        flops = (op.flops[0] + op.flops[1] * samples) / share
        dims = [fixed + per * samples for fixed, per in op.dims]
        if op.kind == "attention":
            # Forward computes 4 FLOPs for each number of a head and score; backward 10, and its scores twice (again, and their gradients).
            scores = flops / dims[3] / (4 if phase == "forward" else 5)
            core += count * (
                attention_seconds(sheet, fitted, precision, stack.attention, scores, flops) + fitted.launch
            )
            continue
        if op.kind == "inner":
            shape = (dims[0] / share, dims[1], dims[2], dims[3])
        elif op.kind == "convolution":
            images, inner, outer, kernel, spatial, groups = dims
            shape = (1.0, images * spatial, outer, inner / groups * kernel)
        else:
            shape = _cut(dims, op, share)
            if narrow and part == "block":
                precision = narrow
                # Both factors are read as they are and written narrow before.
                lots, rows, columns, depth = shape
                wide = WIDTH.get(op.dtype, 4) * (2 if scanned else 1)
                narrowed = lots * depth * (rows + columns) * (wide + NARROW[narrow])
                rest += count * fused * stream_seconds(sheet, fitted, narrowed)
        # Channels of an image lie side by side where matrix units are used.
        lines = (inner / groups, outer) if op.kind == "convolution" else lines_of(op.lies, shape)
        seconds = count * (product_seconds(sheet, fitted, precision, shape, flops, moved, lines) + fitted.launch)
        if op.kind == "inner":
            core += seconds
        else:
            products += seconds
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


def _sum(layout: Layout, wires: Wires) -> float:
    """Ranks of tp add up what passes from block to block once."""
    return wires.reduce(layout.work.given * layout.samples, wires.group(layout.plan.mesh.tp, 1))


def _tensor(layout: Layout, wires: Wires, fitted: Fitted, products: float) -> float:
    """What the ranks of tp say to each other in one pass of a block."""
    said = layout.work.sums * _sum(layout, wires)
    return max(said - fitted.overlap * min(said, products), 0.0) if layout.stack.overlap_tensor else said


def _columns_again(layout: Layout, wires: Wires, fitted: Fitted, products: float) -> float:
    """What is gathered once more in the backward of a block whose ranks of tp keep parts of the sequence: the input of each column, for
    its weight's gradient, while that of the input is computed (Korthikanti et al. 2022, 4.2.2)."""
    if layout.along == 1:
        return 0.0
    said = layout.work.sums * wires.gather(layout.work.given * layout.samples, wires.group(layout.plan.mesh.tp, 1))
    return max(said - fitted.overlap * products / 2, 0.0)


def _context(layout: Layout, wires: Wires, fitted: Fitted, core: float) -> float:
    """What the ranks of cp say to each other in one pass of a block: keys and values go round while attention runs."""
    mesh = layout.plan.mesh
    if mesh.cp == 1:
        return 0.0
    said = wires.gather(layout.work.keys * layout.micro / mesh.tp, wires.group(mesh.cp, mesh.tp))
    return max(said - fitted.overlap * core, 0.0)


@dataclass(frozen=True, slots=True)
class _Held:
    """Parameters that so many data ranks hold alike, and how far apart these are."""

    elements: float
    ranks: int
    stride: int


def _alike(layout: Layout, elements: float, experts: float) -> Iterator[_Held]:
    """`elements` parameters by who else has them: of experts each rank of ep has its own."""
    mesh = layout.plan.mesh
    if elements > experts:
        yield _Held(elements - experts, layout.data, mesh.tp)
    if experts:
        yield _Held(experts / mesh.ep, layout.data // mesh.ep, mesh.tp * mesh.ep)


def _gather(layout: Layout, wires: Wires, held: _Held, width: float) -> float:
    """Seconds to put together what ZeRO divides, or to add it up and divide it."""
    return wires.gather(width * held.elements, wires.group(min(layout.shards, held.ranks), held.stride))


def _sharded(layout: Layout, wires: Wires) -> tuple[float, float]:
    """Seconds to fetch the parameters of one block for forward; and for backward, with giving its gradients away."""
    plan, work = layout.plan, layout.work
    if plan.zero < 3 or layout.shards < 2 or plan.whole:
        return 0.0, 0.0
    fetch = give = 0.0
    for held in _alike(layout, work.held(1, plan.mesh.tp), work.experts / plan.mesh.tp):
        fetch += _gather(layout, wires, held, layout.stack.fetched or work.width)
        give += _gather(layout, wires, held, layout.message * work.trained)
    return fetch, fetch + (0.0 if plan.keep_gradients else give)


def _root(layout: Layout, wires: Wires, rank: int) -> tuple[float, float]:
    """Under zero=3 the parameters outside of blocks, or all where the model is one unit, are fetched before anything is computed, and stay
    until their gradients go."""
    plan, work = layout.plan, layout.work
    if plan.zero < 3 or layout.shards < 2:
        return 0.0, 0.0
    experts = layout.experts(rank) if plan.whole else 0.0
    elements = layout.elements(rank, divided=False) if plan.whole else layout.outside(rank)
    fetch = give = 0.0
    for held in _alike(layout, elements, experts):
        fetch += _gather(layout, wires, held, work.width)
        give += _gather(layout, wires, held, layout.message * work.trained)
    return fetch, 0.0 if plan.keep_gradients else give


def _accumulate(layout: Layout, fitted: Fitted) -> float:
    """Seconds in which one block's gradients are added to those of earlier micro-batches."""
    if layout.count == 1:
        return 0.0
    plan, size = layout.plan, layout.work.held(1, layout.plan.mesh.tp) * layout.work.trained
    if plan.zero >= 2 and not plan.keep_gradients:
        size /= layout.shards
    return stream_seconds(layout.sheet, fitted, size * (2 * layout.gradient + layout.work.width))


def _exchange(layout: Layout, wires: Wires, fitted: Fitted, last: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of what the data ranks exchange beside blocks; `last`: of the last stage's backward of a micro-batch.

    Without ZeRO gradients are added up once a step. zero=1 gives each rank its part of the sums once, zero=2 after every micro-batch
    (unless gradients are kept), and then everybody fetches the new parameters.
    """
    plan, mesh, work, stack = layout.plan, layout.plan.mesh, layout.work, layout.stack
    fullest = max(layout.here, key=layout.elements)
    given = fetched = 0.0
    for held in _alike(layout, layout.elements(fullest, divided=False), layout.experts(fullest)):
        width = layout.message * work.trained
        shards = min(layout.shards, held.ranks)
        among = wires.reduce(width * held.elements / shards, wires.group(held.ranks // shards, held.stride * shards))
        if plan.zero == 0:
            given += wires.reduce(width * held.elements, wires.group(held.ranks, held.stride))
        elif plan.zero == 3:
            given += among + (_gather(layout, wires, held, width) if plan.keep_gradients else 0.0)
        else:
            given += among + _gather(layout, wires, held, width)
            fetched += _gather(layout, wires, held, stack.fetched or work.width)
    times = layout.count if plan.zero == 2 and not plan.keep_gradients else 1
    # One unit has all its gradients when backward is done.
    beside = stack.overlap and (mesh.pp == 1 or stack.overlap_stages) and not (plan.zero and plan.whole)
    hidden = times * min(given, last * fitted.overlap) if beside else 0.0
    return times * given - hidden + fetched + _tied(layout, wires) + _gathered_tensors(layout, wires), hidden


def _gathered_tensors(layout: Layout, wires: Wires) -> float:
    """Optimizers that need whole tensors: gradients and values go to the owners, values come back."""
    work, found = layout.work, 0.0
    total = (work.elements[0] + work.layers * work.elements[1] + work.elements[2]) * work.trained
    for part, reads, draws in work.across:
        each = owned(layout.plan, reads, draws)
        if each is not None:
            size = part * each.share * total * work.width
            found += MESSAGES * wires.gather(size, wires.group(each.ranks, 1))
    return found


def _tied(layout: Layout, wires: Wires) -> float:
    """The first and the last stage add up the gradients of what they share."""
    mesh = layout.plan.mesh
    if mesh.pp == 1:
        return 0.0
    size = layout.message * layout.work.tied / mesh.tp
    return wires.reduce(size, wires.group(2, (mesh.pp - 1) * layout.data * mesh.tp))


def _optimizer(layout: Layout, fitted: Fitted) -> float:
    """Seconds of the update: gradients, states both ways, parameters (of which a wide copy is the state); clipping reads and writes
    gradients besides."""
    plan, work = layout.plan, layout.work
    mine = max((layout.shard if plan.zero else layout.elements)(rank) for rank in layout.here) * work.trained
    total = (work.elements[0] + work.layers * work.elements[1] + work.elements[2]) * work.trained
    for part, reads, draws in work.across:
        found = owned(plan, reads, draws)
        mine += part * (found.share * total - mine) if found is not None else 0.0
    moved = layout.gradient + 2 * layout.state + work.width * (1 if layout.master else 2)
    if work.clip:
        moved += 3 * layout.gradient
    return stream_seconds(layout.sheet, fitted, moved * mine)

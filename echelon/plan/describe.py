"""A plan in words, the difference of two plans, and how a plan cuts a model (repeated blocks folded)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from echelon.plan.batch_split import largest_micro_batch
from echelon.plan.placement import cuts_by_parameter
from echelon.plan.plan import GROUPS, Plan
from echelon.plan.profile import PipelineUnit, Profile, fold_path
from echelon.plan.stages import stage_count, stage_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGroup:
    """Modules that are cut in the same way, or replicated for the same reason."""

    path: str  #: `blocks.*.up` for `count` modules
    count: int = 1
    cut: str  #: as a Placement's; "whole"
    source: str = ""
    parts: tuple[int, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        modules = f"{self.path}{f' x {self.count}' if self.count > 1 else ''}"
        if self.cut == "whole":
            return f"{modules}: whole, {self.why}"
        return f"{modules}: {self.cut}{f' in {len(self.parts)} parts' if self.parts else ''} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One stage: its units, folded, and its share of the work."""

    number: int
    rank: int  #: on the pp axis
    units: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        return f"stage {self.number} on rank {self.rank} of pp ({self.share:.0%} of the work): {', '.join(self.units)}"


def group_cuts(plan: Plan) -> tuple[CutGroup, ...]:
    """What tp does to each module that has parameters, in the model's order; cut ones first."""
    paths: dict[CutGroup, list[str]] = {}
    for placement in plan.tensor.placements:
        parts = max((part.fused_sizes for part in placement.slices), key=len, default=())
        group = CutGroup(path=fold_path(placement.path), cut=placement.cut, source=placement.source, parts=parts)
        paths.setdefault(group, []).append(placement.path)
    for module in plan.tensor.replicated:
        paths.setdefault(CutGroup(path=fold_path(module.path), cut="whole", why=module.reason), []).append(module.path)
    return tuple(
        replace(group, path=(group.path if len(members) > 1 else members[0]) or "the model itself", count=len(members))
        for group, members in paths.items()
    )


def summarize_stages(plan: Plan, pipeline_units: Sequence[PipelineUnit]) -> tuple[StageSummary, ...]:
    """The stages of a complete plan."""
    total_work = sum(unit.cost for unit in pipeline_units) or 1.0
    ranges = stage_ranges(plan, len(pipeline_units))
    stages = [[pipeline_units[index] for index in unit_range] for unit_range in ranges]
    return tuple(
        StageSummary(
            number=number, rank=number % plan.mesh.pp, units=tuple(fold_index_ranges([unit.path for unit in units])),
            share=sum(unit.cost for unit in units) / total_work,
        )
        for number, units in enumerate(stages)
    )  # fmt: skip


def fold_index_ranges(paths: Iterable[str]) -> Iterable[str]:
    """`blocks.0, blocks.1, blocks.2` as `blocks.0-2`."""
    run: list[tuple[str, int, str]] = []
    for path in (*paths, ""):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", path)
        current = (match[1], int(match[2]), match[3]) if match else (path, -1, "")
        if run and not (current[1] >= 0 and (current[0], current[1] - 1, current[2]) == run[-1]):
            (prefix, first, suffix), last = run[0], run[-1][1]
            yield prefix if first < 0 else f"{prefix}{first}{f'-{last}' if last > first else ''}{suffix}"
            run = []
        if path:
            run.append(current)


def pluralize(count: int, noun: str) -> str:
    """`1 sample`, `3 samples`, `2 micro-batches`."""
    return f"{count:,} {noun}{('es' if noun.endswith('h') else 's') * (count != 1)}"


def cut_fraction(plan: Plan, profile: Profile, *cuts: str) -> float:
    """Fraction of the parameters' bytes that tp cuts, or cuts in these ways."""
    cut_names = cuts_by_parameter(item for item in plan.tensor.placements if not cuts or item.cut in cuts).keys()
    cut_bytes = sum(item.bytes for item in profile.parameters if cut_names & {item.name, *item.aliases})
    return cut_bytes / (profile.bytes or 1)


def describe_plan(plan: Plan, batch: int | None = None) -> str:
    """The plan in words, one decision per line."""
    ranks, dp, tp, pp = plan.ranks, plan.mesh.dp, plan.mesh.tp, plan.mesh.pp
    if ranks == 1:
        lines = ["one process"]
    elif ranks == dp:
        lines = [f"{ranks} ranks, each with its own samples"]
    else:
        lines = [f"{ranks} ranks, {'all' if dp == 1 else f'groups of {ranks // dp}'} with the same samples"]
    if tp > 1:
        lines.append(f"tp={tp}: modules are cut into {tp} shards, one per rank of the axis")
    if plan.tensor.sequence:
        where = "; ".join(", ".join(fold_index_ranges(segment.blocks)) for segment in plan.tensor.segments)
        lines.append(f"sequence parallelism between the cut modules{f' of {where}' if where else ''}")
    if pp > 1:
        num_stages = stage_count(plan)
        per_rank = f", {num_stages // pp} per rank" if num_stages > pp else ""
        lines.append(f"pp={pp}: {num_stages} stages{per_rank}, schedule {plan.pipeline.schedule}")
    lines += [f"{axis}={size}" for axis, size in plan.mesh.sizes.items() if axis in ("cp", "ep") and size > 1]
    if dp > 1 and plan.server.dense == "allreduce":
        lines.append(_ZERO_STAGES[plan.zero])
    if plan.uses_servers:
        lines += _describe_servers(plan)
    if plan.data.batch_shares:
        lines.append(f"unequal shares of the batch per data rank: {' : '.join(map(str, plan.data.batch_shares))}")
    if plan.data.keep_gradients:
        lines.append("full gradients are kept between micro-batches and reduced once per step")
    if batch is not None and batch < dp:
        lines.append(f"a batch of {batch} cannot feed {dp} data ranks")
    elif batch is not None:
        count = pluralize(plan.count_micro_batches(batch), "micro-batch")
        largest = largest_micro_batch(batch, dp, plan.micro, plan.data.batch_shares)
        lines.append(f"a batch of {batch}: {count} of up to {pluralize(largest, 'sample')} per rank")
    elif plan.micro:
        lines.append(f"micro-batches of {pluralize(plan.micro, 'sample')} per rank")
    compiled, unfused = ", compiled" if plan.compile else "", "" if plan.fused else ", unfused optimizer kernels"
    lines.append(f"computes in {plan.precision or 'the precision of the job'}{compiled}{unfused}")
    if plan.recompute == "block":
        lines.append("each block saves only its input and is recomputed in backward")
    elif plan.recompute == "selective":
        lines.append("each block saves the outputs of matrix products and attention; backward recomputes the rest")
    if plan.batchnorm == "sync":
        lines.append("batch-norm statistics are taken over all ranks")
    if plan.threads:
        lines.append(f"{pluralize(plan.threads, 'CPU thread')} per rank")
    return "\n".join(lines)


_ZERO_STAGES = (
    "every rank holds the whole model; gradients are all-reduced in buckets during backward",
    "optimizer state is sharded; gradients are reduced and parameters gathered once per step",
    "optimizer state and gradients are sharded; gradients are reduced every micro-batch",
    "parameters, gradients and optimizer state are sharded; each block is gathered when it is needed",
)


def _describe_servers(plan: Plan) -> Iterator[str]:
    server = plan.server
    tables = f" ({', '.join(table.path or 'the model itself' for table in server.tables)})" if server.tables else ""
    rest = " and all other parameters" if server.dense == "server" else ""
    copies = f", each row on {server.replicas} of them" if server.replicas > 1 else ""
    verb = "holds" if server.servers == 1 else "hold"
    yield f"{pluralize(server.servers, 'parameter server')} {verb} the tables{tables}{rest}{copies}"
    if server.staleness is None:
        yield "asynchronous: ranks never wait for each other"
    elif server.staleness:
        yield f"a rank waits while it is more than {pluralize(server.staleness, 'step')} ahead of the slowest"
    else:
        yield "synchronous: the gradients of a step are summed over all ranks and applied once"


def diff_plans(left: Plan, right: Plan) -> list[str]:
    """What differs between two plans, field by field, as `name: left -> right`; empty when they are equal."""

    def format_value(value: object) -> object:
        if isinstance(value, tuple) and value and not isinstance(value[0], int):  # hundreds of modules
            return pluralize(len(value), "module")
        return list(value) if isinstance(value, tuple) else value

    top_level = [item.name for item in fields(Plan) if item.name not in ("mesh", *GROUPS.values())]
    pairs = {axis: (size, right.mesh.sizes[axis]) for axis, size in left.mesh.sizes.items()}
    pairs |= {name: (left.get(name), right.get(name)) for name in (*top_level, *GROUPS)}
    return [f"{name}: {format_value(a)} -> {format_value(b)}" for name, (a, b) in pairs.items() if a != b]

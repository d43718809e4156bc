"""The space of plans that a search visits, in families with bounds on their step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from echelon.errors import PlanError
from echelon.plan.check import check
from echelon.plan.cluster import Cluster
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan, Precision, Recompute, Schedule
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile
from echelon.plan.stages import (
    INTERLEAVED_SCHEDULES,
    INTERLEAVED_STAGES_PER_RANK,
    balance_stages,
    find_stages,
    forbidden_stage_starts,
)
from echelon.planner.candidate import Candidate
from echelon.simulator.device_kinds import stage_device_kinds
from echelon.simulator.simulator import Simulator

#: tp communicates in every block: it is searched only within the devices that share a fast link.
_MAX_TP = 16
#: The largest cp that is searched.
_MAX_CP = 16
#: Goals that minimize devices also try this many numbers of nodes between each power of two and the next.
_STEPS_PER_DOUBLING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFamily:
    """Plans with the same computation per rank. They differ in ZeRO stage, schedule and sequence sharding."""

    mesh: Mesh
    micro: int
    recompute: Recompute
    precision: Precision | None


class PlanSpace:
    """Plans of one model on one cluster. `beyond`: include those that are forecast and not executed yet."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        ranks: int | None = None,
        beyond: bool = False,
        precisions: tuple[Precision | None, ...] = (None,),
    ) -> None:
        self.profile, self.cluster, self.ranks, self.precisions = profile, cluster, ranks, precisions
        self.simulator = Simulator(profile, cluster)
        self.beyond = beyond and not self.simulator.is_measured
        self.first_cluster = self.simulator.uniform_clusters[0]
        node = self.first_cluster.nodes[0]
        self._is_measured_cpu = self.simulator.is_measured and cluster.device_kind == "cpu"
        devices = len(node.devices) * len(self.first_cluster.nodes)
        self.max_ranks = cluster.max_ranks if self.simulator.is_measured else devices
        domain = max(node.wire.domain if node.wire else 1, len(node.devices))
        self.max_tp = min(self.max_ranks if self.simulator.is_measured else domain, _MAX_TP)
        self._best_block_seconds: list[float] | None = None
        self._stage_starts: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        if ranks is not None and (ranks < 1 or (not self.simulator.is_measured and ranks > self.max_ranks)):
            raise PlanError(f"ranks={ranks}: {cluster.name} has {self.max_ranks} devices; use 1 to {self.max_ranks}")

    def rank_counts(self, *, fine_grained: bool) -> list[int]:
        """1, 2, 4 ... and all. `fine_grained`: also whole nodes, each number up to 16, then 16 per doubling."""
        if self.ranks is not None:
            return [self.ranks]
        counts = {*powers_of_two(self.max_ranks), self.max_ranks}
        per_node, nodes = len(self.first_cluster.nodes[0].devices), 1
        while fine_grained and nodes * per_node <= self.max_ranks:
            counts.add(nodes * per_node)
            nodes += max(2 ** (nodes.bit_length() - 1) // _STEPS_PER_DOUBLING, 1)
        return sorted(counts)

    def families(self, ranks: int) -> Iterator[PlanFamily]:
        """The families of plans over this many ranks."""
        profile, model = self.profile, self.simulator.model
        recompute_options: list[Recompute] = ["none", "selective", "block"] if profile.fsdp_units else ["none"]
        for tp, pp, cp in product(
            powers_of_two(min(ranks, self.max_tp)),
            divisors(ranks),
            powers_of_two(min(ranks, _MAX_CP) if self.beyond else 1),
        ):
            dp, remainder = divmod(ranks, tp * pp * cp)
            if remainder or dp > profile.batch or pp > max(len(profile.pipeline_units), 1):
                continue
            for ep in powers_of_two(dp * cp) if self.beyond and model.expert_elements else [1]:
                if (dp * cp) % ep or (ep > 1 and model.expert_count % ep):
                    continue
                mesh = Mesh(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
                sizes = micro_batch_sizes(-(-profile.batch // dp))
                for micro, recompute, precision in product(sizes, recompute_options, self.precisions):
                    yield PlanFamily(mesh=mesh, micro=micro, recompute=recompute, precision=precision)

    def plans(self, family: PlanFamily) -> Iterator[Plan]:
        """The plans of a family."""
        mesh, template = family.mesh, self.base_plan(family)
        # gpipe is neither faster nor smaller than 1f1b (tests/planner/test_space.py).
        schedules: list[Schedule] = ["1f1b"] if mesh.pp == 1 else ["1f1b", "interleaved", "zero-bubble"]
        for zero, schedule, sequence in product(
            (0, 1, 2, 3) if mesh.dp > 1 else (0,), schedules, (False, True) if mesh.tp > 1 else (False,)
        ):
            if sequence and mesh.pp > 1 and not self.beyond:
                continue
            if schedule == "zero-bubble" and (zero or family.recompute != "none"):
                continue
            plan = template.replace(
                zero=zero,
                schedule=schedule,
                sequence=sequence,
                # Ranks that run different blocks would deadlock if each block were sharded by itself.
                shard_as_one=zero > 0 and bool(self.profile.varying_blocks_reason),
            )
            if mesh.pp == 1:
                yield plan
                continue
            slowdowns = self.stage_slowdowns(plan)
            # Stages balanced for unequal devices may not fit where equal stages do.
            for starts in {self._balanced_stage_starts(plan, each) for each in (slowdowns, ())}:
                if starts is not None:
                    yield plan.replace(stages=starts)

    def base_plan(self, family: PlanFamily) -> Plan:
        """A plan of the family without stages."""
        mesh = family.mesh
        return Plan(
            mesh=mesh,
            micro=family.micro if family.micro < -(-self.profile.batch // mesh.dp) else None,
            recompute=family.recompute,
            precision=family.precision,
            # Measurements use all cores, divided evenly among the ranks.
            threads=max(self.cluster.cores // mesh.ranks, 1) if self._is_measured_cpu else None,
            model=self.profile.model,
        )

    def data_parallel_plans(self) -> Iterator[Plan]:
        """The purely data-parallel plans without recomputation."""
        for ranks in self.rank_counts(fine_grained=False):
            sizes = micro_batch_sizes(-(-self.profile.batch // ranks))
            for micro in sizes:
                yield from self.plans(PlanFamily(mesh=Mesh(dp=ranks), micro=micro, recompute="none", precision=None))

    def data_parallel_candidates(self) -> list[Candidate]:
        """The executable ones among them, whether they fit or not."""
        return [
            Candidate(plan=plan, forecast=self.simulator.forecast(plan))
            for plan in self.data_parallel_plans()
            if not self.errors(plan)
        ]

    def rank_count_bound(self, ranks: int) -> float:
        """A lower bound on the step time of all plans over this many ranks: all blocks at the best rate of any micro-batch and tp."""
        if self.simulator.is_measured:
            return 0.0  # rates depend on the load, and such clusters have few ranks
        if self._best_block_seconds is None:
            self._best_block_seconds = self._find_best_block_seconds()
        ranks_by_kind = Counter(self.simulator.kind_by_rank[:ranks])
        samples_per_second = sum(count / self._best_block_seconds[kind] for kind, count in ranks_by_kind.items())
        return self.profile.batch * self.simulator.model.layers / samples_per_second

    def family_bound(self, family: PlanFamily) -> float:
        """A lower bound on the family's step time: the blocks of the fullest rank, one micro-batch after another."""
        block_seconds = self._block_seconds(family)
        micro_batches = self.base_plan(family).count_micro_batches(self.profile.batch)
        kind_by_rank, mesh = self.simulator.kind_by_rank, family.mesh
        if len(block_seconds) == 1 or mesh.pp == 1:
            slowest = max(block_seconds[kind] for kind in set(kind_by_rank[: mesh.ranks]) or {0})
            return micro_batches * self._most_blocks_per_rank(mesh.pp) * slowest
        # Slow ranks may get fewer blocks; the best split takes equally long on every rank.
        seconds_per_rank = [
            max(block_seconds[kind] for kind in kinds)
            for kinds in stage_device_kinds(self.base_plan(family), kind_by_rank)
        ]
        return micro_batches * self.simulator.model.layers / sum(1 / each for each in seconds_per_rank)

    def stage_slowdowns(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of a block on each stage relative to the fastest one; () if all devices are equal."""
        block_seconds = [block for _, block, _ in self.simulator.part_seconds(plan)]
        if len(block_seconds) == 1:
            return ()
        kinds_by_stage = stage_device_kinds(plan, self.simulator.kind_by_rank)
        by_stage = [max(block_seconds[kind] for kind in kinds) for kinds in kinds_by_stage]
        return tuple(round(seconds / min(by_stage), 2) for seconds in by_stage) * _stages_per_rank(plan)

    def with_cuts(self, plan: Plan, template: Plan) -> Plan:
        """`plan` with the cuts of `template`; stages that would begin between a column and its row move."""
        tensor, units = template.tensor, self.profile.pipeline_units
        plan = plan.replace(placements=tensor.placements, replicated=tensor.replicated, segments=tensor.segments)
        if set(plan.pipeline.stages) & forbidden_stage_starts(plan, units):
            starts = find_stages(plan, units, self.stage_slowdowns(plan))
            if starts is None:
                raise PlanError(f'"{plan}": the model has too few stage boundaries; use a smaller pp')
            plan = plan.replace(stages=starts)
        return plan

    def errors(self, plan: Plan) -> list[Problem]:
        """Why the engine cannot execute a plan; `beyond` ignores axes that it does not support yet."""
        problems = check(plan, self.profile, self.first_cluster)
        if self.beyond:
            problems = tuple(each for each in problems if not each.not_implemented and each.path != "sequence")
        return [problem for problem in problems if problem.severity == "error"]

    def _find_best_block_seconds(self) -> list[float]:
        """For each kind of device, the least seconds per sample of one block."""
        batch, options = self.profile.batch, []
        splits = product(powers_of_two(_MAX_TP), powers_of_two(_MAX_CP if self.beyond else 1))
        meshes = [Mesh(tp=tp, cp=cp) for tp, cp in splits if tp * cp <= self.max_ranks]
        for mesh, micro, precision in product(meshes, micro_batch_sizes(batch), self.precisions):
            family = PlanFamily(mesh=mesh, micro=micro, recompute="none", precision=precision)
            micro_batches = self.base_plan(family).count_micro_batches(batch)
            options.append([seconds * mesh.ranks * micro_batches / batch for seconds in self._block_seconds(family)])
        return [min(kind) for kind in zip(*options, strict=True)]

    def _block_seconds(self, family: PlanFamily) -> list[float]:
        """For each kind of device, seconds of one block, forward and backward, with the sequence sharded, which is fastest."""
        plan = self.base_plan(family).replace(sequence=family.mesh.tp > 1)
        return [block for _, block, _ in self.simulator.part_seconds(plan)]

    def _most_blocks_per_rank(self, pp: int) -> float:
        """The least number of blocks on the fullest rank: equal blocks are not split."""
        model = self.simulator.model
        has_equal_blocks = all(unit.blocks in (0.0, 1.0) for unit in model.pipeline_units)
        return -(-model.layers // pp) if has_equal_blocks else model.layers / pp

    def _balanced_stage_starts(self, plan: Plan, slowdowns: tuple[float, ...]) -> tuple[int, ...] | None:
        """Stage starts that make the slowest stage as fast as possible."""
        before, block, after = max(self.simulator.part_seconds(plan), key=sum)
        # Round to a tenth of a block: finer differences lead to the same stages.
        before, after = round(10 * before / block) / 10, round(10 * after / block) / 10
        stages = plan.mesh.pp * _stages_per_rank(plan)
        key = (stages, before, after, slowdowns)
        if key not in self._stage_starts:
            forbidden = forbidden_stage_starts(plan, self.profile.pipeline_units)
            self._stage_starts[key] = balance_stages(self._unit_costs(before, after), stages, forbidden, slowdowns)
        return self._stage_starts[key]

    def _unit_costs(self, before: float, after: float) -> list[float]:
        """The computation of each pipeline unit in blocks: units before the blocks share `before`, units after them `after`."""
        costs = [unit.blocks for unit in self.simulator.model.pipeline_units]
        positions = [position for position, cost in enumerate(costs) if cost] or [0, len(costs) - 1]
        first, last = positions[0], positions[-1]
        for units, cost in ((range(first), before), (range(last + 1, len(costs)), after)):
            for unit in units:
                costs[unit] = cost / len(units)
        if not first:
            costs[0] += before
        if last == len(costs) - 1:
            costs[-1] += after
        return costs


def _stages_per_rank(plan: Plan) -> int:
    return INTERLEAVED_STAGES_PER_RANK if plan.pipeline.schedule in INTERLEAVED_SCHEDULES else 1


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 ... up to `limit`."""
    return [2**power for power in range(limit.bit_length())]


def divisors(size: int) -> list[int]:
    """All divisors of `size`."""
    return [divisor for divisor in range(1, size + 1) if size % divisor == 0]


def micro_batch_sizes(local_batch: int) -> list[int]:
    """1, 2, 4 ... samples, and the whole local batch."""
    return sorted({*powers_of_two(local_batch), local_batch})

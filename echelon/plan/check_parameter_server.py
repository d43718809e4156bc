"""What a plan with a parameter server must keep to."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.plan.parameter_server import candidates, choose
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem
from echelon.plan.profile import Profile, Rule

#: What servers compute for parameters that are no tables.
DENSE = ("SGD", "Adagrad", "Adam", "AdamW")
#: So many tables are named with their reasons.
_TOLD = 3


def alone(plan: Plan) -> Iterator[Problem]:
    """Without a model."""
    if not plan.served:
        yield from _idle(plan)
        return
    if plan.replicas > plan.servers:
        yield Problem(
            path="replicas", value=plan.replicas, rule=f"each on a server of its own, and servers={plan.servers}",
            remedy=f"use servers={plan.replicas} or more, or replicas={plan.servers}",
        )  # fmt: skip
    for axis in ("tp", "pp"):
        if getattr(plan.mesh, axis) > 1:
            yield Problem(
                path=axis, value=getattr(plan.mesh, axis), rule="under exchange=server each rank has samples of its own and reads their rows",
                remedy=f"use dp={plan.ranks}: the tables, most of the model, are not on the ranks anyway",
            )  # fmt: skip
    if plan.zero:
        yield Problem(
            path="zero", value=plan.zero, rule="under exchange=server the large tables are sharded over the servers, and what is left is whole on each rank",
            remedy="use zero=0",
        )  # fmt: skip
    if plan.compile:
        yield Problem(
            path="compile", value=True, rule="rows come from a server while forward runs, which torch.compile cannot trace",
            remedy="leave `compile` out",
        )  # fmt: skip
    if plan.recompute != "none":
        yield Problem(
            path="recompute", value=plan.recompute, rule="what is computed again in backward would read rows again that others may have changed",
            remedy="leave `recompute` out",
        )  # fmt: skip
    if plan.free and plan.batchnorm == "sync":
        yield Problem(
            path="batchnorm", value="sync", rule="ranks that do not wait for each other have no common statistics",
            remedy="use batchnorm=local, staleness=0 or dense=allreduce",
        )  # fmt: skip
    if plan.free and plan.precision == "fp16":
        yield Problem(
            path="precision", value="fp16", rule="an overflow has to be known on all ranks, which do not wait for each other",
            remedy="use precision=bf16 or fp32, staleness=0 or dense=allreduce",
        )  # fmt: skip


def _idle(plan: Plan) -> Iterator[Problem]:
    """What only a server would read."""
    plain = Plan()
    for name in ("dense", "staleness", "servers", "replicas", "rows", "tables"):
        value = getattr(plan, name)
        if value != getattr(plain, name):
            shown = "none" if value is None else len(value) if isinstance(value, tuple) else value
            yield Problem(
                path=name, value=shown, rule="it is of plans with a parameter server", remedy=f"add exchange=server, or leave `{name}` out"
            )  # fmt: skip


def check_served(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """With a model: are there tables, and can a server train what it is given as torch would?"""
    if not plan.served:
        return
    known = {each.path: each for each in profile.tables}
    for served in plan.tables:
        table = known.get(served.path)
        if table is None or (table.rows, table.dim) != (served.rows, served.dim):
            have = "no such table" if table is None else f"{table.rows} x {table.dim} there"
            yield Problem(
                path="tables", value=f"{served.path} ({served.rows} x {served.dim})", rule=f"{profile.name} has {have}",
                remedy="leave tables out: they are found",
            )  # fmt: skip
        elif table.unfit:
            yield Problem(path="tables", value=served.path, rule=table.unfit, remedy="or leave it with the ranks")
    if not plan.tables:
        yield from _none(plan, profile)
    if plan.dense == "server":
        strange = next((rule.name for rule in profile.optimizers if not _computed(rule, plan, profile)), None)
        if strange is not None:
            yield Problem(
                path="dense", value="server", rule=f"servers do not compute {strange}, but {', '.join(DENSE)}",
                remedy="use one of these, or dense=allreduce, which leaves it to the ranks",
            )  # fmt: skip
    if plan.free and profile.clip:
        yield Problem(
            path="staleness", value="none" if plan.staleness is None else plan.staleness,
            rule="clip= needs the norm of all ranks' gradient, and ranks do not wait for each other",
            remedy="use staleness=0 or dense=allreduce, or leave clip= out",
        )  # fmt: skip
    if plan.free and profile.norms:
        yield Problem(
            path="dense", value="server", rule=f"{profile.norms[0]} keeps running statistics, which ranks that do not wait for each other have each of its own",
            remedy="the checkpoint has those of rank 0; use staleness=0 or dense=allreduce for common ones", severity="warning",
        )  # fmt: skip


def _computed(rule: Rule, plan: Plan, profile: Profile) -> bool:
    """Whether servers do all that an optimizer does; what trains tables alone was looked at with them."""
    served = {each.path for each in plan.tables or choose(plan, profile)}
    mine = sum(each.rows * each.dim for each in profile.tables if each.path in served and each.rule == rule.name)
    return rule.name in DENSE or mine == rule.elements


def _none(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """No table is named: are there any to be found?"""
    large = list(candidates(plan, profile))
    if any(not each.unfit for each in large) or (plan.dense == "server" and not large):
        return
    if large:
        whys: dict[str, list[str]] = {}
        for each in large:
            whys.setdefault(each.unfit, []).append(each.path or "the model itself")
        told = "; ".join(
            f"{', '.join(paths[:_TOLD])}{' ...' * (len(paths) > _TOLD)}: {why}" for why, paths in whys.items()
        )
        yield Problem(
            path="exchange",
            value="server",
            rule=f"no table can be served ({told})",
            remedy="or use exchange=allreduce",
        )
        return
    largest = max((each.rows for each in profile.tables), default=0)
    yield Problem(
        path="exchange", value="server", rule=f"{profile.name} has no table (nn.Embedding, nn.EmbeddingBag) of rows={plan.rows} or more",
        remedy=f"use rows={largest} (its largest), or exchange=allreduce" if largest else "use exchange=allreduce, or dense=server as well",
    )  # fmt: skip

"""What a plan with a parameter server must keep to."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.plan.parameter_server import choose_served_tables, large_tables
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem
from echelon.plan.profile import OptimizerProfile, Profile

#: What servers compute for parameters that are no tables.
SERVER_OPTIMIZERS = ("SGD", "Adagrad", "Adam", "AdamW")
#: So many tables are named with their reasons.
_MAX_LISTED = 3


def check_server_settings(plan: Plan) -> Iterator[Problem]:
    """Without a model."""
    if not plan.uses_servers:
        yield from _check_unused_server_fields(plan)
        return
    if plan.server.replicas > plan.server.servers:
        yield Problem(
            path="replicas", value=plan.server.replicas, rule=f"each on a server of its own, and servers={plan.server.servers}",
            remedy=f"use servers={plan.server.replicas} or more, or replicas={plan.server.servers}",
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
    if plan.asynchronous and plan.batchnorm == "sync":
        yield Problem(
            path="batchnorm", value="sync", rule="ranks that do not wait for each other have no common statistics",
            remedy="use batchnorm=local, staleness=0 or dense=allreduce",
        )  # fmt: skip
    if plan.asynchronous and plan.precision == "fp16":
        yield Problem(
            path="precision", value="fp16", rule="an overflow has to be known on all ranks, which do not wait for each other",
            remedy="use precision=bf16 or fp32, staleness=0 or dense=allreduce",
        )  # fmt: skip


def _check_unused_server_fields(plan: Plan) -> Iterator[Problem]:
    """What only a server would read."""
    default_plan = Plan()
    for name in ("dense", "staleness", "servers", "replicas", "min_table_rows", "tables"):
        value = plan.get(name)
        if value != default_plan.get(name):
            displayed = "none" if value is None else len(value) if isinstance(value, tuple) else value
            yield Problem(
                path=name.replace("min_table_rows", "rows"), value=displayed, rule="it is of plans with a parameter server", remedy=f"add exchange=server, or leave `{name}` out"
            )  # fmt: skip


def check_server_tables(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """With a model: are there tables, and can a server train what it is given as torch would?"""
    if not plan.uses_servers:
        return
    tables_by_path = {profiled_table.path: profiled_table for profiled_table in profile.tables}
    for served in plan.server.tables:
        table = tables_by_path.get(served.path)
        if table is None or (table.rows, table.dim) != (served.rows, served.dim):
            actual = "no such table" if table is None else f"{table.rows} x {table.dim} there"
            yield Problem(
                path="tables", value=f"{served.path} ({served.rows} x {served.dim})", rule=f"{profile.name} has {actual}",
                remedy="leave tables out: they are found",
            )  # fmt: skip
        elif table.unsupported_reason:
            yield Problem(
                path="tables", value=served.path, rule=table.unsupported_reason, remedy="or leave it with the ranks"
            )
    if not plan.server.tables:
        yield from _check_missing_tables(plan, profile)
    if plan.server.dense == "server":
        unsupported = next(
            (rule.name for rule in profile.optimizers if not _is_server_optimizer(rule, plan, profile)), None
        )
        if unsupported is not None:
            yield Problem(
                path="dense", value="server", rule=f"servers do not compute {unsupported}, but {', '.join(SERVER_OPTIMIZERS)}",
                remedy="use one of these, or dense=allreduce, which leaves it to the ranks",
            )  # fmt: skip
    if plan.asynchronous and profile.clips_gradients:
        yield Problem(
            path="staleness", value="none" if plan.server.staleness is None else plan.server.staleness,
            rule="clip_norm= needs the norm of all ranks' gradient, and ranks do not wait for each other",
            remedy="use staleness=0 or dense=allreduce, or leave clip_norm= out",
        )  # fmt: skip
    if plan.asynchronous and profile.batch_norms:
        yield Problem(
            path="dense", value="server", rule=f"{profile.batch_norms[0]} keeps running statistics, which ranks that do not wait for each other have each of its own",
            remedy="the checkpoint has those of rank 0; use staleness=0 or dense=allreduce for common ones", severity="warning",
        )  # fmt: skip


def _is_server_optimizer(optimizer: OptimizerProfile, plan: Plan, profile: Profile) -> bool:
    """Whether servers do all that an optimizer does; what trains tables alone was looked at with them."""
    served_paths = {table.path for table in plan.server.tables or choose_served_tables(plan, profile)}
    table_elements = sum(
        table.rows * table.dim
        for table in profile.tables
        if table.path in served_paths and table.optimizer == optimizer.name
    )
    return optimizer.name in SERVER_OPTIMIZERS or table_elements == optimizer.trainable_elements


def _check_missing_tables(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """No table is named: are there any to be found?"""
    candidate_tables = list(large_tables(plan, profile))
    if any(not table.unsupported_reason for table in candidate_tables) or (
        plan.server.dense == "server" and not candidate_tables
    ):
        return
    if candidate_tables:
        paths_by_reason: dict[str, list[str]] = {}
        for table in candidate_tables:
            paths_by_reason.setdefault(table.unsupported_reason, []).append(table.path or "the model itself")
        reasons_text = "; ".join(
            f"{', '.join(paths[:_MAX_LISTED])}{' ...' * (len(paths) > _MAX_LISTED)}: {reason}"
            for reason, paths in paths_by_reason.items()
        )
        yield Problem(
            path="exchange",
            value="server",
            rule=f"no table can be served ({reasons_text})",
            remedy="or use exchange=allreduce",
        )
        return
    most_rows = max((table.rows for table in profile.tables), default=0)
    yield Problem(
        path="exchange", value="server", rule=f"{profile.name} has no table (nn.Embedding, nn.EmbeddingBag) of rows={plan.server.min_table_rows} or more",
        remedy=f"use rows={most_rows} (its largest), or exchange=allreduce" if most_rows else "use exchange=allreduce, or dense=server as well",
    )  # fmt: skip

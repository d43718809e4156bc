"""Whether a plan with a parameter server can be executed."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.plan.parameter_server import choose_served_tables, large_tables
from echelon.plan.plan import Plan
from echelon.plan.problem import Problem, broken_rules
from echelon.plan.profile import OptimizerProfile, Profile

#: Optimizers that servers run for parameters outside tables.
SERVER_OPTIMIZERS = ("SGD", "Adagrad", "Adam", "AdamW")
#: Fields that only a server reads, by their words.
_SERVER_FIELDS = ("dense", "staleness", "servers", "replicas", "rows", "tables")
#: Tables named per reason.
_MAX_LISTED = 3


def check_server_settings(plan: Plan) -> Iterator[Problem]:
    """Problems with any model."""
    if not plan.uses_servers:
        for name in _SERVER_FIELDS:
            problem = Problem.of(plan, name, "needs a parameter server", f"add exchange=server, or leave `{name}` out")
            if problem.value != Problem.of(Plan(), name, "", "").value:
                yield problem
        return
    mesh, replicas, servers = plan.mesh, plan.server.replicas, plan.server.servers
    remedy = f"use dp={plan.ranks}: the tables, most of the model, are on the servers anyway"
    synchronous = "staleness=0 or dense=allreduce"
    yield from broken_rules(
        plan,
        (replicas > servers, "replicas", f"each replica needs its own server, and servers={servers}",
         f"use servers={replicas} or more, or replicas={servers}"),
        (mesh.tp > 1, "tp", "under exchange=server each rank has its own samples and reads their rows", remedy),
        (mesh.pp > 1, "pp", "under exchange=server each rank has its own samples and reads their rows", remedy),
        (plan.zero, "zero", "under exchange=server the large tables are sharded over the servers, and each rank holds all of the rest", "use zero=0"),
        (plan.compile, "compile", "forward receives rows from a server, which torch.compile cannot trace", "leave `compile` out"),
        (plan.recompute != "none", "recompute", "recomputation would read rows again that others may have changed", "leave `recompute` out"),
        (plan.asynchronous and plan.batchnorm == "sync", "batchnorm", "asynchronous ranks have no common statistics",
         f"use batchnorm=local, {synchronous}"),
        (plan.asynchronous and plan.precision == "fp16", "precision", "all ranks must learn of an overflow, and asynchronous ranks do not wait",
         f"use precision=bf16 or fp32, {synchronous}"),
    )  # fmt: skip


def check_server_tables(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """Problems with this model: are there tables, and can servers train what they hold as torch would?"""
    if not plan.uses_servers:
        return
    tables_by_path = {table.path: table for table in profile.tables}
    for served in plan.server.tables:
        table = tables_by_path.get(served.path)
        if table is None or (table.rows, table.dim) != (served.rows, served.dim):
            actual = "no such table" if table is None else f"{table.rows} x {table.dim} there"
            value, remedy = f"{served.path} ({served.rows} x {served.dim})", "leave tables out: they are found"
            yield Problem(path="tables", value=value, rule=f"{profile.name} has {actual}", remedy=remedy)
        elif table.unsupported_reason:
            remedy = "or leave it with the ranks"
            yield Problem(path="tables", value=served.path, rule=table.unsupported_reason, remedy=remedy)
    if not plan.server.tables:
        yield from _check_missing_tables(plan, profile)
    optimizers = profile.optimizers if plan.server.dense == "server" else ()
    unsupported = next((rule.name for rule in optimizers if not _is_server_optimizer(rule, plan, profile)), "")
    yield from broken_rules(
        plan,
        (unsupported, "dense", f"servers do not compute {unsupported}, but {', '.join(SERVER_OPTIMIZERS)}",
         "use one of these, or dense=allreduce, which leaves it to the ranks"),
        (plan.asynchronous and profile.clips_gradients, "staleness", "clip_norm= needs the norm of all ranks' gradients, and asynchronous ranks do not wait",
         "use staleness=0 or dense=allreduce, or leave clip_norm= out"),
    )  # fmt: skip
    if plan.asynchronous and profile.batch_norms:
        rule = f"each asynchronous rank keeps its own running statistics of {profile.batch_norms[0]}"
        remedy = "the checkpoint has those of rank 0; use staleness=0 or dense=allreduce for common ones"
        yield Problem.warning(plan, "dense", rule, remedy)


def _is_server_optimizer(optimizer: OptimizerProfile, plan: Plan, profile: Profile) -> bool:
    """Whether servers run the optimizer; one that trains served tables only was checked with them."""
    served_paths = {table.path for table in plan.server.tables or choose_served_tables(plan, profile)}
    tables = [table for table in profile.tables if table.path in served_paths and table.optimizer == optimizer.name]
    is_for_tables = sum(table.rows * table.dim for table in tables) == optimizer.trainable_elements
    return optimizer.name in SERVER_OPTIMIZERS or is_for_tables


def _check_missing_tables(plan: Plan, profile: Profile) -> Iterator[Problem]:
    """Whether tables will be found for a plan that names none."""
    tables, most_rows = list(large_tables(plan, profile)), max((table.rows for table in profile.tables), default=0)
    if any(not table.unsupported_reason for table in tables) or (plan.server.dense == "server" and not tables):
        return
    if tables:
        paths: dict[str, list[str]] = {}
        for table in tables:
            paths.setdefault(table.unsupported_reason, []).append(table.path or "the model itself")
        more = {reason: " ..." * (len(affected) > _MAX_LISTED) for reason, affected in paths.items()}
        reasons = "; ".join(f"{', '.join(affected[:_MAX_LISTED])}{more[why]}: {why}" for why, affected in paths.items())
        yield Problem.of(plan, "exchange", f"no table can be served ({reasons})", "or use exchange=allreduce")
        return
    rule = f"{profile.name} has no table (nn.Embedding, nn.EmbeddingBag) of rows={plan.server.min_table_rows} or more"
    remedy = f"use rows={most_rows} (its largest), or " if most_rows else "use dense=server as well, or "
    yield Problem.of(plan, "exchange", rule, f"{remedy}exchange=allreduce")

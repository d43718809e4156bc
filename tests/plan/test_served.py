"""Plans with a parameter server: which are refused, with what to do, and which tables are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.plan.check import check
from echelon.plan.describe import describe_plan
from echelon.plan.parameter_server import MAX_RANK_TABLE_BYTES, ServedTable, choose_served_tables
from echelon.plan.plan import Plan, ServerPlan
from echelon.plan.profile import Amount, MemorySnapshot, OptimizerProfile, Profile, TableProfile
from echelon.plan.text import from_text

USERS = TableProfile(path="users", rows=50_000, dim=16, lookups=Amount(0.0, 1.0), optimizer="Adagrad")
SMALL = TableProfile(path="days", rows=7, dim=4, lookups=Amount(0.0, 1.0), optimizer="Adagrad")
TIED = replace(USERS, path="items", unsupported_reason="its weight is another module's too; untie them")
PROFILE = Profile(
    model="m", name="Net", batch=64, precision="fp32", device="cpu", parameters=(), modules=(), operators=(),
    moments=(MemorySnapshot(module="loss", phase="backward", alive=Amount(1.0), saved=Amount(), gradients=0.0),),
    optimizers=(OptimizerProfile(name="Adagrad", state_bytes=0, temporary_bytes=0, trainable_elements=10**7),), tables=(USERS, SMALL, TIED),
)  # fmt: skip


def told(text: str, profile: Profile | None = None) -> str:
    return "\n".join(str(problem) for problem in check(from_text(text), profile))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("staleness=4", "staleness=4: needs a parameter server; add exchange=server"),
        ("staleness=none", "staleness=none: needs a parameter server"),
        (
            "exchange=server replicas=2",
            "replicas=2: each replica needs its own server, and servers=1; use servers=2 or more",
        ),
        ("exchange=server dp=2 zero=1", "zero=1: under exchange=server the large tables are sharded over the servers"),
        ("exchange=server tp=2", "tp=2: under exchange=server each rank has its own samples"),
        ("exchange=server compile", "compile=True: forward receives rows from a server"),
        ("exchange=server recompute=block", "recompute=block: recomputation would read rows again"),
        ("exchange=server dense=server staleness=2 batchnorm=sync", "batchnorm=sync: asynchronous ranks have no"),
        (
            "exchange=server dense=server staleness=none precision=fp16",
            "precision=fp16: all ranks must learn of an overflow",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(text: str, words: str) -> None:
    assert words in told(text)


def test_what_can_be_is_not() -> None:
    for text in ("exchange=server dp=4", "exchange=server dp=2 servers=3 replicas=3 staleness=none dense=server"):
        assert told(text, PROFILE) == ""


def test_a_model_has_to_have_tables_that_can_be_served() -> None:
    assert "Net has no table (nn.Embedding, nn.EmbeddingBag) of rows=1000000 or more; use rows=50000" in told(
        "exchange=server rows=1000000", PROFILE
    )
    only = replace(PROFILE, tables=(SMALL, TIED))
    assert "no table can be served (items: its weight is another module's too" in told("exchange=server", only)
    named = from_text("exchange=server").replace(tables=(ServedTable(path="users", rows=50_000, dim=8),))
    assert "Net has 50000 x 16 there" in "\n".join(map(str, check(named, PROFILE)))
    named = named.replace(tables=(ServedTable(path="items", rows=50_000, dim=16),))
    assert "untie them" in "\n".join(map(str, check(named, PROFILE)))


def test_clipping_needs_ranks_that_wait_for_each_other() -> None:
    clipped = replace(PROFILE, clips_gradients=True)
    assert "clip_norm= needs the norm of all ranks' gradients" in told(
        "exchange=server dense=server staleness=2", clipped
    )
    assert told("exchange=server staleness=2", clipped) == told("exchange=server dense=server", clipped) == ""


def test_servers_compute_some_optimizers_only() -> None:
    strange = replace(
        PROFILE,
        optimizers=(
            *PROFILE.optimizers,
            OptimizerProfile(name="Lion", state_bytes=0, temporary_bytes=0, trainable_elements=9),
        ),
    )
    assert "servers do not compute Lion, but SGD, Adagrad, Adam, AdamW" in told("exchange=server dense=server", strange)
    assert told("exchange=server", strange) == ""
    # What trains tables alone is looked at with these.
    rows = replace(PROFILE, tables=(replace(USERS, optimizer="SparseAdam"),))
    sparse = replace(
        rows,
        optimizers=(
            OptimizerProfile(name="SparseAdam", state_bytes=0, temporary_bytes=0, trainable_elements=50_000 * 16),
        ),
    )
    assert told("exchange=server dense=server", sparse) == ""


def test_tables_are_found_by_their_size() -> None:
    plan = from_text("exchange=server")
    assert choose_served_tables(plan, PROFILE) == (ServedTable(path="users", rows=50_000, dim=16),)
    assert [each.path for each in choose_served_tables(plan.replace(min_table_rows=5), PROFILE)] == ["users", "days"]
    beyond = replace(PROFILE, tables=(replace(USERS, rows=MAX_RANK_TABLE_BYTES // 64 + 1),))
    assert choose_served_tables(plan, beyond)[0].initialized_by == "server"  # no rank ever makes it
    assert plan.incomplete
    assert not plan.replace(tables=choose_served_tables(plan, PROFILE)).incomplete


def test_in_words() -> None:
    words = describe_plan(from_text("dp=2 exchange=server servers=3 replicas=2 staleness=4"))
    assert "3 parameter servers hold the tables, each row on 2 of them" in words
    assert "more than 4 steps ahead of the slowest" in words
    assert "gradients are all-reduced" not in describe_plan(from_text("dp=2 exchange=server dense=server"))
    assert Plan(
        exchange="server",
        server=ServerPlan(dense="server", staleness=None),
    ).asynchronous
    assert not Plan(exchange="server", server=ServerPlan(dense="server")).asynchronous


def test_rows_that_are_touched() -> None:
    assert USERS.distinct_rows(100) == pytest.approx(100, rel=0.01)
    assert USERS.distinct_rows(10**7) == pytest.approx(50_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("staleness=soon", "staleness='soon' is not an integer"),
        ("staleness", "staleness needs a number of steps, or none"),
        ("replicas=4", "each row is on 1 to 3 servers"),
        ("exchange=pigeon", "is not one of allreduce, server"),
    ],
)
def test_wrong_text_is_answered(text: str, message: str) -> None:
    from echelon.errors import PlanError

    with pytest.raises(PlanError, match=message):
        from_text(text)

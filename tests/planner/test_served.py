"""Forecasts and search with a parameter server, on a model whose table is most of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.plan.catalogue import parse_cluster as named
from echelon.plan.check import check
from echelon.plan.plan import Plan
from echelon.plan.profile import (
    Amount,
    MemorySnapshot,
    Operator,
    OptimizerProfile,
    ParameterProfile,
    Profile,
    TableProfile,
)
from echelon.plan.text import from_text
from echelon.planner import explain, search, why_not
from echelon.planner.data_plans import should_offer_servers
from echelon.simulator import simulate
from echelon.simulator.parameter_server_cost import (
    fill_served_tables,
    server_memory_bytes,
    server_traffic,
    without_served_tables,
)
from tests.simulator.cases import make_cluster, make_gpus, make_profile


def make_clicks(rows: int = 1_000_000, *, batch: int = 256) -> Profile:
    """The stack of linear layers, after a table of rows of 64 numbers, four of which a sample reads."""
    plain = make_profile(blocks=2, width=64, batch=batch)
    table = TableProfile(path="users", rows=rows, dim=64, lookups=Amount(0.0, 4.0), optimizer="Adagrad")
    read = Operator(name="embedding", kind="stream", phase="forward", module="users", moved=Amount(0.0, 4 * 520.0))
    written = replace(read, name="embedding_dense_backward", phase="backward", moved=Amount(table.bytes, 4 * 264.0))
    elements = plain.elements + rows * 64
    done = MemorySnapshot(
        module="users embedding_dense_backward", phase="backward", alive=Amount(float(table.bytes), 4 * 256.0), saved=Amount(),
        gradients=float(plain.bytes), blocks=1,
    )  # fmt: skip
    return replace(
        plain,
        parameters=(ParameterProfile(name="users.weight", shape=(rows, 64)), *plain.parameters),
        operators=(read, *plain.operators, written),
        moments=(*plain.moments, done),
        optimizers=(
            OptimizerProfile(
                name="Adagrad", state_bytes=4 * elements, temporary_bytes=4 * rows * 64, trainable_elements=elements
            ),
        ),
        tables=(table,),
    )


def served(text: str, profile: Profile) -> Plan:
    return fill_served_tables(from_text(f"exchange=server {text}"), profile)


def test_ranks_hold_rows_and_not_the_table() -> None:
    profile, cluster = make_clicks(), make_gpus(2, 64e9)
    whole, mine = (simulate(profile, cluster, plan) for plan in (Plan(), served("dp=1", profile)))
    assert mine.memory.peak < whole.memory.peak / 10
    left = without_served_tables(profile, served("dp=1", profile))
    assert left.elements == make_profile(blocks=2, width=64).elements
    assert left.optimizers[0].trainable_elements == left.elements
    # The servers hold it, with Adagrad's sums and the index.
    assert server_memory_bytes(profile, served("dp=1", profile)) > 2 * profile.tables[0].bytes
    assert server_memory_bytes(profile, served("dp=1 servers=2 replicas=2", profile)) > 4 * profile.tables[0].bytes
    assert any("1 server holds 1 table of 256 MB" in note for note in mine.notes)


def test_servers_hold_the_state_that_the_optimizer_was_seen_to_keep() -> None:
    """SGD has momentum or not, which its name does not say."""
    profile = make_clicks()
    table = replace(profile.tables[0], optimizer="SGD")
    sizes = []
    for each in (0, 4):
        rule = replace(profile.optimizers[0], name="SGD", state_bytes=each * profile.optimizers[0].trainable_elements)
        changed = replace(profile, tables=(table,), optimizers=(rule,))
        sizes.append(server_memory_bytes(changed, served("dp=1", changed)))
    assert sizes[1] - sizes[0] == table.bytes


def test_a_bound_hides_what_being_in_step_waits_for() -> None:
    profile, cluster = make_clicks(), make_gpus(2, 64e9)
    in_step, bounded = (simulate(profile, cluster, served(f"dp=2 staleness={s}", profile)) for s in (0, 4))
    assert bounded.time.exchange < in_step.time.exchange
    assert bounded.time.hidden > in_step.time.hidden
    assert "results differ from those of one device" in bounded.notes[-1]


def test_more_rows_and_more_replicas_never_cost_less() -> None:
    profile = make_clicks()
    before = server_traffic(profile, served("dp=2", profile), 64)
    assert server_traffic(profile, served("dp=2", profile), 128).transfer_bytes > before.transfer_bytes
    assert (
        server_traffic(profile, served("dp=2 servers=2 replicas=2", profile), 64).server_seconds > before.server_seconds
    )
    assert server_traffic(profile, served("dp=2 dense=server", profile), 64).transfer_bytes > before.transfer_bytes


def test_servers_are_offered_where_the_table_fits_no_device() -> None:
    profile = make_clicks(10_000_000)  # 2.6 GB, and as much of Adagrad's and of gradients
    best = search(profile, make_gpus(2, 3e9))
    assert best[0].plan.uses_servers
    assert best[0].plan.server.tables[0].path == "users"
    assert not [each for each in check(best[0].plan, profile) if each.severity == "error"]
    told = explain(best)
    assert "1 table of 2.56 GB" in told
    assert "hidden" in told
    # Where it fits it is not asked for.
    assert not any(each.plan.uses_servers for each in search(make_clicks(), make_gpus(2, 64e9)))


def test_why_not_says_what_servers_would_cost_or_what_forbids_them() -> None:
    profile, cluster = make_clicks(), make_cluster(cores=2, memory=64e9)
    best = search(profile, cluster)[0].plan
    assert "against" in why_not(profile, cluster, from_text("dp=2 exchange=server"), best)
    tied = replace(
        profile, tables=(replace(profile.tables[0], unsupported_reason="AdamW moves every row; use SparseAdam"),)
    )
    assert "AdamW moves every row; use SparseAdam" in why_not(tied, cluster, from_text("exchange=server"), best)


def test_tables_beyond_the_hosts_memory_do_not_fit() -> None:
    profile = make_clicks(2_000_000_000)  # half a terabyte, twice with Adagrad's
    forecast = simulate(profile, make_gpus(2, 64e9), served("dp=2", profile))
    assert not forecast.fits
    assert forecast.peak_at == "the servers' tables, in host memory"
    # Rows that begin on servers are made when they are first pushed to: few samples read few of them.
    few = replace(profile, samples=10_000)
    assert served("dp=2", few).server.tables[0].initialized_by == "server"
    assert simulate(few, make_gpus(2, 64e9), served("dp=2", few)).fits


def test_unequal_devices_and_large_tables_are_worth_a_look() -> None:
    assert not should_offer_servers(make_clicks(), named("2xA100-80GB"))
    assert should_offer_servers(make_clicks(400_000_000), named("2xA100-80GB"))
    assert not should_offer_servers(make_profile(), named("2xA100-80GB"))


def test_a_cluster_by_its_data_sheets_gets_servers_where_it_needs_them() -> None:
    profile = replace(make_clicks(500_000_000), device="cuda")
    found = search(profile, named("2xA100-80GB"), top=3)
    assert found[0].plan.uses_servers
    assert found[0].forecast.fits


@pytest.mark.parametrize("text", ["dp=2 staleness=none", "dp=1 servers=4", "dp=2 dense=server staleness=3"])
def test_every_forecast_has_its_bounds_in_order(text: str) -> None:
    profile = make_clicks()
    time = simulate(profile, make_cluster(cores=2, memory=64e9), served(text, profile)).time
    assert 0 <= time.low <= time.step <= time.high

"""What tp leaves whole: the integer program finds the best of all choices, and memory decides where it must."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.plan import catalogue
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.placement import Placement, TensorSlice
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.planner import search
from echelon.planner.tp_selection import (
    inseparable_modules,
    replicate_faster_modules,
    replicate_modules,
    select_to_replicate,
)
from echelon.simulator import simulate
from tests.simulator.cases import cut, make_language


def subsets(count: int) -> list[tuple[int, ...]]:
    """Every choice but all of them: something must be cut."""
    return list(chain.from_iterable(combinations(range(count), size) for size in range(count)))


@given(st.lists(st.tuples(st.integers(-20, 20), st.integers(-5, 20)), min_size=2, max_size=7), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_the_program_finds_the_best_of_all_choices(each: list[tuple[int, int]], room: int) -> None:
    costs, sizes = [cost / 64 for cost, _ in each], [size / 64 for _, size in each]
    fitting = [chosen for chosen in subsets(len(each)) if sum(sizes[at] for at in chosen) <= room / 64]
    best = min(sum(costs[at] for at in chosen) for chosen in fitting)
    left = select_to_replicate(costs, sizes, room / 64)
    assert tuple(left) in fitting
    assert sum(costs[at] for at in left) == pytest.approx(best)


def completed(plan: Plan, profile: Profile) -> Plan:
    """Pairs in blocks, the table and the head cut."""
    table = Placement(path="embed", cut="vocabulary", slices=(TensorSlice("weight", 0),))
    head = Placement(path="head", cut="logits", slices=(TensorSlice("weight", 0),))
    plan = cut(plan, profile)
    return plan.replace(placements=(*plan.tensor.placements, table, head)) if plan.mesh.tp > 1 else plan


def slow(memory: float = 80e9) -> Cluster:
    """Two devices whose link is slow: sums of what blocks pass on cost more than dividing them saves."""
    made = catalogue.parse_cluster("2xA100-80GB")
    node = made.nodes[0]
    assert node.wire is not None
    devices = tuple(replace(device, memory=int(memory)) for device in node.devices)
    return replace(made, nodes=(replace(node, devices=devices, wire=replace(node.wire, rate=3e9)),))


MODEL = make_language(blocks=4, width=2048, batch=1, length=2048, vocab=65536)


def needs(forecast: Forecast) -> float:
    return forecast.memory.required


def test_a_pair_is_cut_with_its_partner_and_a_tied_weight_with_its_other_name() -> None:
    plan = completed(Plan(mesh=Mesh(tp=2)), MODEL)
    assert set(inseparable_modules(plan, MODEL)) == {
        frozenset({"blocks.*.up", "blocks.*.down"}),
        frozenset({"embed"}),
        frozenset({"head"}),
    }
    tied = make_language(tied=True)
    assert frozenset({"embed", "head"}) in inseparable_modules(completed(Plan(mesh=Mesh(tp=2)), tied), tied)


def test_what_is_faster_whole_is_left_whole_unless_memory_forbids_it() -> None:
    plan = completed(Plan(mesh=Mesh(tp=2)), MODEL)

    def chosen(memory: float) -> Forecast:
        return replicate_faster_modules(plan, MODEL, lambda other: simulate(MODEL, slow(memory), other))

    everything = simulate(MODEL, slow(), plan)
    free = chosen(80e9)
    assert free.time.step < everything.time.step
    assert {each.path for each in free.plan.tensor.replicated} >= {"blocks.0.up", "blocks.3.down"}
    choices = [
        simulate(
            MODEL,
            slow(),
            replicate_modules(
                plan, set().union(*(inseparable_modules(plan, MODEL)[at] for at in left)) if left else ()
            ),
        )
        for left in subsets(3)
    ]
    assert free.time.step == pytest.approx(min(each.time.step for each in choices), rel=1e-3)
    # Room for all that is cut and little more: nothing can be left whole that is large.
    tight = chosen(needs(everything) * 1.001)
    assert tight.fits
    assert needs(tight) < needs(free)


def test_a_search_leaves_whole_what_is_faster_so() -> None:
    model = replace(MODEL, pipeline_units=())  # one sample and no stages: two ranks have nothing but tp
    (first, *_) = search(model, slow(), ranks=2, complete=lambda plan: completed(plan, model))
    everything = simulate(model, slow(), completed(first.plan.replace(placements=(), replicated=()), model))
    assert first.plan.mesh.tp == 2
    assert first.plan.tensor.replicated
    assert first.forecast.time.step < everything.time.step

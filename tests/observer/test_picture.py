"""Pictures and traces of a plan: what they show is what is forecast."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from echelon.errors import PlanError
from echelon.observer.plan_figure import to_svg, write_figure, write_trace
from echelon.observer.report.write import write_report
from echelon.plan import catalogue
from echelon.plan.text import from_text
from echelon.simulator import simulate
from echelon.simulator.calibration import load_constants
from echelon.simulator.timeline import Timeline, build_timeline
from tests.simulator.cases import cut, make_gpus, make_stack

PROFILE = make_stack(blocks=8, width=1024, batch=16, length=256)


def step(text: str = "dp=2 pp=4 micro=1", cluster: str = "2x8xA100-80GB") -> Timeline:
    return build_timeline(PROFILE, catalogue.parse_cluster(cluster), from_text(text))


def test_every_micro_batch_goes_through_every_stage_and_back() -> None:
    found = step()
    seen = Counter((event.kind, event.stage) for event in found.events if event.kind in ("forward", "backward"))
    assert seen == {(kind, stage): 8 for kind in ("forward", "backward") for stage in range(4)}
    assert (found.shown_micro_batches, found.micro_batch_count) == (8, 8)
    for rank in range(4):
        mine = sorted((event.begin, event.end) for event in found.events if event.rank == rank)
        assert all(before[1] <= after[0] + 1e-12 for before, after in itertools.pairwise(mine))


def test_the_last_event_ends_when_the_step_is_forecast_to() -> None:
    plan, cluster = from_text("dp=2 pp=4 micro=1"), catalogue.parse_cluster("8xA100-80GB")
    told = simulate(PROFILE, cluster, plan).time
    # What the host does between steps is no event; what it does between micro-batches is within one.
    constants = load_constants()
    between = told.overhead * constants.step / (constants.step + 8 * constants.micro)
    ends = max(event.end for event in build_timeline(PROFILE, cluster, plan).events)
    assert ends == pytest.approx(told.step - between, rel=0.01)


def test_a_machine_that_was_measured_has_a_timeline_too() -> None:
    plan = cut(from_text("dp=1 pp=2 micro=4"), PROFILE)
    found = build_timeline(PROFILE, make_gpus(2, 64e9), plan)
    assert {event.kind for event in found.events} >= {"forward", "backward", "optimizer"}
    assert len(found.memory) == 2


def test_long_steps_show_their_beginning() -> None:
    found = build_timeline(
        replace(PROFILE, batch=4096), catalogue.parse_cluster("8xA100-80GB"), from_text("pp=4 micro=1")
    )
    assert found.shown_micro_batches < found.micro_batch_count == 4096


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures_are_written(tmp_path: Path, ending: str) -> None:
    path = write_figure(step("dp=2 tp=2 pp=4 micro=1"), tmp_path / "new" / f"plan.{ending}")
    if ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    text = path.read_text()
    ElementTree.fromstring(text)
    for word in ("dp=2 tp=2 pp=4 micro=1", "stage 3", "activations", "node 1", "backward"):
        assert word in text
    assert text == write_figure(step("dp=2 tp=2 pp=4 micro=1"), tmp_path / "again.svg").read_text()


def test_a_picture_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"a figure is a \.svg or \.png file"):
        write_figure(step(), tmp_path / "plan.gif")


def test_the_trace_holds_every_event(tmp_path: Path) -> None:
    found = step()
    made = json.loads(write_trace(found, tmp_path / "trace.json").read_text())
    spans = [each for each in made["traceEvents"] if each["ph"] == "X"]
    assert len(spans) == len(found.events)
    assert {each["tid"] for each in spans} == {0, 1, 2, 3}
    assert all(each["dur"] >= 0 for each in spans)


def test_the_report_of_a_run_shows_the_step(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    assert "The step as forecast" not in write_report(folder).read_text()
    cluster, plan = make_gpus(2, 64e9), from_text("dp=2")
    for document in (PROFILE, cluster, plan):
        document.save(folder / f"{document.KIND}.json")
    page = write_report(folder).read_text()
    assert "The step as forecast" in page
    assert to_svg(build_timeline(PROFILE, cluster, plan))[:200] in page

"""What is slow is not said to be impossible."""

from __future__ import annotations

from pathlib import Path

from echelon.cli.doctor import _list_problems, _slow_precisions
from echelon.plan.check import check
from echelon.plan.cluster import Cluster, Device, Node, RateCurve, RatePoint
from echelon.plan.mesh import Mesh
from echelon.plan.text import from_text


def measured(rate: float) -> Cluster:
    """A CPU whose bfloat16 products run at `rate`, its float32 ones at 1e9."""
    curves = tuple(
        RateCurve(operation="mm", dtype=dtype, points=(RatePoint((64.0, 64.0, 64.0), value),))
        for dtype, value in (("float32", 1e9), ("bfloat16", rate))
    )
    device = Device(kind="cpu", name="cpu", memory=2**30, cores=2, curves=curves)
    return Cluster(name="here", nodes=(Node(name="n", cores=2, memory=2**30, devices=(device,)),), versions={})


def test_a_slow_precision_works() -> None:
    cluster = measured(1e7)
    (said,) = _slow_precisions(cluster.nodes[0].devices[0])
    assert said == "precision=bf16: matrix products measured 100 times slower than fp32's on this CPU"
    assert not any("precision" in problem for problem in _list_problems(cluster))
    assert _slow_precisions(measured(2e9).nodes[0].devices[0]) == []


def test_only_axes_that_are_not_executed_are_problems() -> None:
    (axes,) = [problem for problem in _list_problems(measured(1e9)) if "axes" in problem]
    named = axes.removeprefix("the axes ").partition(":")[0].split(" and ")
    for axis in Mesh.__dataclass_fields__:
        plan = "dp=2 ep=2" if axis == "ep" else f"{axis}=2"  # experts are spread over the data axis
        executed = not any(problem.not_implemented for problem in check(from_text(plan)))
        assert executed == (axis not in named), axis


def test_what_verify_leaves_is_not_committed() -> None:
    assert "/certificate.json" in (Path(__file__).parents[2] / ".gitignore").read_text().splitlines()

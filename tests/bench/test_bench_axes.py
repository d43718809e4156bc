"""What is raced in `python -m bench.axes` computes the same on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bench.axes import PLANS, race_axis
from bench.handwritten import BY_HAND
from bench.workloads import WORKLOADS, HeadGPT, Workload, tokens
from echelon.engine.run import Run
from echelon.partition.complete_plan import complete
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.sampling import only_whole

SMALL = Workload(
    name="small",
    what="",
    model=lambda: HeadGPT(vocab=32, context=8, width=16, layers=4, heads=2),
    samples=lambda: tokens(64, 8, 32),
    loss=WORKLOADS["gpt-axes"].loss,
    optimizer=WORKLOADS["gpt-axes"].optimizer,
    batch=8,
)


def losses(world: World, axis: str, plan: Plan) -> list[tuple[float, float | None]]:
    """Step by step: echelon's loss and that by hand, of the same batches; None: it is computed on another rank."""
    theirs = BY_HAND[axis](SMALL, world, plan)
    found: list[tuple[float, float | None]] = []
    with Run(SMALL.job(steps=4), plan, world) as run:
        for batch in run.batches():
            parts: Sequence[tuple[torch.Tensor, torch.Tensor]] = [micro.batch for micro in batch.micro_batches]
            inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
            ours, loss = run.step(batch).loss, theirs.step(inputs, targets)
            found.append((float(ours), None if loss is None else float(loss)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("axis", [pytest.param("tp", marks=only_whole), *(axis for axis in PLANS if axis != "tp")])
def test_the_axes_by_hand_train_as_echelon_does(ranks: RankPool, axis: str) -> None:
    plan = complete(from_text(PLANS[axis]), SMALL.job())
    each = ranks.run(2, losses, axis, plan)
    ours = [one for one, _ in each[0]]
    if axis == "zero":  # by hand a rank has the loss of its own samples
        theirs = [(one[1] + other[1]) / 2 for one, other in zip(*each, strict=True)]
    else:
        theirs = [loss for _, loss in each[-1]]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[0] != pytest.approx(ours[-1], rel=1e-3)  # they train


@only_whole
def test_a_race_times_both(ranks: RankPool) -> None:
    plan = complete(from_text(PLANS["zero"]), WORKLOADS["gpt-axes"].job())
    ours, theirs = ranks.run(2, race_axis, "zero", plan, 1, 1.0, timeout=300)[0]
    assert (ours.name, theirs.name) == ("echelon", "by hand")
    assert min(ours.cpu) > 0 < min(theirs.cpu)

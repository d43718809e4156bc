"""Half precision: the loss scale follows overflows, all ranks agree on a skipped step, and token sums stay in range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.engine.precision import LossScale
from echelon.engine.run import Run
from echelon.plan.text import from_text
from echelon.testing.ranks import Pool
from echelon.world import World
from tests.engine.jobs import mlp, tokens


def test_the_scale_halves_at_an_overflow_and_doubles_with_patience() -> None:
    scale = LossScale(scale=1024.0, patience=3)
    scale.update(overflow=True)
    assert scale.scale == 512
    for _ in range(3):
        scale.update(overflow=False)
    assert scale.scale == 1024
    for _ in range(2):
        scale.update(overflow=False)
    scale.update(overflow=True)
    assert (scale.scale, scale.good) == (512, 0)
    for _ in range(100):
        scale.update(overflow=True)
    assert scale.scale == 1


def halves(world: World, plan: str) -> list[dict[str, Any]]:
    """An fp16 job whose second step overflows on one rank's samples only."""
    calls = 0

    def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        value = F.cross_entropy(output.float(), batch[-1])
        return value * 1e30 if calls == 2 and world.rank == world.size - 1 else value

    run = Run(mlp(loss=loss, precision="fp16", clip=1.0), from_text(plan), world)
    found = []
    for batch in run.batches():
        before = [value.detach().clone() for value in run.model.parameters()]
        step = run.step(batch)
        changed = any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
        assert run.loss_scale is not None
        found.append({"skipped": step.skipped, "changed": changed, "scale": run.loss_scale.scale})
    run.close()
    return found


@pytest.mark.parametrize("plan", ["dp=2 precision=fp16", "dp=2 zero=3 precision=fp16"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Pool, plan: str) -> None:
    for found in ranks.run(2, "tests.engine.test_precision:halves", plan):
        assert [step["skipped"] for step in found] == [False, True, False, False]
        # Each rank holds something that changes in every step that is not skipped.
        assert [step["changed"] for step in found] == [True, False, True, True]
        assert [step["scale"] for step in found] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


def test_sums_over_tokens_do_not_overflow_the_scale() -> None:
    """A sum over many tokens times the scale is far out of fp16's range; the step must still be a good one."""
    job = tokens(batch=24, precision="fp16")
    run = Run(job, from_text("precision=fp16"), World())
    step = run.step(next(iter(run.batches())))
    whole = Run(job, from_text("precision=fp32"), World())
    exact = whole.step(next(iter(whole.batches())))
    assert not step.skipped
    assert float(step.loss) == pytest.approx(float(exact.loss), rel=1e-2)
    assert run.nominal == 2.0 ** round(torch.log2(torch.tensor(run.nominal)).item())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_full(precision: str) -> None:
    losses = {}
    for kind in ("fp32", precision):
        run = Run(mlp(precision=kind), from_text(f"precision={kind}"), World())
        losses[kind] = [float(run.step(batch).loss) for batch in run.batches()]
        assert all(value.dtype == torch.float32 for value in run.model.parameters())
    assert losses[precision] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses[precision] != losses["fp32"]

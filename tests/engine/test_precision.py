"""Half precision: the loss scale follows overflows, all ranks agree on a skipped step, and token sums stay in range."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.engine.precision import LossScale
from echelon.engine.run import Run
from echelon.errors import TrainingError
from echelon.job import Job
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.jobs import mlp, tokens


def test_the_scale_halves_at_an_overflow_and_doubles_with_patience() -> None:
    scale = LossScale(scale=1024.0, growth_interval=3)
    scale.update(overflowed=True)
    assert scale.scale == 512
    for _ in range(3):
        scale.update(overflowed=False)
    assert scale.scale == 1024
    for _ in range(2):
        scale.update(overflowed=False)
    scale.update(overflowed=True)
    assert (scale.scale, scale.good_steps) == (512, 0)
    for _ in range(100):
        scale.update(overflowed=True)
    assert scale.scale == 1


def halves(world: World, plan: str) -> list[dict[str, Any]]:
    """An fp16 job whose second step overflows on one rank's samples only."""

    def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
        # By the step and not by the call: a step may be computed again.
        factor = 1e30 if run.step_number == 1 and world.rank == world.size - 1 else 1.0
        return F.cross_entropy(output.float() * factor, batch[-1])

    run = Run(mlp(loss=loss, precision="fp16", clip_norm=1.0), from_text(plan), world)
    found = []
    for batch in run.batches():
        before = [value.detach().clone() for value in run.model.parameters()]
        step = run.step(batch)
        changed = any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
        assert run.loss_scale is not None
        found.append({"skipped": step.skipped, "changed": changed, "scale": run.loss_scale.scale})
    run.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["dp=2 precision=fp16", "dp=2 zero=3 precision=fp16", "dp=2 shares=3:1 precision=fp16"]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, plan: str) -> None:
    for found in ranks.run(2, "tests.engine.test_precision:halves", plan):
        assert [step["skipped"] for step in found] == [False, True, False, False]
        # Each rank holds something that changes in every step that is not skipped.
        assert [step["changed"] for step in found] == [True, False, True, True]
        assert [step["scale"] for step in found] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


def test_sums_over_tokens_do_not_overflow_the_scale() -> None:
    """A sum over many tokens times the scale is far out of fp16's range; the step must still be a good one."""
    job = tokens(batch_size=24, precision="fp16")
    run = Run(job, from_text("precision=fp16"), World())
    step = run.step(next(iter(run.batches())))
    whole = Run(job, from_text("precision=fp32"), World())
    exact = whole.step(next(iter(whole.batches())))
    assert not step.skipped
    assert float(step.loss) == pytest.approx(float(exact.loss), rel=1e-2)
    assert run.nominal_count == 2.0 ** round(torch.log2(torch.tensor(run.nominal_count)).item())


def hopeless(world: World, plan: str) -> tuple[int, str]:
    """An fp16 job whose gradients overflow at any scale; how many steps it makes, and its last words."""
    job = mlp(loss=lambda output, batch: output.float().sum() * 1e38, precision="fp16", epochs=None, steps=40)
    run = Run(job, from_text(plan), world)
    try:
        for batch in run.batches():
            run.step(batch)
    except TrainingError as error:
        return run.step_number, str(error)
    finally:
        run.close()
    return run.step_number, "no error"


def test_a_run_that_diverged_in_fp16_stops(ranks: RankPool) -> None:
    for steps, message in ranks.run(2, "tests.engine.test_precision:hopeless", "dp=2 precision=fp16"):
        assert steps == 16 + 4  # from 2^16 down to 1, and the fifth overflow there
        assert "gradients overflow fp16 at step 21, as in the 4 steps before" in message


def test_overflows_now_and_then_are_not_hopeless() -> None:
    scale = LossScale(scale=1.0)
    for _ in range(20):
        for overflow in (True, True, True, True, False):
            scale.update(overflowed=overflow)
            assert not scale.has_diverged
    for _ in range(5):
        scale.update(overflowed=True)
    assert scale.has_diverged


def set_switches(matmul: str, convolution: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = convolution


def switches() -> tuple[str, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older switch announces the newer ones
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("precision", "within"), [("fp32", ("highest", False)), ("tf32", ("high", True))])
def test_switches_follow_the_precision_and_are_put_back(precision: str, within: tuple[str, bool]) -> None:
    before = switches()
    users = ("medium", not within[1])
    try:
        set_switches(*users)
        with Run(mlp(), from_text(f"precision={precision}"), World()) as run:
            assert switches() == within
        assert switches() == users
        with Run(mlp(), from_text("precision=bf16"), World()):
            assert switches() == users
        set_switches(*within)
        run.close()  # a second time: it is not its business any more
        assert switches() == within
    finally:
        set_switches(*before)


def filters(world: World, plan: str) -> bool:
    """Whether a run leaves the process's warning filters as they were."""
    with warnings.catch_warnings():
        warnings.resetwarnings()  # what other tests' runs in this process left
        with Run(mlp(), from_text(plan), world) as run:
            run.step(next(iter(run.batches())))
            changed = bool(warnings.filters)
        return changed and not warnings.filters


def test_a_sharded_run_puts_the_warning_filters_back(ranks: RankPool) -> None:
    assert all(ranks.run(2, "tests.engine.test_precision:filters", "dp=2 zero=3"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_full(precision: str) -> None:
    losses = {}
    for kind in ("fp32", precision):
        run = Run(mlp(precision=kind), from_text(f"precision={kind}"), World())
        losses[kind] = [float(run.step(batch).loss) for batch in run.batches()]
        assert all(value.dtype == torch.float32 for value in run.model.parameters())
    assert losses[precision] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses[precision] != losses["fp32"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_step_as_in_a_plain_loop(dtype: torch.dtype, kind: Any) -> None:
    """torch's fused kernels do not, on a CPU."""
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    job = Job(
        model=lambda: nn.Linear(64, 1).to(dtype),
        loss=lambda output, batch: output.float().square().mean(),
        optimizer=lambda parameters: kind(parameters, lr=0.1, **({} if kind is torch.optim.SGD else {"eps": 1e-3})),
        data=TensorDataset(inputs, inputs),
        batch_size=8,
        epochs=3,
    )
    with Run(job, from_text("dp=1"), World()) as run:
        model = nn.Linear(64, 1).to(dtype)
        model.load_state_dict(run.model.state_dict())
        optimizer = kind(model.parameters(), lr=0.1, **({} if kind is torch.optim.SGD else {"eps": 1e-3}))
        for batch in run.batches():
            run.step(batch)
            optimizer.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.step()
        assert all(
            torch.allclose(one.float(), two.float(), rtol=0.05, atol=0.02)
            for one, two in zip(model.parameters(), run.model.parameters(), strict=True)
        )

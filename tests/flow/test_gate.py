"""The gate before a training and the spot checks in it: what is proved, kept, refused, left, and noticed later."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import echelon
from echelon.engine.run import Run
from echelon.errors import DivergenceError, LaunchError, PlanError, UnverifiedPlanError
from echelon.events import Event
from echelon.flow import gate
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import ResolvedPlan
from echelon.flow.run_folder import RunFolder
from echelon.observer import read_events
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler import sample_coupling
from echelon.testing.rank_pool import RankError, RankPool
from echelon.verifier import spot_check
from echelon.world import World
from tests.flow.jobs import (
    checked_losses,
    checked_steps,
    coupled,
    failing_on_rank_1,
    keeping,
    kept,
    make,
    scaled,
    split_by_rank,
    trained_alone,
    trained_on_ranks,
)
from tests.sampling import some


@pytest.fixture(autouse=True)
def _gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ECHELON_VERIFY", "1")


def train(folder: Path, job: echelon.Job, plan: str, **settings: Any) -> list[Event]:
    events: list[Event] = []
    echelon.train(job, plan, out=folder, quiet=True, listeners=[events.append], **settings)
    return events


def messages(events: list[Event], kind: str) -> list[str]:
    return [event.data["message"] for event in events if event.kind == kind]


class Late(nn.Module):
    """Begins to couple the samples of a batch after some calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.net, self.left = nn.Linear(8, 1), calls

    def forward(self, values: Tensor) -> Tensor:
        self.left -= 1
        found = self.net(values)
        return found if self.left > 0 else found - found.mean(0)


class Drops(nn.Module):
    """Draws random numbers, counts its calls and keeps a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)), 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        return self.net(values)


@pytest.mark.journey
def test_a_plan_is_verified_once(tmp_path: Path) -> None:
    first = train(tmp_path / "a", make(), "dp=1 micro=4")
    (line,) = messages(first, "verified")
    assert line.startswith("verified in ")
    assert '"dp=1 micro=4" computes what one device computes' in line
    certificate = json.loads((tmp_path / "a" / "certificate.json").read_text())
    assert certificate["verified"] is True
    (again,) = messages(train(tmp_path / "b", make(), "dp=1 micro=4"), "verified")
    assert again.startswith("verified by an earlier start")
    # Another plan is another proof.
    (other,) = messages(train(tmp_path / "c", make(), "dp=1 micro=2"), "verified")
    assert other.startswith("verified in ")


def test_one_process_needs_no_proof(tmp_path: Path) -> None:
    events = train(tmp_path / "run", make(), "dp=1")
    assert not messages(events, "verified")
    assert not (tmp_path / "run" / "certificate.json").exists()


def test_opting_out_is_logged(tmp_path: Path) -> None:
    events = train(tmp_path / "run", make(), "dp=1 micro=4", verify=False)
    assert any("--no-verify" in message for message in messages(events, "warning"))
    assert not messages(events, "verified")


class Leaky(torch.optim.SGD):
    """Steps further where forward was called several times: what micro-batches do and one batch does not."""

    passes = 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.01 * Leaky.passes
        Leaky.passes = 0
        super().step()


class Passed(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        Leaky.passes += 1
        return super().forward(values)


def test_a_plan_that_computes_something_else_does_not_train(tmp_path: Path) -> None:
    job = make(model=lambda: Passed(8, 1), optimizer=lambda parameters: Leaky(parameters, lr=0.01))
    wrong = '"dp=1 micro=4" does not compute what one device computes, first at '
    with pytest.raises(UnverifiedPlanError, match=f"{wrong}.*parameter"):
        train(tmp_path / "run", job, "dp=1 micro=4", fallback=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UnverifiedPlanError):  # from the cache
        train(tmp_path / "run", job, "dp=1 micro=4", fallback=False)
    # By default the job trains all the same, without what is wrong, and the reason is logged.
    events = train(tmp_path / "run", job, "dp=1 micro=4")
    assert [event.data["plan"] for event in events if event.kind == "start"] == ["dp=1"]
    assert any(f'"dp=1 micro=4" runs as "dp=1": {wrong}' in message for message in messages(events, "warning"))
    plain = train(tmp_path / "plain", job, "dp=1")
    assert not messages(plain, "verified")
    losses = [[event.data["loss"] for event in each if event.kind == "step"] for each in (events, plain)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("samples", ["all", "some"])
def test_behaviour_that_begins_late_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: str
) -> None:
    if samples == "some":
        monkeypatch.setattr(spot_check, "SECONDS_PER_CHECK", 1e-12)
    monkeypatch.setattr(sample_coupling, "MAX_LATER_CALLS", 0)
    job = make(model=lambda: Late(20), epochs=12)
    with pytest.raises(DivergenceError, match=r"step \d+: .* off what one device computes"):
        train(tmp_path / "run", job, "dp=1 micro=4", every=2)
    checkpoints = tmp_path / "run" / "checkpoints"
    agreed = RunFolder(tmp_path / "run", keep=2).last_checked_step()
    assert agreed >= 2, "the gate has checked two steps"
    saved = {int(path.name[5:13]): path.suffix for path in checkpoints.glob("step-*")}
    assert 2 in saved or agreed > 2, "the newest checkpoint that was checked stays, whatever keep= is"
    assert saved == {step: ".doubted" if step > agreed else "" for step in saved}
    assert min(saved) <= agreed < max(saved)
    # The proof of the first steps is withdrawn.
    with pytest.raises(UnverifiedPlanError, match="off what one device computes"):
        train(tmp_path / "again", job, "dp=1 micro=4", fallback=False)


def test_auto_goes_on_from_the_last_checkpoint_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second plan is proved at first, computes something else later, and is left with what it trained until then."""
    monkeypatch.setattr(sample_coupling, "MAX_LATER_CALLS", 0)
    job = make(model=lambda: Late(20), epochs=12)
    texts = ("dp=1 micro=4", "dp=1")
    monkeypatch.setattr(sys.modules["echelon.flow.train"], "candidate_plans", lambda *_, **__: plans(*texts))
    events = train(tmp_path / "run", job, "auto", every=2)
    starts = [(event.data["plan"], event.step) for event in events if event.kind == "start"]
    assert [plan for plan, _ in starts] == list(texts)
    assert any("off what one device computes" in message for message in messages(events, "warning"))
    steps = [event.step for event in events if event.kind == "step"]
    assert steps[-1] == 12 * 4
    assert len(steps) < 2 * 12 * 4, "it went on, and did not begin again"
    # It goes back behind the first step that the error may have reached, although later checkpoints were written.
    found = re.search(
        r"step (\d+) is the last that was checked.*: (step-.*?); .* starts from step-0*(\d+)",
        "\n".join(messages(events, "warning")),
    )
    assert found, "the log names what is set aside"
    agreed, aside, resumed = int(found[1]), [int(each[5:13]) for each in found[2].split(", ")], int(found[3])
    assert resumed == starts[1][1] <= agreed < min(aside)
    # All that was trained after it is trained again.
    again = steps.index(resumed + 1, steps.index(resumed + 1) + 1)
    assert steps[again:] == list(range(resumed + 1, 12 * 4 + 1))
    assert len({*map(str, (tmp_path / "run").parent.glob("run*"))}) == 1


class Edits(nn.Linear):
    """Changes its input in place, counts its calls and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.draws = torch.Generator().manual_seed(5)

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        values.mul_(0.9)
        return super().forward(values) + 1e-3 * torch.rand((), generator=self.draws)


def test_inputs_that_forward_changes_are_computed_with_once(tmp_path: Path) -> None:
    """By the step itself, the probe before it, and the checks."""
    found = [
        [event.data["loss"] for event in train(tmp_path / plan, make(model=Edits), plan) if event.kind == "step"]
        for plan in ("dp=1", "dp=1 micro=4")
    ]
    assert found[0] == pytest.approx(found[1], rel=5e-3)  # what is drawn differs, and is small; 0.9 is not


def mixup(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Mixes each sample of a batch with another one of it."""
    values, wanted = (torch.stack([row[place] for row in rows]) for place in (0, 1))
    share, others = torch.rand(()), torch.randperm(len(rows))
    return share * values + (1 - share) * values[others], share * wanted + (1 - share) * wanted[others]


def test_collation_that_mixes_samples_is_proved(tmp_path: Path) -> None:
    events = train(tmp_path / "run", make(collate=mixup), "dp=1 micro=3")
    assert messages(events, "verified")
    assert [event.data["count"] for event in events if event.kind == "checked"] != [0]
    coupled = make(collate=mixup, loss=lambda output, batch: (output - batch[-1]).std())
    with pytest.raises(UnverifiedPlanError, match="does not compute what one device computes"):
        train(tmp_path / "coupled", coupled, "dp=1 micro=4", fallback=False)


class Queue(nn.Linear):
    """Keeps its last four inputs, which parts of a batch cannot do as the whole does."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.register_buffer("ring", torch.zeros(4, 8))

    def forward(self, values: Tensor) -> Tensor:
        found = super().forward(values) + 1e-3 * self.ring.mean()
        with torch.no_grad():
            self.ring.copy_(torch.cat([self.ring, values])[-4:])
        return found


def test_state_of_whole_batches_is_trained_undivided(tmp_path: Path) -> None:
    for plan in ("dp=1", "dp=1 micro=4"):
        events = train(tmp_path / plan, make(model=Queue), plan)
        assert [event.data["plan"] for event in events if event.kind == "start"] == ["dp=1"]
    assert any(
        '"dp=1 micro=4" runs as "dp=1"' in message and "ring" in message for message in messages(events, "warning")
    )


class Thaws(nn.Module):
    """Lets its first layer train from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(8, 8), nn.Linear(8, 1), 0
        self.first.requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.first.requires_grad_(True)
        return self.last(self.first(values))


def test_one_process_trains_what_is_unfrozen_late(tmp_path: Path) -> None:
    job = make(model=Thaws, clip_norm=1.0)
    found = [event.data["loss"] for event in train(tmp_path / "run", job, "dp=1") if event.kind == "step"]
    with Run(make(model=Thaws), Plan(), World()) as run:
        model, batches = run.model, [batch.micro_batches[0].batch for batch in run.batches()]
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        for values, wanted in batches:
            loss = F.mse_loss(model(values), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.journey
@pytest.mark.parametrize("plan", ["auto", "dp=2", "dp=2 zero=3"])
def test_rank_0_trains_alone_where_no_plan_for_all_is_right(
    ranks: RankPool, tmp_path: Path, plan: str, known_machine: Path
) -> None:
    found = ranks.run(
        2, trained_alone, str(tmp_path / "run"), plan, str(known_machine), init_process_group=False, timeout=240
    )
    assert found[0] == found[1]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [each["plan"] for each in events if each["kind"] == "start"] == ["dp=1"]
    alone = train(tmp_path / "alone", coupled(), "dp=1")
    assert [event.data["loss"] for event in alone if event.kind == "step"] == [
        each["loss"] for each in events if each["kind"] == "step"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan", "words"),
    [
        ("sparse", "auto", "optimizer= is SparseAdam, which takes sparse gradients alone"),
        ("sparse", "dp=2", "optimizer= is SparseAdam, which takes sparse gradients alone"),
        ("scaled", "pp=2 micro=4", "cannot train loss.scale, a parameter of loss="),
        ("normalised", "dp=2", "differs when it is read again; each data rank reads only some of the samples"),
    ],
)
def test_one_process_trains_what_ranks_cannot_exchange(
    ranks: RankPool, tmp_path: Path, known_machine: Path, kind: str, plan: str, words: str
) -> None:
    folder = tmp_path / "run"
    ranks.run(2, trained_on_ranks, kind, str(folder), plan, str(known_machine), init_process_group=False, timeout=240)
    events = read_events(folder)
    assert [event.data["plan"] for event in events if event.kind == "start"] == ["dp=1"]
    assert any(words in message for message in messages(events, "warning"))
    assert sum(event.kind == "step" for event in events) == (4 if kind == "sparse" else 12)


@pytest.mark.slow
def test_a_job_that_asks_for_the_number_of_processes_is_warned_of(
    ranks: RankPool, tmp_path: Path, known_machine: Path
) -> None:
    ranks.run(
        2, trained_on_ranks, "scaled by hand", str(tmp_path), "dp=2", str(known_machine), init_process_group=False
    )
    assert any("the job reads WORLD_SIZE" in message for message in messages(read_events(tmp_path), "warning"))


@pytest.mark.slow
def test_rank_0_names_what_failed_on_another_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, failing_on_rank_1, str(tmp_path / "run"), init_process_group=False, timeout=120)
    (message, *_) = messages(read_events(tmp_path / "run"), "warning")
    assert '"dp=2 zero=3" runs as "dp=1"' in message
    assert "rank 1 cannot have this part of the batch" in message


@pytest.mark.slow
def test_what_modules_keep_raises_no_alarm(ranks: RankPool, tmp_path: Path, known_machine: Path) -> None:
    ranks.run(2, kept, str(tmp_path / "run"), str(known_machine), init_process_group=False, timeout=120)
    events = read_events(tmp_path / "run")
    assert [event.data["plan"] for event in events if event.kind == "start"] == ["dp=2"]
    alone = train(tmp_path / "alone", keeping(), "dp=1")
    assert [event.data["loss"] for event in events if event.kind == "step"] == pytest.approx(
        [event.data["loss"] for event in alone if event.kind == "step"], rel=1e-4
    )


def test_ranks_that_wait_learn_of_a_failure(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"the loss is (nan|inf)"):
        ranks.run(2, trained_alone, str(tmp_path / "run"), "dp=2", "", math.inf, init_process_group=False, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("samples", ["all", "some"])
def test_spot_checks_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: str) -> None:
    """Dropout, a counter and batch statistics: the checked run trains what an unchecked one does, bit for bit."""
    if samples == "some":
        monkeypatch.setattr(spot_check, "SECONDS_PER_CHECK", 1e-12)
    job = make(model=Drops, epochs=4)

    def losses(folder: str, verify: bool) -> list[float]:
        events = train(tmp_path / folder, job, "dp=1 micro=4", verify=verify)
        return [event.data["loss"] for event in events if event.kind == "step"]

    assert losses("checked", True) == losses("plain", False)


@pytest.mark.slow
def test_spot_checks_leave_the_losss_own_gradients(tmp_path: Path) -> None:
    found = [
        [event.data["loss"] for event in train(tmp_path / str(verify), scaled(Drops), "dp=1 micro=4", verify=verify)
         if event.kind == "step"]
        for verify in (True, False)
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("plan", some("checked", ["dp=2", "dp=2 zero=3", "tp=2", "pp=2 micro=4"], 2))
def test_ranks_are_checked_and_train_the_same(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    checked = ranks.run(2, checked_losses, str(tmp_path / "checked"), plan, True, timeout=240)
    plain = ranks.run(2, checked_losses, str(tmp_path / "plain"), plan, False, timeout=240)
    (count, *losses) = checked[0]
    assert count > 0
    assert losses == plain[0][1:]


def test_every_launch_checks_other_steps() -> None:
    found = [checked_steps(World(), "dp=1") for _ in range(6)]
    assert len({tuple(steps) for steps in found}) > 1
    for steps in found:
        assert steps[-1] == 50 * 4 - 1
        first, *_ = starts = [3 * 2**place for place in range(7)]
        assert all(sum(start <= step < 2 * start for step in steps) in (1, 2) for start in starts if start < 199)
        assert steps[0] >= first
    assert checked_steps(World(), "dp=1", 7) == checked_steps(World(), "dp=1", 7)


def test_ranks_check_the_same_steps(ranks: RankPool) -> None:
    one, other = ranks.run(2, checked_steps, "dp=2", timeout=120)
    assert one == other


def failing(*kinds: str, started: bool = False) -> Any:
    left = list(kinds)

    def execute(prepared: ResolvedPlan) -> ResolvedPlan:
        if not left:
            return prepared
        error = LaunchError(f"{prepared.plan} is wrong")
        error.error_class, error.started = left.pop(0), started
        raise error

    return execute


def plans(*texts: str) -> Iterator[ResolvedPlan]:
    return iter([ResolvedPlan(plan=from_text(text)) for text in texts])


def test_auto_takes_the_first_plan_that_is_not_disproved() -> None:
    taken = gate.run_first_proved(plans("dp=4", "dp=2", "dp=1"), failing("UnverifiedPlanError", "DivergenceError"))
    assert taken.plan == Plan()
    assert 'auto left "dp=4": dp=4 is wrong' in taken.fallback
    assert 'auto left "dp=2": dp=2 is wrong' in taken.warnings


def test_other_errors_before_the_first_step_lead_to_one_process() -> None:
    taken = gate.run_first_proved(plans("dp=4", "dp=2", "dp=1"), failing("WorldError"))
    assert taken.plan == Plan()
    with pytest.raises(LaunchError, match="dp=1 is wrong"):  # the job itself is at fault
        gate.run_first_proved(plans("dp=4", "dp=2", "dp=1"), failing("JobError", "JobError"))


def test_without_fallback_the_given_plan_runs_or_nothing(tmp_path: Path) -> None:
    """Also where the profile alone shows that it cannot."""
    with pytest.raises(UnverifiedPlanError, match=r'"dp=1 micro=4" runs as "dp=1": .* \(--no-fallback'):
        train(tmp_path / "run", coupled(), "dp=1 micro=4", fallback=False)


def test_only_a_disproof_before_the_first_step_replaces_a_given_plan() -> None:
    def asked() -> Iterator[ResolvedPlan]:
        given = ResolvedPlan(plan=from_text("dp=2 tp=2 micro=4 recompute=block"))
        return iter([given, *gate.fallback_plans(given)])

    assert [str(each.plan) for each in asked()] == [
        "dp=2 tp=2 micro=4 recompute=block", "dp=2 tp=2 micro=4", "dp=1 tp=2 recompute=block", "dp=1"
    ]  # fmt: skip
    taken = gate.run_first_proved(asked(), failing("UnverifiedPlanError", "UnshardableStateError", "DivergenceError"))
    assert taken.plan == Plan()
    assert '"dp=1 tp=2 recompute=block" runs as "dp=1"' in taken.fallback
    for kind, started in (("WorldError", False), ("DivergenceError", True)):
        with pytest.raises(LaunchError):
            gate.run_first_proved(asked(), failing(kind, started=started))


def test_auto_stops_looking_when_its_time_is_over() -> None:
    asked = ("dp=4", "dp=3", "dp=2", "dp=1")
    kinds = ("UnverifiedPlanError", "UnverifiedPlanError")
    assert str(gate.run_first_proved(plans(*asked), failing(*kinds), lambda _: 30.0).plan) == "dp=2"
    assert str(gate.run_first_proved(plans(*asked), failing("UnverifiedPlanError"), lambda _: 0.0).plan) == "dp=1"
    # A plan that trained before it was disproved costs nothing of that time.
    assert (
        str(gate.run_first_proved(plans(*asked), failing("DivergenceError", started=True), lambda _: 0.0).plan)
        == "dp=3"
    )


def test_errors_of_a_running_training_end_it() -> None:
    with pytest.raises(LaunchError, match="dp=4 is wrong"):
        gate.run_first_proved(plans("dp=4", "dp=1"), failing("TrainingError", started=True))
    with pytest.raises(LaunchError, match="dp=2 is wrong"):  # nothing left to try
        gate.run_first_proved(plans("dp=2"), failing("UnverifiedPlanError"))


def test_auto_ends_at_one_process_where_nothing_can_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> ResolvedPlan:
        raise PlanError("no plan can be executed")

    monkeypatch.setattr(gate, "resolve_plan", refuse)
    (only,) = gate.candidate_plans(JobSource(make()), "auto")
    assert only.plan == Plan()
    assert "no plan can be executed" in only.fallback


@pytest.mark.parametrize(
    ("text", "plain"),
    [("dp=1", True), ("dp=1 micro=8", True), ("dp=1 micro=4", False), ("dp=1 recompute=block", False), ("dp=2", False)],
)
def test_what_needs_a_proof(text: str, plain: bool) -> None:
    assert gate.is_baseline(from_text(text), make()) is plain


def test_the_bound_grows_with_the_run() -> None:
    from tests.observer.runs import forecast

    expected = forecast()
    short = ResolvedPlan(plan=Plan(), forecast=expected)
    assert gate.verification_limit(make(epochs=None, steps=1), short) == gate.MIN_SECONDS
    steps = int(1e6 / expected.time.step)
    assert gate.verification_limit(make(epochs=None, steps=steps), short) == pytest.approx(
        gate.RUN_SHARE * 1e6, rel=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize(("share", "seed"), [(1, 1), (8, 1), (8, 3)], ids=["always", "seldom", "later"])
def test_data_that_cannot_be_read_twice_is_not_compared(
    tmp_path: Path, share: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        """Once the proof is made it gives other numbers each time, for one in `share` samples, as augmentation with entropy of its own does."""

        reads = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            Own.reads += 1
            value = torch.full((8,), float(index)) / 32
            other = Own.reads > 400 and index % share == 0
            return (value + Own.reads % 1000 * 1e-3 if other else value), value.sum().view(1)

    monkeypatch.setattr(spot_check.secrets, "randbits", lambda _: seed)
    events = train(tmp_path / "run", make(data=Own(), epochs=60), "dp=1 micro=4")
    assert events[-1].data["reason"] == "finished"
    found = [each for each in messages(events, "warning") if "gave other samples when they were read again" in each]
    assert len(found) == 1


@pytest.mark.slow
def test_ranks_that_begin_to_read_other_samples_are_stopped(ranks: RankPool, tmp_path: Path) -> None:
    for error in ranks.run(2, split_by_rank, str(tmp_path / "run"), init_process_group=False, timeout=120):
        assert "data rank 1 read other samples than rank 0 reads there" in error


class Entropy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Augments by entropy of its own."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.full((8,), index / 32) + int.from_bytes(os.urandom(2)) / 2**20
        return value, value.sum().view(1)


@pytest.mark.slow
def test_a_plan_is_proved_on_data_with_entropy_of_its_own(tmp_path: Path) -> None:
    events = train(tmp_path / "run", make(data=Entropy(), epochs=2), "dp=1 micro=4")
    (line,) = messages(events, "verified")
    assert line.startswith("verified in ")


def test_samples_are_fewer_where_time_is_short() -> None:
    from echelon.profiler import profile
    from echelon.verifier.reduced_job import reduce_job

    job = make(data=TensorDataset(torch.randn(600, 8), torch.randn(600, 1)), batch_size=301)
    found = profile(job)
    assert reduce_job(job, from_text("dp=2 micro=8"), found, found.flops(301), 6) is None
    few = reduce_job(job, from_text("dp=2 micro=8"), found, found.flops(301) / 20, 6)
    assert few is not None
    assert few.job.batch_size == 15
    assert few.plan.micro == 4
    assert few.job.steps == 6
    assert few.note == "sampled: the time allows 15 samples a step, of 301"


class Blocks(nn.Module):
    """Equal blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12))
        self.head = nn.Linear(8, 1)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + block(values)
        return self.head(values)


@pytest.mark.slow
def test_a_shortened_model_is_proved_for_the_whole() -> None:
    from echelon.profiler import profile
    from echelon.verifier.reduced_job import reduce_job

    job = make(model=Blocks)
    few = reduce_job(job, from_text("dp=1 micro=4"), profile(job), 1.0, 12)
    assert few is not None
    assert few.note.endswith("and the first 4 of 12 equal blocks in blocks")
    assert len(few.job.model().blocks) == 4


@pytest.mark.slow
def test_a_plan_is_proved_where_the_loss_draws_from_the_systems_entropy(tmp_path: Path) -> None:
    generator, log = random.SystemRandom(), list[float]()

    def loss(output: Tensor, batch: Any) -> Tensor:
        log.append(generator.random())
        return F.mse_loss(output, batch[-1])

    events = train(tmp_path / "run", make(loss=loss, epochs=2), "dp=1 micro=4")
    (line,) = messages(events, "verified")
    assert line.startswith("verified in ")
    assert len(set(log)) == len(log) > 0

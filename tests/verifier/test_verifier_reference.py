"""The reference against loops written out by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from echelon.engine.run import Run
from echelon.errors import JobError
from echelon.job import Job
from echelon.plan.batch_split import split_batch
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import ReferenceData, open_reference_data
from echelon.world import World

X = torch.randn(21, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (21,), generator=torch.Generator().manual_seed(2))
#: Samples that count, so that pieces of equal size weigh differently.
KEEP = torch.arange(21) % 3 > 0


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1])


def counted(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch[-1]
    return F.cross_entropy(output, labels, reduction="sum", ignore_index=-100), (labels != -100).sum()


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": net, "loss": mean, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.1), "data": TensorDataset(X, Y),
        "batch_size": 8, "epochs": 2, "seed": 3,
    }  # fmt: skip
    return Job(**settings | changes)


def plan(dp: int = 1, micro: int | None = None, **changes: Any) -> Plan:
    return Plan(mesh=Mesh(dp=dp), micro=micro, **changes)


def start(made: Job) -> nn.Module:
    torch.manual_seed(made.seed)
    return made.model().double()  # type: ignore[operator]


def whole(feed: ReferenceData, step: int) -> tuple[Tensor, Tensor]:
    x, y = feed.read(step, np.arange(feed.samples_in(step)))
    return x.double(), y


def require_same(reference: Reference, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(reference.model.state_dict()[name], value, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_mean_loss_with_clipping_over_an_uneven_last_batch(clip: float | None) -> None:
    made = job(clip_norm=clip)
    feed = open_reference_data(made)
    reference, model = Reference(made, plan(dp=3, micro=2), feed), start(made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert [feed.samples_in(step) for step in range(4)] == [8, 8, 5, 8]
    for step in range(4):
        record = reference.step(step)
        x, y = whole(feed, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        assert record.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        for name, value in model.named_parameters():
            torch.testing.assert_close(record.gradients[name], value.grad, rtol=1e-12, atol=1e-15)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else 1e9)
        assert record.norm is not None
        assert record.norm.item() == pytest.approx(norm.item(), rel=1e-12)
        optimizer.step()
    require_same(reference, model)
    assert record.optimizer.keys() == {
        f"0/{name}/{key}" for name, _ in model.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")
    }
    torch.testing.assert_close(record.optimizer["0/0.weight/exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_a_sum_and_count_loss_is_divided_by_the_count_of_the_whole_batch() -> None:
    labels = torch.where(KEEP, Y, -100)
    made = job(model=norm_net, loss=counted, data=TensorDataset(X, labels))
    feed = open_reference_data(made)
    reference, model = Reference(made, plan(dp=2, micro=2), feed), start(made)
    record = reference.step(0)
    x, y = whole(feed, 0)
    shares = [part for share in split_batch(8, 2, 2) for part in share]
    sums = [F.cross_entropy(model(x[s.start : s.stop]), y[s.start : s.stop], reduction="sum") for s in shares]
    assert len({int((y[s.start : s.stop] != -100).sum()) for s in shares}) > 1, "equal counts would prove nothing"
    loss = torch.stack(sums).sum() / (y != -100).sum()
    loss.backward()
    assert record.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, value in model.named_parameters():
        torch.testing.assert_close(record.gradients[name], value.grad, rtol=1e-10, atol=1e-14)


def test_local_batch_norm_runs_the_micro_batches_one_after_another() -> None:
    made = job(model=norm_net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    feed = open_reference_data(made)
    reference, model = Reference(made, plan(dp=2, micro=3), feed), start(made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2):  # 2 is short
        reference.step(step)
        x, y = whole(feed, step)
        optimizer.zero_grad()
        for share in split_batch(len(x), 2, 3):
            for part in share:
                loss = F.cross_entropy(model(x[part.start : part.stop]), y[part.start : part.stop])
                (loss * part.size / len(x)).backward()
        optimizer.step()
    require_same(reference, model)


def test_synchronised_batch_norm_runs_each_round_of_all_ranks_together() -> None:
    made = job(model=norm_net)
    feed = open_reference_data(made)
    reference, model = Reference(made, plan(dp=2, micro=2, batchnorm="sync"), feed), start(made)
    record = reference.step(0)
    x, y = whole(feed, 0)
    for positions in ([0, 1, 4, 5], [2, 3, 6, 7]):
        (F.cross_entropy(model(x[positions]), y[positions]) / 2).backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(record.gradients[name], value.grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(record.buffers["1.running_var"], model[1].running_var)
    assert record.buffers["1.num_batches_tracked"] == 2


def test_frozen_batch_norm_leaves_the_batch_whole() -> None:
    frozen = norm_net()
    frozen[1].train = lambda mode=True: frozen[1]  # type: ignore[index, method-assign]
    frozen[1].training = False  # type: ignore[index]
    reference = Reference(job(model=frozen), plan(dp=2, micro=2), open_reference_data(job()))
    assert [len(piece) for piece in reference.position_groups(8)] == [8]


@pytest.mark.parametrize("made", [job(), job(model=norm_net)], ids=["whole", "norm"])
def test_a_twin_has_the_same_samples_together_and_parameters_off_by_a_rounding(made: Job) -> None:
    feed, size = open_reference_data(made), 2.0**-52
    twin, plain = Reference(made, plan(dp=2), feed, perturbation=size), Reference(made, plan(dp=2), feed)
    assert [piece.tolist() for piece in twin.position_groups(5)] == [
        piece.tolist() for piece in plain.position_groups(5)
    ]
    for mine, true in zip(twin.model.parameters(), plain.model.parameters(), strict=True):
        apart = (mine - true).abs()
        assert apart.any() == true.any()
        assert (apart <= 2 * size * true.abs()).all()
    mine, true = twin.step(0), plain.step(0)
    assert mine.loss.item() == pytest.approx(true.loss.item(), rel=1e-12)
    assert any(not torch.equal(value, true.gradients[name]) for name, value in mine.gradients.items())


def test_a_module_is_copied_and_left_alone() -> None:
    module = net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    made = job(model=module)
    Reference(made, plan(), open_reference_data(made)).step(0)
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])


def test_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    made = job()
    Reference(made, plan(), open_reference_data(made)).step(0)
    assert torch.equal(before, torch.get_rng_state())


def test_schedules_step_once_per_step_and_are_told_the_total() -> None:
    def schedule(optimizer: Any, steps: int) -> Any:
        optimizer.param_groups[0]["total"] = steps
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    made = job(model=norm_net, lr_schedule=schedule)
    reference = Reference(made, plan(dp=2, micro=2), open_reference_data(made))
    reference.step(0)
    assert reference.optimizers[0].param_groups[0]["total"] == 6
    assert reference.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


def test_several_optimizers_by_name_and_frozen_parameters() -> None:
    def two(pairs: Any) -> list[torch.optim.Optimizer]:
        named = dict(pairs)
        assert "0.weight" not in named
        biases = [value for name, value in named.items() if name.endswith("bias")]
        weights = [value for name, value in named.items() if name.endswith("weight")]
        return [torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.Adam(biases, lr=0.1)]

    def frozen() -> nn.Module:
        model = net()
        model[0].weight.requires_grad_(False)
        return model

    made = job(model=frozen, optimizer=two)
    reference = Reference(made, plan(), open_reference_data(made))
    start = reference.model[0].weight.clone()  # type: ignore[index]
    record = reference.step(0)
    assert torch.equal(record.parameters["0.weight"], start)
    assert record.gradients["0.weight"] is None
    assert {"0/2.weight/momentum_buffer", "1/2.bias/exp_avg"} <= record.optimizer.keys()


def test_an_optimizer_that_looks_at_parameters_gets_parameters() -> None:
    made = job(optimizer=lambda params: torch.optim.SGD([p for p in params if p.ndim > 1], lr=0.1, momentum=0.5))
    reference = Reference(made, plan(), open_reference_data(made))
    assert reference.step(0).optimizer.keys() == {"0/0.weight/momentum_buffer", "0/2.weight/momentum_buffer"}


def test_pretrained_weights_and_the_meta_device(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.full((5, 4), 0.25)}, file)

    def empty() -> nn.Module:
        with torch.device("meta"):
            return net()

    made = job(model=empty, weights=file)
    model = Reference(made, plan(), open_reference_data(made)).model
    assert torch.equal(model[0].weight, torch.full((5, 4), 0.25, dtype=torch.float64))  # type: ignore[index]
    assert model[2].weight.abs().sum() > 0  # type: ignore[index]


def test_weights_of_a_checkpoint_and_of_a_runs_last_one_are_read(tmp_path: Any) -> None:
    with Run(job(), plan(), World()) as run:
        batches = run.batches(2)
        for number in (1, 2):
            run.step(next(batches))
            run.save(tmp_path / "checkpoints" / f"step-{number:08d}")
        trained = {name: value.detach().double() for name, value in run.model.state_dict().items()}
    (tmp_path / "checkpoints" / "step-00000003").mkdir()  # cut short

    def started(weights: Any) -> dict[str, Tensor]:
        return Reference(job(weights=weights), plan(), open_reference_data(job())).model.state_dict()

    for folder in (tmp_path, tmp_path / "checkpoints" / "step-00000002"):
        assert all(torch.equal(value, trained[name]) for name, value in started(folder).items())
    earlier = started(tmp_path / "checkpoints" / "step-00000001")
    assert not torch.equal(earlier["0.weight"], trained["0.weight"])
    with pytest.raises(JobError, match="a folder without a checkpoint; give a run, a checkpoint"):
        started(tmp_path / "checkpoints" / "step-00000003")


def test_an_index_of_weights_stays_in_its_folder(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    (tmp_path / "inside").mkdir()
    save_file({"0.weight": torch.full((5, 4), 0.25)}, tmp_path / "shard.safetensors")
    index = tmp_path / "inside" / "model.safetensors.index.json"
    for name in ("../shard.safetensors", str(tmp_path / "shard.safetensors")):
        index.write_text(json.dumps({"weight_map": {"0.weight": name}}))
        with pytest.raises(JobError, match="leaves the folder"):
            Reference(job(weights=index), plan(), open_reference_data(job()))


def test_forward_order_is_that_of_the_calls() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(5, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    made = job(model=Backwards)
    reference = Reference(made, plan(), open_reference_data(made))
    reference.step(0)
    assert reference.forward_order == {"": 0, "first": 1, "last": 2}


def test_the_short_last_batch_is_one_of_the_steps() -> None:
    assert open_reference_data(job()).choose_steps(2) == (0, 1, 2)
    assert open_reference_data(job(batch_size=7)).choose_steps(2) == (0, 1)
    assert open_reference_data(job(epochs=None, steps=2)).choose_steps(2) == (0, 1)
    assert open_reference_data(job(epochs=None, steps=1)).choose_steps(5) == (0,)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return zip(X, Y, strict=True)


def test_a_stream_is_read_in_its_own_order_epoch_after_epoch() -> None:
    feed = open_reference_data(job(data=Stream(), epochs=None, steps=5, batch_size=8))
    assert [feed.samples_in(step) for step in (3, 2, 0)] == [8, 5, 8]
    assert torch.equal(feed.read(2, np.array([1, 0]))[0], X[[17, 16]])
    assert torch.equal(feed.read(3, np.array([0]))[0], X[:1])
    even = open_reference_data(job(data=Stream(), epochs=None, steps=5, batch_size=7))
    assert torch.equal(even.read(3, np.array([0, 1]))[0], X[:2])

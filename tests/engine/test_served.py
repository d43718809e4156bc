"""A parameter server in a training: the numbers of one device, through checkpoints, on other numbers of ranks and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from echelon.engine.backends.server_optimizers import make_rule
from echelon.engine.init_model import skip_table_init
from echelon.engine.weights import export_weights
from echelon.errors import IncompatibleCheckpointError, JobError
from echelon.plan.parameter_server import ServedTable
from echelon.testing.rank_pool import RankPool
from tests.engine.served import stop_together, train

pytest.importorskip("numba")


@pytest.mark.journey
def test_ranks_with_servers_train_what_one_device_trains(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks to a checkpoint after three steps, then one rank with more servers, all else on the servers or not."""
    (true, losses), *_ = ranks.run(1, train, "dp=1", stop=6)
    saved = str(tmp_path / "step-3")
    (_, before), *_ = ranks.run(2, train, "dp=2 micro=4 exchange=server", stop=3, save=saved, timeout=120)
    assert before[:3] == pytest.approx(losses[:3], rel=1e-5)
    (mine, after), *_ = ranks.run(
        1, train, "dp=1 exchange=server servers=2 replicas=2", stop=6, load=saved, timeout=120
    )
    assert after == pytest.approx(losses[3:], rel=1e-5)  # the loss of an evaluation is the last
    assert mine.keys() == true.keys()
    for name, value in true.items():
        assert torch.allclose(mine[name], value, rtol=1e-4, atol=1e-6), name
    exported = export_weights(saved, tmp_path / "clicks.safetensors")
    with safe_open(tmp_path / "clicks.safetensors", "pt") as file:
        assert set(file.keys()) == {*true}
        assert file.get_tensor("users.weight").shape == (60, 4)
    assert exported.tensors == len(true)
    # Weights from a checkpoint into servers, and from the file into a rank: the same first loss.
    (_, from_file), *_ = ranks.run(1, train, "dp=1", stop=1, weights=str(tmp_path / "clicks.safetensors"))
    (_, to_servers), *_ = ranks.run(1, train, "dp=1 exchange=server", stop=1, weights=saved, timeout=120)
    assert to_servers[0] == pytest.approx(from_file[0], rel=1e-6)
    with pytest.raises(Exception, match=r"items\.0\.weight was trained by a parameter server there") as refused:
        ranks.run(1, train, "dp=1", stop=6, load=saved)
    assert isinstance(refused.value.__cause__, IncompatibleCheckpointError)


@pytest.mark.slow
def test_servers_that_run_already_are_gone_on_with_and_no_others(ranks: RankPool, tmp_path: Path) -> None:
    from echelon.server import Servers, Table, connect

    saved, secret = str(tmp_path / "step-2"), tmp_path / "secret"
    with Servers(2, replicas=2, shards=16, staleness=0, aggregate=True) as running:
        secret.touch(mode=0o600)
        secret.write_text(running.secret.hex())
        there = (running.address, str(secret))

        def run(plan: str = "dp=2 exchange=server", **more: Any) -> list[float]:
            return ranks.run(2, train, plan, elsewhere=there, timeout=120, **more)[0][1]

        with pytest.raises(Exception, match="have staleness=0, aggregate=True, and the plan has staleness=4"):
            run("dp=2 exchange=server staleness=4", stop=2)
        before = run(stop=2, save=saved)
        with pytest.raises(Exception, match="they hold what this job trained before; resume from its last checkpoint"):
            run(stop=2)
        after = run(stop=4, load=saved)
        with pytest.raises(Exception, match=r"they are at step 4, and the checkpoint .* at step 2; start servers with"):
            run(stop=4, load=saved)
        with connect(running.address, secret=running.secret, worker="other") as client:
            client.declare(Table(name="strange", dim=3))
        with pytest.raises(Exception, match=r"they hold another job's items\.0\.weight, .*: strange is there as Table"):
            run(stop=4, load=saved)
    (_, losses), *_ = ranks.run(1, train, "dp=1", stop=4)
    assert [*before[:2], *after] == pytest.approx(losses, rel=1e-5)


def test_ranks_that_do_not_wait_stop_at_the_same_step(ranks: RankPool) -> None:
    assert ranks.run(2, stop_together, 5, 3) == [9, 9]  # asked at 5: one may be 3 steps further by then


def test_rules_that_servers_cannot_keep_are_refused() -> None:
    rows = [nn.Parameter(torch.zeros(3, 2))]
    for optimizer, words in (
        (torch.optim.Adam(rows, amsgrad=True), "servers do not support amsgrad="),
        (torch.optim.SGD(rows, lr=0.1, momentum=0.9, maximize=True), "negate the loss"),
        (torch.optim.RMSprop(rows), "no server computes RMSprop"),
    ):
        with pytest.raises(JobError, match=words):
            make_rule("users.weight", optimizer, optimizer.param_groups[0], is_table=True)
    adam = torch.optim.AdamW(rows, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-7)
    rule = make_rule("head.weight", adam, adam.param_groups[0], is_table=False)
    assert (rule.kind, rule.beta1, rule.beta2, rule.eps, rule.weight_decay, rule.decoupled) == (
        "adam",
        0.8,
        0.9,
        1e-7,
        0.1,
        True,
    )
    for optimizer, moved in (
        (torch.optim.AdamW(rows), True),
        (torch.optim.SGD(rows, lr=0.1, momentum=0.9), True),
        (torch.optim.SGD(rows, lr=0.1, weight_decay=0.1), True),
        (torch.optim.SGD(rows, lr=0.1), False),
        (torch.optim.Adagrad(rows, weight_decay=0.1), True),
        (torch.optim.Adagrad(rows), False),
        (torch.optim.SparseAdam(rows), False),
    ):
        assert make_rule("users.weight", optimizer, optimizer.param_groups[0], is_table=True).every == moved
    for optimizer, slow in (
        (torch.optim.Adam(rows, weight_decay=0.1), True),
        (torch.optim.Adagrad(rows, weight_decay=0.1), True),
        (torch.optim.AdamW(rows, weight_decay=0.1), False),
        (torch.optim.Adam(rows), False),
    ):
        assert (
            make_rule("users.weight", optimizer, optimizer.param_groups[0], is_table=True).replays_each_update == slow
        )
    strange = torch.optim.Adam(rows, amsgrad=True)
    with pytest.raises(JobError, match="amsgrad=True is not done by servers"):
        make_rule("head.weight", strange, strange.param_groups[0], is_table=False)


def test_a_table_that_begins_on_servers_is_never_made() -> None:
    huge = ServedTable(path="users", rows=10**12, dim=8, initialized_by="server")  # 32 TB
    with skip_table_init([huge]):
        model = nn.ModuleDict({"users": nn.Embedding(10**12, 8), "days": nn.EmbeddingBag(7, 8)})
    assert model["users"].weight.is_meta
    assert not model["days"].weight.is_meta
    assert not nn.Embedding(3, 8).weight.is_meta

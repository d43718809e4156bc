"""The words for what a mistake looks like. The whole way, from a fault in a run to these words, is in test_verifier_faults.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.verifier.compare import Bounds, compare_tensors
from echelon.verifier.explain_failure import Evidence, describe_wrong_shard, explain
from echelon.verifier.first_divergence import TensorPair, find_first_divergence
from echelon.verifier.known_bugs import KnownBug
from echelon.verifier.reference import StepRecord
from echelon.verifier.tolerances import ParameterTolerance, compare_records

TRUE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
GRADIENTS: dict[str, Tensor | None] = {"a.weight": TRUE, "a.bias": TRUE * 3, "norm.weight": TRUE - 1, "z.weight": TRUE}
ORDER = {"": 0, "a": 1, "norm": 2, "z": 3}


def record(**changes: Any) -> StepRecord:
    given: dict[str, Any] = {
        "step": 1,
        "loss": torch.tensor(2.0).double(),
        "norm": torch.tensor(3.0).double(),
        "gradients": GRADIENTS,
        "parameters": {"a.weight": TRUE},
        "buffers": {"mean": TRUE},
        "optimizer": {},
    }
    return StepRecord(**given | changes)


def told(
    mine: StepRecord, *, true: StepRecord | None = None, mesh: Mesh | None = None, zero: int = 0, **known: Any
) -> str:
    true = true or record()
    made = compare_records(mine, true, ParameterTolerance(true.parameters))
    worst = find_first_divergence(made, Bounds(), ORDER)
    assert worst is not None
    plan = Plan(mesh=mesh or Mesh(dp=2), micro=1, zero=zero)
    given: dict[str, Any] = {
        "micro_batch_count": 4,
        "forward_order": ORDER,
        "actual": mine,
        "expected": true,
        "plan": plan,
        "bounds": Bounds(),
    }
    return explain(Evidence(divergence=worst, differences=made, **given | known))


def grown(factor: float, *names: str) -> Mapping[str, Tensor | None]:
    return {
        name: value * factor if value is not None and (name in names or not names) else value
        for name, value in GRADIENTS.items()
    }


@pytest.mark.parametrize(
    ("factor", "mesh", "words"),
    [
        (2.0, Mesh(dp=2), "dp = 2 times the reference: looks like a sum over the data ranks"),
        (0.5, Mesh(dp=2), "1/dp = 1/2 of the reference: looks like a mean over the data ranks that is taken twice"),
        (3.0, Mesh(tp=3), "tp = 3 times the reference: looks like a loss that every rank of the tensor axis adds whole"),
        (0.2, Mesh(pp=5), "1/pp = 1/5 of the reference"),
        (4.0, Mesh(dp=2), "micro-batches = 4 times the reference"),
        (0.125, Mesh(dp=2), "1/dp x micro-batches = 1/8 of the reference"),
        (4.0, Mesh(tp=4), "tp = 4 times the reference: looks like a loss that every rank of the tensor axis adds whole or micro-batches = 4"),
        (0.0, Mesh(dp=2), "it is zero"),
        (-1.0, Mesh(dp=2), "the sign is wrong"),
        (1.5, Mesh(dp=2), "1.5 times the reference exactly"),
    ],
)  # fmt: skip
def test_a_clean_factor_is_named(factor: float, mesh: Mesh, words: str) -> None:
    text = told(record(gradients=grown(factor)), mesh=mesh)
    assert text.startswith("4 of 4 gradients are off, ")
    assert words in text


def test_a_factor_of_all_is_told_from_a_factor_of_some() -> None:
    assert "all of these dp = 2 times" in told(record(gradients=grown(2.0)))
    assert "all of these" not in told(record(gradients=grown(2.0) | {"z.weight": TRUE * 3}))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a.bias",), "1 of 4 gradients are off, "),
        (("norm.weight", "a.norm"), "all of them in norm layers (LayerNorm)"),
        (("a.bias", "z.bias"), "all of them biases"),
    ],
)
def test_what_the_tensors_have_in_common_is_told(names: tuple[str, ...], words: str) -> None:
    true = GRADIENTS | {"a.norm": TRUE, "z.bias": TRUE}
    mine = {name: value + 1 if name in names and value is not None else value for name, value in true.items()}
    true = {name: value for name, value in true.items() if name in GRADIENTS or name in names}
    mine = {name: value for name, value in mine.items() if name in true}
    kinds = {"norm.weight": "LayerNorm", "a.norm": "LayerNorm"}
    assert words in told(record(gradients=mine), true=record(gradients=true), module_classes=kinds)


def test_a_suspect_that_gives_the_same_numbers_is_named_and_no_other() -> None:
    mine = record(gradients=GRADIENTS | {"a.weight": TRUE + 1})
    suspects = [KnownBug(description="not this", value=TRUE), KnownBug(description="this one", value=TRUE + 1)]
    assert told(mine, known_bugs=suspects).endswith("this one")
    assert "this" not in told(mine, known_bugs=suspects[:1])


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_gradient_that_is_left_from_the_step_before_is_named(share: float) -> None:
    previous = torch.tensor([0.3, 0.1, -7.0]).double()
    mine = record(gradients=GRADIENTS | {"a.weight": TRUE + share * previous})
    assert "the gradient of the step before is still in it" in told(mine, previous_gradients={"a.weight": previous})
    assert "step before" not in told(mine, previous_gradients={"a.weight": previous.flip(0)})


def test_a_weight_that_came_apart_is_named() -> None:
    mine = record(gradients=GRADIENTS | {"a.weight": TRUE + 1, "head.weight": TRUE})
    assert "an untied weight: the model shares a.weight and head.weight" in told(
        mine, aliases={"head.weight": "a.weight"}
    )
    assert "untied" not in told(mine)


def test_where_backward_goes_wrong_is_told_if_it_is_right_at_the_end() -> None:
    mine = record(gradients=GRADIENTS | {"a.weight": TRUE + 1, "norm.weight": TRUE})
    text = told(mine, mesh=Mesh(tp=2))
    assert "those of all modules after norm: backward is right until there; looks like a sum over tp" in text
    assert "until there" not in told(record(gradients=mine.gradients, loss=torch.tensor(5.0).double()), mesh=Mesh(tp=2))


def test_a_forward_that_is_wrong_is_not_called_a_wrong_weight() -> None:
    mine = record(gradients=dict.fromkeys(GRADIENTS, TRUE + 1), loss=torch.tensor(5.0).double())
    assert "weighted wrongly" in told(mine)
    assert "weighted wrongly" not in told(mine, forward_agrees=False)


def test_norms_are_told_apart() -> None:
    squares = {name: float(value.square().sum()) for name, value in GRADIENTS.items() if value is not None}
    true = record(norm=torch.tensor(sum(squares.values())).double().sqrt())
    assert true.norm is not None
    held = {name: (2 if "a." in name else 1, frozenset({0})) for name in GRADIENTS}
    copied = sum(square * held[name][0] for name, square in squares.items())
    mesh = Mesh(tp=2)
    assert "counts every rank's copy" in told(
        record(norm=torch.tensor(copied).double().sqrt()), true=true, mesh=mesh, replication=held
    )
    alone = record(norm=torch.tensor(1.25).double(), local_norm=torch.tensor(1.25).double())
    assert "what rank 0 holds alone" in told(alone, true=true, mesh=mesh, replication=held)
    assert "sqrt(tp) = 1.41421 times the reference" in told(record(norm=true.norm * 2**0.5), true=true, mesh=mesh)
    odd = told(record(norm=true.norm * 1.3), true=true, mesh=mesh, replication=held)
    assert "times the reference" not in odd, "a number is a multiple of any other"
    assert "looks like a norm over some of them" in odd


def test_a_stale_buffer_is_told_from_one_that_differs() -> None:
    mine = record(buffers={"mean": TRUE + 1})
    assert "a stale buffer" in told(mine, tensors_before={"buffer": {"mean": TRUE + 1}})
    assert "stale" not in told(mine, tensors_before={"buffer": {"mean": TRUE - 1}})


def test_parameters_are_told_by_rate_by_shard_and_by_length_of_the_step() -> None:
    old = {"parameter": {"a.weight": TRUE - 0.5}}
    slower = record(parameters={"a.weight": TRUE - 0.25}, learning_rates=(0.05,))
    true = record(learning_rates=(0.1,))
    assert "looks like a schedule that is stepped another number of times" in told(
        slower, true=true, tensors_before=old
    )
    assert "after 4 steps: it is stepped once per micro-batch" in told(
        slower, true=true, tensors_before=old, steps_by_rate={0.05: 4}
    )
    assert "the step is 0.5 times the reference's" in told(record(parameters=slower.parameters), tensors_before=old)
    kept = record(parameters={"a.weight": torch.cat([TRUE[:2], TRUE[2:] - 0.5])})
    text = told(kept, tensors_before=old, zero=2)
    assert "what rank 1 of dp holds (2 to 2 of 3 along dim 0) is off" in text
    assert "it was not updated" in text
    assert "not updated" not in told(kept, tensors_before={"parameter": {"a.weight": TRUE - 0.7}}, zero=2)


def test_optimizer_state_of_another_rank_is_named() -> None:
    state = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    true = record(optimizer={"0/a.weight/exp_avg": state})
    swapped = record(optimizer={"0/a.weight/exp_avg": state.roll(2)})
    assert "rank 0 of dp has what belongs to rank 1" in told(swapped, true=true, zero=1)
    assert "belongs to" not in told(record(optimizer={"0/a.weight/exp_avg": state * 2}), true=true, zero=1)


def test_a_part_that_is_no_ranks_own_is_not_called_one() -> None:
    true = torch.ones(4, 4).double()
    plan = Plan(mesh=Mesh(tp=2))
    columns, corner = true.clone(), true.clone()
    columns[:, 2:] += 1
    corner[1:3, 1:3] += 1
    assert (
        describe_wrong_shard(TensorPair(actual=columns, expected=true), plan)
        == "what rank 1 of tp holds (2 to 3 of 4 along dim 1)"
    )
    assert describe_wrong_shard(TensorPair(actual=corner, expected=true), plan) is None
    assert describe_wrong_shard(TensorPair(actual=true * 2, expected=true), plan) is None


def test_what_has_no_number_is_not_explained() -> None:
    made = compare_tensors("buffer", {}, {"mean": TRUE}, step=1)
    plan, mine = Plan(), record(buffers={})
    known: dict[str, Any] = {
        "micro_batch_count": 1,
        "forward_order": ORDER,
        "actual": mine,
        "expected": record(),
        "plan": plan,
        "bounds": Bounds(),
    }
    assert explain(Evidence(divergence=made[0], differences=made, **known)) == ""

"""What known mistakes would give, against the same thing written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.verifier.known_bugs import aliases_of, sum_micro_batches, tied_weight_gradients, wrong_weightings
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import open_reference_data
from tests.verifier import proofs


def reference(name: str, plan: Plan, **changes: Any) -> Reference:
    job = proofs.make_job(name, **changes)
    return Reference(job, plan, open_reference_data(job))


def truth(name: str, plan: Plan, parameter: str) -> tuple[Tensor, Tensor]:
    made = reference(name, plan)
    loss = made.backward(0)
    grad = made.model.get_parameter(parameter).grad
    assert grad is not None
    return grad, loss


PLAN = Plan(mesh=Mesh(dp=2), micro=2)


@pytest.mark.parametrize(("name", "parameter"), [("keys", "value.weight"), ("norm", "3.weight")])
def test_the_parts_add_up_to_the_truth(name: str, parameter: str) -> None:
    grad, loss = truth(name, PLAN, parameter)
    found = sum_micro_batches(reference(name, PLAN), 0, parameter)
    count = sum(part.count for part in found)
    assert [(part.rank, part.index) for part in found] == [(r, t) for r in range(2) for t in range(len(found) // 2)]
    torch.testing.assert_close(sum(part.value for part in found) / count, grad, rtol=1e-12, atol=1e-15)
    losses = sum_micro_batches(reference(name, PLAN), 0, "")
    torch.testing.assert_close(sum(part.value for part in losses) / count, loss, rtol=1e-12, atol=1e-15)


def test_samples_that_are_normalised_together_do_not_come_apart() -> None:
    plan = Plan(mesh=Mesh(dp=2), batchnorm="sync")
    assert sum_micro_batches(reference("norm", plan), 0, "3.weight") == []
    assert list(wrong_weightings([])) == []


def test_each_mistake_gives_what_it_says() -> None:
    found = sum_micro_batches(reference("keys", PLAN), 0, "value.weight")
    a, b, c, d = found  # two ranks, two micro-batches each
    count = a.count + b.count + c.count + d.count
    assert len({part.count for part in found}) > 1, "the job must show what this test is about"
    suspects = list(wrong_weightings(found))

    def value(words: str) -> list[Tensor]:
        return [each.value for each in suspects if words in each.description]

    means = [part.value / part.count for part in found]
    torch.testing.assert_close(value("weighted by samples")[0], sum(means) / 4)  # two samples in each
    torch.testing.assert_close(value("plain mean")[0], sum(means) / 4)
    torch.testing.assert_close(value("rank 0's own")[0], (a.value + b.value) / count)
    torch.testing.assert_close(value("rank 1's own")[1], (c.value + d.value) / (c.count + d.count))
    torch.testing.assert_close(value("micro-batch 2 of 2 is left out")[0], (a.value + c.value) / count)
    torch.testing.assert_close(value("micro-batch 1 of 2 is left out")[1], (b.value + d.value) / (b.count + d.count))


def test_only_what_the_plan_has_is_suspected() -> None:
    plan = Plan(micro=4)
    words = " | ".join(
        each.description for each in wrong_weightings(sum_micro_batches(reference("keys", plan), 0, "value.weight"))
    )
    assert "own samples" not in words
    assert "micro-batch 1 of 2 is left out" in words
    words = " | ".join(
        each.description for each in wrong_weightings(sum_micro_batches(reference("keys", Plan()), 0, "value.weight"))
    )
    assert "left out" not in words


def test_a_tied_weight_has_one_gradient_for_each_use() -> None:
    made = reference("gpt", PLAN, model=lambda: proofs.GPT(vocab=32, context=8, width=16, layers=1, heads=2, tied=True))
    assert aliases_of(made.model, "tokens.weight") == ["tokens.weight", "head.weight"]
    tokens, head = tied_weight_gradients(made, 0, "tokens.weight")
    assert "gradient of tokens.weight alone" in tokens.description
    assert "gradient of head.weight alone" in head.description
    assert made.model.get_parameter("head.weight") is made.model.get_parameter("tokens.weight"), "tied again"
    made.backward(0)
    grad = made.model.get_parameter("tokens.weight").grad
    assert grad is not None
    torch.testing.assert_close(tokens.value + head.value, grad, rtol=1e-12, atol=1e-15)
    assert not torch.allclose(tokens.value, grad)
    assert list(tied_weight_gradients(made, 0, "positions.weight")) == []

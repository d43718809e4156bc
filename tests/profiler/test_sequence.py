"""Where each rank can have a part of the sequence only is found by trying; what does not work on a part is left whole, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.errors import PlanError
from echelon.partition.complete_plan import complete
from echelon.partition.find_sequence_parallel import SequenceSegments, find_segments
from echelon.partition.find_tp import find_tensor_cuts
from echelon.plan.text import from_text
from tests.engine.sequences import Attention, Block, Stack, numbers
from tests.zoo.data import train


def segments(model: nn.Module, *inputs: Any, ways: int = 2) -> SequenceSegments:
    model = model.double().eval()
    given = inputs or (numbers(2, 6, 12),)

    def loss() -> Tensor:
        return (model(*given) * numbers(*given[0].shape, seed=3)).sum()

    return find_segments(model, loss, ways, find_tensor_cuts(model, loss, ways).placements)


def test_blocks_that_follow_each_other_are_one_segment() -> None:
    (found,) = segments(Stack()).segments
    assert (found.blocks, found.argument, found.dim) == (("blocks.0", "blocks.1", "blocks.2"), "0", 1)
    assert {each.path: each.returns_sequence for each in found.gathers} == {
        f"blocks.{n}.{path}": False for n in range(3) for path in ("attention", "up")
    }
    # Norms and the rows' biases meet a part of the sequence; the norm behind the last block does not.
    names = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attention.out.bias", "down.bias")
    assert set(found.partial_gradients) == {f"blocks.{n}.{name}" for n in range(3) for name in names}


def test_the_sequence_is_where_positions_see_each_other() -> None:
    """Samples would work too: nothing between them is mixed."""
    (found,) = segments(Stack(first=True), numbers(6, 4, 12)).segments
    assert found.dim == 0


def test_a_norm_behind_what_is_put_together_is_not_added_up() -> None:
    """It meets the whole sequence: its gradient is the whole one already."""

    class Normed(Attention):
        def __init__(self, first: bool) -> None:
            super().__init__(first)
            self.norm = nn.LayerNorm(12)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    class Twice(Block):
        def __init__(self, first: bool) -> None:
            super().__init__(first)
            self.attention = Normed(first)

    (found,) = segments(Stack(kind=Twice)).segments
    assert {each.path for each in found.gathers} == {
        f"blocks.{n}.{path}" for n in range(3) for path in ("attention", "up")
    }
    assert not any("attention.norm" in name for name in found.partial_gradients)
    assert any("norm1" in name for name in found.partial_gradients)


def test_attention_that_cannot_be_cut_gets_the_whole_sequence_and_gives_a_part() -> None:
    class Joined(Block):
        def __init__(self, first: bool) -> None:
            super().__init__(first)
            self.attention = Attention(first, joined=True)

    (found,) = segments(Stack(kind=Joined)).segments
    assert {each.path: each.returns_sequence for each in found.gathers}["blocks.0.attention"] is True
    assert not any("attention" in name for name in found.partial_gradients)


class Here(Block):
    """Attention in the block itself, which reads the length from its hidden states."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.attention.qkv(self.norm1(x)).view(b, t, 3, self.attention.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.attention.out(seen.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Placed(Block):
    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.places = nn.Parameter(numbers(6, 12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places)


class Batch(Block):
    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.batch = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Deep(Block):
    """Stochastic depth: one number for each sample, which the parts of a sample must not draw apart."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[0], 1, 1, dtype=x.dtype) > 0.2 if self.training else 1.0
        return x + kept * super().forward(x)


class Levelled(Block):
    """Keeps the level of its hidden states."""

    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.register_buffer("level", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.level.lerp_(x.detach().abs().mean(), 0.5)
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Here, Placed, Batch, Deep, Levelled])
def test_blocks_that_do_not_work_on_a_part_are_no_segment(kind: type[Block]) -> None:
    found = segments(Stack(kind=kind))
    assert not found.segments
    assert found.reason


def test_hidden_states_that_others_read_end_a_segment() -> None:
    class Skipping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = self.blocks[0](x)
            return self.norm(self.blocks[2](self.blocks[1](first)) + first)

    assert [each.blocks for each in segments(Skipping()).segments] == [("blocks.0",), ("blocks.1", "blocks.2")]


def test_a_layer_without_a_partner_is_put_together_for_a_part() -> None:
    """Its outputs cannot be: each rank has them for other positions."""

    class Alone(Block):
        def __init__(self, first: bool) -> None:
            super().__init__(first)
            self.alone = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.alone(super().forward(x)).tanh()

    found = segments(Stack(kind=Alone))
    cuts = {each.path: (each.cut, each.gathered_in) for each in found.placements}
    assert cuts["blocks.1.alone"] == ("stored", "blocks.1")
    assert "blocks.1.alone.weight" in found.segments[0].partial_gradients


def test_a_module_that_counts_positions_in_a_buffer_gets_the_whole_sequence() -> None:
    class Router(nn.Module):
        """As DeepSeek has it: what was chosen often is chosen less."""

        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(12, 4)
            self.register_buffer("load", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.out(x).softmax(-1)
            self.load += scores.detach().argmax(-1).flatten().bincount(minlength=4)
            return scores.sum(-1, keepdim=True) * x

    class Routed(Block):
        def __init__(self, first: bool) -> None:
            super().__init__(first)
            self.router = Router()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.router(x)

    (found,) = segments(Stack(kind=Routed)).segments
    assert {each.path: each.returns_sequence for each in found.gathers}["blocks.1.router"] is True


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model = Stack().double().eval()
    before = model(numbers(2, 6, 12))
    assert segments(model).segments
    assert torch.equal(model(numbers(2, 6, 12)), before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_a_segment_is_refused_with_the_remedy() -> None:
    job = train(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
        data=TensorDataset(torch.randn(16, 8)),
        inputs=lambda batch: (batch, {}),
        loss=lambda output, batch: output.square().mean(),
    )
    with pytest.raises(
        PlanError,
        match=r"no blocks of the model work on a part .* a module of its own, leave `sequence` out, or use recompute",
    ):
        complete(from_text("tp=2 sequence"), job)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_what_a_block_does_in_one_mode_only_is_tried_in_that(training: bool) -> None:
    class Moody(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out - out.mean(1, keepdim=True) if self.training is training else out

    assert not segments(Stack(kind=Moody)).segments


@pytest.mark.slow
def test_random_numbers_in_the_blocks_are_held_still() -> None:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    (found,) = segments(Stack(kind=Dropped)).segments
    assert found.uses_rng


class Mixed(Block):
    """A gate that starts at zero, before a mean over the positions."""

    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.gate * x.mean(1, keepdim=True)


class Limited(Block):
    """A limit on the sequence's norm that initial values do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * (500 / x.norm(dim=(1, 2), keepdim=True)).clamp(max=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Mixed, Limited])
def test_what_initial_values_hide_is_found(kind: type[Block]) -> None:
    assert not segments(Stack(kind=kind)).segments

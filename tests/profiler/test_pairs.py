"""Pairs are found by trying: what works on a part of its columns is one, what does not is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.partition.hf_tp_plan import find_hinted_pairs
from echelon.partition.tp_layouts import Candidate
from echelon.partition.tp_pairs import PairAnalysis, find_pairs


def pairs_of(model: nn.Module, *inputs: Any, ways: int = 2, hints: bool = False) -> PairAnalysis:
    model = model.double().eval()
    given = inputs or (torch.randn(3, 8, dtype=torch.float64),)
    return find_pairs(model, lambda: model(*given).square().sum(), ways, find_hinted_pairs(model) if hints else ())


def rows(found: PairAnalysis) -> list[str]:
    return [pair.candidate.row for pair in found.pairs]


class Between(nn.Module):
    """Two layers, and what the test puts between them."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.up, self.down, self.work = nn.Linear(8, 12), nn.Linear(12, 8), work

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.work(self.up(x)))


@pytest.mark.parametrize(
    ("work", "right"),
    [
        (F.gelu, True),
        (lambda x: x * x.sigmoid(), True),
        (lambda x: F.dropout(x, 0.5, training=False), True),
        (lambda x: x.view(-1, 12), False),
        (lambda x: x.softmax(-1), False),
        (lambda x: F.layer_norm(x, x.shape[-1:]), False),
        (lambda x: x.flip(-1), False),
        (lambda x: x.cumsum(-1), False),
        (lambda x: x + torch.arange(x.shape[-1]), False),
    ],
)
def test_what_stands_between(work: Any, right: bool) -> None:
    assert rows(pairs_of(Between(work))) == ["down"] * right


class Scaled(Between):
    def __init__(self, beside: bool) -> None:
        super().__init__(None)
        self.scale, self.beside = nn.Parameter(torch.tensor(1.5)), beside

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.up(x).relu() * self.scale)
        return out * self.scale if self.beside else out


def test_a_parameter_that_acts_on_the_columns_has_shares_of_its_gradient() -> None:
    (pair,) = pairs_of(Scaled(beside=False)).pairs
    assert pair.partial_parameters == ("scale",)
    assert all(pair.partial_parameters == () for pair in pairs_of(Between(F.gelu)).pairs)
    # Used elsewhere too, a part of its gradient would be the whole.
    assert not pairs_of(Scaled(beside=True)).pairs


def test_outputs_that_others_read_stay_whole() -> None:
    class Both(Between):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(hidden.relu()) + hidden.sum(-1, keepdim=True)

    assert not pairs_of(Both(None)).pairs


def test_a_layer_that_is_called_twice_is_no_part_of_a_pair() -> None:
    class Twice(Between):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()) + self.up(2 * x).sum(-1, keepdim=True)

    assert not pairs_of(Twice(None)).pairs


def test_modules_that_are_called_by_the_names_of_their_arguments_are_found_alike() -> None:
    class Named(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(input=self.up(input=x).relu() * self.scale)
            return out

    (pair,) = pairs_of(Named(beside=False)).pairs
    assert (pair.candidate.paths, pair.partial_parameters) == (("up", "down"), ("scale",))


class Attention(nn.Module):
    def __init__(self, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(8, 12 * heads), nn.Linear(4 * heads, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.transpose(-2, -1)).softmax(-1), self.dropout, self.training)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


X = torch.randn(2, 5, 8, dtype=torch.float64)


def test_a_fused_projection_is_cut_in_three_parts() -> None:
    (pair,) = pairs_of(Attention(4), X).pairs
    assert (pair.layout.fused_sizes, pair.layout.shard_multiple) == ((16, 16, 16), 1)
    assert pair.layout.divided_attributes == (("", "heads"),)


def test_odd_heads_stay_whole_heads() -> None:
    (pair,) = pairs_of(Attention(3), X).pairs
    assert (pair.layout.fused_sizes, pair.layout.shard_multiple) == ((12, 12, 12), 4)


def test_a_pair_says_whether_something_in_it_draws() -> None:
    for heads in (3, 4):
        assert [pair.draws_random for pair in pairs_of(Attention(heads, dropout=0.1), X).pairs] == [True]
        assert [pair.draws_random for pair in pairs_of(Attention(heads), X).pairs] == [False]


@pytest.mark.parametrize(
    ("work", "right"),
    [
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: x * torch.rand_like(x), True),
        (lambda x: x * torch.rand(x.shape[0], 1), False),  # one coin for a sample
        (lambda x: x + torch.randn_like(x) * torch.rand(()), False),  # noise of a random size
        (lambda x: x * torch.rand(x.shape[-1]), True),
    ],
)
def test_each_rank_draws_by_itself_only_what_is_drawn_for_each_column(work: Any, right: bool) -> None:
    found = pairs_of(Between(work))
    assert rows(found) == ["down"] * right
    assert all(pair.draws_random for pair in found.pairs)


def test_what_is_drawn_before_and_behind_a_pair_is_drawn_alike_and_may_be_anything() -> None:
    class Around(Between):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.rand(len(x), 1)) * torch.rand(())

    assert rows(pairs_of(Around(F.gelu))) == ["down"]


def test_batch_norm_is_asked_without_being_changed() -> None:
    model = nn.Sequential(nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Conv1d(6, 4, 1))
    before = model[1].running_mean.clone().double()
    (pair,) = pairs_of(model, torch.randn(3, 8, 9, dtype=torch.float64)).pairs
    assert pair.draws_random
    assert torch.equal(model[1].running_mean, before)


def test_the_model_is_left_as_it_was() -> None:
    model = Attention(4).double().eval()
    before, state = model(X), {name: value.clone() for name, value in model.state_dict().items()}
    assert pairs_of(model, X).pairs
    assert torch.equal(model(X), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_channels_are_followed_through_norms() -> None:
    model = nn.Sequential(nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 1))
    (pair,) = pairs_of(model, torch.randn(3, 8, 9, dtype=torch.float64)).pairs
    assert pair.candidate.paths == ("0", "1", "3")
    assert pair.layout.divided_attributes == (("1", "num_features"),)


class Hinted(Between):
    def __init__(self, work: Any, plan: dict[str, str]) -> None:
        super().__init__(work)
        self.config = SimpleNamespace(base_model_tp_plan=plan)


def test_a_models_own_hint_is_taken_where_it_is_right() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    (pair,) = pairs_of(nn.Sequential(Hinted(F.gelu, plan)), hints=True).pairs
    assert pair.candidate.is_hinted
    assert pair.candidate.paths == ("0.up", "0.down")
    assert not pairs_of(Hinted(lambda x: x.softmax(-1), plan), hints=True).pairs


def test_hints_with_stars_meet_every_layer() -> None:
    model = nn.Sequential(*(Between(F.gelu) for _ in range(3)))
    model.config = SimpleNamespace(base_model_tp_plan={"*.up": "colwise", "*.down": "rowwise"})  # type: ignore[assignment]
    assert [each.paths for each in find_hinted_pairs(model)] == [(f"{i}.up", f"{i}.down") for i in range(3)]


@pytest.mark.extra
@pytest.mark.slow
def test_transformers_says_how_llama_is_cut() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    found = [each.paths for each in find_hinted_pairs(transformers.LlamaForCausalLM(config))]
    at = "model.layers.0"
    assert (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", f"{at}.mlp.down_proj") in found
    assert tuple(f"{at}.self_attn.{name}_proj" for name in "qkvo") in found


class Masked(nn.Conv2d):
    """As PixelCNN has it: a weight sees only what came before."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(self.weight)
        mask[..., -1, :] = 0
        return self._conv_forward(x, self.weight * mask, self.bias)


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


IMAGE = torch.randn(2, 4, 6, 6, dtype=torch.float64)


def test_a_layer_with_a_forward_of_its_own_is_no_part_of_a_pair() -> None:
    masked = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), Masked(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert not pairs_of(masked, IMAGE).pairs
    assert not pairs_of(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Doubled(12, 8))).pairs
    assert not pairs_of(nn.Sequential(Doubled(8, 12), nn.ReLU(), nn.Linear(12, 8))).pairs
    patched = nn.Linear(12, 8)
    patched.forward = lambda x: F.linear(x, patched.weight.abs())  # type: ignore[method-assign]
    assert not pairs_of(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), patched)).pairs


class Conv1D(nn.Module):
    """Named as transformers' linear layer is, and another one."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * (x @ self.weight) + self.bias


def test_the_ranks_rows_must_add_up_to_what_the_row_gave() -> None:
    assert not pairs_of(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Conv1D(8, 12))).pairs


class Read(nn.Module):
    """Has a parameter of its own, and computes with one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, weight: Tensor) -> Tensor:
        return self.scale * (weight.t() @ weight).square().sum()


@pytest.mark.parametrize(
    "read",
    [lambda w: (w.t() @ w).square().sum(), lambda w: (w.T @ w.T.T).square().sum(), lambda w: w.data.mean(), Read()],
    ids=["method", "property", "data", "module"],
)
@pytest.mark.parametrize("place", ["up", "down"])
def test_a_weight_that_is_read_elsewhere_is_no_part_of_a_pair(read: Any, place: str) -> None:
    """Each rank would regularise its own rows."""

    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.read = Between(F.gelu), read

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) + self.read(getattr(self.block, place).weight)

    assert not pairs_of(Regularised()).pairs


class Reading(nn.Module):
    """Has a parameter of its own, and computes with a buffer that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, norm: nn.BatchNorm1d) -> Tensor:
        return self.scale * norm.running_var.mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "right"),
    [
        (lambda norm: norm.running_var.mean(), False),
        (lambda norm: norm.running_mean.data.norm(), False),
        (lambda norm: 1 / norm.running_mean.shape[0], False),
        (Reading(), False),
        (lambda norm: float(norm.num_batches_tracked), True),
        (lambda norm: torch.zeros((), dtype=norm.running_mean.dtype), True),
    ],
    ids=["method", "data", "size", "module", "count", "dtype"],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_norm_whose_statistics_are_read_elsewhere_is_not_cut_along(read: Any, right: bool, first: bool) -> None:
    """A rank has those of its channels only."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.read = Between(nn.BatchNorm1d(12)), read

        def forward(self, x: Tensor) -> Tensor:
            if first:
                told = self.read(self.block.work)
                return self.block(x) + told
            return self.block(x) + self.read(self.block.work)

    assert rows(pairs_of(Watched())) == ["block.down"] * right


class Penalised(Between):
    """Its hidden states are penalised, always or in training only."""

    def __init__(self, *, always: bool, beside: bool = False) -> None:
        super().__init__(None)
        self.always, self.penalty = always, torch.zeros((), dtype=torch.float64)
        self.norm = nn.LayerNorm(12) if beside else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        if self.training or self.always:
            self.penalty = (hidden if self.norm is None else self.norm(hidden)).abs().mean()
        return self.down(hidden)


def penalised(model: Penalised, hints: Any = ()) -> PairAnalysis:
    model, x = model.double(), torch.randn(3, 8, dtype=torch.float64)
    return find_pairs(model, lambda: model(x).square().sum() + model.penalty, 2, hints)


@pytest.mark.parametrize("always", [False, True])
def test_hidden_states_that_the_loss_reads_stay_whole(always: bool) -> None:
    assert not penalised(Penalised(always=always)).pairs
    model = Penalised(always=always, beside=True)
    assert not penalised(model, [Candidate(("up",), "down", is_hinted=True)]).pairs
    # Where the loss does not read it there is nothing to penalise.
    assert rows(pairs_of(Penalised(always=always))) == ["down"]


@pytest.mark.parametrize("training", [False, True])
def test_what_is_done_in_one_mode_only_is_tried_in_that(training: bool) -> None:
    class Moody(Between):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x).relu()
            return self.down(hidden.softmax(-1) if self.training is training else hidden)

    assert not pairs_of(Moody(None)).pairs


def test_a_model_without_a_loss_in_evaluation_is_tried_in_training() -> None:
    class Trains(Between):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if self.training else {}

    assert rows(pairs_of(Trains(F.gelu))) == ["down"]


def test_draws_and_moving_buffers_do_not_hide_a_pair() -> None:
    class Moving(Between):
        def __init__(self) -> None:
            super().__init__(nn.Dropout(0.5))
            self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.1 * torch.randn_like(x) - self.mean
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.5)
            return super().forward(x)

    model = Moving()
    (pair,) = pairs_of(model).pairs
    assert pair.draws_random
    assert not model.mean.any()
    assert model.work.p == 0.5


class Counted(nn.Module):
    """Keeps how active the hidden states of its block are, in the way that `keep(model, hidden)` says: at once, or when all is over."""

    def __init__(self, keep: Any, *, at_once: bool) -> None:
        super().__init__()
        self.block = Between(nn.ReLU())
        self.register_buffer("active", torch.zeros((), dtype=torch.float64))
        self.keep, self.at_once, self.hidden = keep, at_once, torch.zeros(0)
        self.block.work.register_forward_hook(self._note)

    def _note(self, _: nn.Module, __: Any, hidden: Tensor) -> None:
        self.hidden = hidden.detach()
        if self.at_once:
            self.keep(self, self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if not self.at_once:
            self.keep(self, self.hidden)
        return out


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("keep", "right"),
    [
        (lambda model, h: model.active.lerp_((h > 0).double().mean(), 0.5), False),
        (lambda model, h: setattr(model, "active", 0.5 * model.active + h.mean()), False),
        (lambda model, h: model.active.add_(1), True),
    ],
    ids=["in place", "assigned", "counted"],
)
def test_buffers_that_are_kept_of_hidden_states_are_kept_of_all_of_them(keep: Any, right: bool, at_once: bool) -> None:
    model = Counted(keep, at_once=at_once)
    assert rows(pairs_of(model)) == ["block.down"] * right
    assert not model.active


@pytest.mark.parametrize(
    ("keep", "right"),
    [
        (lambda model, h: model.active.fill_(h.mean().item()), False),
        (lambda model, h: model.active.data.copy_(h.mean()), False),
        (lambda model, h: model.active.fill_(h.shape[0]), True),
    ],
    ids=["as a number", "by its data", "samples"],
)
def test_a_buffer_that_cannot_be_followed_is_tried(keep: Any, right: bool) -> None:
    model = Counted(keep, at_once=True)
    assert rows(pairs_of(model)) == ["block.down"] * right
    assert not model.active


def banned(logits: Tensor) -> Tensor:
    logits.view(-1, 12)[:, :2] = -1e9
    return logits.view(-1, 12)


def cooled(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    logits.div_(0.7)
    return flat


def risen(logits: Tensor) -> Tensor:
    wide = logits.double()
    F.relu(wide, inplace=True)
    return wide.flatten(0, 1)


@pytest.mark.parametrize(
    ("way", "right"), [(lambda x: x.flatten(0, 1), True), (banned, False), (cooled, False), (risen, False)]
)
def test_logits_that_are_changed_in_place_are_not_left_in_parts(way: Any, right: bool) -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 12)

        def forward(self, x: Tensor) -> Tensor:
            loss = F.cross_entropy(way(self.head(x)), torch.arange(6))
            loss += 0.1 * x.mean()  # the loss is nobody's part
            return loss

    found = pairs_of(Scored(), torch.randn(2, 3, 8, dtype=torch.float64))
    assert found.cross_entropy_inputs == ({"head"} if right else set())


def test_columns_that_are_all_alike_tell_nothing() -> None:
    """A norm over nothing but zeros would pass for one that works on a part."""

    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            noise = self.up(torch.randn_like(x))
            return self.down(F.layer_norm(noise, noise.shape[-1:])) + x

    assert not pairs_of(Zeros()).pairs


class Gated(Between):
    """A gate that starts at zero, before something that reads across columns."""

    def __init__(self, across: Any) -> None:
        super().__init__(None)
        self.gate, self.across = nn.Parameter(torch.zeros(())), across

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return self.down(h + self.gate * self.across(h))


class Residual(nn.Module):
    """Blocks whose last layer starts at zero, with a norm across columns in them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), norm
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return x + self.down(F.layer_norm(h, h.shape[-1:]) if self.norm else h)


@pytest.mark.parametrize(
    ("model", "right"),
    [
        (lambda: Gated(lambda h: h.mean(-1, keepdim=True)), False),
        (lambda: Gated(lambda h: h * 2), True),
        (lambda: Residual(norm=True), False),
        (lambda: Residual(norm=False), True),
        (lambda: Between(lambda h: h * (6 / h.norm(dim=-1, keepdim=True)).clamp(max=1)), False),
        (lambda: Between(lambda h: h.clamp(-6, 6)), True),
        (lambda: Between(lambda h: h * (h.norm(dim=-1, keepdim=True) * 9).clamp(max=1)), False),
        (lambda: Between(lambda h: h + h.mean(-1, keepdim=True) - h.mean(-1, keepdim=True).detach()), False),
        (lambda: Between(lambda h: h + h.sign() - h.sign().detach()), True),
    ],
)
def test_what_initial_values_hide(model: Any, right: bool) -> None:
    torch.manual_seed(0)
    made = model()
    before = {name: value.clone() for name, value in made.double().named_parameters()}
    assert rows(pairs_of(made)) == ["down"] * right
    assert all(torch.equal(value, before[name]) for name, value in made.named_parameters())

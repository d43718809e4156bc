"""Control flow, hooks and module structure that differ by sample, by step or by process."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from bench.adversary.kit import (
    CLASSES,
    SAMPLES,
    WIDTH,
    Block,
    Net,
    Samples,
    classes,
    cross_entropy,
    integers,
    net,
    numbers,
    plain,
    sgd,
)
from bench.adversary.spec import Spec, job

WORDS = ("alpha", "beta", "gamma", "delta")


def spoken(rare: bool = False) -> tuple[Samples, Any]:
    """Samples with a language each, and their collate function."""
    x, y = classes().tensors
    kinds = [WORDS[3 if rare and place % 11 == 5 else place % 3] for place in range(SAMPLES)]
    rows = [(x[place], kinds[place], y[place]) for place in range(SAMPLES)]

    def collate(chosen: list[Any]) -> dict[str, Any]:
        return {
            "x": torch.stack([row[0] for row in chosen]),
            "kind": [row[1] for row in chosen],
            "y": torch.stack([row[2] for row in chosen]),
        }

    return Samples(rows), collate


class Adapters(nn.Module):
    """One adapter per language; only those that the batch names run."""

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.ordered = ordered
        self.adapters = nn.ModuleDict({word: nn.Linear(WIDTH, WIDTH) for word in WORDS})
        self.rest = Net()

    def forward(self, x: Tensor, kind: list[str]) -> Tensor:
        out = x
        names = sorted(set(kind)) if self.ordered else set(kind)
        for name in names:
            at = torch.tensor([place for place, each in enumerate(kind) if each == name])
            out = out.index_add(0, at, torch.tanh(self.adapters[name](x[at])))
        return self.rest(out)


def by_language(ordered: bool, rare: bool = False) -> Spec:
    data, collate = spoken(rare)
    return Spec(
        model=lambda: Adapters(ordered).double(),
        loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
        optimizer=sgd(),
        data=data,
        collate=collate,
    )


@job("modules run in the order of a set of strings: each process hashes them differently", owner="watch")
def hash_order() -> Spec:
    return by_language(ordered=False)


@job("a few samples' text decides which adapter runs", owner="cuts")
def data_dependent_adapter() -> Spec:
    return by_language(ordered=True)


@job("one adapter runs for a few samples only: some ranks never call it in a step", owner="cuts")
def rare_adapter() -> Spec:
    return by_language(ordered=True, rare=True)


class Experts(nn.Module):
    """Top-1 routing: each expert sees the samples that chose it, perhaps none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            at = (chosen == place).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, expert(x[at]) * weight[at, None])
        return x + out


@job("mixture of experts: an expert without samples is not called", owner="cuts")
def experts() -> Spec:
    return Spec(**plain(model=net(depth=2, block=Experts)))


class Balanced(Net):
    """Experts with a balance term over the batch."""

    def __init__(self) -> None:
        super().__init__(depth=2, block=Experts)

    def forward(self, x: Tensor) -> Any:
        shares = [block.gate(x).softmax(-1).mean(0) for block in self.blocks]
        return super().forward(x), sum((share**2).sum() for share in shares)


@job("the balance term of experts is a product of batch means", refusable="dp micro zero shares")
def balanced_experts() -> Spec:
    return Spec(
        **plain(
            model=lambda: Balanced().double(), eval_data=None, metrics={},
            loss=lambda output, batch: F.cross_entropy(output[0], batch[-1]) + 0.1 * output[1],
        )
    )  # fmt: skip


class LayerDrop(Net):
    """Blocks are left out at random."""

    draw = staticmethod(lambda: float(torch.rand(())))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or self.draw() > 0.4:
                x = block(x)
        return self.head(x)


class LayerDropPython(LayerDrop):
    draw = staticmethod(random.random)


class LayerDropNumpy(LayerDrop):
    draw = staticmethod(lambda: float(numpy.random.rand()))


@job("layer drop by torch.rand", owner="cuts")
def layer_drop() -> Spec:
    return Spec(**plain(model=lambda: LayerDrop().double()), check="consistent")


@job("layer drop by Python's random", owner="cuts")
def layer_drop_python() -> Spec:
    return Spec(**plain(model=lambda: LayerDropPython().double()), check="consistent")


@job("layer drop by NumPy", owner="cuts")
def layer_drop_numpy() -> Spec:
    return Spec(**plain(model=lambda: LayerDropNumpy().double()), check="consistent")


class OwnDraws(Net):
    """Dropout by the model's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.training:
                x = x * (torch.rand(x.shape, generator=self.generator, dtype=x.dtype) > 0.2)
        return self.head(x)


@job("dropout by a generator that the model owns", refusable="resume")
def own_generator() -> Spec:
    return Spec(**plain(model=lambda: OwnDraws().double()), check="consistent")


@job("dropout everywhere: ranks of tp and pp must draw the same masks")
def dropout() -> Spec:
    def block() -> nn.Module:
        return nn.Sequential(Block(), nn.Dropout(0.3))

    return Spec(**plain(model=net(block=block)), check="consistent")


class EarlyExit(Net):
    """The batch leaves as soon as all its samples are confident."""

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place and float(x.abs().mean()) > 0.85:
                break
        return self.head(x)


@job("early exit by a mean over the batch", refusable="dp micro zero shares pp")
def early_exit() -> Spec:
    return Spec(**plain(model=lambda: EarlyExit().double(), eval_data=None, metrics={}))


class Unfreezing(Net):
    """A block more runs every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        active = 1 + int(self.steps) // 3
        if self.training:
            self.steps += 1
        for block in self.blocks[:active]:
            x = block(x)
        return self.head(x)


@job("gradual growth: a block more every third step", owner="cuts", refusable="micro pp")
def growing() -> Spec:
    return Spec(**plain(model=lambda: Unfreezing().double(), eval_data=None, metrics={}))


class Thawing(Net):
    """requires_grad is switched on by forward, later."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 4:
            self.blocks[0].requires_grad_(True)
        return super().forward(x)


@job(
    "gradual unfreezing: requires_grad_ in forward from step 5 on (DDP never reduces it)",
    owner="cuts",
    refusable="dp micro zero shares pp",
)
def thawing() -> Spec:
    return Spec(**plain(model=lambda: Thawing().double(), eval_data=None, metrics={}))


class Freezing(Net):
    """requires_grad is switched off by forward, once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 5:
            self.blocks[0].requires_grad_(False)
        return super().forward(x)


@job("a block that forward freezes in its fifth call, once", refusable="micro zero pp")
def freezing() -> Spec:
    return Spec(**plain(model=lambda: Freezing().double(), eval_data=None, metrics={}))


class LateGate(Net):
    """A branch that opens when a gate parameter has grown."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.extra = nn.Parameter(torch.zeros(())), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + self.gate * x[:, :CLASSES]
        return out + self.extra(x) if float(self.gate.detach().abs()) > 0.02 else out


@job("a branch that opens once a learned gate has grown", owner="cuts")
def late_gate() -> Spec:
    return Spec(**plain(model=lambda: LateGate().double()))


class MadeLate(Net):
    """A layer that forward makes when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.extra is None:
            self.extra = nn.Linear(WIDTH, WIDTH).to(x.dtype)
            with torch.no_grad():
                for value in self.extra.parameters():
                    value.fill_(0.1)
        return super().forward(x + self.extra(x))


@job("a layer that forward makes: the optimizer never sees it", owner="watch")
def layer_made_late() -> Spec:
    return Spec(**plain(model=lambda: MadeLate().double(), eval_data=None, metrics={}))


@job("LazyLinear: sizes follow from the first batch", owner="verifier")
def lazy_linear() -> Spec:
    return Spec(
        **plain(model=lambda: nn.Sequential(nn.LazyLinear(16, dtype=torch.float64), nn.Tanh(), nn.LazyLinear(CLASSES, dtype=torch.float64))),
        check="consistent",
    )  # fmt: skip


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(12, WIDTH), Net(WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rest(self.table(ids)))


@job("tied embedding and head", owner="cuts")
def tied() -> Spec:
    data = TensorDataset(integers(12, SAMPLES, 5), integers(12, SAMPLES, 5, seed=3))
    return Spec(
        model=lambda: Tied().double(), optimizer=sgd(), data=data,
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
    )  # fmt: skip


class Recurrent(Net):
    """One block applied four times."""

    def __init__(self) -> None:
        super().__init__(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(x)


@job("one block applied several times", owner="cuts")
def shared_block() -> Spec:
    return Spec(**plain(model=lambda: Recurrent().double()))


class Borrowed(Net):
    """The head uses a block's weight, outside of that block."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + (x @ self.blocks[1].down.weight)[:, :CLASSES]


@job("a block's weight is read outside of it", owner="cuts")
def weight_read_outside() -> Spec:
    return Spec(**plain(model=lambda: Borrowed().double()))


class Functional(Net):
    """Blocks are called by torch.func.functional_call with scaled weights."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weights = {name: value * 1.1 for name, value in block.named_parameters()}
            x = torch.func.functional_call(block, weights, (x,))
        return self.head(x)


@job("torch.func.functional_call with changed weights", owner="cuts")
def functional_call() -> Spec:
    return Spec(**plain(model=lambda: Functional().double()))


class InnerGradient(Net):
    """A gradient inside forward (an energy model's force)."""

    def forward(self, x: Tensor) -> Tensor:
        force = torch.func.grad(lambda each: self.blocks[0](each).pow(2).sum())(x)
        return super().forward(x - 0.1 * force)


@job("torch.func.grad inside forward", owner="cuts")
def inner_gradient() -> Spec:
    return Spec(**plain(model=lambda: InnerGradient().double()))


class SecondOrder(Net):
    """A gradient penalty: autograd.grad with create_graph."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            out = super().forward(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out, slope.pow(2).sum(-1)


@job("a gradient penalty: second derivatives of the parameters", owner="cuts")
def gradient_penalty() -> Spec:
    return Spec(
        **plain(
            model=lambda: SecondOrder().double(), eval_data=None, metrics={},
            loss=lambda output, batch: F.cross_entropy(output[0], batch[-1]) + 0.1 * output[1].mean(),
        )
    )  # fmt: skip


class Checkpointed(Net):
    """Activation checkpointing by the user."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@job("torch.utils.checkpoint by the user, under recompute too", owner="cuts")
def checkpointed() -> Spec:
    return Spec(**plain(model=lambda: Checkpointed().double()))


def hooked_net() -> nn.Module:
    model = Net().double()
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    model.blocks[1].register_forward_hook(lambda module, given, output: output * 1.1)
    model.blocks[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.9,))
    return model


@job("hooks on a parameter, on forward and on backward", owner="cuts")
def hooks() -> Spec:
    return Spec(**plain(model=hooked_net))


def per_sample_hook() -> nn.Module:
    model = Net().double()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return model


@job(
    "a hook clamps a parameter's gradient: of the whole batch or of a part",
    owner="cuts",
    refusable="dp micro zero shares pp",
)
def clamping_hook() -> Spec:
    return Spec(**plain(model=per_sample_hook))


def orthogonal_net() -> nn.Module:
    model = Net().double()
    for block in model.blocks:
        parametrizations.orthogonal(block.up)
    return model


@job("orthogonal parametrization", owner="cuts", refusable="tp")
def orthogonal() -> Spec:
    return Spec(**plain(model=orthogonal_net), tolerance=1e-7)


class Symmetric(nn.Module):
    """A square weight made symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric_net() -> nn.Module:
    model = Net(block=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    for block in model.blocks:
        parametrize.register_parametrization(block[0], "weight", Symmetric())
    return model.double()


@job("a parametrization that reads across the whole matrix", owner="cuts")
def symmetric() -> Spec:
    return Spec(**plain(model=symmetric_net))


def weight_normed() -> nn.Module:
    model = Net()
    for block in model.blocks:
        parametrizations.weight_norm(block.up)
    return model.double()


@job("weight norm", owner="cuts")
def weight_norm() -> Spec:
    return Spec(**plain(model=weight_normed))


@job("torch.jit.script", owner="verifier")
def scripted() -> Spec:
    return Spec(
        **plain(
            model=lambda: nn.Sequential(
                torch.jit.script(Block()), torch.jit.script(Block()), nn.Linear(WIDTH, CLASSES)
            ).double()
        )
    )


@job("a parameter with no elements", owner="cuts")
def empty_parameter() -> Spec:
    def model() -> nn.Module:
        made = Net().double()
        made.nothing = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))
        return made

    return Spec(**plain(model=model))


@job("parameters that no output depends on", owner="cuts")
def unused_parameters() -> Spec:
    def model() -> nn.Module:
        made = Net().double()
        made.spare = nn.Linear(WIDTH, WIDTH).double()
        return made

    return Spec(**plain(model=model, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)))


class Eval(Net):
    """A frozen part in eval mode that stays there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(WIDTH)
        self.stem.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Eval:
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


@job("a frozen batch norm that train() keeps in eval mode", owner="cuts")
def frozen_norm() -> Spec:
    return Spec(**plain(model=lambda: Eval().double()))


@job("in-place activations and views of the input", owner="cuts")
def in_place() -> Spec:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(x)
            out[:, : WIDTH // 2].mul_(0.5)
            return F.relu_(out) + x

    return Spec(**plain(model=net(block=InPlace)))


@job("the model changes its input in place", owner="inputs", refusable="recompute")
def edits_input() -> Spec:
    class Edits(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.mul_(0.9)
            return super().forward(x)

    return Spec(**plain(model=lambda: Edits().double(), eval_data=None, metrics={}))


@job("kwargs and nested containers between blocks", owner="cuts")
def nested_calls() -> Spec:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, state: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
            x, history = state["x"], state["history"]
            return {"x": x + torch.tanh(self.linear(x)) * scale, "history": (*history, x)}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Inner() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            state: dict[str, Any] = {"x": x, "history": ()}
            for place, block in enumerate(self.blocks):
                state = block(state, scale=1.0 / (1 + place))
            return self.head(state["x"] + sum(state["history"]) * 0.1)

    return Spec(model=lambda: Outer().double(), loss=cross_entropy, optimizer=sgd(), data=classes())


@job("a batch whose content decides a Python number in the graph", refusable="dp micro zero shares pp")
def python_number() -> Spec:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.1 * x.abs().max().item())

    return Spec(**plain(model=lambda: Scaled().double(), eval_data=None, metrics={}))


@job("a GRU over sequences of unequal lengths, packed in forward", owner="cuts")
def packed_sequence() -> Spec:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, last = self.rnn(packed)
            return self.head(last[0])

    data = TensorDataset(numbers(SAMPLES, 6, WIDTH), integers(6, SAMPLES, seed=5) + 1, integers(CLASSES, SAMPLES))
    return Spec(model=lambda: Reader().double(), loss=cross_entropy, optimizer=sgd(), data=data)


@job("a weight that is tied to another one in the fourth forward", refusable="micro pp zero tp resume")
def tied_late() -> Spec:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.head, self.calls = nn.Linear(WIDTH, CLASSES), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            if self.calls == 4:
                self.second.weight = self.first.weight
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    return Spec(model=lambda: Late().double(), loss=cross_entropy, optimizer=sgd(), data=classes())

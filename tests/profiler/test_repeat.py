"""Blocks alike: few are traced, and the profile is the one that tracing all of them gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from echelon.job import Job
from echelon.plan.profile import Profile
from echelon.profiler import profile
from echelon.profiler import profile_model as tracing
from echelon.profiler.repeated_blocks import TRACED_BLOCKS, find_repeated_blocks
from echelon.testing.models import GPT, MLP, Block
from tests.sampling import WHOLE, drawing

LAYERS = 8


class Numbered(GPT):
    """Blocks that know their place."""

    def __init__(self) -> None:
        super().__init__(width=32, layers=LAYERS, heads=2)
        for number, block in enumerate(self.blocks):
            block.number = number  # type: ignore[assignment]


class EveryThird(GPT):
    """What is between blocks depends on which they are."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 3 == 2 and number > TRACED_BLOCKS:
                x = x * 2
        return self.head(self.norm(x))


class Collects(GPT):
    """What comes behind the blocks depends on how many there are."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, found = self.tokens(tokens), []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return self.head(self.norm(torch.stack(found).mean(0)))


class Backwards(GPT):
    """Blocks are called in another order."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Indexed(GPT):
    """Asks for a block that few do not have."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + 0 * self.blocks[LAYERS - 1].norm1(x)))


class Stacked(nn.Module):
    """Blocks in a sequence within a module, with what surrounds them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.body = nn.ModuleDict({"layers": nn.Sequential(*(Block(32, 2) for _ in range(LAYERS)))})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body["layers"](self.tokens(tokens)))


def words(model: Callable[[], nn.Module], precision: str = "fp32") -> Job:
    tokens = torch.randint(0, 64, (16, 24))
    return Job(
        model=model, loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), data=TensorDataset(tokens, tokens), batch_size=8, steps=1,
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


def vectors() -> Job:
    data = TensorDataset(torch.randn(16, 32), torch.zeros(16, dtype=torch.long))
    return Job(
        model=lambda: MLP(width=32, layers=LAYERS), loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9), data=data, batch_size=8, steps=1,
    )  # fmt: skip


def gpt(**options: object) -> Callable[[], nn.Module]:
    return lambda: GPT(width=32, layers=LAYERS, heads=2, **options)  # type: ignore[arg-type]


def whole(job: Job, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """With every block traced."""
    with monkeypatch.context() as patched:
        patched.setattr(tracing, "find_repeated_blocks", lambda model: None)
        return profile(job, device="cpu")


#: Each is traced twice, which takes seconds: the plainest and some of the others, another few with each commit.
JOBS: dict[str, Callable[[], Job]] = {
    "gpt": lambda: words(gpt()),
    "tied": lambda: words(gpt(tied=True, dropout=0.1)),
    "bf16": lambda: words(gpt(), "bf16"),
    "stacked": lambda: words(Stacked),
    "mlp": vectors,
    "numbered": lambda: words(Numbered),
    "every-third": lambda: words(lambda: EveryThird(width=32, layers=LAYERS, heads=2)),
    "collects": lambda: words(lambda: Collects(width=32, layers=LAYERS, heads=2)),
    "backwards": lambda: words(lambda: Backwards(width=32, layers=LAYERS, heads=2)),
    "indexed": lambda: words(lambda: Indexed(width=32, layers=LAYERS, heads=2)),
}
DRAWN = list(JOBS) if WHOLE else ["gpt", *drawing("repeat").sample(list(JOBS)[1:], 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_a_profile_is_the_same_however_many_blocks_are_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]()
    assert profile(job, device="cpu") == whole(job, monkeypatch)


@pytest.mark.slow
def test_few_blocks_are_traced_where_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    step = tracing._record_step
    monkeypatch.setattr(
        tracing, "_record_step", lambda job, model, *rest: traced.append(len(model.blocks)) or step(job, model, *rest)
    )  # type: ignore[func-returns-value]
    profile(words(gpt()), device="cpu")
    assert traced == [TRACED_BLOCKS, TRACED_BLOCKS]
    traced.clear()
    profile(words(lambda: EveryThird(width=32, layers=LAYERS, heads=2)), device="cpu")
    assert traced == [LAYERS, LAYERS]


def test_blocks_are_alike_where_all_that_they_hold_is() -> None:
    model = GPT(width=32, layers=LAYERS, heads=2)
    run = find_repeated_blocks(model)
    assert run is not None
    assert (run.path, run.count, run.block_path(3)) == ("blocks", LAYERS, "blocks.3")
    assert find_repeated_blocks(Numbered()) is None
    model.blocks[5].dropout.p = 0.5  # type: ignore[union-attr,assignment]
    assert find_repeated_blocks(model) is None
    other = GPT(width=32, layers=LAYERS, heads=2)
    other.blocks[LAYERS - 1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    assert find_repeated_blocks(other) is None
    tables = GPT(width=32, layers=LAYERS, heads=2)
    for block in tables.blocks:
        block.table = numpy.zeros(4)  # type: ignore[assignment]
    assert find_repeated_blocks(tables) is None  # an array does not say whether it is equal
    hooked = GPT(width=32, layers=LAYERS, heads=2)
    hooked.blocks[2].register_forward_hook(lambda *_: None)
    assert find_repeated_blocks(hooked) is None

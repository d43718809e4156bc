"""Whether samples see each other: a batch is held against its two halves, in a small real step on the CPU.

Where they do (contrastive losses, losses over all pairs, experts that fill up) neither ranks nor micro-batches may part a
batch. Batch norms are left out, held at fixed statistics: they are known by their class, and a plan says how they are taken.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from echelon.job import Job, call_loss, call_model, lift
from echelon.profiler.example import Example
from echelon.profiler.still import Stillness, silence

#: Parameters beyond which no model is built for this: with gradients and in float64 200 M are more than 3 GB.
PARAMETERS = 200 * 10**6
#: FLOPs that the comparison may take, and how many are nothing: about ten seconds and one on two slow cores.
FLOPS, _EASY = 2e11, 2e10
#: Relative difference of a gradient that rounding explains.
_BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-6}
#: A gradient is measured against its own largest value, but never against less than this part of the model's largest.
_FLOOR = 1e-2


def coupling(job: Job, example: Example, *, parameters: int, flops: float) -> tuple[bool, list[str]]:
    """(whether the samples of a batch depend on each other other than through batch norms, notes where it is not known).

    `parameters`: how many the model has; `flops`: of one step of one sample.
    """
    if job.batch < 2:
        return False, []
    # Halves of two, unless that takes long: code treats a single sample apart now and then.
    samples = 4 if job.batch >= 4 and _cost(4, flops) <= _EASY else 2
    if parameters > PARAMETERS or _cost(samples, flops) > FLOPS:
        return False, [_unknown("the model is too large to try it on a CPU")]
    try:
        with random_states():
            return _compared(job, example, samples)
    except Exception as error:  # whatever a user's model needs that is not here
        return False, [_unknown(f"a small step on the CPU failed with {type(error).__name__}: {first_line(error)}")]


def _cost(samples: int, flops: float) -> float:
    """FLOPs of a batch and its halves."""
    return 2 * samples * flops


def _compared(job: Job, example: Example, samples: int) -> tuple[bool, list[str]]:
    both, half = _Comparison(job, example), samples // 2
    whole, halves = _Part(0, samples), [_Part(0, half), _Part(half, half)]
    apart = both.apart(whole, halves)
    if math.isnan(apart):
        return False, [_unknown("the gradients of a small step are not numbers")]
    if apart <= both.bound:
        return False, []
    # In float32 rounding may flip a ReLU, and then the difference is no longer small; float64 is slow, so that only a suspect pays.
    with contextlib.suppress(Exception):  # a model that keeps float32 tensors to itself does not run in it
        wide = _Comparison(job, example, torch.float64)
        apart, both = wide.apart(whole, halves), wide
    if apart <= both.bound:
        return False, []
    if both.apart(whole, [_Part(0, samples, seed=1)]) > both.bound:
        return False, [_unknown("the model, the loss or the collation draws random numbers that cannot be held still")]
    return True, []


def _unknown(why: str) -> str:
    return (
        f"whether samples of a batch see each other (as in contrastive losses) is not known, because {why}; they are taken as "
        "independent: if they are not, use dp=1 without micro"
    )


class _Part(NamedTuple):
    """`size` samples from `first` on, and the seed under which they are collated and computed."""

    first: int
    size: int
    seed: int = 0


class _Comparison:
    """The model in one type, and how far two ways of computing the same samples are apart."""

    def __init__(self, job: Job, example: Example, dtype: torch.dtype = torch.float32) -> None:
        self._job, self._example, self._dtype = job, example, dtype
        self._model = lift(_still_model(job), dtype)
        self._still = Stillness(random=True, narrow=dtype == torch.float64)
        self._buffers = {name: value.clone() for name, value in self._model.named_buffers()}
        self.bound = _BOUNDS[dtype]

    def apart(self, whole: _Part, parts: Sequence[_Part]) -> float:
        """How far the gradient of `whole` is from that of `parts` together: the worst tensor's largest difference over its
        largest value, small tensors measured against the others."""
        self._model.zero_grad(set_to_none=True)
        total, count = self._loss(whole)
        (total / count).backward()
        sizes = self._sizes()
        # The parts' gradients are taken off again: where they agree with the whole's nothing is left.
        for part in parts:
            total, _ = self._loss(part)
            (total / -count).backward()
        least = _FLOOR * max(sizes.values(), default=0.0)
        left = [(size, max(sizes.get(name, 0.0), least)) for name, size in self._sizes().items()]
        if any(math.isnan(size) for size, _ in left):
            return math.nan
        return max((size / scale if scale else math.inf for size, scale in left if size), default=0.0)

    def _loss(self, part: _Part) -> tuple[Tensor, float]:
        """(sum, count) of the loss of one part, from the state that the model started with."""
        with torch.no_grad():
            for name, value in self._model.named_buffers():
                value.copy_(self._buffers[name])
        seed_all(part.seed)
        batch = tree_map(self._cast, self._example.batch(part.size, first=part.first))
        with self._still():
            loss = call_loss(self._job, call_model(self._job, self._model, batch), batch, self._model)
        # A mean is over the samples.
        return (loss[0], float(loss[1])) if isinstance(loss, tuple) else (loss * part.size, float(part.size))

    def _cast(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu", self._dtype if leaf.is_floating_point() else None)

    def _sizes(self) -> dict[str, float]:
        """The largest value of each gradient."""
        named = self._model.named_parameters()
        return {name: float(p.grad.abs().max()) for name, p in named if p.grad is not None and p.numel()}


def _still_model(job: Job) -> nn.Module:
    """A model of its own, with the values that training starts from, dropout off and batch norms that look at no batch."""
    seed_all(job.seed)
    model = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model()
    model = model.to("cpu").train()
    silence(model)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
            if module.running_mean is None:
                module.running_mean, module.running_var = (
                    torch.zeros(module.num_features),
                    torch.ones(module.num_features),
                )
    return model


def seed_all(seed: int) -> None:
    """Every generator that a model may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Leaves the generators as they were."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


def first_line(error: Exception) -> str:
    """What an error says, short enough for a note."""
    return (str(error).strip().splitlines() or [""])[0][:160]

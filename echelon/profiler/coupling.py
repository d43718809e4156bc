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
from torch.utils._pytree import tree_leaves, tree_map

from echelon.job import Job, call_loss, call_model, lift
from echelon.profiler.example import Example
from echelon.profiler.still import Stillness, silence

#: Parameters beyond which no model is built for this: with gradients and in float64 200 M are more than 3 GB.
PARAMETERS = 200 * 10**6
#: FLOPs that the comparison may take, and how many are nothing: about ten seconds and one on two slow cores.
FLOPS, _EASY = 2e11, 2e10
#: Relative difference of a gradient that rounding explains.
_BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-6}
#: Relative difference of a loss, in float32, that rounding explains.
_LOSS = 3e-5
#: Samples on which the loss alone is tried, the seconds that reading them may take, and how large its outputs are.
_MANY, _READING, _SCALES = 64, 1.0, (1.0, 4.0)
#: A gradient is measured against its own largest value, but never against less than this part of the model's largest.
_FLOOR = 1e-2


def coupling(job: Job, example: Example, *, parameters: int, flops: float) -> tuple[bool | None, str]:
    """(whether the samples of a batch depend on each other other than through batch norms; None and the reason where it is not known).

    `parameters`: how many the model has; `flops`: of one step of one sample.
    """
    if job.batch < 2:
        return False, ""
    # Halves of two and more, unless that takes long: code treats a single sample apart now and then.
    samples = next(size for size in (8, 4, 2) if job.batch >= size and (size == 2 or _cost(size, flops) <= _EASY))
    if parameters > PARAMETERS or _cost(samples, flops) > FLOPS:
        return None, "the model is too large to try it on a CPU"
    try:
        with random_states():
            return _compared(job, example, samples)
    except Exception as error:  # whatever a user's model needs that is not here
        return None, f"a small step on the CPU failed with {type(error).__name__}: {first_line(error)}"


def _cost(samples: int, flops: float) -> float:
    """FLOPs of a batch and its halves."""
    return 2 * samples * flops


def _compared(job: Job, example: Example, samples: int) -> tuple[bool | None, str]:
    both, half = _Comparison(job, example), samples // 2
    whole, halves = _Part(0, samples), [_Part(0, half), _Part(half, half)]
    apart = both.apart(whole, halves)
    if math.isnan(apart):
        return None, "the gradients of a small step are not numbers"
    if apart <= both.bound:
        return both.loss_couples(samples), ""
    # In float32 rounding may flip a ReLU, and then the difference is no longer small; float64 is slow, so that only a suspect pays.
    with contextlib.suppress(Exception):  # a model that keeps float32 tensors to itself does not run in it
        wide = _Comparison(job, example, torch.float64)
        apart, both = wide.apart(whole, halves), wide
    if apart <= both.bound:
        return False, ""
    if both.apart(whole, [_Part(0, samples, seed=1)]) > both.bound:
        return None, "the model, the loss or the collation draws random numbers that cannot be held still"
    return True, ""


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

    def loss_couples(self, samples: int) -> bool:
        """Whether the loss alone parts badly, on many samples and on outputs that the model has not given yet: a mean over what is not
        padding, or over what it gets wrong, shows on few samples of a fresh model by chance only. False where outputs cannot be drawn."""
        try:
            with torch.no_grad():
                batch = tree_map(self._cast, self._example.batch(samples))
                with self._still():
                    output = call_model(self._job, self._model, batch)
                leaves = tree_leaves(output)
                if not leaves or not all(_is_rows(leaf, samples) for leaf in leaves):
                    return False
                more = self._example.more(_MANY, _READING)
                halves = more[: len(more) // 2], more[len(more) // 2 :]
                for scale in _SCALES:
                    whole = self._drawn(output, more, slice(None), scale)
                    if not math.isfinite(whole):
                        continue
                    cut = len(halves[0])
                    parts = self._drawn(output, halves[0], slice(cut), scale, of=len(more))
                    parts += self._drawn(output, halves[1], slice(cut, None), scale, of=len(more))
                    again = self._drawn(output, more, slice(None), scale, seed=1)
                    if abs(parts - whole) > _LOSS * abs(whole) and again == whole:
                        return True
        except Exception:  # a loss that does not take such outputs, samples that make no batch together
            return False
        return False

    def _drawn(
        self, output: Any, samples: list[Any], rows: slice, scale: float, *, of: int | None = None, seed: int = 0
    ) -> float:
        """The loss of `samples` on rows of drawn outputs, times their number."""
        numbers, count = torch.Generator().manual_seed(0), of or len(samples)

        def drawn(leaf: Tensor) -> Tensor:
            return (scale * torch.randn(count, *leaf.shape[1:], generator=numbers).to(leaf.dtype))[rows]

        seed_all(seed)
        batch, outputs = tree_map(self._cast, self._example.collate(samples)), tree_map(drawn, output)
        with self._still():
            loss = call_loss(self._job, outputs, batch, self._model)
        return float(loss) * len(samples) if isinstance(loss, Tensor) else math.nan  # a sum and its count part well

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
        grads = {name: _numbers(p.grad) for name, p in named if p.grad is not None}
        return {name: float(grad.abs().max()) for name, grad in grads.items() if grad.numel()}


def _numbers(grad: Tensor) -> Tensor:
    """Those that are stored, of a sparse gradient."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _is_rows(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and leaf.shape[0] == samples


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


def outside_torch() -> Any:
    """Where Python's and NumPy's generators are; another one after each draw."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), name, numpy.asarray(keys).tobytes(), rest


def first_line(error: Exception) -> str:
    """What an error says, short enough for a note."""
    return (str(error).strip().splitlines() or [""])[0][:160]

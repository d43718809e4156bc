"""Whether samples see each other: a batch is compared with its parts, equal and unequal ones, in a small real step on the CPU.

A mean over counts that differ between parts (labels that are not ignored) couples nothing on a CPU: while it trains, the parts are weighed by
the counts that the loss's graph tells (loss_counts.py), and so they are here. An accelerator is not waited for, and does not weigh them.

A model or a loss whose state changes with every call (a counter, a running mean, in buffers or Python attributes) may couple samples at every
ninth call only. Of these a private copy is advanced call by call, and each call is compared with its parts from the same state.

Where they do (contrastive losses, losses over all pairs, experts that fill up) neither ranks nor micro-batches may part a
batch. Batch norms are left out, held at fixed statistics: they are known by their class, and a plan says how they are taken.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.job import Job, call_loss, call_model, lift
from echelon.loss_counts import read_counts
from echelon.tree import tree_leaves, tree_map
from echelon.trials.deep_copies import copy_module
from echelon.trials.determinism import Stillness, silence
from echelon.trials.example_batch import Example
from echelon.trials.lazy_modules import initialise_lazy
from echelon.trials.random_state import random_states, seed_all
from echelon.trials.reachable import GENERATORS, reachable
from echelon.trials.shape_model import call_factory
from echelon.trials.snapshot import Snapshot

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
#: Calls after which a model that computes something else with each of them has shown it.
_CALLS = 8
#: Later calls that are tried where state changes from call to call, the seconds that they may take and the samples of each.
LATER, _SECONDS, _FEW = 64, 2.0, 4
#: Bytes of a tensor, and elements of a parameter, beyond which they are not noted as state.
_STATE_BYTES, _STATE_ELEMENTS = 2**24, 4096
#: A gradient is measured against its own largest value, but never against less than this part of the model's largest.
_FLOOR = 1e-2


def coupling(
    job: Job, example: Example, *, parameters: int, flops: float, weighs: bool = False
) -> tuple[bool | None, str]:
    """(whether the samples of a batch depend on each other other than through batch norms; None and the reason where it is not known).

    `parameters`: how many the model has; `flops`: of one step of one sample; `weighs`: whether parts are weighed by what their losses
    average over.
    """
    if job.batch < 2:
        return False, ""
    # Halves of two and more, unless that takes long: code treats a single sample apart now and then.
    samples = next(size for size in (8, 4, 2) if job.batch >= size and (size == 2 or _cost(size, flops) <= _EASY))
    if parameters > PARAMETERS or _cost(samples, flops) > FLOPS:
        return None, "the model is too large to try it on a CPU"
    try:
        with random_states():
            return _compared(job, example, samples, weighs)
    except Exception as error:  # whatever a user's model needs that is not here
        return None, f"a small step on the CPU failed with {type(error).__name__}: {first_line(error)}"


def _cost(samples: int, flops: float) -> float:
    """FLOPs of a batch and its halves."""
    return 2 * samples * flops


def _compared(job: Job, example: Example, samples: int, weighs: bool) -> tuple[bool | None, str]:
    """What the first calls show, and what later ones do where state changes from call to call."""
    both, start = _Comparison(job, example, weighs), None
    with contextlib.suppress(Exception):  # objects that cannot be looked into
        start = both.noted()
    found, why = _first_calls(both, samples)
    if found or start is None:
        return found, why
    with contextlib.suppress(Exception):  # state that cannot be put back, a model that takes no other batch size
        later = both.fresh() if start.changed() else None
        if later and later.keeps_state(_Part(0, samples)) and later.couples_later(min(samples, _FEW)):
            return True, ""
    return found, why


def _first_calls(both: _Comparison, samples: int) -> tuple[bool | None, str]:
    whole, splits = _Part(0, samples), _splits(samples)
    apart = both.furthest(whole, splits)
    if math.isnan(apart):
        return None, "the gradients of a small step are not numbers"
    if apart <= both.bound:
        return both.loss_couples(samples), ""
    # In float32 rounding may flip a ReLU, and then the difference is no longer small; float64 is slow, so that only a suspect pays.
    with contextlib.suppress(Exception):  # a model that keeps float32 tensors to itself does not run in it
        wide = both.fresh(torch.float64)
        apart, both = wide.furthest(whole, splits), wide
    if apart <= both.bound:
        return both.loss_couples(samples), ""
    other = [_Part(0, samples, seed=1)]
    if both.apart(whole, other) > both.bound:
        if both.from_here(generators=False).apart(whole, other) > both.bound:
            return None, "the model, the loss or the collation draws random numbers that cannot be held still"
        return None, "the model, the loss or the collation keeps state by which each call computes something else"
    if both.fresh().drifts(whole):
        return None, "the model computes something else with each call"
    return True, ""


class _Part(NamedTuple):
    """`size` samples from `first` on, and the seed under which they are collated and computed."""

    first: int
    size: int
    seed: int = 0


def _halves(first: int, samples: int) -> tuple[_Part, list[_Part]]:
    """`samples` from number `first` on, and their halves."""
    half = samples // 2
    return _Part(first, samples), [_Part(first, half), _Part(first + half, samples - half)]


def _splits(samples: int) -> list[list[_Part]]:
    """Ways to part a batch: halves, and unequal parts of two samples and more where there are enough."""
    quarter, half = samples // 4, samples // 2
    sizes: list[tuple[int, ...]] = [(half, samples - half)]
    if quarter > 1:
        rest = samples - quarter
        sizes += [(quarter, rest), (rest, quarter), (quarter, quarter, rest - quarter)]
    return [[_Part(sum(each[:place]), size) for place, size in enumerate(each)] for each in sizes]


def _places(model: nn.Module) -> dict[tuple[str, str], tuple[dict[str, Tensor | None], Tensor | None]]:
    """The buffers by path and name, also those that are None, and where they are held."""
    return {
        (path, key): (module._buffers, value)
        for path, module in model.named_modules()
        for key, value in module._buffers.items()
    }


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


class _Comparison:
    """The model in one type, and how far two ways of computing the same samples are apart."""

    def __init__(self, job: Job, example: Example, weighs: bool, dtype: torch.dtype = torch.float32) -> None:
        self._job, self._example, self._dtype = job, example, dtype
        self._model = lift(_still_model(job), dtype)
        self._still = Stillness(random=True, narrow=dtype == torch.float64)
        self._buffers = {
            place: None if value is None else value.clone() for place, (_, value) in _places(self._model).items()
        }
        self.bound, self._weighs = _BOUNDS[dtype], weighs
        #: What every call starts from; None: from the first buffers.
        self._start: Snapshot | None = None

    def fresh(self, dtype: torch.dtype = torch.float32) -> _Comparison:
        """Another one, with the model as training begins."""
        return _Comparison(self._job, self._example, self._weighs, dtype)

    def noted(self, *, generators: bool = True) -> Snapshot:
        """What model, loss and collation hold now, but the weights. `generators`: also where theirs are."""
        job, model = self._job, self._model
        roots = {"model": model, "buffers": list(model.buffers()), "loss": job.loss, "inputs": job.inputs}
        roots["collate"] = self._example.collate
        without = {id(each) for each in model.parameters() if each.numel() > _STATE_ELEMENTS}
        if not generators:
            without |= {id(each) for each in reachable(roots).values() if isinstance(each, GENERATORS)}
        return Snapshot(roots, without=without, largest=_STATE_BYTES)

    def from_here(self, *, generators: bool = True) -> _Comparison:
        """Itself, with every call from now on made from the present state."""
        self._start = self.noted(generators=generators)
        return self

    def keeps_state(self, whole: _Part) -> bool:
        """Whether calls change buffers, or leave something else each time for the same samples: an output that is kept is no state."""
        before = self.noted()
        self._advance(whole)
        after, places = self.noted(), _places(self._model)
        found = any(not _is_equal(value, self._buffers.get(place)) for place, (_, value) in places.items())
        if not found:
            self._advance(whole)
            found = after.changed()
        before.put_back()
        return found

    def couples_later(self, samples: int) -> bool:
        """Whether the samples of a batch see each other at one of the later calls, each compared with its parts from the same state.
        The next call goes on from what the last part left."""
        end = time.thread_time() + _SECONDS  # other processes do not count
        for call in range(LATER):
            whole, halves = _halves(call * samples, samples)
            if self.from_here().parts_badly(whole, halves) and self._stays_apart(call, whole, halves):
                return True
            if time.thread_time() > end:
                return False
        return False

    def _stays_apart(self, call: int, whole: _Part, halves: Sequence[_Part]) -> bool:
        """Whether it is neither rounding nor random numbers nor state that could not be put back."""
        with contextlib.suppress(Exception):  # as at the first call: a model may not run in float64
            wide = self.fresh(torch.float64)
            for earlier in range(call):
                wide._advance(_halves(earlier * whole.size, whole.size)[1][-1])
            self._put_back()  # the loss's, which both have
            if not wide.from_here().parts_badly(whole, halves):
                return False
        self._put_back()
        return self.apart(whole, [whole._replace(seed=1)]) <= self.bound

    def _advance(self, whole: _Part) -> None:
        """A call that goes on from what the last one left."""
        self._start = Snapshot({})
        self._loss(whole)

    def parts_badly(self, whole: _Part, parts: Sequence[_Part]) -> bool:
        """Whether the parts together have another gradient than the whole, or none."""
        apart = self.furthest(whole, [parts])
        if math.isnan(apart):  # the whole batch may have no gradient either
            return not math.isnan(self.apart(whole, []))
        return apart > self.bound

    def furthest(self, whole: _Part, splits: Sequence[Sequence[_Part]]) -> float:
        """How far the gradient of `whole` is at most from that of its parts, weighed as they are while it trains."""
        worst = 0.0
        for parts in splits:
            apart = self.apart(whole, parts)
            if self._weighs and apart > self.bound:
                apart = min(apart, self.apart(whole, parts, counted=True))
            if math.isnan(apart):
                return apart
            worst = max(worst, apart)
        return worst

    def apart(self, whole: _Part, parts: Sequence[_Part], *, counted: bool = False) -> float:
        """How far the gradient of `whole` is from that of `parts` together: the worst tensor's largest difference over its
        largest value, small tensors measured against the others. `counted`: parts weigh what their losses average over."""
        self._model.zero_grad(set_to_none=True)
        total, count = self._loss(whole, counted=counted)
        (total / count).backward()
        sizes = self._sizes()
        # The parts' gradients are taken off again: where they agree with the whole's nothing is left.
        for part in parts:
            total, _ = self._loss(part, counted=counted)
            (total / -count).backward()
        least = _FLOOR * max(sizes.values(), default=0.0)
        left = [(size, max(sizes.get(name, 0.0), least)) for name, size in self._sizes().items()]
        if any(math.isnan(size) for size, _ in left):
            return math.nan
        return max((size / scale if scale else math.inf for size, scale in left if size), default=0.0)

    def drifts(self, whole: _Part) -> bool:
        """Whether calls change what the model computes, other than by its buffers."""
        with torch.no_grad():
            losses = {float(self._loss(whole)[0]) for _ in range(_CALLS)}
        return len(losses) > 1

    def loss_couples(self, samples: int) -> bool:
        """Whether the loss alone parts badly, on many samples and on outputs that the model has not given yet: a mean over what is not
        padding, or over what it gets wrong, shows on few samples of a fresh model by chance only. False where outputs cannot be drawn."""
        try:
            batch = tree_map(self._cast, self._example.batch(samples))
            with self._still(), torch.no_grad():
                output = call_model(self._job, self._model, batch)
            leaves = tree_leaves(output)
            if not leaves or not all(_is_rows(leaf, samples) for leaf in leaves):
                return False
            more = self._example.more(_MANY, _READING)
            for scale in _SCALES:
                whole = self._drawn(output, more, _Part(0, len(more)), scale)
                if not math.isfinite(whole.mean):
                    continue
                again = self._drawn(output, more, _Part(0, len(more), seed=1), scale)
                for parts in _splits(len(more)) if again == whole else ():
                    if not whole.adds_up([self._drawn(output, more, part, scale) for part in parts]):
                        return True
        except Exception:  # a loss that does not take such outputs, samples that make no batch together
            return False
        return False

    def _drawn(self, output: Any, samples: list[Any], part: _Part, scale: float) -> _Mean:
        """The loss of some of `samples` on rows of drawn outputs."""
        numbers, rows = torch.Generator().manual_seed(0), slice(part.first, part.first + part.size)

        def drawn(leaf: Tensor) -> Tensor:
            every = scale * torch.randn(len(samples), *leaf.shape[1:], generator=numbers).to(leaf.dtype)
            return every[rows].requires_grad_()

        seed_all(part.seed)
        batch, outputs = tree_map(self._cast, self._example.collate(samples[rows])), tree_map(drawn, output)
        with self._still():
            loss = call_loss(self._job, outputs, batch, self._model)
        if not isinstance(loss, Tensor):
            return _Mean(math.nan, part.size, math.nan)  # a sum and its count part well
        count = _count(loss) if self._weighs else None
        return _Mean(float(loss), part.size, math.nan if count is None else count)

    def _loss(self, part: _Part, *, counted: bool = False) -> tuple[Tensor, float]:
        """(sum, count) of the loss of one part, from the state that the model started with."""
        self._put_back()
        seed_all(part.seed)
        batch = tree_map(self._cast, self._example.batch(part.size, first=part.first))
        with self._still():
            loss = call_loss(self._job, call_model(self._job, self._model, batch), batch, self._model)
        if isinstance(loss, tuple):
            return loss[0], float(loss[1])
        # A mean is over the samples, or over what its graph says.
        count = (_count(loss) if counted else None) or float(part.size)
        return loss * count, count

    def _put_back(self) -> None:
        if self._start is not None:
            self._start.put_back()
            return
        with torch.no_grad():
            for place, (slots, value) in _places(self._model).items():
                first = self._buffers.get(place)
                if value is not None and first is not None and value.shape == first.shape:
                    value.copy_(first)
                elif value is not first:
                    slots[place[1]] = None if first is None else first.clone()

    def _cast(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("cpu", self._dtype if leaf.is_floating_point() else None)

    def _sizes(self) -> dict[str, float]:
        """The largest value of each gradient."""
        named = self._model.named_parameters()
        grads = {name: _numbers(p.grad) for name, p in named if p.grad is not None}
        return {name: float(grad.abs().max()) for name, grad in grads.items() if grad.numel()}


@dataclass(frozen=True, slots=True)
class _Mean:
    """A mean over `samples`, and what it is divided by (NaN: not known)."""

    mean: float
    samples: int
    count: float

    def adds_up(self, parts: Sequence[_Mean]) -> bool:
        """Whether it is the mean of `parts`, weighed by their samples or by what they are divided by."""
        for weights in ([part.samples for part in parts], [part.count for part in parts]):
            total = sum(part.mean * weight for part, weight in zip(parts, weights, strict=True) if weight)
            if abs(total / sum(weights) - self.mean) <= _LOSS * abs(self.mean):
                return True
        return False


def _count(loss: Tensor) -> float | None:
    """What the (first) average in a loss is divided by; None: it cannot be read."""
    reading = read_counts(loss)
    return float(reading.terms[0].count) if reading.terms and not reading.opaque else None


def _numbers(grad: Tensor) -> Tensor:
    """Those that are stored, of a sparse gradient."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _is_rows(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and leaf.shape[0] == samples


def _still_model(job: Job) -> nn.Module:
    """A model of its own, with the values that training starts from, dropout off and batch norms that look at no batch."""
    seed_all(job.seed)
    model = copy_module(job.model) if isinstance(job.model, nn.Module) else call_factory(job.model)
    initialise_lazy(model, job)
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


def first_line(error: Exception) -> str:
    """What an error says, short enough for a note."""
    return (str(error).strip().splitlines() or [""])[0][:160]

"""Two runs made comparable: no randomness, and no rounding to float32 inside a float64 model. Both runs get the same.

Masks cannot be equal when batches or ranks draw their own, so dropout is turned off and other random numbers are set to the
middle of their distribution, without drawing:

    uniform, normal, Cauchy     the mean, or the median where there is none
    whole numbers               the middle of the range
    exponential                 the median; with it Gumbel noise is the same everywhere
    gamma, Dirichlet, RReLU     the mean
    Poisson                     the rate: whole numbers would jump where two runs round it differently
    Bernoulli                   one: a mask that keeps everything
    a permutation               the identity, the only one that is the same in a batch and in its parts
    picks by weight             the heaviest first; with replacement the heaviest each time

Python's and NumPy's numbers are held in the same way (`host_random.py`). What escapes (fractional pooling, functions
of NumPy in C extensions) is drawn, and the survey says so. Casts that the model writes out (`x.float()`, `softmax(...,
dtype=torch.float32)`) are lifted to float64. The search for coupled samples and the proof of a plan both need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from echelon.trials import host_random
from echelon.trials.float64_ops import plain_script_functions, restart_names, swapped
from echelon.trials.random_state import seed_all

#: What a proof computes in, in place of what a model asks for.
WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

_DROPOUTS: tuple[Callable[..., Any], ...] = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
)  # fmt: skip
_IN_PLACE: tuple[Callable[..., Any], ...] = (
    torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_,
)  # fmt: skip


def _full(value: float, *size: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    return torch.empty(*size, **kwargs).fill_(value).requires_grad_(requires_grad)


def _randint(*args: Any, **kwargs: Any) -> Tensor:
    low, high, size = _range(args, kwargs, "size")
    return _full((low + high - 1) // 2, size, **{"dtype": torch.int64} | kwargs)


def _randint_like(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high, _ = _range(args, kwargs)
    return torch.full_like(input, (low + high - 1) // 2, **kwargs)


def _range(args: tuple[Any, ...], kwargs: dict[str, Any], *last: str) -> tuple[int, int, Any]:
    """(low, high, whatever `last` names) of (high, last) or (low, high, last), any of them by name."""
    names = (
        ("low", "high", *last)
        if len(args) + len(kwargs.keys() & {"low", "high", *last}) > 1 + len(last)
        else ("high", *last)
    )
    given = dict(zip([name for name in names if name not in kwargs], args, strict=False))
    found = given | {name: kwargs.pop(name) for name in names if name in kwargs}
    return int(found.get("low", 0)), int(found["high"]), found.get("size")


def _normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if size is not None:
        return _full(mean, size, **kwargs)
    return _as_drawn(torch.as_tensor(mean) + torch.zeros_like(torch.as_tensor(std)))


def _as_drawn(input: Tensor) -> Tensor:
    """`input` as if drawn from it: connected, with a gradient of zero."""
    return input.clone().copy_(input.detach())


def _kept(input: Tensor, p: float | None = None) -> Tensor:
    return input.clone().fill_(1.0)


def _multinomial(input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    if replacement:
        return input.argmax(-1, keepdim=True).expand(*input.shape[:-1], num_samples).clone()
    return input.topk(num_samples, dim=-1).indices


def _gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    # Noise that is the same everywhere leaves a softmax as it is.
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    return torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


#: What draws -> what gives the middle of its distribution instead, called with the same arguments but the generator.
_MIDDLES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: partial(_full, 0.5),
    torch.rand_like: partial(torch.full_like, fill_value=0.5),
    torch.randn: partial(_full, 0.0),
    torch.randn_like: torch.zeros_like,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: lambda n, **kwargs: torch.arange(n, **{"dtype": torch.int64} | kwargs),
    torch.normal: _normal,
    torch.bernoulli: _kept,
    torch.poisson: _as_drawn,
    torch.multinomial: _multinomial,
    Tensor.bernoulli: _kept,
    Tensor.bernoulli_: lambda self, *p, **kwargs: self.fill_(1.0),
    Tensor.multinomial: _multinomial,
    Tensor.uniform_: lambda self, low=0.0, high=1.0, **names: self.fill_((names.get("from", low) + names.get("to", high)) / 2),
    Tensor.normal_: lambda self, mean=0.0, std=1.0: self.fill_(mean),
    Tensor.cauchy_: lambda self, median=0.0, sigma=1.0: self.fill_(median),
    Tensor.exponential_: lambda self, lambd=1.0: self.fill_(math.log(2.0) / lambd),
    F.gumbel_softmax: _gumbel_softmax,
    F.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    torch._standard_gamma: Tensor.clone,
    torch._sample_dirichlet: lambda alpha: alpha / alpha.sum(-1, keepdim=True),
}  # fmt: skip


#: What takes random numbers, of torch's Python interface.
DRAWING = frozenset(
    {*_MIDDLES, *_DROPOUTS, *_IN_PLACE, F.scaled_dot_product_attention, F.rrelu, F.fractional_max_pool2d}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """What has to be held still for a model. `random`: functions that draw; `narrow`: casts below float64; `seeded`: something draws
    all the same, so that both runs are seeded alike before each micro-batch."""

    random: bool = False
    narrow: bool = False
    seeded: bool = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Hold]:
        """Hold it still."""
        before, hold = torch.get_default_dtype(), Hold(self)
        with contextlib.ExitStack() as stack:
            if self.random or self.narrow:
                stack.enter_context(plain_script_functions())
                stack.enter_context(hold)
            if self.random:
                stack.enter_context(host_random.held())
            if self.narrow:
                torch.set_default_dtype(torch.float64)
            try:
                yield hold
            finally:
                torch.set_default_dtype(before)


#: An optimizer's step in a proof: noise that it adds is held, half precision inside it (Muon's) is lifted.
UPDATE = Stillness(random=True, narrow=True)


class Hold(TorchFunctionMode):
    """Rewrites calls of torch's Python interface as they are made."""

    def __init__(self, what: Stillness) -> None:
        super().__init__()
        self._what = what
        #: The casts that were lifted and the draws that were held.
        self.changed: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._what.random:
            if func in _DROPOUTS or func in _IN_PLACE:
                return args[0] if args else kwargs["input"]
            if func is F.scaled_dot_product_attention:
                if len(args) > 4:
                    args = (*args[:4], 0.0, *args[5:])
                else:
                    kwargs["dropout_p"] = 0.0
        if self._what.narrow:
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                self.changed.add(func.__name__)
                func = Tensor.double
            named = (*args, *kwargs.values())
            if any(isinstance(value, torch.dtype) and value in WIDE for value in named) and not _is_counter(func, args):
                self.changed.add(func.__name__)
                args = tuple(_widened(value) for value in args)
                kwargs = {key: _widened(value) for key, value in kwargs.items()}
            func = swapped(func, args)
        if self._what.random and func in _MIDDLES:
            self.changed.add(func.__name__)
            return _held(func, args, kwargs)
        return func(*args, **kwargs)


def _is_counter(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a single number is made: an optimizer's step count, which CUDA's fused kernels read as float32 whatever it is."""
    return func is torch.zeros and args in (((),), ([],))


def _held(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` would have made, at its middle; the generator is not touched, or a survey would take it for drawn."""
    kwargs.pop("generator", None)
    out = kwargs.pop("out", None)
    made = _MIDDLES[func](*args, **kwargs)
    return made if out is None else out.resize_(made.shape).copy_(made)


def _widened(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def silence(model: nn.Module) -> list[str]:
    """Turn off the dropout of torch's own modules and hold NumPy's generators that modules keep, in place; gives their paths."""
    silenced = []
    for path, module in model.named_modules():
        name = _rate(module)
        if name is not None and getattr(module, name) > 0:
            setattr(module, name, 0.0)
            silenced.append(path)
        for key, value in list(vars(module).items()):
            held = host_random.held_generator(value)
            if held is not None:
                setattr(module, key, held)
                silenced.append(f"{path}.{key}" if path else key)
    return silenced


@contextlib.contextmanager
def silenced(model: nn.Module) -> Iterator[None]:
    """The same for a while."""
    named = [(module, _rate(module)) for module in model.modules()]
    rates: list[tuple[nn.Module, str, Any]] = [(module, name, getattr(module, name)) for module, name in named if name]
    rates += [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if host_random.held_generator(value) is not None
    ]
    silence(model)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)


def _rate(module: nn.Module) -> str | None:
    """The attribute that says how much a module drops."""
    if isinstance(module, _DropoutNd):
        return "p"
    return "dropout" if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else None


def seed_samples(*place: int) -> None:
    """Seed all default generators by a place: a job's seed, a step, the first sample of a micro-batch."""
    number = int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big") >> 1
    seed_all(number)


def seed_build(seed: int) -> None:
    """Seed everything that a model's constructor may draw from, and have frameworks that number their layers start again."""
    seed_all(seed)
    restart_names()

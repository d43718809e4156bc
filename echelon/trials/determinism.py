"""Make two runs comparable: no randomness, and no rounding to float32 inside a float64 model.

Ranks that draw masks of their own cannot agree, so dropout is off and other random numbers are fixed at the middle of their distribution:

    uniform, normal, Cauchy     the mean, or the median where there is none
    integers                    the middle of the range
    exponential                 the median; with it Gumbel noise is the same everywhere
    gamma, Dirichlet, RReLU     the mean
    Poisson                     the rate: integers would jump where two runs round it differently
    Bernoulli                   one: a mask that keeps everything
    a permutation               the identity, the only one that is the same in a batch and in its parts
    picks by weight             the heaviest first; with replacement the heaviest each time

Python's and NumPy's numbers are fixed in the same way (`host_random.py`); `verifier/nondeterminism_scan.py` reports what escapes (fractional
pooling, C extensions of NumPy). Casts that the model writes out (`x.float()`, `softmax(..., dtype=torch.float32)`) are widened to float64.
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
from echelon.trials.float64_ops import get_float64_replacement, reset_keras_layer_names, script_functions_as_python
from echelon.trials.random_state import seed_all

#: What a proof computes in, in place of what a model asks for.
WIDENED_DTYPES = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip

_DROPOUT_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
    torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_,
)  # fmt: skip


def _filled_tensor(value: float, *size: Any, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    return torch.empty(*size, **kwargs).fill_(value).requires_grad_(requires_grad)


def _middle_randint(*args: Any, **kwargs: Any) -> Tensor:
    low, high, size = _parse_randint_bounds(args, kwargs, "size")
    return _filled_tensor((low + high - 1) // 2, size, **{"dtype": torch.int64} | kwargs)


def _middle_randint_like(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high, _ = _parse_randint_bounds(args, kwargs)
    return torch.full_like(input, (low + high - 1) // 2, **kwargs)


def _parse_randint_bounds(args: tuple[Any, ...], kwargs: dict[str, Any], *last: str) -> tuple[int, int, Any]:
    """(low, high, size) of (high, *last) or (low, high, *last), any of them by name."""
    names = ("high", *last)
    if len(args) + len(kwargs.keys() & {"low", *names}) > len(names):
        names = ("low", *names)
    arguments = dict(zip([name for name in names if name not in kwargs], args, strict=False))
    arguments |= {name: kwargs.pop(name) for name in names if name in kwargs}
    return int(arguments.get("low", 0)), int(arguments["high"]), arguments.get("size")


def _mean_normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if size is not None:
        return _filled_tensor(mean, size, **kwargs)
    return _as_drawn(torch.as_tensor(mean) + torch.zeros_like(torch.as_tensor(std)))


def _as_drawn(input: Tensor) -> Tensor:
    """`input` as if drawn from it: connected, with a gradient of zero."""
    return input.clone().copy_(input.detach())


def _ones_like(input: Tensor, p: float | None = None) -> Tensor:
    return input.clone().fill_(1.0)


def _most_likely_multinomial(input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    if replacement:
        return input.argmax(-1, keepdim=True).expand(*input.shape[:-1], num_samples).clone()
    return input.topk(num_samples, dim=-1).indices


def _noiseless_gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    soft = (logits / tau).softmax(dim)  # noise that is the same everywhere does not change a softmax
    if not hard:
        return soft
    return torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


def _mean_rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: Any = 0, inplace: Any = 0) -> Any:
    return F.leaky_relu(input, (lower + upper) / 2, bool(inplace))


#: What draws -> what returns the middle of its distribution, called with the same arguments but the generator.
_DETERMINISTIC_DRAWS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: partial(_filled_tensor, 0.5),
    torch.rand_like: partial(torch.full_like, fill_value=0.5),
    torch.randn: partial(_filled_tensor, 0.0),
    torch.randn_like: torch.zeros_like,
    torch.randint: _middle_randint,
    torch.randint_like: _middle_randint_like,
    torch.randperm: lambda n, **kwargs: torch.arange(n, **{"dtype": torch.int64} | kwargs),
    torch.normal: _mean_normal,
    torch.bernoulli: _ones_like,
    torch.poisson: _as_drawn,
    torch.multinomial: _most_likely_multinomial,
    Tensor.bernoulli: _ones_like,
    Tensor.bernoulli_: lambda self, *p, **kwargs: self.fill_(1.0),
    Tensor.multinomial: _most_likely_multinomial,
    Tensor.uniform_: lambda self, low=0.0, high=1.0, **names: self.fill_((names.get("from", low) + names.get("to", high)) / 2),
    Tensor.normal_: lambda self, mean=0.0, std=1.0: self.fill_(mean),
    Tensor.cauchy_: lambda self, median=0.0, sigma=1.0: self.fill_(median),
    Tensor.exponential_: lambda self, lambd=1.0: self.fill_(math.log(2.0) / lambd),
    F.gumbel_softmax: _noiseless_gumbel_softmax,
    F.rrelu: _mean_rrelu,
    torch.rrelu: _mean_rrelu,
    torch._standard_gamma: Tensor.clone,
    torch._sample_dirichlet: lambda alpha: alpha / alpha.sum(-1, keepdim=True),
}  # fmt: skip


#: Functions of torch's Python interface that use random numbers.
_OTHER_RANDOM_FUNCTIONS = (F.scaled_dot_product_attention, F.fractional_max_pool2d)
RANDOM_FUNCTIONS = frozenset({*_DETERMINISTIC_DRAWS, *_DROPOUT_FUNCTIONS, *_OTHER_RANDOM_FUNCTIONS})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterministicMode:
    """What to change in both runs: `fix_random`: functions that draw; `widen_casts`: casts below float64; `needs_seeding`: something draws all
    the same, so both runs are seeded alike before each micro-batch."""

    fix_random: bool = False
    widen_casts: bool = False
    needs_seeding: bool = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[TorchCallRewriter]:
        default_dtype, rewriter = torch.get_default_dtype(), TorchCallRewriter(self)
        with contextlib.ExitStack() as stack:
            if self.fix_random or self.widen_casts:
                stack.enter_context(script_functions_as_python())
                stack.enter_context(rewriter)
            if self.fix_random:
                stack.enter_context(host_random.fixed_host_random())
            if self.widen_casts:
                torch.set_default_dtype(torch.float64)
            try:
                yield rewriter
            finally:
                torch.set_default_dtype(default_dtype)


#: For an optimizer's step in a proof: fixes noise that it adds, widens half precision inside it (Muon's).
OPTIMIZER_STEP_MODE = DeterministicMode(fix_random=True, widen_casts=True)


class TorchCallRewriter(TorchFunctionMode):
    """Rewrites calls of torch's Python interface as they are made."""

    def __init__(self, mode: DeterministicMode) -> None:
        super().__init__()
        self._mode = mode
        self.changed_functions: set[str] = set()  #: the casts that were widened and the draws that were fixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._mode.fix_random:
            if func in _DROPOUT_FUNCTIONS:
                return args[0] if args else kwargs["input"]
            if func is F.scaled_dot_product_attention:
                if len(args) > 4:
                    args = (*args[:4], 0.0, *args[5:])
                else:
                    kwargs["dropout_p"] = 0.0
        if self._mode.widen_casts:
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                self.changed_functions.add(func.__name__)
                func = Tensor.double
            # A single number is an optimizer's step count, which CUDA's fused kernels read as float32 in any case.
            is_step_count = func is torch.zeros and args in (((),), ([],))
            dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
            if not is_step_count and any(dtype in WIDENED_DTYPES for dtype in dtypes):
                self.changed_functions.add(func.__name__)
                args = tuple(_widen_dtype(value) for value in args)
                kwargs = {key: _widen_dtype(value) for key, value in kwargs.items()}
            func = get_float64_replacement(func, args)
        if self._mode.fix_random and func in _DETERMINISTIC_DRAWS:
            self.changed_functions.add(func.__name__)
            kwargs.pop("generator", None)  # untouched, or it would look as if it had drawn
            out = kwargs.pop("out", None)
            drawn = _DETERMINISTIC_DRAWS[func](*args, **kwargs)
            return drawn if out is None else out.resize_(drawn.shape).copy_(drawn)
        return func(*args, **kwargs)


def _widen_dtype(value: Any) -> Any:
    return WIDENED_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


def disable_randomness(model: nn.Module) -> list[str]:
    """Turn off the dropout of torch's own modules and fix NumPy's generators that modules keep, in place; returns their paths."""
    changes = _random_attributes(model)
    for _, module, name, _, fixed_value in changes:
        setattr(module, name, fixed_value)
    return [path for path, _, _, original, _ in changes if original]


@contextlib.contextmanager
def randomness_disabled(model: nn.Module) -> Iterator[None]:
    """`disable_randomness` while inside."""
    originals = _random_attributes(model)
    disable_randomness(model)
    try:
        yield
    finally:
        for _, module, name, original, _ in originals:
            setattr(module, name, original)


def _random_attributes(model: nn.Module) -> list[tuple[str, nn.Module, str, Any, Any]]:
    """(path, module, attribute, value, value without randomness) of dropout rates and of NumPy's generators."""
    attributes: list[tuple[str, nn.Module, str, Any, Any]] = []
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd | nn.RNNBase | nn.MultiheadAttention):
            name = "p" if isinstance(module, _DropoutNd) else "dropout"
            attributes.append((path, module, name, getattr(module, name), 0.0))
        for key, value in vars(module).items():
            if (generator := host_random.make_fixed_generator(value)) is not None:
                attributes.append((f"{path}.{key}" if path else key, module, key, value, generator))
    return attributes


def seed_from_position(*position: int) -> None:
    """Seed all default generators by a position: a job's seed, a step, the first sample of a micro-batch."""
    seed_all(int.from_bytes(hashlib.blake2b(repr(position).encode(), digest_size=8).digest(), "big") >> 1)


def seed_model_build(seed: int) -> None:
    """Seed everything that a model's constructor may draw from, and restart the numbering of layers."""
    seed_all(seed)
    reset_keras_layer_names()

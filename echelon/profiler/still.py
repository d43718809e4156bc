"""Two runs made comparable: no randomness, and no rounding to float32 inside a float64 model. Both runs get the same.

Masks cannot be equal when batches or ranks draw their own, so dropout is turned off and other random numbers are set to the
middle of their distribution. Casts that the model writes out (`x.float()`, `softmax(..., dtype=torch.float32)`) are lifted to
float64. The search for coupled samples and the proof of a plan both need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)

_DROPOUTS: tuple[Callable[..., Any], ...] = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
)  # fmt: skip
_IN_PLACE: tuple[Callable[..., Any], ...] = (
    torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_,
)  # fmt: skip
#: Drawn values -> the middle of their distribution, given what the call would have returned.
_MIDDLES: dict[Callable[..., Any], Callable[[Tensor], Tensor]] = {
    torch.rand: lambda drawn: drawn.fill_(0.5),
    torch.rand_like: lambda drawn: drawn.fill_(0.5),
    torch.randn: lambda drawn: drawn.zero_(),
    torch.randn_like: lambda drawn: drawn.zero_(),
    torch.bernoulli: lambda drawn: drawn.fill_(1.0),
    Tensor.bernoulli: lambda drawn: drawn.fill_(1.0),
    Tensor.bernoulli_: lambda drawn: drawn.fill_(1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """What has to be held still for a model. `random`: functions that draw; `narrow`: casts below float64."""

    random: bool = False
    narrow: bool = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold it still."""
        before = torch.get_default_dtype()
        with _Hold(self) if self.random or self.narrow else contextlib.nullcontext():
            if self.narrow:
                torch.set_default_dtype(torch.float64)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


class _Hold(TorchFunctionMode):
    """Rewrites calls of torch's Python interface as they are made."""

    def __init__(self, what: Stillness) -> None:
        super().__init__()
        self._what = what

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
                func = Tensor.double
            args = tuple(torch.float64 if _narrow(value) else value for value in args)
            kwargs = {key: torch.float64 if _narrow(value) else value for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        return _MIDDLES[func](result) if self._what.random and func in _MIDDLES else result


def _narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW


def silence(model: nn.Module) -> list[str]:
    """Turn off the dropout of torch's own modules, in place; gives their paths."""
    silenced = []
    for path, module in model.named_modules():
        name = (
            "p"
            if isinstance(module, _DropoutNd)
            else "dropout"
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention)
            else None
        )
        if name is not None and getattr(module, name) > 0:
            setattr(module, name, 0.0)
            silenced.append(path)
    return silenced

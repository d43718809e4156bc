"""Activations computed again: a repeated block forgets what it computed and runs its forward once more in backward.

block       it keeps its input alone
selective   and what its products and attentions gave, which are dear to compute: all else is cheap
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.plan.again import keeps
from echelon.plan.plan import Recompute

#: Contexts of the first and of the second forward.
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute(blocks: Sequence[nn.Module], what: Recompute) -> None:
    """Make `blocks` forget what they computed until backward asks for it. Numbers, random ones too, come out the same."""
    for block in blocks if what != "none" else ():
        block.forward = _again(block, block.forward, _selective if what == "selective" else _nothing)


def _again(block: nn.Module, forward: Callable[..., Any], kept: Callable[[], _Contexts]) -> Callable[..., Any]:
    def contexts() -> _Contexts:
        keep, reuse = kept()
        return keep, _second(block, reuse)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return call


@contextmanager
def _second(block: nn.Module, reuse: AbstractContextManager[Any]) -> Iterator[None]:
    """The second forward computes with copies of the buffers: batch norms would count the batch twice."""
    before = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    with ExitStack() as stack:
        for module, buffers in before:
            stack.callback(module._buffers.update, buffers)
            module._buffers.update({name: None if it is None else it.clone() for name, it in buffers.items()})
        stack.enter_context(reuse)
        yield


def _nothing() -> _Contexts:
    return nullcontext(), nullcontext()


def _selective() -> _Contexts:
    keep, reuse = create_selective_checkpoint_contexts(_policy)
    return keep, _Reuse(reuse)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator._overloadpacket.__name__ if isinstance(operator, torch._ops.OpOverload) else ""
    # One that draws random numbers must draw them again, or all that follow would be others.
    save = keeps(name) and not _argument(operator, "dropout_p", args, kwargs)
    return CheckpointPolicy.PREFER_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _argument(operator: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    places = [argument.name for argument in operator._schema.arguments]
    if name not in places:
        return None
    place = places.index(name)
    return args[place] if place < len(args) else kwargs.get(name)


class _Reuse(TorchDispatchMode):
    """torch's own second half, but what was changed in place since (a residual, a sum over ranks) is computed again: torch raises."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._kept.__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError:
            return func(*args, **(kwargs or {}))

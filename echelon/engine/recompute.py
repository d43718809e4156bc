"""Activations computed again: a repeated block keeps only its input, and runs its forward once more in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Make `blocks` forget what they computed until backward asks for it. Numbers, random ones too, come out the same."""
    for block in blocks:
        block.forward = _again(block, block.forward)


def _again(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _set_aside(block)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return call


@contextmanager
def _set_aside(block: nn.Module) -> Iterator[None]:
    """The second forward computes with copies of the buffers: batch norms would count the batch twice."""
    before = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    try:
        for module, buffers in before:
            module._buffers.update({name: None if it is None else it.clone() for name, it in buffers.items()})
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)

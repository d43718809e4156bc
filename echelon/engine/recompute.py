"""Activations computed again: a repeated block forgets what it computed and runs its forward once more in backward.

    block       it keeps its input alone
    selective   and what its products and attentions gave, which are dear to compute: all else is cheap

torch's own selective checkpointing is not used: it raises where something it keeps is changed in place, and does not see that at all
through the views that a product without a bias returns (torch 2.13). Here what was changed is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # no public name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from echelon.plan.again import keeps
from echelon.plan.plan import Recompute


def recompute(blocks: Sequence[nn.Module], what: Recompute) -> None:
    """Make `blocks` forget what they computed until backward asks for it. Numbers, random ones too, come out the same."""
    for block in blocks if what != "none" else ():
        block.forward = _again(block, block.forward, selective=what == "selective")


def _again(block: nn.Module, forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kept, modes = _Kept(), _get_current_function_mode_stack()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not selective:
                return nullcontext(), _second(block, modes, nullcontext())
            return _Keep(kept), _second(block, modes, _Reuse(kept))

        out = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        kept.forget(tree_leaves(out))  # what others hold they may change
        return out

    return call


@contextmanager
def _second(block: nn.Module, modes: Sequence[TorchFunctionMode], reuse: AbstractContextManager[Any]) -> Iterator[None]:
    """The second forward computes with copies of the buffers: batch norms would count the batch twice.

    It runs under the modes (a default device, a proof's stillness) that the first one ran under: in backward there are none.
    """
    before = [(module, dict(module._buffers)) for module in block.modules() if module._buffers]
    with ExitStack() as stack:
        for module, buffers in before:
            stack.callback(module._buffers.update, buffers)
            module._buffers.update({name: None if it is None else it.clone() for name, it in buffers.items()})
        for mode in modes:
            stack.enter_context(mode)
        stack.enter_context(reuse)
        yield


class _Kept:
    """What products and attentions gave, in the order of their calls; None: to be computed again."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def forget(self, changed: Sequence[Any]) -> None:
        """Drop what shares memory with one of `changed`."""
        memory = {_memory(each) for each in changed if isinstance(each, Tensor)}
        for place, output in enumerate(self.outputs):
            if any(_memory(each) in memory for each in tree_leaves(output) if isinstance(each, Tensor)):
                self.outputs[place] = None


class _Keep(TorchDispatchMode):
    """The first forward."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _worth(func, args, kwargs):
            # Not the tensor itself: it will hold the graph, which holds what is kept.
            self._kept.outputs.append(tree_map_only(Tensor, Tensor.detach, out))
        elif self._kept.outputs:
            self._kept.forget(_written(func, args, kwargs))
        return out


class _Reuse(TorchDispatchMode):
    """The second forward: takes what is kept, each once."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept, self._next = kept, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _worth(func, args, kwargs):
            return func(*args, **kwargs)
        place, self._next = self._next, self._next + 1
        found, self._kept.outputs[place] = self._kept.outputs[place], None
        return func(*args, **kwargs) if found is None else found


def _worth(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not keeps(func._overloadpacket.__name__):
        return False
    # One that draws random numbers must draw them again, or all that follow would be others.
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return not given.get("dropout_p")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a call changes."""
    if func.namespace == "c10d":  # messages do not say which
        return tree_leaves((args, dict(kwargs)))
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
    return tree_leaves([given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write])


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

"""Activations computed again: a repeated block forgets what it computed and runs its forward once more in backward.

    block       it keeps its input alone
    selective   and what its products and attentions gave, which are dear to compute: all else is cheap

torch's own selective checkpointing is not used: it raises where something it keeps is changed in place, and does not see that at all
through the views that a product without a bias returns (torch 2.13). Here what was changed is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # no public name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from echelon.errors import TrainingError
from echelon.plan.plan import Recompute
from echelon.plan.recompute_policy import keeps


def recompute(blocks: Sequence[nn.Module], what: Recompute) -> Callable[[], None]:
    """Make `blocks` forget what they computed until backward asks for it. Numbers, random ones too, come out the same.

    Returns what makes them as they were.
    """
    changed = [(block, block.__dict__.get("forward")) for block in blocks if what != "none"]
    for block, _ in changed:
        # Methods, not closures: a copy of the model calls its own.
        block.forward = MethodType(_again(block.forward, selective=what == "selective"), block)

    def put_back() -> None:
        for block, own in changed:
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = own

    return put_back


def _again(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    inner = (
        forward.__func__ if isinstance(forward, MethodType) else lambda block, *args, **kwargs: forward(*args, **kwargs)
    )
    #: Buffers that a forward was seen to change.
    moving: set[tuple[str, str]] = set()

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(block, *args, **kwargs)
        kept, modes, before = _Kept(), _get_current_function_mode_stack(), _Before(block, moving)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not selective:
                return nullcontext(), _second(before, modes, nullcontext())
            return _Keep(kept), _second(before, modes, _Reuse(kept))

        out = checkpoint(inner, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        before.forget_constants()
        kept.forget(tree_leaves(out))  # what others hold they may change
        return out

    return call


class _Before:
    """A block's buffers as its first forward found them, also None: the second must not see what the first, or a later batch, made of them.

    Of those that no forward was seen to change no copy is held until then. Batch norms in training do not read theirs.
    """

    def __init__(self, block: nn.Module, moving: set[tuple[str, str]]) -> None:
        self._block, self._moving = block, moving
        self._found = {
            (path, name): (buffer, None if buffer is None else buffer._version)
            for path, module in block.named_modules()
            if not isinstance(module, _BatchNorm)
            for name, buffer in module._buffers.items()
        }
        self._copies = {place: None if buffer is None else buffer.clone() for place, (buffer, _) in self._found.items()}

    def forget_constants(self) -> None:
        """After the first forward."""
        self._moving.update(self._changed())
        self._copies = {place: copy for place, copy in self._copies.items() if place in self._moving}

    def _changed(self) -> list[tuple[str, str]]:
        modules = dict(self._block.named_modules())
        now = {place: modules[place[0]]._buffers.get(place[1]) for place in self._found}
        return [
            place
            for place, (buffer, version) in self._found.items()
            if now[place] is not buffer or (buffer is not None and buffer._version != version)
        ]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """While it lasts the block has its buffers as they were, in copies that it may change."""
        unseen = sorted(set(self._changed()) - self._copies.keys())
        if unseen:
            raise TrainingError(
                f"recompute: the buffer {'.'.join(filter(None, unseen[0]))} of a {type(self._block).__name__} was changed between its forward and its "
                "backward, by no forward before: what it was is not known any more; use recompute=none"
            )
        with ExitStack() as stack:
            for path, module in self._block.named_modules():
                stack.callback(module._buffers.update, dict(module._buffers))
                for name, value in list(module._buffers.items()):
                    held = self._copies.get((path, name), value)
                    module._buffers[name] = None if held is None else held.clone()
            yield


@contextmanager
def _second(before: _Before, modes: Sequence[TorchFunctionMode], reuse: AbstractContextManager[Any]) -> Iterator[None]:
    """The second forward computes with copies of the buffers: batch norms would count the batch twice.

    It runs under the modes (a default device, a proof's stillness) that the first one ran under: in backward there are none.
    """
    with ExitStack() as stack:
        stack.enter_context(before.put_back())
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
        if not memory:  # most calls change nothing, and this is asked after each of them
            return
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

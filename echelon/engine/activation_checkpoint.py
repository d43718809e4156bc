"""Activation checkpointing: a repeated block drops its activations and runs forward again in backward. plan/recompute_policy.py says what it keeps.

torch's selective checkpointing is not used: it raises where a kept tensor is changed in place, and misses that through the views which a
product without a bias returns (torch 2.13). Here changed outputs are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack  # no public name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from echelon.errors import TrainingError
from echelon.plan.plan import Recompute
from echelon.plan.recompute_policy import saves_output


def checkpoint_activations(blocks: Sequence[nn.Module], policy: Recompute) -> Callable[[], None]:
    """Make `blocks` recompute their activations in backward, with the same results, random numbers included. Returns a function that undoes it."""
    wrapped = [(block, block.__dict__.get("forward")) for block in blocks if policy != "none"]
    for block, _ in wrapped:
        # Methods, not closures: a copy of the model must call its own.
        block.forward = MethodType(_checkpointed_forward(block.forward, selective=policy == "selective"), block)

    def restore() -> None:
        for block, original_forward in wrapped:
            if original_forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = original_forward

    return restore


def _checkpointed_forward(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    run_forward = forward.__func__ if isinstance(forward, MethodType) else lambda _, *args, **kw: forward(*args, **kw)
    mutable_buffers: set[tuple[str, str]] = set()

    def checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run_forward(block, *args, **kwargs)
        save_mode, buffers = _SaveMode(), _BufferSnapshot(block, mutable_buffers)
        modes = _get_current_function_mode_stack()

        def make_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not selective:
                return nullcontext(), _recompute_context(buffers, modes)
            return save_mode, _recompute_context(buffers, [*modes, _ReuseMode(save_mode.outputs)])

        output = checkpoint(run_forward, block, *args, use_reentrant=False, context_fn=make_contexts, **kwargs)
        buffers.drop_constant_copies()
        save_mode.drop_aliases(tree_leaves(output))  # callers may change it
        return output

    return checkpointed


class _BufferSnapshot:
    """A block's buffers before its first forward: the second must not see changes. Copies are kept of those that a forward has changed."""

    def __init__(self, block: nn.Module, mutable: set[tuple[str, str]]) -> None:
        self._block, self._mutable = block, mutable
        self._originals = {
            (path, name): (buffer, None if buffer is None else buffer._version)
            for path, module in block.named_modules()
            if not isinstance(module, _BatchNorm)
            for name, buffer in module._buffers.items()
        }
        self._copies = {key: None if buffer is None else buffer.clone() for key, (buffer, _) in self._originals.items()}

    def drop_constant_copies(self) -> None:
        """After the first forward."""
        self._mutable.update(self._changed_keys())
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._mutable}

    def _changed_keys(self) -> list[tuple[str, str]]:
        modules = dict(self._block.named_modules())
        current = {key: modules[key[0]]._buffers.get(key[1]) for key in self._originals}
        changed = []
        for key, (buffer, version) in self._originals.items():
            if current[key] is not buffer or (buffer is not None and buffer._version != version):
                changed.append(key)
        return changed

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Inside, the block has copies of the buffers as they were."""
        newly_changed = sorted(set(self._changed_keys()) - self._copies.keys())
        if newly_changed:
            name = ".".join(filter(None, newly_changed[0]))
            problem = f"the buffer {name} of a {type(self._block).__name__} first changed between forward and backward"
            raise TrainingError(f"recompute: {problem}, so its value is lost; use recompute=none")
        with ExitStack() as stack:
            for path, module in self._block.named_modules():
                stack.callback(module._buffers.update, dict(module._buffers))
                for name, buffer in list(module._buffers.items()):
                    copy = self._copies.get((path, name), buffer)
                    module._buffers[name] = None if copy is None else copy.clone()
            yield


@contextmanager
def _recompute_context(buffers: _BufferSnapshot, modes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """Run the second forward on copies of the buffers, under the function modes of the first (a default device): backward has none."""
    with ExitStack() as stack:
        for context in (buffers.restore(), *modes):
            stack.enter_context(context)
        yield


class _SaveMode(TorchDispatchMode):
    """The first forward: keeps outputs in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        #: None: recompute it.
        self.outputs: list[Any] = []

    def drop_aliases(self, values: Sequence[Any]) -> None:
        """Drop outputs that share memory with one of `values`."""
        storages = _storage_ids(values)
        for index, output in enumerate(self.outputs if storages else ()):  # most calls write nothing
            if not storages.isdisjoint(_storage_ids(tree_leaves(output))):
                self.outputs[index] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if _is_kept(func, args, kwargs):
            # Detached: the tensor would hold the graph, which holds the kept outputs.
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, output))
        elif self.outputs:
            self.drop_aliases(_written_tensors(func, args, kwargs))
        return output


class _ReuseMode(TorchDispatchMode):
    """The second forward: takes each kept output once."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs, self._next_index = outputs, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        index, self._next_index = self._next_index, self._next_index + 1
        output, self._outputs[index] = self._outputs[index], None
        return func(*args, **kwargs) if output is None else output


def _storage_ids(values: Sequence[Any]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}


def _is_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = func._overloadpacket.__name__
    if not saves_output(name):
        return False
    return saves_output(name, is_random=bool(_named_arguments(func, args, kwargs).get("dropout_p")))


def _named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    if func.namespace == "c10d":  # its schemas do not show it
        return tree_leaves((args, dict(kwargs)))
    if not func._schema.is_mutable:
        return []
    values, arguments = _named_arguments(func, args, kwargs), func._schema.arguments
    written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return tree_leaves([values.get(name) for name in written])

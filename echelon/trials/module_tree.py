"""A model's modules: what each holds, as `plan.profile.units` reads them, and hooks around all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def list_modules(model: nn.Module) -> list[tuple[str, str, dict[int, int]]]:
    """(path, class name, identity -> bytes of its own parameters) of every module; a shared module at each of its paths. A compiled module
    (torch.jit) is one, with all that it holds: nothing can be hooked or replaced inside it."""
    modules: list[tuple[str, str, dict[int, int]]] = []
    compiled_prefix: str | None = None
    for path, module in model.named_modules(remove_duplicate=False):
        if compiled_prefix is not None and path.startswith(compiled_prefix):
            continue
        compiled_prefix = (f"{path}." if path else "") if is_torchscript(module) else None
        own_parameters = module.parameters(recurse=compiled_prefix is not None)
        modules.append((path, type(module).__name__, {id(p): p.nbytes for p in own_parameters}))
    return modules


def is_torchscript(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


@contextlib.contextmanager
def module_hooks(
    model: nn.Module, before: Callable[[str], Any] | None = None, after: Callable[[str, Any], Any] | None = None
) -> Iterator[None]:
    """Call `before(path)` and `after(path, output)` around every module's forward, also around one that raises. TorchScript takes no hooks."""
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            if is_torchscript(module):
                continue
            if before is not None:
                hooks.callback(module.register_forward_pre_hook(_make_hook(before, path), prepend=True).remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(_make_hook(after, path), always_call=True).remove)
        yield


def _make_hook(function: Callable[..., Any], path: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: Any, *output: Any) -> None:  # returning something would replace the input or the output
        function(path, *output)

    return hook

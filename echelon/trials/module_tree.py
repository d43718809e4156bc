"""A model's modules and what each holds, as `plan.profile.units` reads them."""

from __future__ import annotations

import torch
from torch import nn


def list_modules(model: nn.Module) -> list[tuple[str, str, dict[int, int]]]:
    """(path, class name, identity -> bytes of its own parameters) of every module; a shared module at each of its paths.

    A compiled module (torch.jit) is one, with all that it holds: nothing can be hooked or replaced inside it.
    """
    modules: list[tuple[str, str, dict[int, int]]] = []
    compiled_prefix: str | None = None
    for path, module in model.named_modules(remove_duplicate=False):
        if compiled_prefix is not None and path.startswith(compiled_prefix):
            continue
        compiled_prefix = (f"{path}." if path else "") if is_torchscript(module) else None
        own_parameters = module.parameters(recurse=compiled_prefix is not None)
        modules.append(
            (
                path,
                type(module).__name__,
                {id(p): p.numel() * p.element_size() for p in own_parameters},
            )
        )
    return modules


def is_torchscript(module: nn.Module) -> bool:
    """Whether torch.jit made it."""
    return isinstance(module, torch.jit.ScriptModule)

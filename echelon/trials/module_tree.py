"""A model's modules and what each holds, as `plan.profile.units` reads them."""

from __future__ import annotations

import torch
from torch import nn


def module_tree(model: nn.Module) -> list[tuple[str, str, dict[int, int]]]:
    """(path, class name, identity -> bytes of its own parameters) of every module; a shared module at each of its paths.

    A compiled module (torch.jit) is one, with all that it holds: nothing can be hooked or replaced inside it.
    """
    found: list[tuple[str, str, dict[int, int]]] = []
    compiled: str | None = None
    for path, module in model.named_modules(remove_duplicate=False):
        if compiled is not None and path.startswith(compiled):
            continue
        compiled = (f"{path}." if path else "") if is_compiled(module) else None
        own = module.parameters(recurse=compiled is not None)
        found.append((path, type(module).__name__, {id(p): p.numel() * p.element_size() for p in own}))
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.jit made it."""
    return isinstance(module, torch.jit.ScriptModule)

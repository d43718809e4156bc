"""A model's modules and what each holds, as `plan.profile.units` reads them."""

from __future__ import annotations

from torch import nn


def module_tree(model: nn.Module) -> list[tuple[str, str, dict[int, int]]]:
    """(path, class name, identity -> bytes of its own parameters) of every module; a shared module at each of its paths."""
    return [
        (path, type(module).__name__, {id(p): p.numel() * p.element_size() for p in module.parameters(recurse=False)})
        for path, module in model.named_modules(remove_duplicate=False)
    ]

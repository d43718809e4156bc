"""What could not be held still (see `profiler/still.py`): watched while it happens, and said in the certificate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public name; used throughout torch's own tools
from torch.utils._pytree import tree_leaves

from echelon.profiler.still import WIDE


class Survey(TorchDispatchMode):
    """Watches one step of the reference: which modules compute below float64, which draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.narrow: dict[str, str] = {}
        self.random: dict[str, str] = {}
        self._model = model
        self._stack: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Survey:
        for path, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self._stack.append(path)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        super().__enter__()
        return self

    def _leave(self) -> None:
        self._stack.pop()  # a hook that returned it would replace the module's output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _generators() if torch.Tag.nondeterministic_seeded in func.tags else []
        result = func(*args, **(kwargs or {}))
        where = (self._stack[-1] or "the model itself") if self._stack else "the loss or backward"
        # Such an operator may draw nothing, as attention without dropout: a generator that moved tells.
        if any(not torch.equal(old, new) for old, new in zip(before, _generators() if before else [], strict=True)):
            self.random.setdefault(where, str(func))
        # Slices and constants of a float32 table round nothing; arithmetic on such values does.
        computed = not func.is_view and any(_floating(leaf) for leaf in tree_leaves((args, kwargs)))
        if computed and any(_floating(leaf) and leaf.dtype in WIDE for leaf in tree_leaves(result)):
            self.narrow.setdefault(where, str(func))
        return result


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _generators() -> list[Tensor]:
    return (
        [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [torch.get_rng_state()]
    )

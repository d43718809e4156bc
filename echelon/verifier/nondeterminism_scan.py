"""Find what `trials/determinism.py` could not make deterministic, for the certificate."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public name; used throughout torch's own tools
from torch.utils._pytree import tree_leaves

from echelon.trials.determinism import WIDENED_DTYPES
from echelon.trials.module_tree import module_hooks
from echelon.trials.random_state import read_host_random_state, read_torch_random_states

#: They overwrite their input.
_OVERWRITING_OPS = (torch.ops.aten.fill_, torch.ops.aten.zero_)


class NondeterminismScan(TorchDispatchMode):
    """Watches one step of the reference: which modules compute below float64, which draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.low_precision_modules: dict[str, str] = {}  #: module path -> its first such operator
        self.random_modules: dict[str, str] = {}
        self._model = model
        self._stack: list[str] = []
        self._hooks = contextlib.ExitStack()
        attributes = [value for module in model.modules() for value in vars(module).values()]
        self._module_generators = [value for value in attributes if isinstance(value, random.Random)]
        self._host_state: Any = None

    def __enter__(self) -> NondeterminismScan:
        self._hooks.enter_context(module_hooks(self._model, self._enter_module, self._leave_module))
        self._host_state = self._read_host_state()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._check_host_state()
        self._stack.clear()
        self._hooks.close()

    def _enter_module(self, path: str) -> None:
        self._check_host_state()
        self._stack.append(path)

    def _leave_module(self, _: str, __: Any) -> None:
        self._check_host_state()
        self._stack.pop()

    def _read_host_state(self) -> Any:
        return read_host_random_state(), [generator.getstate() for generator in self._module_generators]

    def _check_host_state(self) -> None:
        """torch does not see draws from Python's and NumPy's generators: the module that ran since the last check has drawn."""
        state = self._read_host_state()
        if state != self._host_state:
            self._host_state = state
            self.random_modules.setdefault(self._current_module, "Python's or NumPy's random numbers")

    @property
    def _current_module(self) -> str:
        return (self._stack[-1] or "the model itself") if self._stack else "the loss or backward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        generators = list(filter(None, [(kwargs or {}).get("generator")]))
        states = read_torch_random_states(generators) if is_seeded else []
        result = func(*args, **(kwargs or {}))
        # Such an operator may draw nothing, as attention without dropout: only a changed generator shows a draw.
        if is_seeded and states != read_torch_random_states(generators):
            self.random_modules.setdefault(self._current_module, str(func))
        # Slices and constants of a float32 table round nothing; arithmetic on such values does.
        computes = not func.is_view and func.overloadpacket not in _OVERWRITING_OPS
        is_arithmetic = computes and any(map(_is_floating, tree_leaves((args, kwargs))))
        if is_arithmetic and any(_is_floating(leaf) and leaf.dtype in WIDENED_DTYPES for leaf in tree_leaves(result)):
            self.low_precision_modules.setdefault(self._current_module, str(func))
        return result


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()

"""What could not be held still (see `trials/determinism.py`): watched while it happens, and said in the certificate."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public name; used throughout torch's own tools
from torch.utils._pytree import tree_leaves

from echelon.trials.determinism import WIDENED_DTYPES
from echelon.trials.random_state import read_host_random_state
from echelon.verifier.compare_outputs import hookable_modules


class NondeterminismScan(TorchDispatchMode):
    """Watches one step of the reference: which modules compute below float64, which draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.low_precision_modules: dict[str, str] = {}
        self.random_modules: dict[str, str] = {}
        self._model = model
        self._stack: list[str] = []
        self._hooks: list[Any] = []
        self._module_generators = [
            value for module in model.modules() for value in vars(module).values() if isinstance(value, random.Random)
        ]
        self._host_state: Any = None

    def __enter__(self) -> NondeterminismScan:
        for path, module in hookable_modules(self._model):
            self._hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self._enter_module(path)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave_module()))
        self._host_state = self._read_host_state()
        super().__enter__()
        return self

    def _enter_module(self, path: str) -> None:
        self._check_host_state()
        self._stack.append(path)

    def _leave_module(self) -> None:
        self._check_host_state()
        self._stack.pop()  # a hook that returned it would replace the module's output

    def _read_host_state(self) -> Any:
        return read_host_random_state(), [generator.getstate() for generator in self._module_generators]

    def _check_host_state(self) -> None:
        """Python's and NumPy's generators move unseen by torch: whoever ran since they were looked at has drawn."""
        state = self._read_host_state()
        if state != self._host_state:
            self._host_state = state
            self.random_modules.setdefault(self._current_module, "Python's or NumPy's random numbers")

    @property
    def _current_module(self) -> str:
        return (self._stack[-1] or "the model itself") if self._stack else "the loss or backward"

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._check_host_state()
        self._stack.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        states_before = _generator_states(generator) if torch.Tag.nondeterministic_seeded in func.tags else []
        result = func(*args, **(kwargs or {}))
        module = self._current_module
        # Such an operator may draw nothing, as attention without dropout: a generator that moved tells.
        if any(
            not torch.equal(state_before, state_after)
            for state_before, state_after in zip(
                states_before, _generator_states(generator) if states_before else [], strict=True
            )
        ):
            self.random_modules.setdefault(module, str(func))
        # Slices and constants of a float32 table round nothing; arithmetic on such values does.
        is_arithmetic = (
            not func.is_view
            and func.overloadpacket not in _OVERWRITING_OPS
            and any(_is_floating(leaf) for leaf in tree_leaves((args, kwargs)))
        )
        if is_arithmetic and any(_is_floating(leaf) and leaf.dtype in WIDENED_DTYPES for leaf in tree_leaves(result)):
            self.low_precision_modules.setdefault(module, str(func))
        return result


#: They overwrite what they are given.
_OVERWRITING_OPS = (torch.ops.aten.fill_, torch.ops.aten.zero_)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _generator_states(generator: torch.Generator | None) -> list[Tensor]:
    """The states of the default generators, or of the one that an operator was given."""
    if generator is not None:
        return [generator.get_state()]
    return (
        [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [torch.get_rng_state()]
    )

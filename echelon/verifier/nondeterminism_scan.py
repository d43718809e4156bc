"""What could not be held still (see `trials/determinism.py`): watched while it happens, and said in the certificate."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public name; used throughout torch's own tools
from torch.utils._pytree import tree_leaves

from echelon.trials import host_random
from echelon.trials.determinism import WIDE
from echelon.verifier.compare_outputs import hookable


class Survey(TorchDispatchMode):
    """Watches one step of the reference: which modules compute below float64, which draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.narrow: dict[str, str] = {}
        self.random: dict[str, str] = {}
        self._model = model
        self._stack: list[str] = []
        self._hooks: list[Any] = []
        self._own = [
            value for module in model.modules() for value in vars(module).values() if isinstance(value, random.Random)
        ]
        self._states: Any = None

    def __enter__(self) -> Survey:
        for path, module in hookable(self._model):
            self._hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self._enter(path)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
        self._states = self._host_states()
        super().__enter__()
        return self

    def _enter(self, path: str) -> None:
        self._note_host()
        self._stack.append(path)

    def _leave(self) -> None:
        self._note_host()
        self._stack.pop()  # a hook that returned it would replace the module's output

    def _host_states(self) -> Any:
        return host_random.states(), [each.getstate() for each in self._own]

    def _note_host(self) -> None:
        """Python's and NumPy's generators move unseen by torch: whoever ran since they were looked at has drawn."""
        states = self._host_states()
        if states != self._states:
            self._states = states
            self.random.setdefault(self._where, "Python's or NumPy's random numbers")

    @property
    def _where(self) -> str:
        return (self._stack[-1] or "the model itself") if self._stack else "the loss or backward"

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._note_host()
        self._stack.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = (kwargs or {}).get("generator")
        before = _generators(own) if torch.Tag.nondeterministic_seeded in func.tags else []
        result = func(*args, **(kwargs or {}))
        where = self._where
        # Such an operator may draw nothing, as attention without dropout: a generator that moved tells.
        if any(not torch.equal(old, new) for old, new in zip(before, _generators(own) if before else [], strict=True)):
            self.random.setdefault(where, str(func))
        # Slices and constants of a float32 table round nothing; arithmetic on such values does.
        computed = (
            not func.is_view
            and func.overloadpacket not in _CONSTANT
            and any(_floating(leaf) for leaf in tree_leaves((args, kwargs)))
        )
        if computed and any(_floating(leaf) and leaf.dtype in WIDE for leaf in tree_leaves(result)):
            self.narrow.setdefault(where, str(func))
        return result


#: They overwrite what they are given.
_CONSTANT = (torch.ops.aten.fill_, torch.ops.aten.zero_)


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _generators(own: torch.Generator | None) -> list[Tensor]:
    """The states of the default generators, or of the one that an operator was given."""
    if own is not None:
        return [own.get_state()]
    return (
        [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [torch.get_rng_state()]
    )

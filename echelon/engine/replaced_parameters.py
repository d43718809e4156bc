"""Refuse parameters that forward replaces while training, where ranks hold parts of them.

`self.b.weight = self.a.weight` in a forward ties two layers from then on, and one process follows. Ranks that shard parameters, cut them or divide
them into stages made their parts at the start: ZeRO would put the old parameter back after the step. torch calls a hook for every parameter that is
assigned to a module's attribute; what it saw raises DivergenceError before the update. A parameter that forward puts back itself is fine.

Not seen: what is written into `module._parameters` or deleted, and under zero the parameters of modules with a `__setattr__` of their own, through
which FSDP2 itself assigns (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from echelon.engine.parallel.shard_layout import Piece
from echelon.errors import DivergenceError
from echelon.plan.plan import Plan


class Replacements:
    """Watches the parameters of one model during steps."""

    def __init__(self, plan: Plan, model: nn.Module, pieces: Mapping[str, Piece]) -> None:
        """`pieces`: the parameters that tp cuts."""
        self._sharded = plan.sharded
        self._everything = plan.sharded or plan.mesh.pp > 1 or plan.served
        self._cut = {name: value for name, value in model.named_parameters() if name in pieces}
        #: By id of a module, where it is in the model, which keeps it alive.
        self._paths = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
        #: By module and attribute, the name of a parameter and what stood there before the step.
        self._replaced: dict[tuple[int, str], tuple[str, nn.Parameter]] = {}
        self._within_step = False
        self._handle = None
        if self._everything or pieces:
            self._handle = register_module_parameter_registration_hook(self._assigned)

    def begin(self) -> None:
        """Before a step's first forward."""
        self._within_step = True
        self._replaced.clear()

    def require_none(self, step: int) -> None:
        """After backward: raise where a parameter was replaced."""
        self._within_step = False
        for name, _ in self._replaced.values():
            raise DivergenceError(
                f"step {step + 1}: forward replaces parameter {name}, of which ranks made their parts at the start: they would train on with the old one; "
                "replace or tie it before training, or use a plan without zero, tp and pp, which follows",
                tensor=name,
                cause="a parameter that is replaced while it trains",
            )

    def close(self) -> None:
        """Take the hook off, and let go of parameters."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._cut.clear()
        self._replaced.clear()

    def _assigned(self, owner: nn.Module, name: str, value: nn.Parameter) -> None:
        """torch's hook, called before the assignment."""
        if not self._within_step or id(owner) not in self._paths:
            return
        place = id(owner), name
        if place in self._replaced:
            if self._replaced[place][1] is value:
                del self._replaced[place]
            return
        before, path = owner._parameters.get(name), self._paths[id(owner)] + name
        if before is not None and before is not value and self._in_parts(owner, path, value):
            self._replaced[place] = path, before

    def _in_parts(self, owner: nn.Module, path: str, value: nn.Parameter) -> bool:
        """Whether ranks hold parts of the parameter that is there or that comes there."""
        if self._sharded and getattr(owner.__setattr__, "__func__", None) is not nn.Module.__setattr__:
            return False
        return self._everything or path in self._cut or any(each is value for each in self._cut.values())

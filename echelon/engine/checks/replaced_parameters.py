"""Refuse parameters that forward replaces while training, where ranks hold parts of them.

`self.b.weight = self.a.weight` in a forward ties two layers from then on, but ranks made their parts at the start: ZeRO would put the old parameter
back after the step. Not seen: what is written into `module._parameters` or deleted, and under zero the parameters of modules with a `__setattr__`
of their own, through which FSDP2 itself assigns (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from echelon.engine.parallel.shard_layout import TPShard
from echelon.errors import DivergenceError
from echelon.plan.plan import Plan


class ReplacedParameterCheck:
    """Watches the parameters of one model during steps."""

    def __init__(self, plan: Plan, model: nn.Module, tp_shards: Mapping[str, TPShard]) -> None:
        self._is_sharded = plan.is_sharded
        self._all_distributed = plan.is_sharded or plan.mesh.pp > 1 or plan.uses_servers
        self._tp_parameters = {name: parameter for name, parameter in model.named_parameters() if name in tp_shards}
        #: Path prefix by id of a module, which the model keeps alive.
        self._module_prefixes = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
        #: By module and attribute, the name of a parameter and the one before the step.
        self._replaced: dict[tuple[int, str], tuple[str, nn.Parameter]] = {}
        self._is_in_step = False
        self._handle = None
        if self._all_distributed or tp_shards:
            self._handle = register_module_parameter_registration_hook(self._on_assignment)

    def begin_step(self) -> None:
        """Before a step's first forward."""
        self._is_in_step = True
        self._replaced.clear()

    def require_no_replacement(self, step: int) -> None:
        """After backward: raise where a parameter was replaced."""
        self._is_in_step = False
        for name, _ in self._replaced.values():
            raise DivergenceError(
                f"step {step + 1}: forward replaces parameter {name}, which ranks sharded or assigned to stages at the start: they would keep training the old one; "
                "replace or tie it before training, or use a plan without zero, tp and pp, which supports it",
                tensor=name,
                cause="a parameter that is replaced while it trains",
            )

    def close(self) -> None:
        """Remove the hook, and free parameters."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._tp_parameters.clear()
        self._replaced.clear()

    def _on_assignment(self, owner: nn.Module, name: str, assigned: nn.Parameter) -> None:
        """torch's hook, called before the assignment."""
        if not self._is_in_step or id(owner) not in self._module_prefixes:
            return
        key = id(owner), name
        if key in self._replaced:
            if self._replaced[key][1] is assigned:
                del self._replaced[key]
            return
        replaced, path = owner._parameters.get(name), self._module_prefixes[id(owner)] + name
        if replaced is not None and replaced is not assigned and self._is_distributed(owner, path, assigned):
            self._replaced[key] = path, replaced

    def _is_distributed(self, owner: nn.Module, path: str, value: nn.Parameter) -> bool:
        """Whether ranks hold parts of the old or the new parameter."""
        if self._is_sharded and getattr(owner.__setattr__, "__func__", None) is not nn.Module.__setattr__:
            return False
        is_cut = path in self._tp_parameters or any(value is cut for cut in self._tp_parameters.values())
        return self._all_distributed or is_cut

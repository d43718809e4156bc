"""Hooks on gradients that the model's own code has set: where a plan cannot keep them it is refused, and where they see a part it is said.

parameter.register_hook(...)            zero and tp put other parameters in its place
module.register_full_backward_hook(...) a stage's backward begins and ends at tensors that the hook does not see
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from echelon.errors import PlanError
from echelon.plan.plan import Plan


def require_hooks(model: nn.Module, plan: Plan, cut: Collection[str], warn: Callable[[str], None]) -> None:
    """Refuse a plan that would drop hooks of `model`. `cut`: names of the parameters that tp cuts."""
    hooked = [name for name, value in model.named_parameters() if value._backward_hooks or _after(value)]
    lost = next((name for name in hooked if plan.sharded or name in cut), None)
    if lost is not None:
        axis = f"zero={plan.zero}" if plan.sharded else f"tp={plan.mesh.tp}"
        raise PlanError(
            f"{axis}: {lost} has a gradient hook (register_hook), and each rank trains a part of it that would not have it; use dp or pp "
            "without zero, or change the gradient in forward (a torch.autograd.Function), which every plan keeps"
        )
    modules = [path for path, module in model.named_modules() if module._backward_hooks or module._backward_pre_hooks]
    if modules and plan.mesh.pp > 1:
        raise PlanError(
            f"pp={plan.mesh.pp}: {modules[0] or 'the model'} has a backward hook, which a stage that begins or ends there would not call; use "
            "dp or tp, or change the gradient in forward (a torch.autograd.Function), which every plan keeps"
        )
    first = next(iter([*hooked, *modules]), None)
    if first is not None and (plan.ranks > 1 or plan.micro):
        warn(
            f"{first} has a hook on gradients: under this plan it is called on each part of the batch (or of the tensor) by itself; "
            "`echelon verify` tells whether that matters"
        )


def _after(value: nn.Parameter) -> bool:
    return bool(getattr(value, "_post_accumulate_grad_hooks", None))

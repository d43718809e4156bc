"""Refuse plans that would drop gradient hooks of the model's own code, and warn where they are called on parts.

parameter.register_hook(...)            zero and tp put other parameters in its place
module.register_full_backward_hook(...) a stage's backward begins and ends at tensors that the hook does not see
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from echelon.errors import PlanError
from echelon.plan.plan import Plan


def require_supported_hooks(
    model: nn.Module, plan: Plan, tp_parameters: Collection[str], warn: Callable[[str], None]
) -> None:
    """Refuse a plan that would drop hooks of `model`. `tp_parameters`: names of the parameters that tp cuts."""
    named = list(model.named_parameters())
    hooked_parameters = [n for n, p in named if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    dropped = next((name for name in hooked_parameters if plan.is_sharded or name in tp_parameters), None)
    if dropped is not None:
        axis = f"zero={plan.zero}" if plan.is_sharded else f"tp={plan.mesh.tp}"
        raise PlanError(
            f"{axis}: {dropped} has a gradient hook (register_hook), and each rank trains a part of it that would not have it; use dp or pp "
            "without zero, or change the gradient in forward (a torch.autograd.Function), which every plan keeps"
        )
    hooked_modules = [path for path, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if hooked_modules and plan.mesh.pp > 1:
        raise PlanError(
            f"pp={plan.mesh.pp}: {hooked_modules[0] or 'the model'} has a backward hook, which a stage that begins or ends there would not call; use "
            "dp or tp, or change the gradient in forward (a torch.autograd.Function), which every plan keeps"
        )
    first_hooked = next(iter([*hooked_parameters, *hooked_modules]), None)
    if first_hooked is not None and (plan.ranks > 1 or plan.micro):
        warn(
            f"{first_hooked} has a hook on gradients: under this plan it is called on each part of the batch (or of the tensor) by itself; "
            "`echelon verify` shows whether that matters"
        )

"""Divides a model into its repeated blocks, what runs before them and what runs after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from echelon.plan.profile import Operator, Profile, fold_path
from echelon.simulator.model_summary import OperatorKind, PartName

#: Matrix products with a weight; others multiply activations (attention without a fused kernel).
_RNN_KERNELS = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward")
_WEIGHT_MATMULS = ("mm", "addmm", "_int_mm", *_RNN_KERNELS)
#: Operators whose backward needs neither inputs nor outputs.
_ADDITIONS = ("add", "add_")


class ModelParts:
    """The repeated blocks of a model and what surrounds them. A model without repeated blocks is one block."""

    def __init__(self, profile: Profile) -> None:
        self.blocks = tuple(dict.fromkeys(map(fold_path, profile.fsdp_units)))  #: folded paths
        self.layers = max(len(profile.fsdp_units), 1)
        self.block_output_bytes = {
            block: max(
                (module.output.per_sample for module in profile.modules if fold_path(module.path) == block), default=0.0
            )
            for block in self.blocks
        }
        self._after = self._modules_after(profile)
        #: Positions of forward operators at the end of a block whose outputs backward does not need: additions and the product before them.
        self.ending_operators = {position for block in self.blocks for position in self._ending(profile, block)}
        self.ending_modules = {
            profile.operators[position].module
            for position in self.ending_operators
            if profile.operators[position].kind != "stream"
        }

    def block_of(self, path: str) -> str | None:
        """The block that contains a folded path."""
        return next((block for block in self.blocks if is_within(path, block)), None)

    def in_block(self, path: str) -> bool:
        """Whether a block contains a folded path."""
        return not self.blocks or self.block_of(path) is not None

    def part_of(self, path: str) -> PartName:
        """The part of the model that a folded path belongs to."""
        if self.in_block(path):
            return "block"
        return "after" if not path or is_within_any(path, (module for module in self._after if module)) else "before"

    def _ending(self, profile: Profile, block: str) -> Iterator[int]:
        for position in reversed(range(len(profile.operators))):
            operator = profile.operators[position]
            if operator.phase == "backward" or not is_within(operator.module, block):
                continue
            if operator.name in _ADDITIONS or operator.kind != "stream":
                yield position
            if operator.name not in _ADDITIONS:
                return

    def _modules_after(self, profile: Profile) -> set[str]:
        """Modules outside of blocks that first run after a block, such as the final norm and the head."""
        reached_blocks, before, after = False, set(), set()
        for operator in profile.operators:
            if operator.phase == "backward":
                break
            if self.block_of(operator.module) is not None:
                reached_blocks = True
            elif reached_blocks and operator.module not in before:
                after.add(operator.module)
            else:
                before.add(operator.module)
        return after


def is_within(path: str, outer: str) -> bool:
    """Whether a module is `outer` or inside it."""
    return path == outer or path.startswith(outer + ".")


def is_within_any(path: str, outers: Iterable[str]) -> bool:
    """Whether a module is one of `outers` or inside one."""
    return any(is_within(path, outer) for outer in outers)


def operator_kind(operator: Operator) -> OperatorKind:
    """The kind by which an operator is priced."""
    if operator.kind == "matmul":
        return "weight_matmul" if operator.name.partition(":")[0] in _WEIGHT_MATMULS else "activation_matmul"
    return operator.kind

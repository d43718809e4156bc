"""Model outputs of which ranks may hold parts: made whole, copied, compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.vocab_parallel import ShardedLogits
from echelon.loss_counts import ModelOutputMarker
from echelon.tree import tensor_versions, tree_flatten, tree_leaves, tree_map


def to_full_tensors(tree: Any) -> Any:
    """`tree` with whole tensors in place of those that ranks hold in parts. Ranks that hold parts of one must call it together."""

    def to_full_tensor(value: Any) -> Any:
        if isinstance(value, FakeTensor):  # another stage has it
            return None
        if isinstance(value, ShardedLogits):
            return value.gather_detached() if value._full_tensor is None else value.full_tensor()
        return value.full_tensor() if isinstance(value, DTensor) else value

    return tree_map(to_full_tensor, tree)


def holds_full_tensors(tree: Any) -> bool:
    """Whether no other rank holds a part of its tensors."""
    leaves = tree_leaves(tree)
    logits = [leaf for leaf in leaves if isinstance(leaf, ShardedLogits)]
    return not any(isinstance(leaf, DTensor) for leaf in leaves) and all(x._full_tensor is not None for x in logits)


def as_graph_leaves(tree: Any) -> Any:
    """`tree` with its floating tensors as leaves of a graph, so that what is computed from them has one."""

    def as_graph_leaf(value: Any) -> Any:
        if type(value) is ShardedLogits and value._full_tensor is not None:
            return as_graph_leaf(value._full_tensor)
        if type(value) is ShardedLogits:
            return ShardedLogits(as_graph_leaf(value._local), value._dim, value._shard_sizes, value._tp)
        if type(value) is not Tensor or not value.is_floating_point():
            return value
        return ModelOutputMarker.apply(value.detach().requires_grad_())

    return tree_map(as_graph_leaf, tree)


def output_versions(tree: Any) -> list[int]:
    """How often each tensor of outputs and batches was written to."""
    return tensor_versions([leaf._local if type(leaf) is ShardedLogits else leaf for leaf in tree_leaves(tree)])


def clone_tree(tree: Any) -> Any:
    """`tree` with containers, tensors and arrays of its own. Ranks that hold parts of a tensor must call it together."""

    def clone_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to_full_tensors(value).clone() if isinstance(value, ShardedLogits | DTensor) else value.clone()
        return value.copy() if isinstance(value, np.ndarray | set) else value

    return tree_map(clone_leaf, tree)


def trees_equal(left: Any, right: Any) -> bool:
    """Whether two trees hold the same numbers; NaN differs from itself."""

    def is_equal(left: Any, right: Any) -> bool:
        if isinstance(left, Tensor):
            return isinstance(right, Tensor) and torch.equal(left, right)
        if isinstance(left, np.ndarray):
            return isinstance(right, np.ndarray) and np.array_equal(left, right)
        return not isinstance(left, set) or left == right

    (left_leaves, left_structure), (right_leaves, right_structure) = tree_flatten(left), tree_flatten(right)
    return left_structure == right_structure and all(map(is_equal, left_leaves, right_leaves))

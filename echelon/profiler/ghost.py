"""A model without numbers: what its units return for a batch of any shape, and in which order forward calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from echelon.profiler.build import unquestioned
from echelon.profiler.visits import Visit, follow, intercepted

#: Computes the loss, or what else is wanted, with a model on a batch.
Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True)
class Returned:
    """What a visit returns for batches of one shape: the structure, and its leaves (tensors without numbers)."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    tensors: tuple[int, ...]  #: places of tensors among the leaves


class Ghost:
    """A copy of the whole model without numbers: it tells what every unit returns for a batch of any shape."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        # Operators whose output's size follows from values (nonzero, as in routers) get a size that is not known.
        sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
        memo: dict[int, Any] = {}
        for value in (*model.parameters(), *model.buffers()):
            memo[id(value)] = self._fake(value, device)
        self.model = copy.deepcopy(model, memo)
        self._known: dict[Any, list[Returned]] = {}

    def _fake(self, value: Tensor, device: torch.device) -> Tensor:
        with self.mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(fake, value.requires_grad)
        return fake

    def visits(self, forward: Forward, batch: Any) -> list[Visit]:
        """The calls of the model's units and whose values they read; empty: it cannot be cut."""
        with self.mode, unquestioned():
            fakes = self._faked(batch)
            return follow(self.model, lambda: forward(self.model, fakes))

    def returned(self, forward: Forward, batch: Any, paths: Sequence[str], *, training: bool) -> list[Returned]:
        """What each visit returns for a batch of this shape; the last entry is what `forward` itself does."""
        key = forward, shape_key(batch), training
        self.model.train(training)
        if key not in self._known:
            found: list[Returned] = []

            def around(path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
                out = call(*args, **kwargs)
                leaves, spec = tree_flatten(out)
                places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
                kept = tuple(
                    leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                    for leaf in leaves
                )
                found.append(Returned(kept, spec, places))
                return out

            with self.mode, unquestioned(), intercepted(self.model, list(paths), around):
                end = _as_tuple(forward(self.model, self._faked(batch)))
            found.append(Returned(end, tree_flatten(end)[1], tuple(range(len(end)))))
            self._known[key] = found
        return self._known[key]

    def _faked(self, batch: Any) -> Any:
        return tree_map(lambda leaf: self.mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def shape_key(batch: Any) -> Any:
    """Equal for batches that lead to tensors of the same shapes everywhere."""
    leaves, spec = tree_flatten(batch)
    plain = (int, float, bool, str, type(None))
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, plain) else type(leaf)
        for leaf in leaves
    )


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)

"""A model without numbers: what its units return for a batch of any shape, and in which order forward calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from echelon.errors import EchelonError
from echelon.profiler.module_calls import Visit, follow, intercepted, unit_paths
from echelon.tree import Structure, tree_flatten, tree_map
from echelon.trials.deep_copies import deep_copy
from echelon.trials.random_state import random_states
from echelon.trials.shape_model import unquestioned

#: Invented numbers are tried in these sizes: a model whose calls or shapes follow from them cannot be cut into stages.
_SCALES = (1.0, -1.0, 30.0)

#: What is returned is remembered for so many shapes of batches.
_KEPT = 64

#: Computes the loss, or what else is wanted, with a model on a batch.
Forward = Callable[[nn.Module, Any], Any]
Around = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Returned:
    """What a visit returns for batches of one shape: the structure, and its leaves (tensors without numbers)."""

    leaves: tuple[Any, ...]
    spec: Structure
    tensors: tuple[int, ...]  #: places of tensors among the leaves


class Ghost:
    """A copy of the whole model without numbers: it tells what every unit returns for a batch of any shape.

    Code that looks at values (a router that skips an expert nobody chose) does not run so. Then units are computed one at a time on
    invented weights: the shapes are what matters, and no more than one unit is held.
    """

    def __init__(self, model: nn.Module, device: torch.device, around: Around = nullcontext) -> None:
        """`around`: within it `forward` is called."""
        self._around = around
        # Operators whose output's size follows from values (nonzero, as in routers) get a size that is not known.
        sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
        memo: dict[int, Any] = {}
        for value in (*model.parameters(), *model.buffers()):
            memo[id(value)] = self._fake(value, device)
        self.model = deep_copy(model, memo)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0  # cuDNN draws a seed for it, which a tensor without numbers does not have
        self._known: dict[Any, list[Returned]] = {}
        self._invents = False
        self._scale = 1.0

    def _fake(self, value: Tensor, device: torch.device) -> Tensor:
        with self.mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(fake, value.requires_grad)
        return fake

    def visits(self, forward: Forward, batch: Any) -> list[Visit]:
        """The calls of the model's units and whose values they read; empty: it cannot be cut."""
        if not self._invents:
            try:
                with self._around(), self.mode, unquestioned():
                    fakes = self._faked(batch)
                    return follow(self.model, lambda: forward(self.model, fakes))
            except EchelonError:
                raise
            except Exception:  # whatever a user's forward does with values it does not have
                self._invents = True
        return self._followed(forward, batch)

    def _followed(self, forward: Forward, batch: Any) -> list[Visit]:
        """The visits on invented numbers; none where other numbers lead to other calls or to other shapes."""
        found: list[Visit] = []
        expected: list[Any] | None = None
        for scale in _SCALES:
            seen: list[Any] = []

            def compute(path: str, call: Callable[..., Any], args: Any, kwargs: Any, seen: list[Any] = seen) -> Any:
                out = self._compute(path, call, args, kwargs)
                seen.append((path, shape_key(out)))
                return out

            given = batch if scale == 1 else tree_map(partial(_scaled, by=scale), batch)
            self._scale = scale
            try:
                with self._around(), random_states(), torch.no_grad(), self._invented_around(unit_paths(self.model)):
                    visits = follow(self.model, partial(forward, self.model, given), compute, looks=True)
            except EchelonError:
                raise
            except Exception:  # numbers that the model does not take
                if scale == 1:
                    raise
                continue
            finally:
                self._scale = 1.0
            if expected is None:
                found, expected = visits, seen
            elif seen != expected:
                return []
        return found

    def returned(
        self, forward: Forward, batch: Any, paths: Sequence[str], *, training: bool, visits: Sequence[Visit] = ()
    ) -> list[Returned]:
        """What each visit returns for a batch of this shape; the last entry is what `forward` itself does. `visits` tell whose values
        depend on what is trained, where numbers are invented."""
        key = forward, shape_key(batch), training
        self.model.train(training)
        if key not in self._known:
            if len(self._known) == _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = (
                self._invented(forward, batch, paths, visits) if self._invents else self._traced(forward, batch, paths)
            )
        return self._known[key]

    def calls(self, forward: Forward, batch: Any, paths: Sequence[str]) -> list[str]:
        """The units that forward calls for a batch, in order."""
        found: list[str] = []

        def around(path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            found.append(path)
            return self._compute(path, call, args, kwargs) if self._invents else call(*args, **kwargs)

        with self._around(), intercepted(self.model, list(paths), around), random_states(), unquestioned():
            if self._invents:
                with torch.no_grad(), self._invented_around(paths):
                    forward(self.model, batch)
            else:
                with self.mode:
                    forward(self.model, self._faked(batch))
        return found

    def _traced(self, forward: Forward, batch: Any, paths: Sequence[str]) -> list[Returned]:
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

        with self._around(), self.mode, unquestioned(), intercepted(self.model, list(paths), around):
            end = _as_tuple(forward(self.model, self._faked(batch)))
        return [*found, Returned(end, tree_flatten(end)[1], tuple(range(len(end))))]

    def _invented(self, forward: Forward, batch: Any, paths: Sequence[str], visits: Sequence[Visit]) -> list[Returned]:
        found: list[Returned] = []
        trained: list[bool] = []

        def around(path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            module = self.model.get_submodule(path)
            reads = visits[len(found)].reads if len(found) < len(visits) else set()
            own = any(value.requires_grad for value in module.parameters())
            trained.append(own or any(trained[source] for source, _ in reads if source < len(trained)))
            out = self._compute(path, call, args, kwargs)
            found.append(self._emptied(out, trained[-1]))
            return out

        with (
            self._around(),
            random_states(),
            torch.no_grad(),
            self._invented_around(paths),
            intercepted(self.model, list(paths), around),
        ):
            end = _as_tuple(forward(self.model, batch))
        return [*found, self._emptied(end, True)]

    def _compute(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with invented(self.model.get_submodule(path), self._scale):
            return call(*args, **kwargs)

    def _invented_around(self, paths: Sequence[str]) -> AbstractContextManager[None]:
        return invented(self.model, self._scale, around=paths)

    def _emptied(self, out: Any, trained: bool) -> Returned:
        leaves, spec = tree_flatten(out)
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

        def empty(leaf: Tensor) -> Tensor:
            with self.mode:
                fake = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return fake.requires_grad_(trained and (leaf.is_floating_point() or leaf.is_complex()))

        return Returned(tuple(empty(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec, places)

    def _faked(self, batch: Any) -> Any:
        return tree_map(lambda leaf: self.mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)


@contextmanager
def invented(module: nn.Module, scale: float = 1.0, around: Sequence[str] = ()) -> Iterator[None]:
    """Inside, the tensors of `module` have numbers, small ones above zero, parameters `scale` times that; not those of the modules
    `around` (paths) which it stands."""
    foreign = {id(inner) for path in around for inner in module.get_submodule(path).modules()}
    before: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Tensor] = {}
    for inner in module.modules():
        if id(inner) in foreign:
            continue
        held: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for slots in held:
            for name, value in slots.items():
                if isinstance(value, FakeTensor) or isinstance(getattr(value, "data", None), FakeTensor):
                    before.append((slots, name, value))
                    slots[name] = made.setdefault(id(value), _numbers(value, scale))
    try:
        yield
    finally:
        for slots, name, value in before:
            slots[name] = value


def _numbers(value: Tensor, scale: float) -> Tensor:
    numbers = torch.rand(value.shape, device=value.device).mul_(0.1)
    if not isinstance(value, nn.Parameter):
        return numbers.to(value.dtype)
    return nn.Parameter(numbers.mul_(scale).to(value.dtype), value.requires_grad)


def _scaled(leaf: Any, by: float) -> Any:
    return leaf * by if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def shape_key(batch: Any) -> Any:
    """Equal for batches that lead to tensors of the same shapes everywhere. Texts and broken numbers change with each batch and say
    nothing of shapes."""
    leaves, spec = tree_flatten(batch)
    plain = (int, bool, type(None))
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, plain) else type(leaf)
        for leaf in leaves
    )


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)

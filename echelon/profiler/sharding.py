"""How a model is cut over the tensor axis: which modules, in which way, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from echelon.plan.placement import Placement
from echelon.profiler.pairs import Found, Pair, find_pairs, is_linear


@dataclass(frozen=True, slots=True)
class Sharding:
    """The cuts for one number of ranks."""

    placements: tuple[Placement, ...]
    whole: dict[str, str]  #: module that stays whole on every rank -> why
    share: float  #: of the parameters' bytes that are cut
    paired: float  #: of the parameters' bytes that are cut in pairs, which talk once


def shard(model: nn.Module, step: Callable[[], Any], ways: int) -> Sharding:
    """The cuts of `model` (real numbers, in eval mode) over `ways` ranks; `step()` computes its loss."""
    found = find_pairs(model, step)
    pairs = list(_fitting(found.pairs, ways))
    placements = {placement.path: placement for pair in pairs for placement in _placed(pair)}
    whole: dict[str, str] = {}
    for path, module in model.named_modules():
        if path in placements or not any(True for _ in module.parameters(recurse=False)):
            continue
        cut, why = _alone(module, path, found, ways)
        if cut is not None:
            placements[path] = cut
        else:
            whole[path] = why
    _keep_tied(model, placements, whole, pairs, found)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return Sharding(
        tuple(placements.values()),
        whole,
        _bytes(model, placements.values()) / total,
        _bytes(model, (p for p in placements.values() if p.source != "universal")) / total,
    )


def _fitting(pairs: Iterable[Pair], ways: int) -> Iterable[Pair]:
    """Pairs that work for so many ranks and do not overlap; the first come first."""
    taken: set[str] = set()
    divided: set[tuple[str, str]] = set()
    for pair in pairs:
        if ways in pair.ways and not taken & {*pair.columns, pair.row} and not divided & set(pair.divide):
            taken |= {*pair.columns, pair.row}
            divided |= set(pair.divide)
            yield pair


def _placed(pair: Pair) -> Iterable[Placement]:
    for path in pair.columns:
        yield Placement(path=path, cut="column", parts=pair.parts, source="pair")
    divide = tuple(f"{path}.{name}" if path else name for path, name in pair.divide)
    yield Placement(path=pair.row, cut="row", divide=divide, source="pair")


def _alone(module: nn.Module, path: str, found: Found, ways: int) -> tuple[Placement | None, str]:
    """The cut that needs no partner, or why there is none."""
    own = [id(value) for value in module.parameters(recurse=False)]
    if path not in found.called:
        return None, f"{type(module).__name__} is not called as a module: its parameters are used by other code"
    if found.touched & set(own):
        return None, "its parameters are also used outside of it"
    if type(module) is nn.Embedding:
        if module.max_norm is not None or module.sparse:
            return None, "an embedding with max_norm or sparse gradients is not cut"
        return _sized(path, "vocabulary", module.num_embeddings, ways)
    if is_linear(module):
        return _sized(path, "gather", int(module.out_features if isinstance(module, nn.Linear) else module.nf), ways)  # type: ignore[arg-type]
    if isinstance(module, _ConvNd) and not module.transposed:
        if module.groups > 1:
            return None, "a convolution in groups is not cut"
        return _sized(path, "gather", module.out_channels, ways)
    return None, f"no rule to cut {type(module).__name__}"


def _sized(path: str, cut: Any, size: int, ways: int) -> tuple[Placement | None, str]:
    # As torch.chunk deals: the last rank must get something.
    if -(-size // ways) * (ways - 1) >= size:
        return None, f"{size} outputs are too few for {ways} ranks"
    return Placement(path=path, cut=cut), ""


def _keep_tied(
    model: nn.Module, placements: dict[str, Placement], whole: dict[str, str], pairs: Iterable[Pair], found: Found
) -> None:
    """A parameter that several modules share is cut the same way in all of them, or in none."""
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for value in module._parameters.values():
            # One that holds it without being called only lends it a name.
            if value is not None and (path in found.called or id(value) in found.touched):
                users.setdefault(id(value), []).append(path)
    shared = [paths for paths in users.values() if len(paths) > 1]
    # Giving one up may leave another without its partner: until nothing changes.
    while torn := next((each for each in shared if len({_signature(placements.get(path)) for path in each}) > 1), None):
        partners = {
            path for pair in pairs if {*pair.columns, pair.row} & set(torn) for path in (*pair.columns, pair.row)
        }
        for path in (*torn, *sorted(partners)):
            if placements.pop(path, None) is not None:
                whole[path] = f"{' and '.join(torn)} share a parameter and cannot be cut alike"


def _signature(placement: Placement | None) -> object:
    """Dim and parts of the weight."""
    if placement is None:
        return None
    return (1 if placement.cut == "row" else 0), placement.parts


def _bytes(model: nn.Module, placements: Iterable[Placement]) -> float:
    seen: dict[int, int] = {}
    for placement in placements:
        module = model.get_submodule(placement.path)
        for name, value in module._parameters.items():
            if value is not None and not (placement.cut == "row" and name == "bias"):
                seen[id(value)] = value.numel() * value.element_size()
    return float(sum(seen.values()))

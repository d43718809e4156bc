"""How a model is cut over the tensor axis: which modules, in which way, and why the others are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from echelon.nn.recurrent import relist
from echelon.partition.hf_tp_plan import hinted
from echelon.partition.tp_layers import CONVOLUTIONS, TRANSPOSED, is_flipped, is_plain, outputs
from echelon.partition.tp_pairs import Found, find_pairs
from echelon.partition.tp_trial import Pair
from echelon.plan.placement import Cut, Placement, Slice, cut_parameters, shares
from echelon.tree import tree_leaves
from echelon.trials.trial_run import alike, calling, mode, rehearsing, same

_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts for one number of ranks."""

    placements: tuple[Placement, ...]
    whole: dict[str, str]  #: module that stays whole on every rank -> why
    resting: dict[str, str]  #: module that is cut at rest only -> why
    share: float  #: of the parameters' bytes that are cut
    paired: float  #: of the parameters' bytes that are cut in pairs or by heads, which talk once
    stored: float  #: of the parameters' bytes that are cut at rest only


def shard(model: nn.Module, step: Callable[[], Any], ways: int) -> Cuts:
    """The cuts of `model` (real numbers) over `ways` ranks; `step()` computes its loss."""
    found = find_pairs(model, step, ways, hinted(model))
    pairs = list(_fitting(found.pairs))
    placements = {placement.path: placement for pair in pairs for placement in _placed(model, pair)}
    whole: dict[str, str] = {}
    heads = [path for path, module in model.named_modules() if type(module) is nn.MultiheadAttention]
    inside = {f"{path}.out_proj" if path else "out_proj" for path in heads}
    for path, module in model.named_modules():
        if path in placements or path in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        cut, why = _alone(module, path, found, ways)
        if cut is not None:
            placements[path] = cut
        else:
            whole[path] = why
    _keep_tied(model, placements, whole, pairs, found)
    with rehearsing(model):
        resting = _store(model, alike(model, step), ways, placements, whole, inside)
    total = sum(p.numel() * p.element_size() for p in model.parameters())

    def share(*cuts: str) -> float:
        return _bytes(model, (each for each in placements.values() if each.cut in cuts)) / total

    paired = share("column", "between", "row", "attention")
    stored = share("stored")
    return Cuts(
        tuple(placements.values()),
        whole,
        resting,
        paired + stored + share("gather", "logits", "vocabulary"),
        paired,
        stored,
    )


def _fitting(pairs: Iterable[Pair]) -> Iterable[Pair]:
    """Pairs that do not overlap; the first come first."""
    taken: set[str] = set()
    divided: set[tuple[str, str]] = set()
    for pair in pairs:
        paths, divide = set(pair.candidate.paths), set(pair.layout.divide)
        if not taken & paths and not divided & divide:
            taken |= paths
            divided |= divide
            yield pair


def _placed(model: nn.Module, pair: Pair) -> Iterable[Placement]:
    candidate, layout = pair.candidate, pair.layout
    rest: dict[str, Any] = {"unit": layout.unit, "draws": pair.draws, "source": "hint" if candidate.hinted else "pair"}
    for path in candidate.columns:
        yield Placement(path=path, cut="column", slices=_outputs(model.get_submodule(path), layout.parts), **rest)
    for path in candidate.between:
        yield Placement(path=path, cut="between", slices=_channels(model.get_submodule(path)), **rest)
    divide = tuple(f"{path}.{name}" if path else name for path, name in layout.divide)
    dim = 0 if is_flipped(model.get_submodule(candidate.row)) else 1
    yield Placement(
        path=candidate.row,
        cut="row",
        slices=(Slice("weight", dim),),
        divide=divide,
        fits=layout.fits,
        partial=pair.partial,
        **rest,
    )


def _outputs(module: Any, parts: tuple[int, ...] = ()) -> tuple[Slice, ...]:
    """A layer whose outputs are cut."""
    transposed = isinstance(module, _ConvNd) and module.transposed and module.groups == 1
    weight = Slice("weight", 1 if is_flipped(module) or transposed else 0, parts)
    return (weight,) if module.bias is None else (weight, Slice("bias", 0, parts))


def _channels(module: nn.Module) -> tuple[Slice, ...]:
    """A module that has a row for each channel."""
    own = (*module._parameters.items(), *module._buffers.items())
    return tuple(Slice(name, 0) for name, value in own if value is not None and value.dim())


def _resting(module: nn.Module, ways: int) -> tuple[Slice, ...]:
    """A module that is cut at rest: its matrices, along their longest dim; vectors are not worth a message."""
    return tuple(
        Slice(name, list(value.shape).index(max(value.shape)))
        for name, value in module._parameters.items()
        if value is not None and value.dim() > 1 and shares(max(value.shape), ways)[-1]
    )


def _alone(module: nn.Module, path: str, found: Found, ways: int) -> tuple[Placement | None, str]:
    """The cut that needs no partner, or why there is none."""
    if path not in found.called:
        how = "computes with parameters of its own" if list(module.children()) else "is not called as a module"
        return None, f"{type(module).__name__} {how}"
    own = {id(value) for value in module.parameters()}
    if found.touched & own:
        return None, "its parameters are also used outside of it"
    if found.sized & own:
        return None, "the sizes of its parameters are read outside of it"
    if type(module) is nn.MultiheadAttention:
        return _heads(module, path, ways)
    table, linear = type(module) in _TABLES, type(module) is nn.Linear or is_flipped(module)
    if not (table or linear or type(module) in (*CONVOLUTIONS, *TRANSPOSED)):
        return None, f"no rule to cut {type(module).__name__}"
    if not is_plain(module):
        return None, f"this {type(module).__name__} computes otherwise, or not with a weight of its own"
    if table:
        return _table(module, path, ways)
    if linear:
        cut: Cut = "logits" if path in found.scored else "gather"
        return _sized(path, cut, _outputs(module), outputs(module), ways)
    return _convolution(module, path, ways)  # type: ignore[arg-type]


def _heads(module: nn.MultiheadAttention, path: str, ways: int) -> tuple[Placement | None, str]:
    heads = module.num_heads
    if module.bias_k is not None or module.add_zero_attn:
        return None, "attention with bias_k, bias_v or add_zero_attn is not cut by heads"
    if not shares(heads, ways)[-1]:
        return None, f"{heads} heads are too few for {ways} ranks; use tp={heads} or less"
    parts = (module.embed_dim,) * 3
    slices = (
        Slice("in_proj_weight", 0, parts),
        Slice("in_proj_bias", 0, parts),
        *(Slice(name, 0) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")),
        Slice("out_proj.weight", 1),
    )
    held = tuple(each for each in slices if attrgetter(each.name)(module) is not None)
    if "forward" in vars(module) or {each.name for each in held} - dict(module.named_parameters()).keys():
        return None, "this MultiheadAttention computes otherwise, or not with weights of its own"
    return Placement(path=path, cut="attention", slices=held, unit=module.embed_dim // heads, source="known"), ""


def _table(module: Any, path: str, ways: int) -> tuple[Placement | None, str]:
    if module.max_norm is not None or module.scale_grad_by_freq:
        return None, "an embedding with max_norm or scale_grad_by_freq is not cut by rows"
    if type(module) is nn.EmbeddingBag and (module.mode != "sum" or module.padding_idx is not None):
        return None, "embedding bags are cut by rows where mode='sum' and there is no padding_idx"
    return _sized(path, "vocabulary", (Slice("weight", 0),), module.num_embeddings, ways)


def _convolution(module: _ConvNd, path: str, ways: int) -> tuple[Placement | None, str]:
    if module.groups == 1:
        return _sized(path, "gather", _outputs(module), module.out_channels, ways)
    if not shares(module.groups, ways)[-1] or (module.transposed and module.groups % ways):
        return None, f"a convolution in {module.groups} groups cannot be dealt out to {ways} ranks"
    unit = 1 if module.transposed else module.out_channels // module.groups
    return Placement(path=path, cut="gather", slices=_outputs(module), unit=unit, source="known"), ""


def _sized(path: str, cut: Cut, slices: tuple[Slice, ...], size: int, ways: int) -> tuple[Placement | None, str]:
    if not shares(size, ways)[-1]:
        return None, f"{size} outputs are too few for {ways} ranks; use tp={size} or less"
    return Placement(path=path, cut=cut, slices=slices), ""


def _keep_tied(
    model: nn.Module, placements: dict[str, Placement], whole: dict[str, str], pairs: Iterable[Pair], found: Found
) -> None:
    """A parameter that several modules share is cut the same way in all of them, or in none."""
    users: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module._parameters.items():
            # One that holds it without being called only lends it a name.
            if value is not None and (path in found.called or id(value) in found.touched):
                users.setdefault(id(value), []).append((path, name))
    shared = [each for each in users.values() if len(each) > 1]
    # Giving one up may leave another without its partner: until nothing changes.
    while uses := next((each for each in shared if len({_use(placements.get(p), n) for p, n in each}) > 1), None):
        torn = [path for path, _ in uses]
        partners = {path for pair in pairs if set(pair.candidate.paths) & set(torn) for path in pair.candidate.paths}
        for path in (*torn, *sorted(partners)):
            if placements.pop(path, None) is not None:
                whole[path] = f"{' and '.join(torn)} share a parameter and cannot be cut alike"


def _use(placement: Placement | None, name: str) -> object:
    """How a parameter is cut in one of the modules that hold it."""
    if placement is None:
        return None
    return next(((each.dim, each.parts, placement.unit) for each in placement.slices if each.name == name), None)


# What is cut at rest only


def _store(
    model: nn.Module,
    step: Callable[[], Any],
    ways: int,
    placements: dict[str, Placement],
    whole: dict[str, str],
    inside: set[str],
) -> dict[str, str]:
    """What has no cut of its own is stored cut and put together while a module runs outside of which nobody reads it.

    Found by trying: elsewhere it is not a number, and neither the loss nor a buffer must notice.
    """
    shared, lone = _shared(model), []
    for path in [*whole, *sorted(inside)]:
        if path.rpartition(".")[0] in placements and path in inside:
            continue  # an out_proj goes with its attention
        module = model.get_submodule(path)
        own = [value for value in module._parameters.values() if value is not None]
        if getattr(module, "max_norm", None) is not None:
            whole[path] = "max_norm changes its rows in forward, which a copy of them would not keep"
        elif all(value.dim() < 2 for value in own):
            whole[path] = f"{type(module).__name__} has vectors only"
        elif any(id(value) in shared for value in own):
            whole.setdefault(path, "it shares a parameter")
        elif _resting(module, ways):
            lone.append(path)
    expected = {True: _left(step)}
    with suppress(Exception), mode(model, training=False):  # it may have no loss but in training
        expected[False] = _left(step)
    if lone and _hidden(model, step, {path: path for path in lone}, ways, expected):
        where: dict[str, str | None] = {path: path for path in lone}
    else:
        where = {
            path: next((each for each in _outward(path) if _hidden(model, step, {path: each}, ways, expected)), None)
            for path in lone
        }
    why: dict[str, str] = {}
    for path, within in where.items():
        if within is None:
            whole.setdefault(path, "used outside of every module that holds it")
        else:
            slices = _resting(model.get_submodule(path), ways)
            placements[path] = Placement(path=path, cut="stored", slices=slices, within=within)
            why[path] = whole.pop(path, "it belongs to an attention that is")
    return why


def _outward(path: str) -> Iterator[str]:
    """A module and those around it."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _shared(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for _, value in model.named_parameters(remove_duplicate=False):
        (twice if id(value) in seen else seen).add(id(value))
    return twice


def _left(step: Callable[[], Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step, and the buffers that it leaves."""
    loss, buffers = step()
    (value, *_) = (leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor))
    return value.detach(), buffers


def _hidden(
    model: nn.Module, step: Callable[[], Any], places: Mapping[str, str], ways: int, expected: Mapping[bool, Any]
) -> bool:
    """Whether modules' own matrices (path -> the module around it) are read, and their sizes, only while that module around it runs.

    `expected`: what a step leaves in training, and in evaluation where there is a loss.
    """
    called: set[str] = set()

    def around(path: str, within: str) -> Callable[..., Any]:
        module, inner = model.get_submodule(path), model.get_submodule(within).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            called.add(path)
            with _replaced(module, true[path]):
                return inner(*args, **kwargs)

        return forward

    values = {
        path: {
            each.name: model.get_submodule(path).get_parameter(each.name)
            for each in _resting(model.get_submodule(path), ways)
        }
        for path in places
    }
    true = {
        path: {name: nn.Parameter(value.detach().clone(), value.requires_grad) for name, value in own.items()}
        for path, own in values.items()
    }
    with ExitStack() as stack, torch.no_grad():
        for path in places:
            stack.enter_context(_replaced(model.get_submodule(path), _cut_away(model.get_submodule(path), ways)))
        for path, within in places.items():
            stack.enter_context(calling(model.get_submodule(within), around(path, within)))
        try:
            for own in values.values():
                for value in own.values():
                    value.fill_(math.nan)
            for training, left in expected.items():
                with torch.enable_grad(), mode(model, training=training), _Sizes():
                    if not same(_left(step), left):
                        return False
            return called == set(places)
        except Exception:  # code that looks at values may refuse those
            return False
        finally:
            for path, own in values.items():
                for name, value in own.items():
                    value.copy_(true[path][name])


class _Sizes(TorchFunctionMode):
    """Refuses sizes that torch's kernels take without looking: `_weight_norm` then writes beyond its output and the process aborts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm and len(args) > 1:
            v, g, dim = args[0], args[1], args[2] if len(args) > 2 else 0
            if g.numel() != (1 if dim == -1 else v.shape[dim]):
                raise ValueError(f"weight norm: {tuple(g.shape)} norms for {tuple(v.shape)} along {dim}")
        return func(*args, **(kwargs or {}))


def _cut_away(module: nn.Module, ways: int) -> dict[str, nn.Parameter]:
    """What is there at rest, in size."""
    shapes = {each.name: each.most(module.get_parameter(each.name).shape, ways, 1) for each in _resting(module, ways)}
    return {
        name: nn.Parameter(value.new_full(shapes[name], math.nan), value.requires_grad)
        for name, value in module.named_parameters(recurse=False)
        if name in shapes
    }


@contextmanager
def _replaced(module: nn.Module, values: dict[str, nn.Parameter]) -> Iterator[None]:
    before = dict(module._parameters)
    try:
        module._parameters.update(values)
        relist(module)
        yield
    finally:
        module._parameters.update(before)
        relist(module)


def _bytes(model: nn.Module, placements: Iterable[Placement]) -> float:
    names = cut_parameters(placements)
    cut = {id(value): value for name, value in model.named_parameters(remove_duplicate=False) if name in names}
    return float(sum(value.numel() * value.element_size() for value in cut.values()))

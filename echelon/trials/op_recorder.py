"""One step, operator by operator: what is called with which shapes, what stays alive, where it happens.

The recorder sits under autograd, so it sees the operators that really run, backward ones too. On fake tensors nothing is
computed; on real ones (the fallback) it sees the same.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from echelon.plan.profile import Phase
from echelon.trials.module_tree import is_compiled


@dataclass(slots=True)
class Call:
    """One operator call of one traced step."""

    name: str
    kind: str
    phase: Phase
    path: str
    dtype: str
    dims: tuple[float, ...]
    flops: float
    moved: float
    made: float
    alive: float = 0.0  #: bytes alive right after it, parameters and gradients aside
    kept: float = 0.0
    gradients: float = 0.0
    blocks: int = 0  #: of a megabyte or more


@dataclass(slots=True)
class Figures:
    """What one module's forward adds up to, children included."""

    flops: float = 0.0
    moved: float = 0.0
    kept: float = 0.0
    output: float = 0.0
    ids: float = 0.0  #: that it looks up in tables


@dataclass(slots=True)
class Trace:
    """One step of one batch size."""

    samples: int
    calls: list[Call] = field(default_factory=list)
    modules: dict[str, Figures] = field(default_factory=dict)
    #: Whether the model or the loss takes a derivative that is differentiated in its turn.
    twice: bool = False
    #: A parameter that forward itself changes, but for rows that `max_norm` shortens; "" where there is none.
    changed: str = ""
    #: A parameter of a block that is read while that block does not run; "" where there is none.
    outside: str = ""
    #: Whether Python's or NumPy's random numbers are drawn.
    draws: bool = False


def graph_hash(traces: Iterable[Trace]) -> str:
    """Hash of the operators of these steps, in order: it changes when the model or the loss computes something else."""
    found = hashlib.sha256()
    for trace in traces:
        for call in trace.calls:
            line = f"{call.name} {call.phase} {call.path} {call.dtype} {call.dims} {call.flops} {call.moved}\n"
            found.update(line.encode())
    return found.hexdigest()


#: From this size on allocators give a tensor a block of its own.
_BLOCK = 2**20


class Recorder(TorchDispatchMode):
    """Notes every operator call. Use `recording(...)`, which also sets the hooks that tell where a call comes from."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.trace = Trace(samples)
        self.phase: Phase = "forward"
        self.stack: list[str] = [""]
        self.path = ""
        self.gradients = 0.0
        self._sizes: dict[int, float] = {}
        self._references: dict[int, Any] = {}
        self._kept: set[int] = set()
        self._ignored: set[int] = set()
        self._alive = self._kept_bytes = 0.0
        self._blocks = 0
        self._parameters: dict[int, tuple[str, str]] = {}

    def watch(self, parameters: Mapping[str, Tensor], blocks: Sequence[str]) -> None:
        """Note who changes `parameters`, by name, and who reads those of a block while it does not run."""
        for name, value in parameters.items():
            block = next((path for path in blocks if name.startswith(f"{path}.")), "")
            if value.numel():
                self._parameters[_identity(value)] = name, block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if self.phase == "forward" and self._parameters:
            self._look(func, args, kwargs, inputs)
        outputs = _tensors(out)
        known = {_identity(tensor) for tensor in inputs}
        made = sum((self.hold(tensor) for tensor in outputs if _identity(tensor) not in known), 0.0)
        if _is_view(func, known, outputs) or func._overloadpacket._qualified_op_name.startswith("prim"):
            return out
        self._note(func, args, kwargs, out, inputs, outputs, made)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
        """Note what happens to parameters, by their memory: writes through `.data` or `_foreach` change no version."""
        for tensor in inputs:
            name, block = self._parameters.get(_identity(tensor), ("", ""))
            if block and block not in self.stack:
                self.trace.outside = self.trace.outside or name
        if self.trace.changed or not func._schema.is_mutable:
            return
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        for each in func._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                for tensor in _tensors(given.get(each.name)):
                    name, _ = self._parameters.get(_identity(tensor), ("", ""))
                    self.trace.changed = self.trace.changed or name

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor (a parameter, a buffer) out of what is alive."""
        self._ignored.add(_identity(tensor))

    def hold(self, tensor: Tensor) -> float:
        """Count a tensor's storage as alive until it is freed; the bytes if it was not known yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._ignored:
            return 0.0
        size = float(storage.nbytes())
        self._sizes[key] = size
        self._alive += size
        self._blocks += size >= _BLOCK

        def freed(_: Any, key: int = key) -> None:
            gone = self._sizes.pop(key, 0.0)
            self._references.pop(key, None)
            self._alive -= gone
            self._blocks -= gone >= _BLOCK
            if key in self._kept:
                self._kept.discard(key)
                self._kept_bytes -= gone

        self._references[key] = weakref.ref(storage, freed)
        return size

    def pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        """Autograd keeps a tensor for backward: note it, once per storage."""
        key = _identity(tensor)
        if key not in self._ignored:
            self.hold(tensor)
            if key not in self._kept:
                self._kept.add(key)
                self._kept_bytes += self._sizes[key]
                for path in self.stack:
                    self.trace.modules.setdefault(path, Figures()).kept += self._sizes[key]
        return self.stack[-1], tensor

    def unpack(self, packed: tuple[str, Tensor]) -> Tensor:
        """Backward takes a kept tensor: the operators that follow belong to the module that kept it."""
        self.path, tensor = packed
        return tensor

    def _note(
        self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor], made: float
    ) -> None:
        name = func._overloadpacket.__name__
        kind, dims, flops = _shape(name, func, args, kwargs, out)
        if name in _MATMULS:
            name += _layout(*_factors(name, args))
        forward = self.phase == "forward"
        moved = _moved(name, inputs, outputs)
        lead = next((t for t in (*inputs, *outputs) if t.is_floating_point()), outputs[0])
        call = Call(
            name=name,
            kind=kind,
            phase=self.phase,
            path=self.stack[-1] if forward else self.path,
            dtype=str(lead.dtype).removeprefix("torch."),
            dims=dims,
            flops=flops,
            moved=moved,
            made=made,
            alive=self._alive,
            kept=self._kept_bytes,
            gradients=self.gradients,
            blocks=self._blocks,
        )
        self.trace.calls.append(call)
        if forward:
            for path in self.stack:
                figures = self.trace.modules.setdefault(path, Figures())
                figures.flops += flops
                figures.moved += moved
                figures.ids += args[1].numel() if name in _LOOKUPS else 0


@contextmanager
def recording(model: nn.Module, samples: int) -> Iterator[Recorder]:
    """Record what happens inside; the recorder knows the module paths of `model` and leaves its parameters out."""
    recorder = Recorder(samples)
    hooks: list[Any] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            recorder.stack.append(path)

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            recorder.stack.pop()
            figures = recorder.trace.modules.setdefault(path, Figures())
            figures.output += sum(t.numel() * t.element_size() for t in _tensors(output))

        return hook

    for path, module in model.named_modules():
        if path and not is_compiled(module):
            hooks.append(module.register_forward_pre_hook(enter(path)))
            hooks.append(module.register_forward_hook(leave(path)))
    try:
        with recorder, saved_tensors_hooks(recorder.pack, recorder.unpack):
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def counting(recorder: Recorder) -> Callable[[Tensor], None]:
    """A hook for finished gradients: counted as done and dropped, so that `alive` never holds them."""

    def done(parameter: Tensor) -> None:
        recorder.gradients += parameter.numel() * parameter.element_size()
        parameter.grad = None

    return done


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


#: Operators that read as much of their first input as they return, however large it is; and one that only writes.
_PICKS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward"}
#: Those that read a table (their first argument) by ids (their second).
_LOOKUPS = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
_WRITES = {"nll_loss_backward", "nll_loss2d_backward"}


def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Bytes that a call reads and writes."""
    read, written = inputs, outputs
    if name in _PICKS:
        largest = max((t.numel() for t in (*inputs[1:], *outputs)), default=0)
        picked = min(largest, inputs[0].numel()) * inputs[0].element_size()
        return float(picked + sum(t.numel() * t.element_size() for t in (*inputs[1:], *outputs)))
    if name in _WRITES:
        read = [t for t in inputs if not t.is_floating_point()]
    return float(sum(t.numel() * t.element_size() for t in (*read, *written)))


def _is_view(func: Any, known: set[int], outputs: list[Tensor]) -> bool:
    """Whether a call computed nothing: it made no tensor, or only aliases of its inputs that it did not write to."""
    if not outputs:
        return True
    if func._schema.is_mutable:
        return False
    return all(_identity(tensor) in known for tensor in outputs)


def _shape(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, tuple[float, ...], float]:
    """(kind, dims, FLOPs) of a call; kind "stream" for operators that are priced by the bytes they move."""
    if name in _MATMULS:
        a, b = _factors(name, args)
        lots = a.shape[0] if a.dim() == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        return "matmul", (float(lots), float(m), float(n), float(k)), 2.0 * lots * m * n * k
    if name in _RECURRENT:
        dims = _recurrence(name, args)
        return "matmul", dims, (4.0 if "backward" in name else 2.0) * math.prod(dims)
    if name == "convolution":
        return "convolution", _convolution(args[0], args[1], out, args[8]), _counted(func, args, kwargs, out)
    if name == "convolution_backward":
        dims = _convolution(args[1], args[2], args[0], args[9])
        return "convolution", dims, _counted(func, args, kwargs, out)
    if "scaled_dot_product" in name and "attention" in name:
        q, k = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        shape = (float(q.shape[0] * q.shape[1]), float(q.shape[-2]), float(k.shape[-2]), float(q.shape[-1]))
        scores = shape[0] * (_looking_back(*shape[1:3]) if _causal(func, args, kwargs) else shape[1] * shape[2])
        # Backward computes the scores again, then four products.
        return "attention", shape, (10.0 if "backward" in name else 4.0) * scores * shape[3]
    return "stream", _laid_out(name, args), _counted(func, args, kwargs, out)


#: Operators that are dealt out by rows or by channels, so that bytes alone do not tell their rate: where the tensor stands that does.
_BY_ROWS = {"native_layer_norm": 0, "native_layer_norm_backward": 1, "nll_loss_forward": 0, "nll_loss_backward": 1}
_BY_CHANNELS = {
    "native_batch_norm": 0, "native_batch_norm_backward": 1, "cudnn_batch_norm": 0, "cudnn_batch_norm_backward": 0,
}  # fmt: skip


def _laid_out(name: str, args: Any) -> tuple[float, ...]:
    """(width of a row, rows), (channels, elements of each, samples), or nothing."""
    if name in _BY_ROWS:
        x = args[_BY_ROWS[name]]
        width = math.prod(args[_BY_ROWS[name] + 1]) if "norm" in name else x.shape[-1]
        return float(width), x.numel() / max(width, 1)
    if name in _BY_CHANNELS:
        x = args[_BY_CHANNELS[name]]
        return float(x.shape[1]), float(math.prod(x.shape[2:])), float(x.shape[0])
    return ()


def _causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention looks back only: kernels then leave out the scores that are not used."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("is_causal", False) is True


def _looking_back(queries: float, keys: float) -> float:
    """Scores of so many queries of which the first sees one key, the second two, and so on."""
    few = min(queries, keys)
    return few * (few + 1) / 2 + (queries - few) * keys


_MATMULS = {"mm": 0, "bmm": 0, "_int_mm": 0, "addmm": 1, "baddbmm": 1}  # name -> place of the first factor


#: Whole recurrent layers in one call -> places of the matrices and of the first state.
_RECURRENT = {
    "mkldnn_rnn_layer": (slice(1, 3), 5),
    "mkldnn_rnn_layer_backward": (slice(1, 3), 5),
    "_cudnn_rnn": (slice(1, 2), 4),
    "_cudnn_rnn_backward": (slice(1, 2), 4),
}


def _recurrence(name: str, args: Any) -> tuple[float, ...]:
    """A recurrent layer as one product of every step: (steps, samples, gates, what each of them adds up)."""
    matrices, state = _RECURRENT[name]
    weights = [tensor for tensor in _tensors(args[matrices]) if tensor.dim() == 2]
    samples, gates = args[state].shape[-2], weights[0].shape[0]
    steps = args[0].numel() / (samples * args[0].shape[-1])
    return steps, float(samples), float(gates), sum(tensor.numel() for tensor in weights) / gates


def _factors(name: str, args: Any) -> tuple[Tensor, Tensor]:
    place = _MATMULS[name]
    return args[place], args[place + 1]


def _layout(a: Tensor, b: Tensor) -> str:
    """`:nt` and so on: which factors lie transposed in memory; libraries differ most between those."""
    return ":" + "".join("t" if x.stride(-2) == 1 and x.stride(-1) != 1 else "n" for x in (a, b))


def _convolution(x: Tensor, weight: Tensor, out: Tensor, groups: int) -> tuple[float, ...]:
    spatial = math.prod(out.shape[2:])
    return (
        float(x.shape[0]), float(x.shape[1]), float(out.shape[1]), float(math.prod(weight.shape[2:])), float(spatial), float(groups),
    )  # fmt: skip


def _counted(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(formula(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError):
        return 0.0

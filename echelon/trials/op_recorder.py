"""Record one step, operator by operator: what is called with which shapes, what stays alive, in which module.

The recorder sits below autograd, so it sees the operators that really run, backward ones too. With fake tensors nothing is computed.
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
from echelon.trials.module_tree import module_hooks


@dataclass(slots=True)
class OpCall:
    name: str
    kind: str
    phase: Phase
    path: str
    dtype: str
    dims: tuple[float, ...]
    flops: float
    moved_bytes: float
    allocated_bytes: float
    alive_bytes: float = 0.0  #: bytes alive right after it, parameters and gradients aside
    saved_bytes: float = 0.0
    gradient_bytes: float = 0.0
    large_storages: int = 0  #: of a megabyte or more


@dataclass(slots=True)
class ModuleTotals:
    """Sums over one module's forward, children included."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    lookup_ids: float = 0.0  #: ids looked up in tables


@dataclass(slots=True)
class StepTrace:
    num_samples: int
    calls: list[OpCall] = field(default_factory=list)
    module_totals: dict[str, ModuleTotals] = field(default_factory=dict)
    has_double_backward: bool = False  #: the model or the loss differentiates a derivative
    #: A parameter that forward itself changes, apart from rows that `max_norm` shortens; "" where there is none.
    mutated_parameter: str = ""
    parameter_read_outside: str = ""  #: a parameter of a block that is read while that block does not run
    draws_host_random: bool = False  #: from Python's or NumPy's generators


def hash_graph(traces: Iterable[StepTrace]) -> str:
    """Hash of the operators of these steps, in order: it changes when the model or the loss computes something else."""
    digest = hashlib.sha256()
    for trace in traces:
        for op in trace.calls:
            digest.update(f"{op.name} {op.phase} {op.path} {op.dtype} {op.dims} {op.flops} {op.moved_bytes}\n".encode())
    return digest.hexdigest()


#: From this size on allocators give a tensor a block of its own.
_LARGE_STORAGE_BYTES = 2**20


class OpRecorder(TorchDispatchMode):
    """Records every operator call. Use `record_ops(...)`, which also hooks the modules, to know where a call comes from."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.trace = StepTrace(num_samples)
        self.phase: Phase = "forward"
        self.module_stack: list[str] = [""]
        self.backward_path = ""
        self.gradient_bytes = 0.0
        self._storage_sizes: dict[int, float] = {}
        self._storage_references: dict[int, Any] = {}
        self._saved_storages: set[int] = set()
        self._ignored_storages: set[int] = set()
        self._alive_bytes = self._saved_bytes = 0.0
        self._large_storages = 0
        self._watched_parameters: dict[int, tuple[str, str]] = {}

    def watch_parameters(self, parameters: Mapping[str, Tensor], blocks: Sequence[str]) -> None:
        """Record which of `parameters`, by name, forward changes, and which of a block it reads while the block does not run."""
        for name, value in parameters.items():
            block = next((path for path in blocks if name.startswith(f"{path}.")), "")
            if value.numel():
                self._watched_parameters[_storage_id(value)] = name, block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = _find_tensors((args, kwargs))
        if self.phase == "forward" and self._watched_parameters:
            self._check_parameter_use(func, args, kwargs, inputs)
        outputs = _find_tensors(out)
        input_storages = set(map(_storage_id, inputs))
        new_tensors = [tensor for tensor in outputs if _storage_id(tensor) not in input_storages]
        allocated_bytes = sum(map(self.track_storage, new_tensors), 0.0)
        # A call computed nothing if it made no tensor, or only aliases of its inputs that it did not write to.
        is_view = not outputs or not (new_tensors or func._schema.is_mutable)
        if not is_view and not func._overloadpacket._qualified_op_name.startswith("prim"):
            self._record_call(func, args, kwargs, out, inputs, outputs, allocated_bytes)
        return out

    def _check_parameter_use(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
        """Watch parameters by their memory: writes through `.data` or `_foreach` change no version."""
        for tensor in inputs:
            name, block = self._watched_parameters.get(_storage_id(tensor), ("", ""))
            if block and block not in self.module_stack:
                self.trace.parameter_read_outside = self.trace.parameter_read_outside or name
        if self.trace.mutated_parameter or not func._schema.is_mutable:
            return
        arguments = _bind_arguments(func, args, kwargs)
        for item in func._schema.arguments:
            if item.alias_info is not None and item.alias_info.is_write:
                for tensor in _find_tensors(arguments.get(item.name)):
                    name, _ = self._watched_parameters.get(_storage_id(tensor), ("", ""))
                    self.trace.mutated_parameter = self.trace.mutated_parameter or name

    def ignore_storage(self, tensor: Tensor) -> None:
        """Leave a tensor (a parameter, a buffer) out of what is alive."""
        self._ignored_storages.add(_storage_id(tensor))

    def track_storage(self, tensor: Tensor) -> float:
        """Count a tensor's storage as alive until it is freed; returns its bytes, 0 if it was counted before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storage_sizes or key in self._ignored_storages:
            return 0.0
        num_bytes = float(storage.nbytes())
        self._storage_sizes[key] = num_bytes
        self._alive_bytes += num_bytes
        self._large_storages += num_bytes >= _LARGE_STORAGE_BYTES

        def on_freed(_: Any, key: int = key) -> None:
            freed_bytes = self._storage_sizes.pop(key, 0.0)
            self._storage_references.pop(key, None)
            self._alive_bytes -= freed_bytes
            self._large_storages -= freed_bytes >= _LARGE_STORAGE_BYTES
            if key in self._saved_storages:
                self._saved_storages.discard(key)
                self._saved_bytes -= freed_bytes

        self._storage_references[key] = weakref.ref(storage, on_freed)
        return num_bytes

    def save_tensor(self, tensor: Tensor) -> tuple[str, Tensor]:
        """Count a tensor that autograd keeps for backward, once per storage."""
        key = _storage_id(tensor)
        if key not in self._ignored_storages:
            self.track_storage(tensor)
            if key not in self._saved_storages:
                self._saved_storages.add(key)
                self._saved_bytes += self._storage_sizes[key]
                for path in self.module_stack:
                    self.trace.module_totals.setdefault(path, ModuleTotals()).saved_bytes += self._storage_sizes[key]
        return self.module_stack[-1], tensor

    def load_tensor(self, packed: tuple[str, Tensor]) -> Tensor:
        """Return a tensor to backward: the operators that follow belong to the module that saved it."""
        self.backward_path, tensor = packed
        return tensor

    def _record_call(
        self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor], allocated_bytes: float
    ) -> None:  # fmt: skip
        name = func._overloadpacket.__name__
        kind, dims, flops = _describe_op(name, func, args, kwargs, out)
        if name in _MATMUL_OPS:
            # `:nt` and so on: libraries differ most by which factors lie transposed in memory.
            factors = _get_matmul_factors(name, args)
            name += ":" + "".join("t" if x.stride(-2) == 1 and x.stride(-1) != 1 else "n" for x in factors)
        is_forward = self.phase == "forward"
        moved_bytes = _count_moved_bytes(name, inputs, outputs)
        main_tensor = next((tensor for tensor in (*inputs, *outputs) if tensor.is_floating_point()), outputs[0])
        self.trace.calls.append(
            OpCall(
                name=name, kind=kind, phase=self.phase, path=self.module_stack[-1] if is_forward else self.backward_path,
                dtype=str(main_tensor.dtype).removeprefix("torch."), dims=dims, flops=flops, moved_bytes=moved_bytes,
                allocated_bytes=allocated_bytes, alive_bytes=self._alive_bytes, saved_bytes=self._saved_bytes,
                gradient_bytes=self.gradient_bytes, large_storages=self._large_storages,
            )
        )  # fmt: skip
        if is_forward:
            for path in self.module_stack:
                totals = self.trace.module_totals.setdefault(path, ModuleTotals())
                totals.flops += flops
                totals.moved_bytes += moved_bytes
                totals.lookup_ids += args[1].numel() if name in _EMBEDDING_OPS else 0


@contextmanager
def record_ops(model: nn.Module, num_samples: int) -> Iterator[OpRecorder]:
    """Record what happens inside; the recorder knows the module paths of `model` and leaves its parameters out."""
    recorder = OpRecorder(num_samples)
    modules, totals = recorder.module_stack, recorder.trace.module_totals

    def enter(path: str) -> None:
        if path:  # what happens outside of the model counts as the model's own
            modules.append(path)

    def leave(path: str, output: Any) -> None:
        if path:
            modules.pop()
            totals.setdefault(path, ModuleTotals()).output_bytes += _count_bytes(_find_tensors(output))

    saving = saved_tensors_hooks(recorder.save_tensor, recorder.load_tensor)
    with module_hooks(model, enter, leave), recorder, saving:
        yield recorder


def make_gradient_hook(recorder: OpRecorder) -> Callable[[Tensor], None]:
    """A hook that counts and drops finished gradients, so that they never count as alive."""

    def count_and_drop(parameter: Tensor) -> None:
        recorder.gradient_bytes += _count_bytes([parameter])
        parameter.grad = None

    return count_and_drop


def _find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _bind_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip((item.name for item in func._schema.arguments), args, strict=False)) | kwargs


#: Operators that read as much of their first input as they return, however large it is; and one that only writes.
_SELECTING_OPS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward"}
#: Those that read a table (their first argument) by ids (their second).
_EMBEDDING_OPS = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
_WRITE_ONLY_OPS = {"nll_loss_backward", "nll_loss2d_backward"}


def _count_moved_bytes(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    if name in _SELECTING_OPS:
        others = [*inputs[1:], *outputs]
        largest = max((tensor.numel() for tensor in others), default=0)
        return float(min(largest, inputs[0].numel()) * inputs[0].element_size() + _count_bytes(others))
    reads = [tensor for tensor in inputs if not tensor.is_floating_point()] if name in _WRITE_ONLY_OPS else inputs
    return float(_count_bytes([*reads, *outputs]))


def _describe_op(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, tuple[float, ...], float]:
    """(kind, dims, FLOPs) of a call; kind "stream" for operators whose price is the bytes they move."""
    if name in _MATMUL_OPS:
        left, right = _get_matmul_factors(name, args)
        num_matmuls = left.shape[0] if left.dim() == 3 else 1
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        return "matmul", (float(num_matmuls), float(m), float(n), float(k)), 2.0 * num_matmuls * m * n * k
    if name in _RECURRENT_OPS:
        dims = _describe_recurrence(name, args)
        return "matmul", dims, (4.0 if "backward" in name else 2.0) * math.prod(dims)
    if name in ("convolution", "convolution_backward"):
        is_forward = name == "convolution"
        x, weight, y, groups = (*args[:2], out, args[8]) if is_forward else (*args[1:3], args[0], args[9])
        kernel, spatial = math.prod(weight.shape[2:]), math.prod(y.shape[2:])
        dims = tuple(map(float, (x.shape[0], x.shape[1], y.shape[1], kernel, spatial, groups)))
        return "convolution", dims, _count_flops(func, args, kwargs, out)
    if "scaled_dot_product" in name and "attention" in name:
        q, k = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        shape = (float(q.shape[0] * q.shape[1]), float(q.shape[-2]), float(k.shape[-2]), float(q.shape[-1]))
        # Kernels leave out the scores that a causal attention does not use.
        is_causal = _bind_arguments(func, args, kwargs).get("is_causal", False) is True
        scores = shape[0] * shape[1] * shape[2]
        if is_causal:  # the first query sees one key, the second two, and so on
            causal = min(shape[1:3])
            scores = shape[0] * (causal * (causal + 1) / 2 + (shape[1] - causal) * shape[2])
        # Backward computes the scores again, then four products.
        return "attention", shape, (10.0 if "backward" in name else 4.0) * scores * shape[3]
    return "stream", _describe_layout(name, args), _count_flops(func, args, kwargs, out)


#: Operators that kernels distribute by rows or by channels, so that their rate follows from more than bytes -> index of the tensor.
_ROW_WISE_OPS = {"native_layer_norm": 0, "native_layer_norm_backward": 1, "nll_loss_forward": 0, "nll_loss_backward": 1}
_CHANNEL_WISE_OPS = {
    "native_batch_norm": 0, "native_batch_norm_backward": 1, "cudnn_batch_norm": 0, "cudnn_batch_norm_backward": 0,
}  # fmt: skip


def _describe_layout(name: str, args: Any) -> tuple[float, ...]:
    """(width of a row, rows), (channels, elements of each, samples), or nothing."""
    if name in _ROW_WISE_OPS:
        x = args[_ROW_WISE_OPS[name]]
        width = math.prod(args[_ROW_WISE_OPS[name] + 1]) if "norm" in name else x.shape[-1]
        return float(width), x.numel() / max(width, 1)
    if name in _CHANNEL_WISE_OPS:
        x = args[_CHANNEL_WISE_OPS[name]]
        return float(x.shape[1]), float(math.prod(x.shape[2:])), float(x.shape[0])
    return ()


_MATMUL_OPS = {"mm": 0, "bmm": 0, "_int_mm": 0, "addmm": 1, "baddbmm": 1}  # name -> place of the first factor


#: Whole recurrent layers in one call -> places of the matrices and of the first state.
_RECURRENT_OPS = {
    "mkldnn_rnn_layer": (slice(1, 3), 5), "mkldnn_rnn_layer_backward": (slice(1, 3), 5),
    "_cudnn_rnn": (slice(1, 2), 4), "_cudnn_rnn_backward": (slice(1, 2), 4),
}  # fmt: skip


def _describe_recurrence(name: str, args: Any) -> tuple[float, ...]:
    """A recurrent layer as one product for each step: (steps, samples, gates, elements that each gate sums)."""
    weight_indices, state_index = _RECURRENT_OPS[name]
    weights = [tensor for tensor in _find_tensors(args[weight_indices]) if tensor.dim() == 2]
    samples, gates = args[state_index].shape[-2], weights[0].shape[0]
    steps = args[0].numel() / (samples * args[0].shape[-1])
    return steps, float(samples), float(gates), sum(tensor.numel() for tensor in weights) / gates


def _get_matmul_factors(name: str, args: Any) -> tuple[Tensor, Tensor]:
    index = _MATMUL_OPS[name]
    return args[index], args[index + 1]


def _count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(formula(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError):
        return 0.0

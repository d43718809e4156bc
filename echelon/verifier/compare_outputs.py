"""Compare the model's outputs between the plan and the reference, micro-batch by micro-batch.

One device computes the whole batch's output at once. It is cut as the plan splits the samples, along the dim that has as many
entries as there are samples. A tensor without such a dim, or of another shape there (padding to the longest), is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from echelon.plan.batch_split import SampleRange
from echelon.verifier.compare import RELATIVE_FLOOR, Difference, has_fractions
from echelon.verifier.tensor_checksum import TensorChecksum, compute_checksum


@dataclass(frozen=True, slots=True)
class OutputSlice:
    tensor_index: int
    sample_range: SampleRange

    def __str__(self) -> str:
        first, last = self.sample_range.start, self.sample_range.stop - 1
        return f"output {self.tensor_index} for {f'samples {first} to {last}' if last > first else f'sample {first}'}"


#: None: it is unknown which part of the tensor belongs to these samples.
OutputChecksums = Mapping[OutputSlice, TensorChecksum | None]


@contextlib.contextmanager
def module_hooks(
    model: nn.Module,
    *,
    on_enter: Callable[[str], None] | None = None,
    on_output: Callable[[str, Any], None] | None = None,
) -> Iterator[None]:
    """Call `on_enter(path)` when forward enters a module and `on_output(path, output)` when it leaves. TorchScript takes no hooks."""
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            # Hooks that return something would replace the module's inputs or outputs.
            if on_enter is not None:
                hooks.callback(module.register_forward_pre_hook(lambda *_, path=path: on_enter(path)).remove)
            if on_output is not None:
                hook = module.register_forward_hook(lambda _, __, output, path=path: on_output(path, output))
                hooks.callback(hook.remove)
        yield


@contextlib.contextmanager
def record_outputs(
    model: nn.Module,
    callback: Callable[[list[Tensor | None]], None],
    unwrap: Callable[[Tensor], Tensor] = lambda value: value,
) -> Iterator[None]:
    """Call `callback` with the tensors of each output of the model; None: not whole on this rank, or without fractions.

    `unwrap` gathers tensors that are sharded behind a full shape.
    """

    @torch.no_grad()
    def on_forward(_: nn.Module, __: Any, output: Any) -> None:
        callback([_comparable_tensor(unwrap(leaf)) for leaf in output_tensors(output)])

    if isinstance(model, torch.jit.ScriptModule):
        yield
        return
    hook = model.register_forward_hook(on_forward)
    try:
        yield
    finally:
        hook.remove()


def output_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output of any structure, in order."""
    for leaf in tree_leaves(vars(output) if dataclasses.is_dataclass(output) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from output_tensors(leaf)


def is_whole(value: Tensor) -> bool:
    """Whether this rank holds the numbers of a tensor: another stage's has none, a DTensor is a shard."""
    return not value.is_meta and not isinstance(value, FakeTensor | DTensor)


def _comparable_tensor(value: Tensor) -> Tensor | None:
    return value if is_whole(value) and has_fractions(value) else None


def checksum_outputs(
    tensors: Sequence[Tensor | None], sample_range: SampleRange, *, first: int = 0, batch_size: int | None = None
) -> dict[OutputSlice, TensorChecksum | None]:
    """The checksums of an output for `sample_range`; its samples begin at row `first` of the `batch_size` rows."""
    size, checksums = sample_range.size, dict[OutputSlice, TensorChecksum | None]()
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            samples = _slice_samples(tensor, first, size, size if batch_size is None else batch_size)
            checksums[OutputSlice(index, sample_range)] = None if samples is None else compute_checksum(samples)
    return checksums


def single_sample_ranges(sample_range: SampleRange) -> list[SampleRange]:
    return [SampleRange(position, position + 1) for position in range(sample_range.start, sample_range.stop)]


def _slice_samples(tensor: Tensor, first: int, size: int, batch_size: int) -> Tensor | None:
    if size == batch_size:
        return tensor
    dim = next((dim for dim, length in enumerate(tensor.shape) if length == batch_size), None)
    return None if dim is None else tensor.narrow(dim, first, size)


def compare_outputs(actual: OutputChecksums, expected: OutputChecksums, step: int) -> list[Difference]:
    norms = [checksum.norm for checksum in expected.values() if checksum is not None and not checksum.has_nan]
    floor = RELATIVE_FLOOR * max(norms, default=0.0)  # of what is zero but for rounding
    differences = []
    for output_slice, b in expected.items():
        a = actual.get(output_slice)
        if a is not None and b is not None and a.shape == b.shape:
            reason, value = "it holds NaN" if a.has_nan else "", a.relative_difference(b, floor)
            differences.append(Difference(kind="output", name=str(output_slice), step=step, value=value, reason=reason))
    return differences


def uncompared_outputs_note(
    actual: OutputChecksums, expected: OutputChecksums, sample_ranges: Sequence[SampleRange]
) -> str:
    """Which outputs are not compared, and why; `sample_ranges`: how the samples are split. Empty: all are compared."""
    indices = sorted({output_slice.tensor_index for output_slice in (*actual, *expected)})
    slices = [OutputSlice(index, sample_range) for index in indices for sample_range in sample_ranges]
    reasons = {output_slice: _uncompared_reason(output_slice, actual, expected) for output_slice in slices}
    uncompared = [f"{output_slice} ({reason})" for output_slice, reason in reasons.items() if reason]
    if not indices:
        return "the model's outputs are not compared: neither run returned one with fractions"
    if len(uncompared) == len(slices):
        return f"the model's outputs are not compared: {', '.join(dict.fromkeys(reasons.values()))}"
    compared = f"outputs of {len(slices) - len(uncompared)} of {len(slices)} micro-batches are compared"
    return f"{compared}, without {format_names(uncompared)}" if uncompared else ""


def _uncompared_reason(output_slice: OutputSlice, actual: OutputChecksums, expected: OutputChecksums) -> str:
    if output_slice not in actual:
        return "the plan's run does not return it once per micro-batch, or not whole"
    if output_slice not in expected:
        return "the reference does not return it"
    a, b = actual[output_slice], expected[output_slice]
    if a is None or b is None:
        return "no dim of samples in " + ("the plan's run" if a is None else "the reference")
    return "" if a.shape == b.shape else f"{a.shape}, in the reference {b.shape}"


def format_names(names: Sequence[str], limit: int = 8) -> str:
    """Names for a note, the first of them where they are many."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

"""What the model gave for the samples of a step: marked by both runs, share by share, and compared.

One device gives the whole batch's output at once. It is cut as the plan shares the samples out, along the dim that has as many entries
as there are samples; a tensor that has no such dim, or another shape there (padding up to the longest), is left out.
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

from echelon.plan.batch_split import Span
from echelon.verifier.compare import FLOOR, Difference
from echelon.verifier.tensor_checksum import Mark, mark


@dataclass(frozen=True, slots=True)
class Given:
    """Which tensor of an output, for which samples."""

    tensor: int
    part: Span

    def __str__(self) -> str:
        first, last = self.part.start, self.part.stop - 1
        return f"output {self.tensor} for {f'samples {first} to {last}' if last > first else f'sample {first}'}"


#: None: given, but it cannot be told which part of it is of these samples.
Outputs = Mapping[Given, Mark | None]


@contextlib.contextmanager
def listening(
    model: nn.Module,
    note: Callable[[list[Tensor | None]], None],
    look: Callable[[Tensor], Tensor] = lambda value: value,
) -> Iterator[None]:
    """Call `note` with the tensors of each output of the model, None for one that is not whole here or has no fractions.

    `look` gives the whole of a tensor that only looks like it.
    """

    @torch.no_grad()
    def heard(_: nn.Module, __: Any, output: Any) -> None:
        note([_numbers(look(leaf)) for leaf in leaves(output)])

    if isinstance(model, torch.jit.ScriptModule):
        yield
        return
    hook = model.register_forward_hook(heard)
    try:
        yield
    finally:
        hook.remove()


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that take hooks, with their paths: TorchScript's take none."""
    return ((path, module) for path, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule))


def leaves(output: Any) -> Iterator[Tensor]:
    """The tensors of an output of any structure, in its own order."""
    for leaf in tree_leaves(vars(output) if dataclasses.is_dataclass(output) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves(leaf)


def _numbers(value: Tensor) -> Tensor | None:
    held = not value.is_meta and not isinstance(value, FakeTensor | DTensor)
    return value if held and (value.is_floating_point() or value.is_complex()) else None


def marked(
    tensors: Sequence[Tensor | None], part: Span, *, first: int = 0, of: int | None = None
) -> dict[Given, Mark | None]:
    """The marks of an output for the samples `part` of the batch, where it has `of` samples and these are those from `first` on."""
    found: dict[Given, Mark | None] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            mine = _share(tensor, first, part.size, part.size if of is None else of)
            found[Given(number, part)] = None if mine is None else mark(mine)
    return found


def singles(part: Span) -> list[Span]:
    """Its samples one by one."""
    return [Span(at, at + 1) for at in range(part.start, part.stop)]


def _share(tensor: Tensor, first: int, size: int, of: int) -> Tensor | None:
    if size == of:
        return tensor
    dim = next((dim for dim, length in enumerate(tensor.shape) if length == of), None)
    return None if dim is None else tensor.narrow(dim, first, size)


def compared(plan: Outputs, true: Outputs, step: int) -> list[Difference]:
    """How far each share of each tensor is off, where both runs have it in one shape."""
    sizes = [each.norm for each in true.values() if each is not None and not each.broken]
    floor = FLOOR * max(sizes, default=0.0)  # of what is zero but for rounding
    found = []
    for given, expected in true.items():
        mine = plan.get(given)
        if mine is not None and expected is not None and mine.shape == expected.shape:
            why = "it holds NaN" if mine.broken else ""
            value = mine.apart(expected, floor)
            found.append(Difference(kind="output", name=str(given), step=step, value=value, why=why))
    return found


def left_out(plan: Outputs, true: Outputs, parts: Sequence[Span]) -> str:
    """What a reader must know of outputs that are not compared; `parts`: how the samples are shared out. Empty: all are."""
    tensors = sorted({given.tensor for given in (*plan, *true)})
    every = [Given(number, part) for number in tensors for part in parts]
    reasons = {given: _why_not(given, plan, true) for given in every}
    out = [f"{given} ({reason})" for given, reason in reasons.items() if reason]
    if not tensors:
        return "the model's outputs are not compared: no run tells of any that has fractions"
    if len(out) == len(every):
        return f"the model's outputs are not compared: {', '.join(dict.fromkeys(reasons.values()))}"
    return (
        f"outputs of {len(every) - len(out)} of {len(every)} shares are compared, without {listed(out)}" if out else ""
    )


def _why_not(given: Given, plan: Outputs, true: Outputs) -> str:
    if given not in plan:
        return "the plan's run does not give it once for each micro-batch, or not whole"
    if given not in true:
        return "the reference does not give it"
    mine, expected = plan[given], true[given]
    if mine is None or expected is None:
        return "no dim of samples in " + ("the plan's run" if mine is None else "the reference")
    return "" if mine.shape == expected.shape else f"{mine.shape}, in the reference {expected.shape}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a note, the first of them where they are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

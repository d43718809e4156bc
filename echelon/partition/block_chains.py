"""Find chains: runs of repeated blocks, each of which receives exactly the hidden states of the previous one, which nothing else reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.plan.placement import Placement
from echelon.plan.profile import find_fsdp_units, is_within
from echelon.profiler.module_calls import UnitCallTracer, intercept_unit_calls, list_unit_paths
from echelon.tree import tree_tensors
from echelon.trials.module_tree import list_modules
from echelon.trials.trial_run import Forward, RunStep

REDUCING_CUTS = ("row", "attention")  #: cuts with an all-reduce


@dataclass(frozen=True, slots=True)
class BlockChain:
    """Blocks in the order of their calls, and the argument with their hidden states."""

    units: tuple[str, ...]
    argument: str


class _HiddenStateTracer(UnitCallTracer):
    """Also records the hidden states that go into and come out of each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_inputs: list[tuple[str, Tensor] | None] = []
        self.hidden_outputs: list[Tensor | None] = []

    def handle_call(self, path: str, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """For `intercept_unit_calls`."""
        self.hidden_inputs.append(next(iterate_tensor_arguments(args, kwargs), None))
        out = super().handle_call(path, forward, args, kwargs)
        first_output = out[0] if type(out) in (list, tuple) and out else out
        self.hidden_outputs.append(first_output if isinstance(first_output, Tensor) else None)
        return out


def iterate_tensor_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The arguments of a call that are tensors, by position or name."""
    for name, value in (*((str(position), argument) for position, argument in enumerate(args)), *kwargs.items()):
        if isinstance(value, Tensor):
            yield name, value


def find_block_chains(model: nn.Module, run_step: RunStep, placements: Iterable[Placement]) -> Iterator[BlockChain]:
    """The chains of a model; `run_step()` computes its loss."""
    reducing_paths = [placement.path for placement in placements if placement.cut in REDUCING_CUTS]
    units = find_fsdp_units(list_modules(model))
    blocks = {unit for unit in units if _supports_sequence_shards(model, unit, reducing_paths)}
    tracer = _HiddenStateTracer()
    with intercept_unit_calls(model, list_unit_paths(model), tracer.handle_call), tracer:
        loss = run_step()
    calls = Counter(call.path for call in tracer.unit_calls)
    readers_by_call: dict[int, set[int]] = {}
    for call_index, call in enumerate(tracer.unit_calls):
        for source_index, output_index in call.reads:
            readers_by_call.setdefault(source_index, set()).update({call_index} if output_index == 0 else ())
    loss_sources = tracer.find_origins(tree_tensors(loss))
    chain: list[int] = []

    def extends_chain(call_index: int) -> bool:
        hidden, previous_output = tracer.hidden_inputs[call_index], tracer.hidden_outputs[chain[-1]]
        is_only_reader = readers_by_call.get(chain[-1]) == {call_index} and (chain[-1], 0) not in loss_sources
        is_passed_on = hidden is not None and hidden[1] is previous_output and hidden[0] == hidden_argument(chain[-1])
        return is_only_reader and is_passed_on

    def hidden_argument(call_index: int) -> str:
        hidden_input = tracer.hidden_inputs[call_index]
        return hidden_input[0] if hidden_input is not None else ""

    def is_block_call(call_index: int) -> bool:
        path, hidden = tracer.unit_calls[call_index].path, tracer.hidden_inputs[call_index]
        output = tracer.hidden_outputs[call_index]
        if path not in blocks or calls[path] != 1 or hidden is None or output is None:
            return False
        return hidden[1].dim() == 3 and hidden[1].is_floating_point() and hidden[1].shape == output.shape

    for call_index in range(len(tracer.unit_calls) + 1):
        can_join = call_index < len(tracer.unit_calls) and is_block_call(call_index)
        if chain and not (can_join and extends_chain(call_index)):
            yield BlockChain(tuple(tracer.unit_calls[index].path for index in chain), hidden_argument(chain[0]))
            chain.clear()
        if can_join:
            chain.append(call_index)


def _supports_sequence_shards(model: nn.Module, block: str, reducing_paths: Iterable[str]) -> bool:
    """Whether a block has an all-reduce to replace, and no norm with statistics over positions."""
    has_batch_norm = any(isinstance(submodule, _NormBase) for submodule in model.get_submodule(block).modules())
    return not has_batch_norm and any(is_within(path, block) for path in reducing_paths)

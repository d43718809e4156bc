"""Compare ranks that must compute the same while they train, at a bounded cost.

    every step        samples that the ranks of one data group read     strided digest, with the loss, over tp x pp
    every step        modules whose calls start collectives, in order   running hash, with the loss, over tp x pp and dp
    step 1, every N   parameters, optimizer state, random states, ...   sums of their bits, along each axis (replica_check.py)
    the same          what the loss keeps, in runs without a proof      digests, over dp; a warning

N follows from the measured cost of a comparison. A difference raises DivergenceError before the optimizer steps (on an accelerator, whose host
must not wait, one step later) and before a checkpoint is written.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.data.loader import StepBatch
from echelon.engine.checkpoint.function_state import describe_slot, find_differing_slots
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.checks.replica_check import ReplicaCheck, all_words_equal, hash_bytes, is_same_on_ranks
from echelon.engine.parallel.fsdp import is_sharded
from echelon.engine.parallel.tensor_parallel import PatchedForward
from echelon.engine.process_groups import Communicator
from echelon.engine.run_state import RunState
from echelon.errors import DivergenceError

#: The cost of comparing replicas: a fraction of a step's time, or seconds per step, whichever is more. All monitoring may cost a short step
#: 0.3 ms, of which the rest takes about 0.2 (bench.watch).
COST_FRACTION, COST_SECONDS = 0.002, 1e-5
#: Steps between comparisons of replicas, at most.
_MAX_INTERVAL = 1000
#: Numbers of a tensor in a step's digest.
_SAMPLED_VALUES = 64
_WORD_MASK = 0xFFFFF
#: A call is its module's number and, above these bits, the size of its input (0 where it may differ between ranks).
_MODULE_BITS = 20
#: Paths of modules, and the sizes of their inputs.
_Calls = list[tuple[str, int]]


class DivergenceMonitor:
    """Monitors one run. `is_off`: check only what decides how a step is computed (a proof compares everything itself)."""

    def __init__(self, run: RunState, attributes: RunAttributes, *, is_off: bool) -> None:
        self._run, self._attributes = run, attributes
        self.is_off = is_off or run.world.size == 1 or run.plan.asynchronous
        self._replica_check = ReplicaCheck(run)
        self._call_order = _CallOrder()
        if not self.is_off and not run.plan.compile:
            self._call_order.record(run)
        self._sample_word = 0
        self._model_parallel_words: list[float] = []
        self._next_comparison = 1
        self._step_started: float | None = None
        self._has_warned = False

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._call_order.close()

    # Every step

    def begin_step(self, batch: StepBatch) -> None:
        """Before the step's first forward."""
        self._call_order.tp_calls.clear()
        self._call_order.gather_calls.clear()
        if not self.is_off and self._run.model_parallel.size > 1:
            self._sample_word = strided_digest([m.batch for m in batch.micro_batches], batch.step) & _WORD_MASK

    def pack_data_parallel(self) -> list[float]:
        """What data ranks sum: the order in which sharded units were gathered."""
        word = float(_hash_calls(self._call_order.gather_calls))
        return [word, word * word]

    def pack_model_parallel(self) -> list[float]:
        """What the ranks of one data group sum: samples, and by stage the order of calls of modules that tp cuts."""
        call_word = float(_hash_calls(self._call_order.tp_calls))
        sample_word, stage = float(self._sample_word), self._run.axes["pp"]
        self._model_parallel_words = [sample_word, sample_word * sample_word, *[0.0] * (2 * stage.size)]
        self._model_parallel_words[2 * stage.rank + 2 : 2 * stage.rank + 4] = [call_word, call_word * call_word]
        return self._model_parallel_words

    def check_data_parallel(self, sums: Sequence[float], step: int) -> None:
        """Raise where data ranks gathered sharded units in different orders."""
        if not all_words_equal(self._run.data_parallel.size, *sums):
            calls = self._call_order.describe(self._call_order.gather_calls)
            self._raise_mismatched_calls(self._run.data_parallel, calls, step, "zero")

    def check_model_parallel(self, sums: Sequence[float], step: int) -> None:
        """Raise where the ranks of one data group read different samples, or called cut modules in different orders."""
        run = self._run
        if sums == [run.model_parallel.size * number for number in self._model_parallel_words]:
            return  # all have this rank's words; stages have slots of their own, and need the rest
        sample_sums, call_sums = sums[:2], [sums[start : start + 2] for start in range(2, len(sums), 2)]
        if not all_words_equal(run.model_parallel.size, *sample_sums):
            rank_words = run.model_parallel.all_gather_object((run.world.rank, self._sample_word))
            rank = next(rank for rank, word in rank_words if word != rank_words[0][1])
            raise DivergenceError(
                f"step {step + 1}: ranks {rank_words[0][0]} and {rank} compute one part of the batch together and read different samples: the data set, its "
                "transforms or collate= draw random numbers of their own; seed them from the sample's number (as torch's, NumPy's and Python's "
                "own generators are here), or use a plan without tp and pp",
                rank=rank,
                cause="the data set draws random numbers of its own",
            )
        # Every stage raises; the ranks of the stage that differs name the modules.
        for stage, sums_of_stage in enumerate(call_sums):
            if not all_words_equal(run.axes["tp"].size, *sums_of_stage):
                named = self._call_order.describe(self._call_order.tp_calls) if stage == run.axes["pp"].rank else None
                self._raise_mismatched_calls(run.model_parallel, named, step, "tp")

    def _raise_mismatched_calls(self, ranks: Communicator, local_calls: _Calls | None, step: int, axis: str) -> None:
        """`local_calls`: the modules that this rank called and the sizes of their inputs; None where it is not among those that differ."""
        gathered = ranks.all_gather_object((self._run.world.rank, local_calls))
        rank_calls = [(rank, calls) for rank, calls in gathered if calls is not None]
        first_rank, first_calls = rank_calls[0]
        rank, other_calls = next(((rank, calls) for rank, calls in rank_calls if calls != first_calls), rank_calls[0])
        pairs = list(zip_longest(first_calls, other_calls, fillvalue=("nothing", 0)))
        index = next((index for index, (call, other) in enumerate(pairs) if call != other), len(pairs))
        (name, size), (other_name, other_size) = pairs[index] if index < len(pairs) else (("nothing", 0),) * 2
        tensor = other_name if index < len(other_calls) else None
        if name == other_name:
            name, other_name = f"{name} with {size:,} inputs", f"{other_name} with {other_size:,}"
        raise DivergenceError(
            f"step {step + 1}: call {index + 1} of a module that exchanges values over {axis} is {name} on rank {first_rank} and {other_name} on rank "
            f"{rank}: sums of different modules were mixed; the order of calls depends on the rank (iteration over a set, hash(), a random choice); "
            f"iterate in sorted order, or use a plan without {axis}",
            rank=rank,
            tensor=tensor,
            cause="the order of calls depends on the rank",
        )

    # Replicas

    def before_update(self, step: int) -> None:
        """After the first backward: compare what forward itself has changed."""
        if not self.is_off and step == 0:
            self._replica_check.compare(0, after_update=False)

    def after_update(self, step: int) -> None:
        """After step `step` (from 1): compare replicas where it is their turn."""
        if self.is_off:
            return
        if step >= self._next_comparison:
            started = time.perf_counter()
            self._replica_check.compare(step)
            self._compare_loss_state(step)
            length = 0.0 if self._step_started is None else started - self._step_started
            self._next_comparison = step + self._comparison_interval(time.perf_counter() - started, length)
        if step >= self._next_comparison - 1:  # the next step's length is needed
            self._step_started = time.perf_counter()

    def compare_replicas(self, step: int) -> None:
        """Compare replicas now, between steps. Every rank must call it."""
        if not self.is_off:
            self._replica_check.compare(step, between_steps=True)

    def _compare_loss_state(self, step: int) -> None:
        """Warn where data ranks hold different values of the loss's state, and no proof has shown that it does not read them."""
        data_parallel, attributes = self._run.data_parallel, self._attributes
        if self._has_warned or not attributes.is_unproved or data_parallel.size == 1:
            return
        fingerprints = attributes.functions.digest_changes()
        if is_same_on_ranks(data_parallel, hash_bytes(repr(sorted(fingerprints.items())).encode())):
            return
        self._has_warned = True
        names = ", ".join(map(describe_slot, find_differing_slots(data_parallel.all_gather_object(fingerprints))))
        if not data_parallel.rank:
            self._run.warn(
                f"{names}: data ranks hold different values after step {step}, each from its own samples; where the loss reads them, this plan "
                "computes something else than one process; leave --no-verify out to find out"
            )

    def _comparison_interval(self, spent: float, length: float) -> int:
        """Steps to the next comparison, the same on every rank, so that its cost stays within the budget."""
        ranks = self._run.ranks
        sums = ranks.all_reduce(torch.tensor([spent, length], dtype=torch.float64).to(ranks.device)).tolist()
        mean_spent, mean_length = (total / ranks.size for total in sums)
        return min(max(int(mean_spent / max(COST_FRACTION * mean_length, COST_SECONDS)), 1), _MAX_INTERVAL)


class _CallOrder:
    """The order in which this rank calls modules whose forward or backward exchanges values with other ranks."""

    def __init__(self) -> None:
        self.tp_calls: list[int] = []
        self.gather_calls: list[int] = []
        self._module_paths: list[str] = []
        self._undo_callbacks: list[Callable[[], None]] = []

    def record(self, run: RunState) -> None:
        """Record calls from here on."""
        tp_paths = {name.rpartition(".")[0] for name in run.tp_shards}
        uneven_paths = {name.rpartition(".")[0] for name, tp_shard in run.tp_shards.items() if not tp_shard.is_even}
        full_sequences = not run.plan.tensor.segments  # parts of a sequence differ in length
        modules = dict(run.model.named_modules())
        for path in sorted(tp_paths & modules.keys()):
            module, has_equal_size = modules[path], full_sequences and path not in uneven_paths
            note = self._make_note(self._register(path), has_equal_size=has_equal_size)
            if isinstance(module.forward, PatchedForward):  # a hook would double the monitor's cost in a short step
                module.forward.pre_hook = note
                self._undo_callbacks.append(partial(setattr, module.forward, "pre_hook", None))
            else:
                hook = module.register_forward_pre_hook(lambda _, args, note=note: note(args[0] if args else None))
                self._undo_callbacks.append(hook.remove)
        paths = {id(module): path for path, module in modules.items()}
        for unit in [] if run.rank_model.sharding is None else run.rank_model.sharding.units:
            note_gather = partial(self._note_gather, self._register(paths.get(id(unit), "")))
            self._undo_callbacks.append(unit.register_forward_pre_hook(note_gather, prepend=True).remove)

    def close(self) -> None:
        for undo in self._undo_callbacks:
            undo()

    def describe(self, calls: Sequence[int]) -> _Calls:
        """The paths of the modules that were called, and the sizes of their inputs."""
        return [(self._module_paths[call % (1 << _MODULE_BITS)], call >> _MODULE_BITS) for call in calls]

    def _register(self, path: str) -> int:
        self._module_paths.append(path or "the model")
        return len(self._module_paths) - 1

    def _make_note(self, module_index: int, *, has_equal_size: bool) -> Callable[[Any], None]:
        """`has_equal_size`: inputs have the same size on every rank."""
        append = self.tp_calls.append

        def note(value: Any) -> None:
            size = value.numel() if has_equal_size and isinstance(value, Tensor) else 0
            append(module_index + (size << _MODULE_BITS))

        return note

    def _note_gather(self, module_index: int, unit: nn.Module, _: Any) -> None:
        if is_sharded(unit):  # otherwise its parameters are gathered already, and nothing is exchanged
            self.gather_calls.append(module_index)


def _hash_calls(calls: Sequence[int]) -> int:
    """A hash of a sequence of calls."""
    return zlib.crc32(array("q", calls).tobytes()) & _WORD_MASK


def strided_digest(value: Any, step: int) -> int:
    """A hash of samples: some numbers of each tensor, others at each step, and the text of everything else."""
    word, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            values = _flat_array(item)
            if values is not None:
                stride = max(len(values) // _SAMPLED_VALUES, 1)
                word = zlib.crc32(values[step % stride :: stride].tobytes(), word) ^ hash(item.shape) & 0xFFFFFFFF
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, str | bytes | int | float):
            word = zlib.crc32(repr(item).encode(), word)
        elif hasattr(item, "__dict__"):
            pending.append(vars(item))
    return word


def _flat_array(value: Tensor) -> np.ndarray | None:
    """A tensor's values on the host, if it has any there. In NumPy, because one torch call costs as much as the whole digest."""
    try:
        return value.numpy().reshape(-1)
    except (TypeError, RuntimeError):  # on a device, sparse, of a type that NumPy lacks, or part of a graph
        if not value.is_cpu or value.layout is not torch.strided:
            return None
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return plain.view(torch.uint8).numpy().reshape(value.numel(), -1)

"""Watch a run while it trains: ranks that must compute the same are compared, at a bounded cost.

    every step     samples that the ranks of one data group read     strided digest       with the loss, over tp x pp
    every step     modules whose calls start collectives, in order   running hash         with the loss, over tp x pp and dp
    step 1, then   parameters, buffers, optimizer state, settings,   sums of their bits   one small message along each
    every N        random states (replicas.py)                                            replicated axis
    the same       what the loss keeps, in runs without a proof      digests              over dp; a warning

N follows from what a comparison was measured to cost. A difference raises DivergenceError on every rank that sees it, before the optimizer steps
(on an accelerator, whose host must not wait, one step later) and before a checkpoint is written.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.data.loader import StepBatch
from echelon.engine.checkpoint.function_state import in_words, places_apart
from echelon.engine.parallel.tensor_parallel import OwnForward
from echelon.engine.process_groups import Group
from echelon.engine.replica_check import Replicas, equal, same
from echelon.errors import DivergenceError

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: What comparing replicas may cost: of a step's time, or seconds a step, whichever is more. The rest of the watch costs a short step about
#: 0.2 ms of the 0.3 that all of it may (bench.watch).
SHARE, SECONDS = 0.002, 1e-5
#: Steps between comparisons of replicas, at most.
_RARELY = 1000
#: Numbers of a tensor that a step's digest looks at.
_LOOKED_AT = 64
_BITS = 0xFFFFF
#: Of a module: its number, and above these bits the size of its input, 0 where ranks may differ in it.
_NUMBER = 20


class Watch:
    """The watch over one run. `off`: only what decides how a step is computed is looked at (a proof compares everything itself)."""

    def __init__(self, run: Run, warn: Callable[[str], None], *, off: bool = False) -> None:
        self._run = run
        self.off = off or run.world.size == 1 or run.plan.free
        self._replicas = Replicas(run, warn)
        self._calls = _Calls(run) if not self.off and not run.plan.compile else None
        self._samples = 0
        self._shared: list[float] = []
        self._next = 1
        self._clock: float | None = None
        self._warn, self._warned = warn, False

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._calls is not None:
            self._calls.close()

    # Every step

    def begin(self, batch: StepBatch) -> None:
        """Before the step's first forward."""
        if self._calls is not None:
            self._calls.begin()
        if not self.off and self._run.core.size > 1:
            self._samples = digest([micro.batch for micro in batch.micros], batch.step) & _BITS

    def data_share(self) -> list[float]:
        """What data ranks add up: the order in which sharded units were gathered."""
        if self._calls is None or not self._calls.gathers:
            return [0.0, 0.0]
        word = float(_word(self._calls.gathers))
        return [word, word * word]

    def core_share(self) -> list[float]:
        """What the ranks of one data group add up: samples, and by stage the order of calls of modules that the tensor axis cuts."""
        samples, calls = float(self._samples), float(_word(self._calls.cuts)) if self._calls is not None else 0.0
        stage = self._run.axes["pp"]
        self._shared = [samples, samples * samples, *[0.0] * (2 * stage.size)]
        self._shared[2 * stage.rank + 2 : 2 * stage.rank + 4] = [calls, calls * calls]
        return self._shared

    def judge_data(self, sums: Sequence[float], step: int) -> None:
        """Raise where data ranks gathered sharded units in different orders."""
        if not equal(self._run.data.size, *sums):
            assert self._calls is not None
            self._mispaired(self._run.data, self._calls.named(self._calls.gathers), step, "zero")

    def judge_core(self, sums: Sequence[float], step: int) -> None:
        """Raise where the ranks of one data group read different samples, or called cut modules in different orders."""
        run = self._run
        if sums == [run.core.size * number for number in self._shared]:
            return  # all have this rank's words; stages have slots of their own, and need the rest
        samples, calls = sums[:2], [sums[place : place + 2] for place in range(2, len(sums), 2)]
        if not equal(run.core.size, *samples):
            found = run.core.gather((run.world.rank, self._samples))
            rank = next(rank for rank, word in found if word != found[0][1])
            raise DivergenceError(
                f"step {step + 1}: ranks {found[0][0]} and {rank} compute one part of the batch together and read different samples: the data set, its "
                "transforms or collate= draw random numbers of their own; seed them from the sample's number (as torch's, NumPy's and Python's "
                "own generators are here), or use a plan without tp and pp",
                rank=rank,
                cause="the data set draws random numbers of its own",
            )
        # All stages learn of it, so that all stop; the ranks of that stage can name the modules.
        for stage, sums_of_stage in enumerate(calls):
            if not equal(run.axes["tp"].size, *sums_of_stage):
                assert self._calls is not None
                named = self._calls.named(self._calls.cuts) if stage == run.axes["pp"].rank else None
                self._mispaired(run.core, named, step, "tp")

    def _mispaired(self, group: Group, mine: list[tuple[str, int]] | None, step: int, axis: str) -> None:
        """`mine`: the modules that this rank called and the sizes of their inputs; None where it is not among those that differ."""
        found = [(rank, calls) for rank, calls in group.gather((self._run.world.rank, mine)) if calls is not None]
        first_rank, first = found[0]
        rank, other = next(((rank, calls) for rank, calls in found if calls != first), found[0])
        place = next(
            (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other))
        )
        (name, size), (other_name, other_size) = (
            calls[place] if place < len(calls) else ("nothing", 0) for calls in (first, other)
        )
        if name == other_name:
            name, other_name = f"{name} with {size:,} inputs", f"{other_name} with {other_size:,}"
        raise DivergenceError(
            f"step {step + 1}: call {place + 1} of a module that exchanges values over {axis} is {name} on rank {first_rank} and {other_name} on rank "
            f"{rank}: sums of different modules were mixed; the order of calls depends on the rank (iteration over a set, hash(), a random choice); "
            f"iterate in sorted order, or use a plan without {axis}",
            rank=rank,
            tensor=other[place][0] if place < len(other) else None,
            cause="the order of calls depends on the rank",
        )

    # Replicas

    def before_update(self, step: int) -> None:
        """After the first backward: what forward itself has changed."""
        if not self.off and step == 0:
            self._replicas.compare(0, updated=False)

    def after_update(self, step: int) -> None:
        """After step `step` (from 1): compare replicas where it is their turn."""
        if self.off:
            return
        if step >= self._next:
            now = time.perf_counter()
            self._replicas.compare(step)
            self._compare_loss_state(step)
            spent, length = time.perf_counter() - now, now - self._clock if self._clock is not None else 0.0
            self._next = step + self._interval(spent, length)
        if step >= self._next - 1:  # the next step's length is needed
            self._clock = time.perf_counter()

    def compare(self, step: int) -> None:
        """Compare replicas now, between steps. Every rank must call it."""
        if not self.off:
            self._replicas.compare(step, settled=True)

    def _compare_loss_state(self, step: int) -> None:
        """Warn where data ranks hold different values of what the loss keeps, and no proof has shown that it does not read them."""
        data, kept = self._run.data, self._run.attributes
        if self._warned or not kept.unproved or data.size == 1:
            return
        mine = kept.functions.fingerprints()
        text = repr(sorted(mine.items())).encode()
        if same(data, int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")):
            return
        self._warned = True
        names = ", ".join(map(in_words, places_apart(data.gather(mine))))
        if not data.rank:
            self._warn(
                f"{names}: data ranks hold different values after step {step}, each from its own samples; where the loss reads them, this plan "
                "computes something else than one process; leave --no-verify out to find out"
            )

    def _interval(self, spent: float, length: float) -> int:
        """Steps to the next comparison, the same on every rank: so many that its cost stays within the budget."""
        group = self._run.ranks
        mean = group.sum(torch.tensor([spent, length], dtype=torch.float64).to(group.device)).tolist()
        budget = max(SHARE * mean[1] / group.size, SECONDS)
        return min(max(int(mean[0] / group.size / budget), 1), _RARELY)


class _Calls:
    """The order in which this rank calls modules whose forward or backward exchanges values with other ranks."""

    def __init__(self, run: Run) -> None:
        self.cuts: list[int] = []
        self.gathers: list[int] = []
        self._paths = ["the model"]
        owners = {name.rpartition(".")[0] for name in run.pieces}
        uneven = {name.rpartition(".")[0] for name, piece in run.pieces.items() if not piece.even}
        whole = not run.plan.segments  # parts of a sequence differ in length
        modules = dict(run.model.named_modules())
        self._hooks: list[RemovableHandle] = []
        self._noted: list[OwnForward] = []
        for path in sorted(owners & modules.keys()):
            note, module = self._cut(self._number(path), sized=whole and path not in uneven), modules[path]
            if isinstance(
                module.forward, OwnForward
            ):  # a hook would cost a short step as much as the rest of the watch
                module.forward.note = note
                self._noted.append(module.forward)
            else:
                self._hooks.append(module.register_forward_pre_hook(_first_of(note)))
        units = [] if run.assembly.sharding is None else run.assembly.sharding.units()
        paths = {id(module): path for path, module in modules.items()}
        for unit in units:
            hook = self._gather(self._number(paths.get(id(unit), "")))
            self._hooks.append(unit.register_forward_pre_hook(hook, prepend=True))

    def begin(self) -> None:
        self.cuts.clear()
        self.gathers.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for forward in self._noted:
            forward.note = None

    def named(self, calls: Sequence[int]) -> list[tuple[str, int]]:
        """The paths of the modules that were called, and the sizes of their inputs."""
        return [(self._paths[call % (1 << _NUMBER)], call >> _NUMBER) for call in calls]

    def _number(self, path: str) -> int:
        self._paths.append(path or self._paths[0])
        return len(self._paths) - 1

    def _cut(self, number: int, *, sized: bool) -> Callable[[Any], None]:
        """`sized`: inputs have the same size on every rank."""
        append = self.cuts.append

        def note(value: Any) -> None:
            append(number + (value.numel() << _NUMBER if sized and isinstance(value, Tensor) else 0))

        return note

    def _gather(self, number: int) -> Callable[[nn.Module, Any], None]:
        from echelon.engine.parallel.fsdp import is_sharded

        def note(unit: nn.Module, _: Any) -> None:
            if is_sharded(unit):  # else its parameters are here already, and nothing is exchanged
                self.gathers.append(number)

        return note


def _first_of(note: Callable[[Any], None]) -> Callable[[nn.Module, Any], None]:
    return lambda _, args: note(args[0] if args else None)


def _word(calls: Sequence[int]) -> int:
    """A number that tells sequences of calls apart."""
    return zlib.crc32(array("q", calls).tobytes()) & _BITS


def digest(value: Any, step: int) -> int:
    """A word that tells samples apart: some numbers of each tensor, others at each step, and the text of everything else."""
    word = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            numbers = _flat(item)
            if numbers is not None:
                stride = max(len(numbers) // _LOOKED_AT, 1)
                word = zlib.crc32(numbers[step % stride :: stride].tobytes(), word) ^ hash(item.shape) & 0xFFFFFFFF
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, str | bytes | int | float):
            word = zlib.crc32(repr(item).encode(), word)
        elif hasattr(item, "__dict__"):
            pending.append(vars(item))
    return word


def _flat(value: Tensor) -> np.ndarray | None:
    """Its numbers in one row, None where the host has none. NumPy's, because each of torch's calls costs a short step as much as all of this."""
    try:
        return value.numpy().reshape(-1)
    except (TypeError, RuntimeError):  # on a device, sparse, of a type that NumPy lacks, or part of a graph
        if not value.is_cpu or value.layout is not torch.strided:
            return None
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return plain.view(torch.uint8).numpy().reshape(value.numel(), -1)

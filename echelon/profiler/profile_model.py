"""A job's model as a Profile: one step at two batch sizes on fake tensors, so that nothing is computed or allocated."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from echelon.errors import EchelonError, JobError
from echelon.job import Job, call_loss, call_model
from echelon.plan.profile import Parameter, Profile, Visit, fingerprint, units
from echelon.profiler.embedding_tables import find_tables
from echelon.profiler.fold_traces import fold_modules, fold_operators, peaks
from echelon.profiler.module_calls import DIFFERENTIATE
from echelon.profiler.pipeline_units import chain
from echelon.profiler.profile_optimizer import rules
from echelon.profiler.repeated_blocks import Run, alike_in_forward, find, shortened, stretched
from echelon.profiler.sample_coupling import coupling, first_line
from echelon.tree import tree_leaves, tree_map
from echelon.trials.example_batch import Example
from echelon.trials.isolation import Isolated
from echelon.trials.module_tree import is_compiled, module_tree
from echelon.trials.op_recorder import Trace, counting, graph_hash, recording
from echelon.trials.random_state import outside_torch, random_states, seed_all
from echelon.trials.shape_model import built, made, unquestioned
from echelon.trials.trial_context import trial_context, without_trace

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes of example data that a trace may hold: a fake step costs nothing, but its inputs are collated for real.
_INPUTS = 64 * 2**20
#: What in a batch does not decide by itself what a model computes.
_FIXED = (Tensor, type(None))
#: Samples of a real run, where tracing fails: few, because the memory is real.
_REAL = (2, 4)
_TWICE = "the model differentiates its own derivative (autograd.grad with create_graph), which torch's fully_shard does not follow"


@dataclass(frozen=True, slots=True)
class _Traced:
    """A model and its steps of two batch sizes; `run`: of blocks alike, where few of them were traced."""

    model: nn.Module
    first: Trace
    second: Trace
    parameters: tuple[Parameter, ...]  #: before the first forward, which may make layers
    run: Run | None = None


class _HeldBesideError(RuntimeError):
    """A layer computes with a parameter that it holds itself."""


@trial_context()
def profile(job: Job, *, device: str | None = None) -> Profile:
    """What a step of `job` computes, moves and keeps. `device`: trace for "cpu" or "cuda" (default: what is here)."""
    with without_trace(job), (isolated := Isolated(job)).active():  # a loss that counts its calls must not count these
        return _profiled(isolated.job, device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _profiled(job: Job, device: str) -> Profile:
    """The profile of a job that is nobody else's."""
    example = Example(job)
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, how, device, beside = _step_somehow(job, example, device, notes)
        model, first, second = traced.model, traced.first, traced.second
        coupled, uncompared = coupling(
            job,
            example,
            parameters=sum(p.numel() for p in model.parameters()),
            flops=sum(call.flops for call in second.calls) / second.samples,
            weighs=device == "cpu",
        )
        visits: tuple[Visit, ...] = ()
        with contextlib.suppress(Exception):  # a model that cannot be cut into stages; who asks for them is told why
            visits = chain(job, example, traced.run)
    return _assemble(
        job, example, model, first, second, parameters=traced.parameters, device=device, how=how, coupled=coupled, uncompared=uncompared,
        visits=visits, notes=notes, unsharded=beside or (_TWICE if second.twice else "") or _lost(model, second),
    )  # fmt: skip


def _step_somehow(
    job: Job, example: Example, device: str, notes: list[str]
) -> tuple[_Traced, Literal["fake", "real"], str, str]:
    """Two steps without their values for `device`, else for the CPU (cuDNN's recurrent layers look at values), else run for real.

    Last, which parameter is held beside its module, if one is.
    """
    beside = ""
    for kind in dict.fromkeys((device, "cpu")):
        try:
            return _traced(job, example, kind), "fake", kind, beside
        except EchelonError:
            raise
        except _HeldBesideError as error:
            beside = str(error)
            notes.append(f"the model cannot be traced without running it ({beside})")
            break
        except Exception as error:  # whatever a user's forward does with values it does not have
            where = "" if kind == "cpu" else f" for {kind}"
            notes.append(
                f"the model cannot be traced{where} without running it ({type(error).__name__}: {first_line(error)})"
            )
    notes[-1] += f": two small steps of {_REAL[0]} and {_REAL[1]} samples were run on the CPU instead"
    return _ran(job, example), "real", "cpu", beside


def _assemble(
    job: Job,
    example: Example,
    model: nn.Module,
    first: Trace,
    second: Trace,
    *,
    parameters: tuple[Parameter, ...],
    device: str,
    how: Literal["fake", "real"],
    coupled: bool | None,
    uncompared: str,
    visits: tuple[Visit, ...],
    notes: list[str],
    unsharded: str,
) -> Profile:
    names = {each.name for each in parameters if each.trainable}
    trained = {name: value for name, value in model.named_parameters() if name in names}
    optimizers, guesses = rules(job, trained)
    blocks = units(module_tree(model))
    if len(first.calls) != len(second.calls):
        notes.append("the operators differ between batch sizes: figures are taken in proportion to the samples")
    return Profile(
        model=fingerprint((p.name, p.shape, p.dtype) for p in parameters),
        name=type(model).__name__,
        batch=job.batch,
        precision=job.precision,
        device=device,
        parameters=parameters,
        modules=fold_modules(first, second, _tree(model)),
        operators=fold_operators(first, second),
        moments=peaks(first, second),
        optimizers=optimizers,
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        units=blocks,
        unit_bytes=tuple(
            sum(p.numel() * p.element_size() for p in model.get_submodule(path).parameters()) for path in blocks
        ),
        visits=visits,
        tables=find_tables(job, model, first, second),
        coupled=coupled,
        uncompared=uncompared,
        norms=tuple(path for path, module in model.named_modules() if isinstance(module, _BatchNorm)),
        input_bytes=example.bytes,
        samples=example.length,
        unsharded=unsharded,
        unsteady=_unsteady(first, second, how, blocks, example),
        clip=job.clip is not None,
        traced=how,
        notes=(*notes, *guesses),
        graph=graph_hash((first, second)),
    )


def _lost(model: nn.Module, trace: Trace) -> str:
    """What happens to parameters and would not happen to the shards of them."""
    compiled = next((path or "the model" for path, module in model.named_modules() if is_compiled(module)), None)
    if compiled is not None:
        return f"{compiled} was compiled by torch.jit, and its parameters cannot be replaced"
    if trace.changed:
        return f"forward changes {trace.changed} itself, which shards would not keep"
    hooked = next((name for name, value in model.named_parameters() if value._backward_hooks), None)
    return f"{hooked} has a gradient hook, which shards would not have" if hooked else ""


def _unsteady(
    first: Trace, second: Trace, how: Literal["fake", "real"], blocks: Sequence[str], example: Example
) -> str:
    """Why ranks may run different blocks, or read a block's parameters while it does not run. Ranks have batches and random numbers of
    their own. Which samples call which block cannot be found by trying some of them: it is enough that the code may look."""
    if first.outside or second.outside:
        return f"{first.outside or second.outside} is read while its block does not run"
    text = next((leaf for leaf in tree_leaves(example.batch(2)) if not isinstance(leaf, _FIXED)), None)
    if text is not None:
        return f"batches hold values of type {type(text).__name__}: if they decide which blocks run"
    idle = next((path for path in blocks if path not in first.modules or path not in second.modules), None)
    if idle is not None:
        return f"{idle} does not run for every batch: if samples decide that it does"
    if how == "real":
        return "the model could not be traced: if its samples decide which blocks run"
    if first.draws or second.draws:
        return "forward draws Python's or NumPy's random numbers: if they decide which blocks run"
    if first.modules.keys() != second.modules.keys():
        return "other modules run for another batch: if they are whole blocks"
    return ""


def _traced(job: Job, example: Example, device: str) -> _Traced:
    """Two fake steps. The smaller has two samples: code and batch norm treat a single one apart."""
    large = max(min(job.batch, _INPUTS // max(example.bytes, 1)), 4)
    with random_states(), FakeTensorMode(allow_non_fake_inputs=True) as mode, unquestioned():
        model = built(job)
        parameters = _parameters(model)
        batches = {}
        for samples in (2, large):
            with unset_fake_temporarily():
                batch = example.batch(samples)
            batches[samples] = tree_map(
                lambda value: _faked(mode, value, device) if isinstance(value, Tensor) else value, batch
            )
        blocks = units(module_tree(model))
        run = find(model)
        if run is not None and _alike(job, model, mode, run, batches[2], device):
            with shortened(model, run):
                few = _steps(job, model, mode, batches, device, blocks)
            traces = stretched(few, run)
            if traces is not None:
                return _Traced(model, traces[0], traces[1], parameters, run)
        first, second = _steps(job, model, mode, batches, device, blocks)
    return _Traced(model, first, second, parameters)


def _steps(
    job: Job, model: nn.Module, mode: FakeTensorMode, batches: dict[int, Any], device: str, blocks: Sequence[str]
) -> list[Trace]:
    """A fake step of each batch."""
    tensors = _tensors(model, mode, device)
    traces = []
    for samples, batch in batches.items():
        seed_all(0)  # whatever Python's and NumPy's numbers decide, both steps are of one kind
        with _untouched(model):
            traces.append(_step(job, model, tensors, batch, samples, device, blocks))
    return traces


def _tensors(model: nn.Module, mode: FakeTensorMode, device: str) -> dict[str, Tensor]:
    """Fakes of all that the model holds, by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tensors = {name: _faked(mode, value, device) for name, value in named}
    _share(model, tensors)
    return tensors


def _names(model: nn.Module) -> list[str]:
    """Of all that the model holds."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in named]


def _alike(job: Job, model: nn.Module, mode: FakeTensorMode, run: Run, batch: Any, device: str) -> bool:
    """Whether a step treats all blocks of the run alike."""
    model.train()
    tensors = _tensors(model, mode, device)

    def step() -> None:
        seed_all(0)
        here = {name: tensors[name] for name in _names(model)}
        output = call_model(job, _Bound(model, here), batch)
        call_loss(job, output, batch, model)

    try:
        with torch.no_grad(), _autocast(job, device):
            return alike_in_forward(model, run, step)
    except Exception:  # whatever a user's forward does with a block that is not there
        return False


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Nothing may reach the model's own parameters: layers that hold them beside their modules (Keras) do not see the fakes."""
    before = {name: value.grad for name, value in model.named_parameters()}
    yield
    reached = [name for name, value in model.named_parameters() if value.grad is not before[name]]
    for name in reached:
        model.get_parameter(name).grad = before[name]
    if reached:
        raise _HeldBesideError(
            f"{reached[0]} is held by a layer itself, beside its module, and computed with from there"
        )


def _ran(job: Job, example: Example) -> _Traced:
    """Two real steps on the CPU, on a copy of the model where the job gives a module."""
    torch_state = torch.random.get_rng_state()
    model = made(job)
    if any(p.is_meta for p in model.parameters()):
        raise JobError(
            "the model is on the meta device and cannot be traced on fake tensors; build it on the CPU to profile it"
        )
    parameters = _parameters(model)
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    blocks = units(module_tree(model))
    traces = [_step(job, model, tensors, example.batch(samples), samples, "cpu", blocks, own=True) for samples in _REAL]
    torch.random.set_rng_state(torch_state)
    return _Traced(model, traces[0], traces[1], parameters)


def _memory(value: Tensor) -> int:
    """Another one after `parameter.data = ...`."""
    return value.untyped_storage()._cdata


def _step(
    job: Job,
    model: nn.Module,
    tensors: dict[str, Tensor],
    batch: Any,
    samples: int,
    device: str,
    blocks: Sequence[str] = (),
    *,
    own: bool = False,
) -> Trace:
    """Forward, loss and backward of one batch, recorded. `blocks`: the modules that ZeRO gathers one at a time; `own`: the tensors are
    those that the model holds."""
    model.train()
    # One thread for backward too, so that the recorder sees it on every device.
    with recording(model, samples) as recorder, torch.autograd.set_multithreading_enabled(False):
        for tensor in tensors.values():
            recorder.ignore(tensor)
        hooks = [
            tensor.register_post_accumulate_grad_hook(counting(recorder))
            for tensor in _unique(tensors)
            if tensor.requires_grad
        ]
        tree_map(lambda value: recorder.hold(value) if isinstance(value, Tensor) else None, batch)
        before, places = outside_torch(), {name: _memory(value) for name, value in tensors.items()}
        shortened = {f"{path}.weight" for path, each in model.named_modules() if getattr(each, "max_norm", None)}
        trained = dict(model.named_parameters(remove_duplicate=False)).keys() - shortened
        recorder.watch({name: tensors[name] for name in trained if name in tensors}, blocks)
        with _autocast(job, device), _Derivatives() as derivatives:
            output = call_model(job, model if own else _Bound(model, tensors), batch)
            loss = call_loss(job, output, batch, model)
        recorder.trace.twice = derivatives.twice
        recorder.trace.draws = outside_torch() != before
        moved = (name for name, value in tensors.items() if name in trained and _memory(value) != places[name])
        recorder.trace.changed = recorder.trace.changed or next(moved, "")
        del output
        total = loss[0] if isinstance(loss, tuple) else loss
        recorder.phase = "backward"
        total.backward()
        for hook in hooks:
            hook.remove()
    return recorder.trace


def _autocast(job: Job, device: str) -> contextlib.AbstractContextManager[Any]:
    half = _HALF.get(job.precision)
    return torch.autocast(device, dtype=half) if half else contextlib.nullcontext()


class _Derivatives(TorchFunctionMode):
    """Whether derivatives are taken that can be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.twice |= func in DIFFERENTIATE and bool(kwargs.get("create_graph"))
        return func(*args, **kwargs)


class _Bound(nn.Module):
    """`model` called with other tensors in place of its own; looks like it to whoever asks for its forward."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._call = lambda *args, **kwargs: functional_call(model, tensors, args, kwargs, tie_weights=False)
        self._model = [model]  # in a list: not a submodule, whose paths would change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def forward(self) -> Any:  # type: ignore[override]
        return self._model[0].forward


def _faked(mode: FakeTensorMode, value: Tensor, device: str) -> Tensor:
    """A fake of `value` on `device`, a leaf if it was one."""
    if isinstance(value, FakeTensor):
        fake = value.detach()
    elif value.is_meta:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    else:
        fake = mode.from_tensor(value.detach())
    if fake.device.type != device:
        fake = fake.to(device)
    return fake.requires_grad_(value.requires_grad)


def _share(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give names that share a parameter the same fake."""
    first: dict[int, str] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        tensors[name] = tensors[first.setdefault(id(value), name)]


def _unique(tensors: dict[str, Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors.values()}.values())


def _parameters(model: nn.Module) -> tuple[Parameter, ...]:
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return tuple(
        Parameter(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            trainable=value.requires_grad,
            aliases=tuple(names[id(value)][1:]),
        )
        for name, value in model.named_parameters()
    )


def _tree(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Path -> (class name, parameter bytes, children included)."""
    return {
        path: (type(module).__name__, sum(p.numel() * p.element_size() for p in module.parameters()))
        for path, module in model.named_modules()
    }

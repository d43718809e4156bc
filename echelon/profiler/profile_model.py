"""A job's model as a Profile: one step at two batch sizes on fake tensors, so that nothing is computed or allocated."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from echelon.errors import EchelonError, JobError, describe_error
from echelon.job import Job, call_loss, call_model
from echelon.plan.profile import ParameterProfile, PipelineUnit, Profile, find_fsdp_units, model_fingerprint
from echelon.profiler.embedding_tables import find_tables
from echelon.profiler.fold_traces import find_peak_moments, fold_modules, fold_operators
from echelon.profiler.module_calls import DERIVATIVE_FUNCTIONS
from echelon.profiler.pipeline_units import find_pipeline_units
from echelon.profiler.profile_optimizer import profile_optimizers
from echelon.profiler.repeated_blocks import (
    RepeatedBlocks,
    extend_traces,
    find_repeated_blocks,
    is_uniform_in_forward,
    shortened_model,
)
from echelon.profiler.sample_coupling import detect_coupling
from echelon.tree import map_tensors, tree_leaves, tree_tensors
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.isolation import IsolatedJob
from echelon.trials.module_tree import is_torchscript, list_modules
from echelon.trials.op_recorder import StepTrace, hash_graph, make_gradient_hook, record_ops
from echelon.trials.random_state import preserve_random_states, read_host_random_state, seed_all
from echelon.trials.shape_model import build_fake_model, make_model, skip_value_checks
from echelon.trials.trial_context import preserve_job_state, trial_context

_MakeFake = Callable[[Tensor], Tensor]

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes of example data for a trace: a fake step costs nothing, but its inputs are collated for real.
_MAX_INPUT_BYTES = 64 * 2**20
#: Batch sizes of real steps, where tracing fails: small, because the memory is real.
_REAL_BATCH_SIZES = (2, 4)
_DOUBLE_BACKWARD_REASON = "the model differentiates its own derivative (autograd.grad with create_graph), which torch's fully_shard does not follow"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedModel:
    model: nn.Module
    small: StepTrace
    large: StepTrace
    parameters: tuple[ParameterProfile, ...]  #: before the first forward, which may create layers
    device: str
    kind: Literal["fake", "real"] = "fake"
    repeated_blocks: RepeatedBlocks | None = None  #: where only some of them were traced


class _DetachedParameterError(RuntimeError):
    """A layer keeps a reference to a parameter outside its module and computes with it."""


@trial_context()
def profile(job: Job, *, device: str | None = None) -> Profile:
    """What a step of `job` computes, moves and saves. `device`: trace for "cpu" or "cuda" (default: what is available)."""
    isolated = IsolatedJob(job)
    with preserve_job_state(job), isolated.active():  # a loss that counts its calls must not count these
        return _profile_isolated(isolated.job, device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _profile_isolated(job: Job, device: str) -> Profile:
    example = ExampleBatches(job)
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, detached_parameter = _trace_or_run(job, example, device, notes)
        model, small, large = traced.model, traced.small, traced.large
        coupled, coupling_unknown_reason = detect_coupling(
            job,
            example,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            flops=sum(op_call.flops for op_call in large.calls) / large.num_samples,
            weigh_by_counts=traced.device == "cpu",
        )
        pipeline_units: tuple[PipelineUnit, ...] = ()
        with contextlib.suppress(Exception):  # a model that cannot be cut into stages; plans with stages report why
            pipeline_units = find_pipeline_units(job, example, traced.repeated_blocks)
    trainable_names = {parameter.name for parameter in traced.parameters if parameter.trainable}
    trainable = {name: value for name, value in model.named_parameters() if name in trainable_names}
    optimizers, optimizer_notes = profile_optimizers(job, trainable)
    fsdp_units = find_fsdp_units(list_modules(model))
    if len(small.calls) != len(large.calls):
        notes.append("the operators differ between batch sizes: figures are taken in proportion to the samples")
    double_backward = _DOUBLE_BACKWARD_REASON if large.has_double_backward else ""
    return Profile(
        model=model_fingerprint((item.name, item.shape, item.dtype) for item in traced.parameters),
        name=type(model).__name__,
        batch=job.batch_size,
        precision=job.precision,
        device=traced.device,
        parameters=traced.parameters,
        modules=fold_modules(small, large, _describe_modules(model)),
        operators=fold_operators(small, large),
        moments=find_peak_moments(small, large),
        optimizers=optimizers,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        fsdp_units=fsdp_units,
        fsdp_unit_bytes=tuple(_parameter_bytes(model.get_submodule(path)) for path in fsdp_units),
        pipeline_units=pipeline_units,
        tables=find_tables(job, model, small, large),
        samples_coupled=coupled,
        coupling_unknown_reason=coupling_unknown_reason,
        batch_norms=tuple(path for path, module in model.named_modules() if isinstance(module, _BatchNorm)),
        input_bytes=example.sample_bytes,
        samples=example.dataset_length,
        unshardable_reason=detached_parameter or double_backward or _find_sharding_obstacle(model, large),
        varying_blocks_reason=_find_control_flow_risk(traced, fsdp_units, example),
        clips_gradients=job.clip_norm is not None,
        traced=traced.kind,
        notes=(*notes, *optimizer_notes),
        graph_hash=hash_graph((small, large)),
    )


def _trace_or_run(job: Job, example: ExampleBatches, device: str, notes: list[str]) -> tuple[_TracedModel, str]:
    """Trace fake steps for `device`, else for the CPU (cuDNN's recurrent layers look at values), else run real ones.

    Also returns which parameter is held outside its module, if one is.
    """
    detached_parameter = ""
    for trace_device in dict.fromkeys((device, "cpu")):
        try:
            return _trace_fake_steps(job, example, trace_device), detached_parameter
        except EchelonError:
            raise
        except _DetachedParameterError as error:
            detached_parameter = str(error)
            notes.append(f"the model cannot be traced without running it ({detached_parameter})")
            break
        except Exception as error:  # a user's forward may do anything with missing values
            target = "" if trace_device == "cpu" else f" for {trace_device}"
            notes.append(f"the model cannot be traced{target} without running it ({describe_error(error)})")
    small, large = _REAL_BATCH_SIZES
    notes[-1] += f": two small steps of {small} and {large} samples were run on the CPU instead"
    return _run_real_steps(job, example), detached_parameter


def _find_sharding_obstacle(model: nn.Module, trace: StepTrace) -> str:
    compiled = next((path or "the model" for path, module in model.named_modules() if is_torchscript(module)), None)
    if compiled is not None:
        return f"{compiled} was compiled by torch.jit, and its parameters cannot be replaced"
    if trace.mutated_parameter:
        return f"forward changes {trace.mutated_parameter} itself, which shards would not keep"
    hooked_parameter = next((name for name, value in model.named_parameters() if value._backward_hooks), None)
    return f"{hooked_parameter} has a gradient hook, which shards would not have" if hooked_parameter else ""


def _find_control_flow_risk(traced: _TracedModel, blocks: Sequence[str], example: ExampleBatches) -> str:
    """Why ranks may run different blocks, or read a block's parameters while it does not run.

    Ranks have their own batches and random numbers. Samples cannot show which of them call which block: it is enough that the code may look.
    """
    small, large = traced.small, traced.large
    if small.parameter_read_outside or large.parameter_read_outside:
        return f"{small.parameter_read_outside or large.parameter_read_outside} is read while its block does not run"
    non_tensor = next((leaf for leaf in tree_leaves(example.batch(2)) if not isinstance(leaf, Tensor | None)), None)
    if non_tensor is not None:
        return f"batches hold values of type {type(non_tensor).__name__}: if they decide which blocks run"
    idle = next((path for path in blocks if path not in small.module_totals or path not in large.module_totals), None)
    if idle is not None:
        return f"{idle} does not run for every batch: if samples decide that it does"
    if traced.kind == "real":
        return "the model could not be traced: if its samples decide which blocks run"
    if small.draws_host_random or large.draws_host_random:
        return "forward draws Python's or NumPy's random numbers: if they decide which blocks run"
    if small.module_totals.keys() != large.module_totals.keys():
        return "other modules run for another batch: if they are whole blocks"
    return ""


def _trace_fake_steps(job: Job, example: ExampleBatches, device: str) -> _TracedModel:
    """Two fake steps. The smaller has two samples: code and batch norms treat a single one differently."""
    large_batch = max(min(job.batch_size, _MAX_INPUT_BYTES // max(example.sample_bytes, 1)), 4)
    with preserve_random_states(), FakeTensorMode(allow_non_fake_inputs=True) as fake_mode, skip_value_checks():
        model = build_fake_model(job)
        make_traced = partial(_TracedModel, model=model, parameters=_describe_parameters(model), device=device)
        with unset_fake_temporarily():
            real_batches = {samples: example.batch(samples) for samples in (2, large_batch)}
        make_fake = partial(_make_fake, fake_mode, device)
        batches = {samples: map_tensors(make_fake, batch) for samples, batch in real_batches.items()}
        blocks = find_fsdp_units(list_modules(model))
        run_steps = partial(_run_fake_steps, job, model, make_fake, batches, device, blocks)
        repeated = find_repeated_blocks(model)
        if repeated and _are_blocks_uniform(job, model, make_fake, repeated, batches[2], device):
            with shortened_model(model, repeated):
                short_traces = run_steps()
            traces = extend_traces(short_traces, repeated)
            if traces is not None:
                return make_traced(small=traces[0], large=traces[1], repeated_blocks=repeated)
        small, large = run_steps()
    return make_traced(small=small, large=large)


def _run_fake_steps(
    job: Job, model: nn.Module, make_fake: _MakeFake, batches: dict[int, Any], device: str, blocks: Sequence[str]
) -> list[StepTrace]:
    tensors = _make_fake_tensors(model, make_fake)
    traces = []
    for samples, batch in batches.items():
        seed_all(0)  # whatever Python's and NumPy's random numbers decide is the same in both steps
        with _parameters_untouched(model):
            traces.append(_record_step(job, model, tensors, batch, samples, device, blocks))
    return traces


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


def _make_fake_tensors(model: nn.Module, make_fake: _MakeFake) -> dict[str, Tensor]:
    """Fakes of all that the model holds, by name; names that share a tensor share its fake."""
    named = _named_tensors(model)
    fakes = {key: make_fake(value) for key, value in {id(value): value for value in named.values()}.items()}
    return {name: fakes[id(value)] for name, value in named.items()}


def _are_blocks_uniform(
    job: Job, model: nn.Module, make_fake: _MakeFake, repeated_blocks: RepeatedBlocks, batch: Any, device: str
) -> bool:
    model.train()
    tensors = _make_fake_tensors(model, make_fake)

    def run_step() -> None:
        seed_all(0)
        present_tensors = {name: tensors[name] for name in _named_tensors(model)}
        output = call_model(job, _ModelWithTensors(model, present_tensors), batch)
        call_loss(job, output, batch, model)

    try:
        with torch.no_grad(), _autocast(job, device):
            return is_uniform_in_forward(model, repeated_blocks, run_step)
    except Exception:  # a user's forward may do anything with a missing block
        return False


@contextlib.contextmanager
def _parameters_untouched(model: nn.Module) -> Iterator[None]:
    """Inside, nothing may reach the model's own parameters: layers that hold them outside their modules (Keras) do not see the fakes."""
    gradients_before = {name: value.grad for name, value in model.named_parameters()}
    yield
    reached = [name for name, value in model.named_parameters() if value.grad is not gradients_before[name]]
    for name in reached:
        model.get_parameter(name).grad = gradients_before[name]
    if reached:
        raise _DetachedParameterError(f"{reached[0]} is held by a layer outside its module, which computes with it")


def _run_real_steps(job: Job, example: ExampleBatches) -> _TracedModel:
    """Two real steps on the CPU, on a copy of the model where the job holds a module."""
    torch_state = torch.random.get_rng_state()
    model = make_model(job)
    if any(parameter.is_meta for parameter in model.parameters()):
        remedy = "build it on the CPU to profile it"
        raise JobError(f"the model is on the meta device and cannot be traced on fake tensors; {remedy}")
    parameters, tensors = _describe_parameters(model), _named_tensors(model)
    blocks = find_fsdp_units(list_modules(model))
    small, large = (
        _record_step(job, model, tensors, example.batch(samples), samples, "cpu", blocks, uses_own_tensors=True)
        for samples in _REAL_BATCH_SIZES
    )
    torch.random.set_rng_state(torch_state)
    return _TracedModel(model=model, small=small, large=large, parameters=parameters, device="cpu", kind="real")


def _storage_id(value: Tensor) -> int:
    """Changes with `parameter.data = ...`."""
    return value.untyped_storage()._cdata


def _record_step(
    job: Job,
    model: nn.Module,
    tensors: dict[str, Tensor],
    batch: Any,
    samples: int,
    device: str,
    blocks: Sequence[str],
    *,
    uses_own_tensors: bool = False,
) -> StepTrace:
    """Record forward, loss and backward of one batch. `blocks`: the modules that ZeRO gathers one at a time; `uses_own_tensors`: `tensors` are
    the model's."""
    model.train()
    # Backward in the same thread, so that the recorder sees it on every device.
    with record_ops(model, samples) as recorder, torch.autograd.set_multithreading_enabled(False):
        hooks = []
        for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
            recorder.ignore_storage(tensor)
            if tensor.requires_grad:
                hooks.append(tensor.register_post_accumulate_grad_hook(make_gradient_hook(recorder)))
        for tensor in tree_tensors(batch):
            recorder.track_storage(tensor)
        trace = recorder.trace
        rng_state, storage_ids = read_host_random_state(), {name: _storage_id(value) for name, value in tensors.items()}
        max_norm = {f"{path}.weight" for path, module in model.named_modules() if getattr(module, "max_norm", None)}
        watched = dict(model.named_parameters(remove_duplicate=False)).keys() - max_norm
        recorder.watch_parameters({name: tensors[name] for name in watched if name in tensors}, blocks)
        with _autocast(job, device), _DoubleBackwardDetector() as derivatives:
            output = call_model(job, model if uses_own_tensors else _ModelWithTensors(model, tensors), batch)
            loss = call_loss(job, output, batch, model)
        trace.has_double_backward = derivatives.has_double_backward
        trace.draws_host_random = read_host_random_state() != rng_state
        replaced = (name for name, x in tensors.items() if name in watched and _storage_id(x) != storage_ids[name])
        trace.mutated_parameter = trace.mutated_parameter or next(replaced, "")
        del output
        recorder.phase = "backward"
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        for hook in hooks:
            hook.remove()
    return trace


def _autocast(job: Job, device: str) -> contextlib.AbstractContextManager[Any]:
    autocast_dtype = _AUTOCAST_DTYPES.get(job.precision)
    return torch.autocast(device, dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()


class _DoubleBackwardDetector(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.has_double_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.has_double_backward |= func in DERIVATIVE_FUNCTIONS and bool(kwargs.get("create_graph"))
        return func(*args, **kwargs)


class _ModelWithTensors(nn.Module):
    """`model` called with other tensors in place of its own; shows its forward."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._call_model = lambda *args, **kwargs: functional_call(model, tensors, args, kwargs, tie_weights=False)
        self._model_in_list = [model]  # in a list: not a submodule, whose paths would change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_model(*args, **kwargs)

    @property
    def forward(self) -> Any:  # type: ignore[override]
        return self._model_in_list[0].forward


def _make_fake(fake_mode: FakeTensorMode, device: str, value: Tensor) -> Tensor:
    """A fake of `value` on `device`, a leaf if it was one."""
    if isinstance(value, FakeTensor):
        fake = value.detach()
    elif value.is_meta:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    else:
        fake = fake_mode.from_tensor(value.detach())
    if fake.device.type != device:
        fake = fake.to(device)
    return fake.requires_grad_(value.requires_grad)


def _describe_parameters(model: nn.Module) -> tuple[ParameterProfile, ...]:
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return tuple(
        ParameterProfile(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            trainable=value.requires_grad,
            aliases=tuple(names[id(value)][1:]),
        )
        for name, value in model.named_parameters()
    )


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _describe_modules(model: nn.Module) -> dict[str, tuple[str, int]]:
    return {path: (type(module).__name__, _parameter_bytes(module)) for path, module in model.named_modules()}

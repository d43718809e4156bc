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
from echelon.profiler.sample_coupling import detect_coupling, first_line
from echelon.tree import tree_leaves, tree_map
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.isolation import IsolatedJob
from echelon.trials.module_tree import is_torchscript, list_modules
from echelon.trials.op_recorder import StepTrace, hash_graph, make_gradient_hook, record_ops
from echelon.trials.random_state import preserve_random_states, read_host_random_state, seed_all
from echelon.trials.shape_model import build_fake_model, make_model, skip_value_checks
from echelon.trials.trial_context import preserve_job_state, trial_context

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes of example data that a trace may hold: a fake step costs nothing, but its inputs are collated for real.
_MAX_INPUT_BYTES = 64 * 2**20
#: What in a batch does not decide by itself what a model computes.
_VALUE_FREE_TYPES = (Tensor, type(None))
#: Samples of a real run, where tracing fails: few, because the memory is real.
_REAL_BATCH_SIZES = (2, 4)
_DOUBLE_BACKWARD_REASON = "the model differentiates its own derivative (autograd.grad with create_graph), which torch's fully_shard does not follow"


@dataclass(frozen=True, slots=True)
class _TracedModel:
    """A model and its steps of two batch sizes; `repeated_blocks`: of blocks alike, where few of them were traced."""

    model: nn.Module
    small_trace: StepTrace
    large_trace: StepTrace
    parameters: tuple[ParameterProfile, ...]  #: before the first forward, which may make layers
    repeated_blocks: RepeatedBlocks | None = None


class _DetachedParameterError(RuntimeError):
    """A layer computes with a parameter that it holds itself."""


@trial_context()
def profile(job: Job, *, device: str | None = None) -> Profile:
    """What a step of `job` computes, moves and keeps. `device`: trace for "cpu" or "cuda" (default: what is here)."""
    with (
        preserve_job_state(job),
        (isolated := IsolatedJob(job)).active(),
    ):  # a loss that counts its calls must not count these
        return _profile_isolated(isolated.job, device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _profile_isolated(job: Job, device: str) -> Profile:
    """The profile of a job that is nobody else's."""
    example = ExampleBatches(job)
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced_model, trace_kind, device, detached_parameter = _trace_or_run(job, example, device, notes)
        model, small_trace, large_trace = traced_model.model, traced_model.small_trace, traced_model.large_trace
        coupled, coupling_unknown_reason = detect_coupling(
            job,
            example,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            flops=sum(op_call.flops for op_call in large_trace.calls) / large_trace.num_samples,
            weigh_by_counts=device == "cpu",
        )
        pipeline_units: tuple[PipelineUnit, ...] = ()
        with contextlib.suppress(Exception):  # a model that cannot be cut into stages; who asks for them is told why
            pipeline_units = find_pipeline_units(job, example, traced_model.repeated_blocks)
    return _assemble_profile(
        job, example, model, small_trace, large_trace, parameters=traced_model.parameters, device=device, trace_kind=trace_kind, coupled=coupled, coupling_unknown_reason=coupling_unknown_reason,
        pipeline_units=pipeline_units, notes=notes, unsharded=detached_parameter or (_DOUBLE_BACKWARD_REASON if large_trace.has_double_backward else "") or _find_sharding_obstacle(model, large_trace),
    )  # fmt: skip


def _trace_or_run(
    job: Job, example: ExampleBatches, device: str, notes: list[str]
) -> tuple[_TracedModel, Literal["fake", "real"], str, str]:
    """Two steps without their values for `device`, else for the CPU (cuDNN's recurrent layers look at values), else run for real.

    Last, which parameter is held beside its module, if one is.
    """
    detached_parameter = ""
    for trace_device in dict.fromkeys((device, "cpu")):
        try:
            return _trace_fake_steps(job, example, trace_device), "fake", trace_device, detached_parameter
        except EchelonError:
            raise
        except _DetachedParameterError as error:
            detached_parameter = str(error)
            notes.append(f"the model cannot be traced without running it ({detached_parameter})")
            break
        except Exception as error:  # whatever a user's forward does with values it does not have
            device_text = "" if trace_device == "cpu" else f" for {trace_device}"
            notes.append(
                f"the model cannot be traced{device_text} without running it ({type(error).__name__}: {first_line(error)})"
            )
    notes[-1] += (
        f": two small steps of {_REAL_BATCH_SIZES[0]} and {_REAL_BATCH_SIZES[1]} samples were run on the CPU instead"
    )
    return _run_real_steps(job, example), "real", "cpu", detached_parameter


def _assemble_profile(
    job: Job,
    example: ExampleBatches,
    model: nn.Module,
    small_trace: StepTrace,
    large_trace: StepTrace,
    *,
    parameters: tuple[ParameterProfile, ...],
    device: str,
    trace_kind: Literal["fake", "real"],
    coupled: bool | None,
    coupling_unknown_reason: str,
    pipeline_units: tuple[PipelineUnit, ...],
    notes: list[str],
    unsharded: str,
) -> Profile:
    trainable_names = {parameter.name for parameter in parameters if parameter.trainable}
    trainable = {name: value for name, value in model.named_parameters() if name in trainable_names}
    optimizers, guesses = profile_optimizers(job, trainable)
    block_paths = find_fsdp_units(list_modules(model))
    if len(small_trace.calls) != len(large_trace.calls):
        notes.append("the operators differ between batch sizes: figures are taken in proportion to the samples")
    return Profile(
        model=model_fingerprint(
            (model_parameter.name, model_parameter.shape, model_parameter.dtype) for model_parameter in parameters
        ),
        name=type(model).__name__,
        batch=job.batch_size,
        precision=job.precision,
        device=device,
        parameters=parameters,
        modules=fold_modules(small_trace, large_trace, _describe_modules(model)),
        operators=fold_operators(small_trace, large_trace),
        moments=find_peak_moments(small_trace, large_trace),
        optimizers=optimizers,
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        fsdp_units=block_paths,
        fsdp_unit_bytes=tuple(
            sum(
                model_parameter.numel() * model_parameter.element_size()
                for model_parameter in model.get_submodule(path).parameters()
            )
            for path in block_paths
        ),
        pipeline_units=pipeline_units,
        tables=find_tables(job, model, small_trace, large_trace),
        samples_coupled=coupled,
        coupling_unknown_reason=coupling_unknown_reason,
        batch_norms=tuple(path for path, module in model.named_modules() if isinstance(module, _BatchNorm)),
        input_bytes=example.sample_bytes,
        samples=example.dataset_length,
        unshardable_reason=unsharded,
        varying_blocks_reason=_find_control_flow_risk(small_trace, large_trace, trace_kind, block_paths, example),
        clips_gradients=job.clip_norm is not None,
        traced=trace_kind,
        notes=(*notes, *guesses),
        graph_hash=hash_graph((small_trace, large_trace)),
    )


def _find_sharding_obstacle(model: nn.Module, trace: StepTrace) -> str:
    """What happens to parameters and would not happen to the shards of them."""
    compiled = next((path or "the model" for path, module in model.named_modules() if is_torchscript(module)), None)
    if compiled is not None:
        return f"{compiled} was compiled by torch.jit, and its parameters cannot be replaced"
    if trace.mutated_parameter:
        return f"forward changes {trace.mutated_parameter} itself, which shards would not keep"
    hooked_parameter = next((name for name, value in model.named_parameters() if value._backward_hooks), None)
    return f"{hooked_parameter} has a gradient hook, which shards would not have" if hooked_parameter else ""


def _find_control_flow_risk(
    small: StepTrace,
    large: StepTrace,
    trace_kind: Literal["fake", "real"],
    blocks: Sequence[str],
    example: ExampleBatches,
) -> str:
    """Why ranks may run different blocks, or read a block's parameters while it does not run. Ranks have batches and random numbers of
    their own. Which samples call which block cannot be found by trying some of them: it is enough that the code may look."""
    if small.parameter_read_outside or large.parameter_read_outside:
        return f"{small.parameter_read_outside or large.parameter_read_outside} is read while its block does not run"
    strange = next((leaf for leaf in tree_leaves(example.batch(2)) if not isinstance(leaf, _VALUE_FREE_TYPES)), None)
    if strange is not None:
        return f"batches hold values of type {type(strange).__name__}: if they decide which blocks run"
    idle = next((path for path in blocks if path not in small.module_totals or path not in large.module_totals), None)
    if idle is not None:
        return f"{idle} does not run for every batch: if samples decide that it does"
    if trace_kind == "real":
        return "the model could not be traced: if its samples decide which blocks run"
    if small.draws_host_random or large.draws_host_random:
        return "forward draws Python's or NumPy's random numbers: if they decide which blocks run"
    if small.module_totals.keys() != large.module_totals.keys():
        return "other modules run for another batch: if they are whole blocks"
    return ""


def _trace_fake_steps(job: Job, example: ExampleBatches, device: str) -> _TracedModel:
    """Two fake steps. The smaller has two samples: code and batch norm treat a single one apart."""
    large_batch = max(min(job.batch_size, _MAX_INPUT_BYTES // max(example.sample_bytes, 1)), 4)
    with preserve_random_states(), FakeTensorMode(allow_non_fake_inputs=True) as fake_mode, skip_value_checks():
        model = build_fake_model(job)
        parameters = _describe_parameters(model)
        batches = {}
        for samples in (2, large_batch):
            with unset_fake_temporarily():
                batch = example.batch(samples)
            batches[samples] = tree_map(
                lambda value: _make_fake(fake_mode, value, device) if isinstance(value, Tensor) else value, batch
            )
        blocks = find_fsdp_units(list_modules(model))
        repeated_blocks = find_repeated_blocks(model)
        if repeated_blocks is not None and _are_blocks_uniform(
            job, model, fake_mode, repeated_blocks, batches[2], device
        ):
            with shortened_model(model, repeated_blocks):
                short_traces = _run_fake_steps(job, model, fake_mode, batches, device, blocks)
            traces = extend_traces(short_traces, repeated_blocks)
            if traces is not None:
                return _TracedModel(model, traces[0], traces[1], parameters, repeated_blocks)
        small_trace, large_trace = _run_fake_steps(job, model, fake_mode, batches, device, blocks)
    return _TracedModel(model, small_trace, large_trace, parameters)


def _run_fake_steps(
    job: Job, model: nn.Module, fake_mode: FakeTensorMode, batches: dict[int, Any], device: str, blocks: Sequence[str]
) -> list[StepTrace]:
    """A fake step of each batch."""
    tensors = _make_fake_tensors(model, fake_mode, device)
    traces = []
    for samples, batch in batches.items():
        seed_all(0)  # whatever Python's and NumPy's numbers decide, both steps are of one kind
        with _parameters_untouched(model):
            traces.append(_record_step(job, model, tensors, batch, samples, device, blocks))
    return traces


def _make_fake_tensors(model: nn.Module, fake_mode: FakeTensorMode, device: str) -> dict[str, Tensor]:
    """Fakes of all that the model holds, by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tensors = {name: _make_fake(fake_mode, value, device) for name, value in named}
    _tie_fakes(model, tensors)
    return tensors


def _list_tensor_names(model: nn.Module) -> list[str]:
    """Of all that the model holds."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in named]


def _are_blocks_uniform(
    job: Job, model: nn.Module, fake_mode: FakeTensorMode, repeated_blocks: RepeatedBlocks, batch: Any, device: str
) -> bool:
    """Whether a step treats all blocks of the run alike."""
    model.train()
    tensors = _make_fake_tensors(model, fake_mode, device)

    def run_step() -> None:
        seed_all(0)
        present_tensors = {name: tensors[name] for name in _list_tensor_names(model)}
        output = call_model(job, _ModelWithTensors(model, present_tensors), batch)
        call_loss(job, output, batch, model)

    try:
        with torch.no_grad(), _autocast(job, device):
            return is_uniform_in_forward(model, repeated_blocks, run_step)
    except Exception:  # whatever a user's forward does with a block that is not there
        return False


@contextlib.contextmanager
def _parameters_untouched(model: nn.Module) -> Iterator[None]:
    """Nothing may reach the model's own parameters: layers that hold them beside their modules (Keras) do not see the fakes."""
    gradients_before = {name: value.grad for name, value in model.named_parameters()}
    yield
    reached_names = [name for name, value in model.named_parameters() if value.grad is not gradients_before[name]]
    for name in reached_names:
        model.get_parameter(name).grad = gradients_before[name]
    if reached_names:
        raise _DetachedParameterError(
            f"{reached_names[0]} is held by a layer itself, beside its module, and computed with from there"
        )


def _run_real_steps(job: Job, example: ExampleBatches) -> _TracedModel:
    """Two real steps on the CPU, on a copy of the model where the job gives a module."""
    torch_state = torch.random.get_rng_state()
    model = make_model(job)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise JobError(
            "the model is on the meta device and cannot be traced on fake tensors; build it on the CPU to profile it"
        )
    parameters = _describe_parameters(model)
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    blocks = find_fsdp_units(list_modules(model))
    traces = [
        _record_step(job, model, tensors, example.batch(samples), samples, "cpu", blocks, uses_own_tensors=True)
        for samples in _REAL_BATCH_SIZES
    ]
    torch.random.set_rng_state(torch_state)
    return _TracedModel(model, traces[0], traces[1], parameters)


def _storage_id(value: Tensor) -> int:
    """Another one after `parameter.data = ...`."""
    return value.untyped_storage()._cdata


def _record_step(
    job: Job,
    model: nn.Module,
    tensors: dict[str, Tensor],
    batch: Any,
    samples: int,
    device: str,
    blocks: Sequence[str] = (),
    *,
    uses_own_tensors: bool = False,
) -> StepTrace:
    """Forward, loss and backward of one batch, recorded. `blocks`: the modules that ZeRO gathers one at a time; `uses_own_tensors`: the tensors are
    those that the model holds."""
    model.train()
    # One thread for backward too, so that the recorder sees it on every device.
    with record_ops(model, samples) as recorder, torch.autograd.set_multithreading_enabled(False):
        for tensor in tensors.values():
            recorder.ignore_storage(tensor)
        hooks = [
            tensor.register_post_accumulate_grad_hook(make_gradient_hook(recorder))
            for tensor in _unique_tensors(tensors)
            if tensor.requires_grad
        ]
        tree_map(lambda value: recorder.track_storage(value) if isinstance(value, Tensor) else None, batch)
        rng_state, storage_ids = read_host_random_state(), {name: _storage_id(value) for name, value in tensors.items()}
        max_norm = {f"{path}.weight" for path, module in model.named_modules() if getattr(module, "max_norm", None)}
        watched = dict(model.named_parameters(remove_duplicate=False)).keys() - max_norm
        recorder.watch_parameters({name: tensors[name] for name in watched if name in tensors}, blocks)
        with _autocast(job, device), _DoubleBackwardDetector() as derivatives:
            output = call_model(job, model if uses_own_tensors else _ModelWithTensors(model, tensors), batch)
            loss = call_loss(job, output, batch, model)
        recorder.trace.has_double_backward = derivatives.has_double_backward
        recorder.trace.draws_host_random = read_host_random_state() != rng_state
        replaced = (
            name for name, value in tensors.items() if name in watched and _storage_id(value) != storage_ids[name]
        )
        recorder.trace.mutated_parameter = recorder.trace.mutated_parameter or next(replaced, "")
        del output
        loss_value = loss[0] if isinstance(loss, tuple) else loss
        recorder.phase = "backward"
        loss_value.backward()
        for hook in hooks:
            hook.remove()
    return recorder.trace


def _autocast(job: Job, device: str) -> contextlib.AbstractContextManager[Any]:
    autocast_dtype = _AUTOCAST_DTYPES.get(job.precision)
    return torch.autocast(device, dtype=autocast_dtype) if autocast_dtype else contextlib.nullcontext()


class _DoubleBackwardDetector(TorchFunctionMode):
    """Whether derivatives are taken that can be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.has_double_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.has_double_backward |= func in DERIVATIVE_FUNCTIONS and bool(kwargs.get("create_graph"))
        return func(*args, **kwargs)


class _ModelWithTensors(nn.Module):
    """`model` called with other tensors in place of its own; looks like it to whoever asks for its forward."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._call_model = lambda *args, **kwargs: functional_call(model, tensors, args, kwargs, tie_weights=False)
        self._model_in_list = [model]  # in a list: not a submodule, whose paths would change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_model(*args, **kwargs)

    @property
    def forward(self) -> Any:  # type: ignore[override]
        return self._model_in_list[0].forward


def _make_fake(fake_mode: FakeTensorMode, value: Tensor, device: str) -> Tensor:
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


def _tie_fakes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give names that share a parameter the same fake."""
    first_names: dict[int, str] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        tensors[name] = tensors[first_names.setdefault(id(value), name)]


def _unique_tensors(tensors: dict[str, Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors.values()}.values())


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


def _describe_modules(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Path -> (class name, parameter bytes, children included)."""
    return {
        path: (
            type(module).__name__,
            sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()),
        )
        for path, module in model.named_modules()
    }

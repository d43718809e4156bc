"""ZeRO stages 1 to 3 on torch's fully_shard.

All three shard parameters at rest. They differ in how long the gathered copies live:

    stage  parameters gathered        gradients between micro-batches
    1      for the whole step         full, exchanged once
    2      for the whole step         sharded, exchanged every micro-batch
    3      for one unit at a time     sharded, exchanged every micro-batch (full with keep_gradients)
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, debug

from echelon.engine.dtensor_reads import patch_host_reads
from echelon.engine.parallel.max_norm_sync import max_norm_weights
from echelon.engine.parallel.module_tensors import materialize_module
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.process_groups import Communicator, WorldCommunicator
from echelon.errors import DivergenceError, PlanError
from echelon.plan.plan import Plan
from echelon.plan.profile import find_fsdp_units
from echelon.trials.module_tree import list_modules

#: Steps that a proof compares.
_PROVED_STEPS = 3


def unit_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered as one, inner ones first; the model itself, which takes the rest, is not among them."""
    modules = dict(model.named_modules(remove_duplicate=False))  # TorchScript has no get_submodule
    return [modules[path] for path in find_fsdp_units(list_modules(model))]


def _fsdp_param_groups(module: Any) -> list[Any]:
    """What fully_shard gathers together for a module. Private names, as there is no public way in."""
    state = module._get_fsdp_state()
    return [
        param_group
        for param_group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if param_group
    ]


def _zero_fill_unused(fsdp_modules: Sequence[FSDPModule], used_ids: set[int]) -> None:
    """Give zeros to parameters that this rank's samples did not reach, and note in `used_ids` those that they did.

    fully_shard leaves such parameters out of the message: where ranks reach different ones their messages differ in length,
    which ends in a crash or, worse, in sums of the wrong numbers.
    """
    for module in fsdp_modules:
        for param_group in _fsdp_param_groups(module):
            param_group.post_backward = _wrap_post_backward(param_group, param_group.post_backward, used_ids)


def _wrap_post_backward(
    param_group: Any, post_backward: Callable[..., None], used_ids: set[int]
) -> Callable[..., None]:
    def zero_fill_then_reduce(*args: Any) -> None:
        for fsdp_param in param_group.fsdp_params:
            full_parameter = getattr(fsdp_param, "_unsharded_param", None)
            if full_parameter is None or not full_parameter.requires_grad:
                continue
            if full_parameter.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
                used_ids.add(id(fsdp_param.sharded_param))
            elif param_group.reduce_grads:
                full_parameter.grad = torch.zeros_like(full_parameter)
        post_backward(*args)

    return zero_fill_then_reduce


def _find_unshardable(module: nn.Module) -> set[nn.Parameter]:
    """What fully_shard takes none of: single numbers (a temperature), none at all, complex ones, dtypes other than most of `module` is; and what forward
    itself changes."""
    plain_parameters = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    elements_by_dtype: Counter[torch.dtype] = Counter()
    for parameter in plain_parameters:
        elements_by_dtype[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    main_dtype = elements_by_dtype.most_common(1)[0][0] if elements_by_dtype else torch.float32
    return {
        parameter
        for parameter in plain_parameters
        if not parameter.dim()
        or not parameter.numel()
        or parameter.is_complex()
        or (parameter.requires_grad and parameter.dtype != main_dtype)
    } | set(max_norm_weights(module))


class ZeroSharding:
    """A model under ZeRO stage 1, 2 or 3. Forward and backward work as before; parameters are DTensors between steps."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        ranks: WorldCommunicator,
        data_parallel: Communicator,
        tp_shards: Mapping[str, TPShard],
        pipeline: Pipeline | None = None,
    ) -> None:
        mesh = data_parallel.device_mesh()
        self._plan, self._data_parallel = plan, data_parallel
        self._unpatch_host_reads = patch_host_reads()
        #: The model's own parameters, which sharded ones take the place of: nobody should hold them after that.
        self._replaced_parameters = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                # On a GPU it moves the weights into one piece of memory, and what is gathered later would not reach them.
                module.flatten_parameters = lambda: None  # type: ignore[method-assign]
        if pipeline is not None:
            self._shard_stages(model, plan, ranks, tp_shards, pipeline)
        for path in (
            [*([] if plan.data.shard_as_one else find_fsdp_units(list_modules(model))), ""] if pipeline is None else ()
        ):
            # Values arrive and are cut unit by unit: the whole model is never on one device.
            unit = model.get_submodule(path)
            materialize_module(model, path, ranks, tp_shards)
            # The root's own parameters are the last of forward and the first of backward: freed, they were gathered again at once.
            ignored_parameters = _find_unshardable(unit)
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=plan.zero == 3 and unit is not model,
                ignored_params=ignored_parameters,
            )
        # The warning is about a gather that an output changed in place would skip; the root stays gathered until its backward.
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view")
        self._warning_filter = warnings.filters[0]
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:
            # Losses are weighted by samples before backward, so that gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.is_meta]
        self._sharded_parameters = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        #: What cannot be sharded and is whole on every rank: its gradients are exchanged apart.
        self.unsharded_parameters = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        self._fsdp_params = [
            fsdp_param
            for module in self._fsdp_modules
            for param_group in _fsdp_param_groups(module)
            for fsdp_param in param_group.fsdp_params
        ]
        #: Of what is gathered, how often forward wrote to it, and of how many steps that is known.
        self._write_counts: list[int] = []
        self._checked_steps = 0
        self._used_ids: set[int] = set()
        _zero_fill_unused(self._fsdp_modules, self._used_ids)
        present_ids = {id(parameter) for parameter in model.parameters()}
        self._replaced_parameters = [
            (name, ref) for name, ref in self._replaced_parameters if id(ref()) not in present_ids
        ]

    def _shard_stages(
        self,
        model: nn.Module,
        plan: Plan,
        ranks: WorldCommunicator,
        tp_shards: Mapping[str, TPShard],
        pipeline: Pipeline,
    ) -> None:
        """Under a pipeline each unit of this rank's stages is sharded by itself; what is not one unit's alone is left whole."""
        other_stage_names = {
            name for name, holding_ranks in pipeline.holding_ranks.items() if pipeline.rank not in holding_ranks
        }
        materialize_module(model, "", ranks, tp_shards, other_stage_names)
        parameters = dict(model.named_parameters())
        shared = {parameters[name] for name in pipeline.shared_parameters()}
        for path in pipeline.unit_paths:
            unit = model.get_submodule(path)
            ignored_parameters = _find_unshardable(unit) | shared
            if any(parameter not in ignored_parameters for parameter in unit.parameters()):
                fully_shard(
                    unit,
                    mesh=self._data_parallel.device_mesh(),
                    reshard_after_forward=plan.zero == 3,
                    ignored_params=ignored_parameters,
                )

    def units(self) -> list[nn.Module]:
        """The modules whose parameters are gathered as one, each when it is called."""
        return [module for module in self._fsdp_modules if isinstance(module, nn.Module)]

    def prepare_micro_batch(self, *, is_last: bool) -> None:
        """Before the forward of a micro-batch; `is_last` of the step."""
        keep_full_gradients = self._plan.zero == 1 or self._plan.data.keep_gradients
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(is_last or not keep_full_gradients, recurse=False)
            module.set_reshard_after_backward(is_last or self._plan.zero == 3, recurse=False)

    def reduce_kept_gradients(self) -> None:
        """After the backward of every micro-batch of a pipeline: exchange what was kept. Private names, as in torch's own stages."""
        self.prepare_micro_batch(is_last=True)
        for module in self._fsdp_modules:
            for param_group in _fsdp_param_groups(module):
                param_group.post_backward()
            module._get_fsdp_state()._root_post_backward_final_callback()

    def backward(self, loss: Tensor) -> None:
        """`start.backward()`, with words for what torch cannot do here."""
        try:
            loss.backward()
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise PlanError(
                f"zero={self._plan.zero}: backward needed parameters that had been given back: the model differentiates its own "
                "derivative (autograd.grad with create_graph), which torch's fully_shard does not follow; use zero=0 (tp also shares the memory)"
            ) from error

    def finish_backward(self) -> None:
        """After the step's backward: a parameter that no sample of any rank reached has no gradient, as on one device."""
        self._require_no_parameter_writes()
        if not self._sharded_parameters:
            return
        self._require_no_stray_gradients()
        used_here = [id(parameter) in self._used_ids for parameter in self._sharded_parameters]
        self._used_ids.clear()
        use_counts = torch.tensor(used_here, dtype=torch.float32).to(self._sharded_parameters[0].device)
        self._data_parallel.all_reduce(use_counts)
        if not all(used_here):  # else there is nothing to learn, and an accelerator need not be waited for
            counts = use_counts.tolist()
            if not any(counts):
                raise PlanError(
                    f"zero={self._plan.zero}: no sharded parameter was reached by any sample, so the model would not learn: it returns "
                    f"them in an object that torch {torch.__version__} does not look into (dataclasses before 2.13); use zero=0, or "
                    "return a dict or a tuple"
                )
            for parameter, count in zip(self._sharded_parameters, counts, strict=True):
                if not count:
                    parameter.grad = None

    def _require_no_parameter_writes(self) -> None:
        """After a step: forward wrote to no gathered parameter to which it did not write in the first steps, which a proof has compared. What
        it writes there is lost."""
        versions = [
            full_parameter._version
            if (full_parameter := getattr(fsdp_param, "_unsharded_param", None)) is not None
            else 0
            for fsdp_param in self._fsdp_params
        ]
        self._checked_steps += 1
        if versions != self._write_counts:
            for fsdp_param, version, old_version in zip(
                self._fsdp_params, versions, self._write_counts or versions, strict=True
            ):
                if version and not old_version and self._checked_steps > _PROVED_STEPS:
                    raise DivergenceError(
                        f"forward writes to parameter {fsdp_param._param_fqn}, of which ranks hold shards: what it writes is lost; update it in a hook of the "
                        f"optimizer, or use zero=0 (it did not in the first {self._checked_steps - 1} steps)",
                        tensor=fsdp_param._param_fqn,
                        cause="forward writes to a parameter",
                    )
            self._write_counts = versions

    def _require_no_stray_gradients(self) -> None:
        """After the first backward: no gradient went to a parameter that a sharded one has replaced."""
        for name, ref in self._replaced_parameters:
            original = ref()
            if original is not None and original.grad is not None:
                raise PlanError(
                    f"zero={self._plan.zero}: {name} would not learn: a layer computes with a parameter that it holds itself, beside its "
                    "module (Keras models do), and only the module's is sharded; use zero=0"
                )
        self._replaced_parameters.clear()

    def close(self) -> None:
        """Undo what is the whole process's."""
        self._unpatch_host_reads()
        with contextlib.suppress(ValueError):  # whoever holds warnings apart, as tests do, has dropped it already
            warnings.filters.remove(self._warning_filter)  # type: ignore[attr-defined]

    def reshard(self) -> None:
        """Back to sharded parameters, after a forward without a backward."""
        for module in self._fsdp_modules:
            module.reshard()


def is_sharded(unit: Any) -> bool:
    """Whether a unit's parameters are in shards now, so that its next call gathers them. Private names, as there is no public way."""
    return any(param_group.is_sharded for param_group in _fsdp_param_groups(unit))


def clear_sharding_caches() -> None:
    """Let go of the process groups that torch's caches of sharded operators remember. Private: there is no public way."""
    clear_cache = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear_cache is not None:
        clear_cache()
    gc.collect()

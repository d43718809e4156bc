"""ZeRO stages 1 to 3 with torch's fully_shard (FSDP2).

All three shard parameters, gradients and optimizer state between steps. They differ in how long gathered copies live:

    zero  parameters are gathered    gradients between micro-batches
    1     for the whole step         full, reduce-scattered once
    2     for the whole step         sharded, reduce-scattered every micro-batch
    3     for one unit at a time     sharded, reduce-scattered every micro-batch (full with keep_gradients)
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, debug

from echelon.engine.dtensor_reads import patch_host_reads
from echelon.engine.parallel.data_parallel import max_norm_weights
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
    """The modules that are gathered as one, inner ones first, without the root."""
    modules = dict(model.named_modules(remove_duplicate=False))  # TorchScript has no get_submodule
    return [modules[path] for path in find_fsdp_units(list_modules(model))]


def is_sharded(unit: Any) -> bool:
    """Whether the next call of a unit gathers its parameters."""
    return any(group.is_sharded for group in _param_groups(unit))


def _param_groups(module: Any) -> list[Any]:
    """What fully_shard gathers together. Private names: torch has no public ones."""
    state = module._get_fsdp_state()
    return [group for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if group]


def _find_unshardable(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that fully_shard cannot shard: scalars, empty or complex ones, minority dtypes, and those that forward writes to."""
    plain = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    elements_by_dtype: Counter[torch.dtype] = Counter()
    for parameter in plain:
        elements_by_dtype[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    main_dtype = elements_by_dtype.most_common(1)[0][0] if elements_by_dtype else torch.float32

    def is_unshardable(parameter: nn.Parameter) -> bool:
        is_minority = parameter.requires_grad and parameter.dtype != main_dtype
        return not parameter.dim() or not parameter.numel() or parameter.is_complex() or is_minority

    return {*filter(is_unshardable, plain), *max_norm_weights(module)}


class ZeroSharding:
    """A model under ZeRO stage 1, 2 or 3. Forward and backward work as before; between steps parameters are DTensors."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        ranks: WorldCommunicator,
        data_parallel: Communicator,
        tp_shards: Mapping[str, TPShard],
        pipeline: Pipeline | None = None,
    ) -> None:
        self._plan, self._data_parallel = plan, data_parallel
        self._unpatch_host_reads = patch_host_reads()
        #: The model's original parameters, which sharded ones replace: nothing should hold them afterwards.
        self._replaced_parameters = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        for module in model.modules():
            if isinstance(module, nn.RNNBase):  # on a GPU it packs weights into a buffer that gathers do not reach
                module.flatten_parameters = lambda: None  # type: ignore[method-assign]
        self._shard_units(model, ranks, tp_shards, pipeline)
        # It warns of a gather that a unit's output, changed in place, would skip; the root stays gathered until its backward.
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view")
        self._warning_filter = warnings.filters[0]
        #: The modules whose parameters are gathered as one when they are called.
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:
            # Losses are weighted by samples before backward: gradients are summed, not averaged.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.is_meta]
        self._sharded_parameters = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        #: Full on every rank; their gradients are all-reduced separately.
        self.unsharded_parameters = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        groups = [group for unit in self.units for group in _param_groups(unit)]
        self._fsdp_params = [fsdp_param for group in groups for fsdp_param in group.fsdp_params]
        #: How often forward wrote to each gathered parameter in the last step, and the number of steps checked.
        self._write_counts: list[int] = []
        self._checked_steps = 0
        #: Ids of the parameters that this rank's samples reached.
        self._used_ids: set[int] = set()
        for group in groups:
            group.post_backward = self._zero_fill_before(group, group.post_backward)
        present_ids = {id(parameter) for parameter in model.parameters()}
        self._replaced_parameters = [item for item in self._replaced_parameters if id(item[1]()) not in present_ids]

    def _shard_units(
        self, model: nn.Module, ranks: WorldCommunicator, tp_shards: Mapping[str, TPShard], pipeline: Pipeline | None
    ) -> None:
        """Shard each unit and the root; of a pipeline the units of this rank's stages, without parameters that several of them share."""
        shared = set[nn.Parameter]()
        if pipeline is None:
            paths = [*([] if self._plan.data.shard_as_one else find_fsdp_units(list_modules(model))), ""]
        else:
            paths, holding_ranks = pipeline.unit_paths, pipeline.holding_ranks.items()
            other_stages = {name for name, holders in holding_ranks if pipeline.rank not in holders}
            materialize_module(model, "", ranks, tp_shards, other_stages)
            parameters = dict(model.named_parameters())
            shared = {parameters[name] for name in pipeline.shared_parameters()}
        for path in paths:
            unit = model.get_submodule(path)
            if pipeline is None:  # values arrive and are sharded unit by unit: no device ever holds the full model
                materialize_module(model, path, ranks, tp_shards)
            ignored = _find_unshardable(unit) | shared
            if pipeline is not None and ignored.issuperset(unit.parameters()):
                continue
            # The root's own parameters are last in forward and first in backward: freed, they would be gathered again at once.
            reshard, mesh = self._plan.zero == 3 and unit is not model, self._data_parallel.device_mesh()
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)

    def _zero_fill_before(self, group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        """Before a group's reduction, give zero gradients to parameters that this rank's samples did not reach: fully_shard leaves those out of
        its message, whose length would differ between ranks."""

        def zero_fill_then_reduce(*args: Any) -> None:
            for fsdp_param in group.fsdp_params:
                full_parameter = getattr(fsdp_param, "_unsharded_param", None)
                if full_parameter is None or not full_parameter.requires_grad:
                    continue
                if full_parameter.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
                    self._used_ids.add(id(fsdp_param.sharded_param))
                elif group.reduce_grads:
                    full_parameter.grad = torch.zeros_like(full_parameter)
            post_backward(*args)

        return zero_fill_then_reduce

    def prepare_micro_batch(self, *, is_last: bool) -> None:
        """Before the forward of a micro-batch; `is_last` of the step."""
        keep_full_gradients = self._plan.zero == 1 or self._plan.data.keep_gradients
        for unit in self.units:
            unit.set_requires_gradient_sync(is_last or not keep_full_gradients, recurse=False)
            unit.set_reshard_after_backward(is_last or self._plan.zero == 3, recurse=False)

    def reduce_kept_gradients(self) -> None:
        """After the backward of all micro-batches of a pipeline: reduce the gradients kept so far, as torch's own stages do."""
        self.prepare_micro_batch(is_last=True)
        for unit in self.units:
            for group in _param_groups(unit):
                group.post_backward()
            unit._get_fsdp_state()._root_post_backward_final_callback()

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, with an explanation where fully_shard cannot follow."""
        try:
            loss.backward()
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise PlanError(
                f"zero={self._plan.zero}: backward needs parameters that were freed after forward: the model differentiates its own "
                "derivative (autograd.grad with create_graph), which torch's fully_shard does not support; use zero=0 (tp also shares the memory)"
            ) from error

    def finish_backward(self) -> None:
        """After the step's backward: parameters that no sample of any rank reached have no gradient, as on one device."""
        self._require_no_parameter_writes()
        if not self._sharded_parameters:
            return
        self._require_no_stray_gradients()
        used_here = [id(parameter) in self._used_ids for parameter in self._sharded_parameters]
        self._used_ids.clear()
        use_counts = torch.tensor(used_here, dtype=torch.float32).to(self._sharded_parameters[0].device)
        self._data_parallel.all_reduce(use_counts)
        if all(used_here):
            return  # without waiting for the device
        counts = use_counts.tolist()
        if not any(counts):
            raise PlanError(
                f"zero={self._plan.zero}: no sample reached any sharded parameter, so the model would not learn: it returns its output "
                f"in an object that torch {torch.__version__} does not traverse (dataclasses before 2.13); use zero=0, or return a dict or a tuple"
            )
        for parameter, count in zip(self._sharded_parameters, counts, strict=True):
            if not count:
                parameter.grad = None

    def _require_no_parameter_writes(self) -> None:
        """Refuse a forward that starts to write to gathered parameters after the steps that a proof compares: its writes are lost."""
        full_parameters = [getattr(fsdp_param, "_unsharded_param", None) for fsdp_param in self._fsdp_params]
        versions = [getattr(parameter, "_version", 0) for parameter in full_parameters]
        self._checked_steps += 1
        if versions == self._write_counts:
            return
        old_versions = self._write_counts or versions
        for fsdp_param, version, old_version in zip(self._fsdp_params, versions, old_versions, strict=True):
            if version and not old_version and self._checked_steps > _PROVED_STEPS:
                name = fsdp_param._param_fqn
                raise DivergenceError(
                    f"forward writes to parameter {name}, which is sharded over ranks: the write is lost; update it in an optimizer hook, "
                    f"or use zero=0 (it did not in the first {self._checked_steps - 1} steps)",
                    tensor=name,
                    cause="forward writes to a parameter",
                )
        self._write_counts = versions

    def _require_no_stray_gradients(self) -> None:
        """Refuse a model in which, after the first backward, an original parameter has the gradient of its sharded replacement."""
        for name, reference in self._replaced_parameters:
            if getattr(reference(), "grad", None) is not None:
                raise PlanError(
                    f"zero={self._plan.zero}: {name} would not learn: a layer computes with its own reference to the parameter (Keras models do), "
                    "and only the module's is sharded; use zero=0"
                )
        self._replaced_parameters.clear()

    def close(self) -> None:
        """Undo what was changed in the process."""
        self._unpatch_host_reads()
        with contextlib.suppress(ValueError):  # code that saves and restores warning filters has dropped it already
            warnings.filters.remove(self._warning_filter)  # type: ignore[attr-defined]

    def reshard(self) -> None:
        """Free gathered parameters, after a forward without a backward."""
        for unit in self.units:
            unit.reshard()


def clear_sharding_caches() -> None:
    """Release the process groups that torch's caches of sharded operators hold. Private name: torch has no public one."""
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    gc.collect()

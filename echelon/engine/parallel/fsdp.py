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

from echelon.engine.dtensor_reads import read_whole
from echelon.engine.init_model import realise
from echelon.engine.parallel.max_norm_sync import shortened
from echelon.engine.parallel.pipeline_parallel import Pipeline
from echelon.engine.parallel.shard_layout import Piece
from echelon.engine.process_groups import Group, Ranks
from echelon.errors import DivergenceError, PlanError
from echelon.plan.plan import Plan
from echelon.plan.profile import units
from echelon.trials.module_tree import module_tree

#: Steps that a proof compares.
_PROVED = 3


def unit_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered as one, inner ones first; the model itself, which takes the rest, is not among them."""
    modules = dict(model.named_modules(remove_duplicate=False))  # TorchScript has no get_submodule
    return [modules[path] for path in units(module_tree(model))]


def _groups(module: Any) -> list[Any]:
    """What fully_shard gathers together for a module. Private names, as there is no public way in."""
    state = module._get_fsdp_state()
    return [each for each in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if each]


def _fill_unused(modules: Sequence[FSDPModule], used: set[int]) -> None:
    """Give zeros to parameters that this rank's samples did not reach, and note in `used` those that they did.

    fully_shard leaves such parameters out of the message: where ranks reach different ones their messages differ in length,
    which ends in a crash or, worse, in sums of the wrong numbers.
    """
    for module in modules:
        for group in _groups(module):
            group.post_backward = _filling(group, group.post_backward, used)


def _filling(group: Any, post_backward: Callable[..., None], used: set[int]) -> Callable[..., None]:
    def fill_then(*arguments: Any) -> None:
        for each in group.fsdp_params:
            full = getattr(each, "_unsharded_param", None)
            if full is None or not full.requires_grad:
                continue
            if full.grad is not None or each.unsharded_accumulated_grad is not None:
                used.add(id(each.sharded_param))
            elif group.reduce_grads:
                full.grad = torch.zeros_like(full)
        post_backward(*arguments)

    return fill_then


def _unshardable(part: nn.Module) -> set[nn.Parameter]:
    """What fully_shard takes none of: single numbers (a temperature), none at all, complex ones, dtypes other than most of `part` is; and what forward
    itself changes."""
    own = [value for value in part.parameters() if not isinstance(value, DTensor)]
    sizes: Counter[torch.dtype] = Counter()
    for value in own:
        sizes[value.dtype] += value.numel() * value.is_floating_point()
    main = sizes.most_common(1)[0][0] if sizes else torch.float32
    return {
        value
        for value in own
        if not value.dim() or not value.numel() or value.is_complex() or (value.requires_grad and value.dtype != main)
    } | set(shortened(part))


class Sharding:
    """A model under ZeRO stage 1, 2 or 3. Forward and backward work as before; parameters are DTensors between steps."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        ranks: Ranks,
        data: Group,
        pieces: Mapping[str, Piece],
        pipeline: Pipeline | None = None,
    ) -> None:
        mesh = data.mesh()
        self._plan, self._data = plan, data
        self._forget_reads = read_whole()
        #: The model's own parameters, which sharded ones take the place of: nobody should hold them after that.
        self._replaced = [(name, weakref.ref(value)) for name, value in model.named_parameters()]
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                # On a GPU it moves the weights into one piece of memory, and what is gathered later would not reach them.
                module.flatten_parameters = lambda: None  # type: ignore[method-assign]
        if pipeline is not None:
            self._shard_stages(model, plan, ranks, pieces, pipeline)
        for path in [*([] if plan.whole else units(module_tree(model))), ""] if pipeline is None else ():
            # Values arrive and are cut unit by unit: the whole model is never on one device.
            part, done = model.get_submodule(path), dict[int, Tensor]()
            realise(model, path, ranks, done, pieces)
            # The root's own parameters are the last of forward and the first of backward: freed, they were gathered again at once.
            loose = _unshardable(part)
            fully_shard(
                part, mesh=mesh, reshard_after_forward=plan.zero == 3 and part is not model, ignored_params=loose
            )
        # The warning is about a gather that an output changed in place would skip; the root stays gathered until its backward.
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view")
        self._filter = warnings.filters[0]
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            # Losses are weighted by samples before backward, so that gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        trained = [value for value in model.parameters() if value.requires_grad and not value.is_meta]
        self._parameters = [value for value in trained if isinstance(value, DTensor)]
        #: What cannot be sharded and is whole on every rank: its gradients are exchanged apart.
        self.loose = [value for value in trained if not isinstance(value, DTensor)]
        self._gathered = [each for module in self._modules for group in _groups(module) for each in group.fsdp_params]
        #: Of what is gathered, how often forward wrote to it, and of how many steps that is known.
        self._writes: list[int] = []
        self._steps = 0
        self._used: set[int] = set()
        _fill_unused(self._modules, self._used)
        present = {id(value) for value in model.parameters()}
        self._replaced = [(name, ref) for name, ref in self._replaced if id(ref()) not in present]

    def _shard_stages(
        self, model: nn.Module, plan: Plan, ranks: Ranks, pieces: Mapping[str, Piece], pipeline: Pipeline
    ) -> None:
        """Under a pipeline each unit of this rank's stages is sharded by itself; what is not one unit's alone is left whole."""
        foreign = {name for name, owners in pipeline.owners.items() if pipeline.rank not in owners}
        realise(model, "", ranks, {}, pieces, foreign)
        parameters = dict(model.named_parameters())
        shared = {parameters[name] for name in pipeline.whole()}
        for path in pipeline.units:
            part = model.get_submodule(path)
            loose = _unshardable(part) | shared
            if any(value not in loose for value in part.parameters()):
                fully_shard(part, mesh=self._data.mesh(), reshard_after_forward=plan.zero == 3, ignored_params=loose)

    def units(self) -> list[nn.Module]:
        """The modules whose parameters are gathered as one, each when it is called."""
        return [module for module in self._modules if isinstance(module, nn.Module)]

    def prepare(self, *, last: bool) -> None:
        """Before the forward of a micro-batch; `last` of the step."""
        keep = self._plan.zero == 1 or self._plan.keep_gradients
        for module in self._modules:
            module.set_requires_gradient_sync(last or not keep, recurse=False)
            module.set_reshard_after_backward(last or self._plan.zero == 3, recurse=False)

    def flush(self) -> None:
        """After the backward of every micro-batch of a pipeline: exchange what was kept. Private names, as in torch's own stages."""
        self.prepare(last=True)
        for module in self._modules:
            for group in _groups(module):
                group.post_backward()
            module._get_fsdp_state()._root_post_backward_final_callback()

    def backward(self, start: Tensor) -> None:
        """`start.backward()`, with words for what torch cannot do here."""
        try:
            start.backward()
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise PlanError(
                f"zero={self._plan.zero}: backward needed parameters that had been given back: the model differentiates its own "
                "derivative (autograd.grad with create_graph), which torch's fully_shard does not follow; use zero=0 (tp also shares the memory)"
            ) from error

    def finish(self) -> None:
        """After the step's backward: a parameter that no sample of any rank reached has no gradient, as on one device."""
        self._require_unwritten()
        if not self._parameters:
            return
        self._require_reached()
        mine = [id(value) in self._used for value in self._parameters]
        self._used.clear()
        ranks = torch.tensor(mine, dtype=torch.float32).to(self._parameters[0].device)
        self._data.sum(ranks)
        if not all(mine):  # else there is nothing to learn, and an accelerator need not be waited for
            users = ranks.tolist()
            if not any(users):
                raise PlanError(
                    f"zero={self._plan.zero}: no sharded parameter was reached by any sample, so the model would not learn: it returns "
                    f"them in an object that torch {torch.__version__} does not look into (dataclasses before 2.13); use zero=0, or "
                    "return a dict or a tuple"
                )
            for value, count in zip(self._parameters, users, strict=True):
                if not count:
                    value.grad = None

    def _require_unwritten(self) -> None:
        """After a step: forward wrote to no gathered parameter to which it did not write in the first steps, which a proof has compared. What
        it writes there is lost."""
        versions = [
            full._version if (full := getattr(each, "_unsharded_param", None)) is not None else 0
            for each in self._gathered
        ]
        self._steps += 1
        if versions != self._writes:
            for each, now, before in zip(self._gathered, versions, self._writes or versions, strict=True):
                if now and not before and self._steps > _PROVED:
                    raise DivergenceError(
                        f"forward writes to parameter {each._param_fqn}, of which ranks hold shards: what it writes is lost; update it in a hook of the "
                        f"optimizer, or use zero=0 (it did not in the first {self._steps - 1} steps)",
                        tensor=each._param_fqn,
                        cause="forward writes to a parameter",
                    )
            self._writes = versions

    def _require_reached(self) -> None:
        """After the first backward: no gradient went to a parameter that a sharded one has replaced."""
        for name, ref in self._replaced:
            old = ref()
            if old is not None and old.grad is not None:
                raise PlanError(
                    f"zero={self._plan.zero}: {name} would not learn: a layer computes with a parameter that it holds itself, beside its "
                    "module (Keras models do), and only the module's is sharded; use zero=0"
                )
        self._replaced.clear()

    def close(self) -> None:
        """Undo what is the whole process's."""
        self._forget_reads()
        with contextlib.suppress(ValueError):  # whoever holds warnings apart, as tests do, has dropped it already
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    def rest(self) -> None:
        """Back to sharded parameters, after a forward without a backward."""
        for module in self._modules:
            module.reshard()


def is_sharded(unit: Any) -> bool:
    """Whether a unit's parameters are in shards now, so that its next call gathers them. Private names, as there is no public way."""
    return any(group.is_sharded for group in _groups(unit))


def forget_meshes() -> None:
    """Let go of the process groups that torch's caches of sharded operators remember. Private: there is no public way."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    gc.collect()

"""What to train: a model, a loss, an optimizer, data and a global batch. Devices are the plan's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakKeyDictionary

from echelon.errors import JobError, suggest_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, Tensor | int | float]"]
    Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train.

    `loss(output, batch)` gives the mean over the batch's samples, or `(sum, count)` where samples weigh differently (tokens). `loss=None`
    takes the model's own `output.loss`, over the labels that are not -100. `batch_size` is the global batch: micro-batches are the plan's.
    """

    model: nn.Module | Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Any]], Optimizers]
    data: Any
    batch_size: int
    loss: Loss | None = None
    epochs: int | None = None
    steps: int | None = None
    #: `batch -> (args, kwargs)`; None: all but a tuple's last element, or a dict's keys that `forward` accepts.
    inputs: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    #: `(optimizer) or (optimizer, total_steps) -> LRScheduler`, stepped once per optimizer step.
    lr_schedule: Callable[..., Any] | None = None
    #: Largest gradient norm; None: no clipping.
    clip_norm: float | None = None
    eval_data: Any = None
    #: name -> `(output, batch) -> mean or (sum, count)`, aggregated over every sample of the evaluation.
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    seed: int = 0
    #: Leave out the last batch of an epoch if it is short, instead of training on it.
    drop_last: bool = False
    #: What to train on before `data`, once: a data set, or a fraction of `data` (0.05), drawn by the seed.
    warmup_data: Any = None
    #: None: named after the job file.
    name: str | None = None
    #: Initial parameters: a safetensors file, its index, a torch state dict, a checkpoint, or a run (its last one).
    weights: str | Path | None = None

    def __new__(cls, *positional: Any, **arguments: Any) -> Self:
        """Refuse a wrong name with a hint; copies are made without arguments."""
        job_fields = cls.__dataclass_fields__
        if positional:
            kind = type(positional[0]).__name__
            raise JobError(f"a Job's fields are given by name: Job(model=...), not Job({kind}, ...)")
        for name in arguments:
            if name not in job_fields:
                hint = suggest_name(f"{name}=", (f"{key}=" for key in job_fields))
                hint = f"did you mean {_OTHER_NAMES[name]}=?" if name in _OTHER_NAMES else hint
                raise JobError(f"a Job has no {name}=; {hint}")
        required = [key for key, item in job_fields.items() if item.default is MISSING is item.default_factory]
        missing = [f"{name}=" for name in required if name not in arguments]
        if arguments and missing:
            verb = "is" if len(missing) == 1 else "are"
            raise JobError(f"a Job needs {' and '.join(missing)}, which {verb} not given")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (is_valid, rule) in _FIELD_RULES.items():
            value = getattr(self, name)
            if not is_valid(value):
                is_short = value is None or isinstance(value, str | int | float)
                shown = f"={value!r}" if is_short else f"= is a {type(value).__name__}"
                raise JobError(f"{name}{shown}: {rule}")
        if (self.epochs is None) == (self.steps is None):
            raise JobError("give one of epochs= and steps=: how long to train")
        for name, metric in self.metrics.items():
            if not isinstance(name, str) or not callable(metric):
                rule = "give text as the name and a function of (output, batch)"
                raise JobError(f"metrics={{{name!r}: {metric!r}}}: {rule}")
            if name == "loss":
                reason = "the loss is always evaluated, under this name"
                raise JobError(f"metrics={{'loss': ...}}: {reason}; give another name")
        for name in ("eval_data", "warmup_data"):
            data = getattr(self, name)
            if _is_empty(data):
                raise JobError(f"{name}= is empty ({type(data).__name__}): give at least one sample, or leave it out")
        self._check_signatures()
        if self.collate is None:
            for name in ("data", "eval_data", "warmup_data"):
                object.__setattr__(self, name, with_torch_format(getattr(self, name)))

    def _check_signatures(self) -> None:
        """Refuse functions that do not take what they will be called with now, not in the first step."""
        is_factory = isinstance(self.model, type) or not hasattr(self.model, "forward")
        calls: list[tuple[str, Any, tuple[str, ...]]] = [
            ("model", self.model if is_factory else None, ("",)),
            ("loss", self.loss, ("output, batch",)),
            ("optimizer", self.optimizer, ("params",)),
            ("inputs", self.inputs, ("batch",)),
            ("collate", self.collate, ("samples",)),
            ("lr_schedule", self.lr_schedule, ("optimizer", "optimizer, total_steps")),
            *((f"metrics[{name!r}]", metric, ("output, batch",)) for name, metric in self.metrics.items()),
        ]
        for name, function, forms in calls:
            counts = [len(form.split(", ")) if form else 0 for form in forms]
            if function is not None and not any(accepts_arguments(function, count) for count in counts):
                call_forms = " or ".join(f"{name}({form})" for form in forms)
                signature = f"{function_location(function)} takes {inspect.signature(function)}"
                raise JobError(f"{name}= is called as {call_forms}, and {signature}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
#: By field, the test of its value and the rule to report.
_FIELD_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "batch_size": (lambda size: size is not None and _is_count(size), "the global batch, an integer of at least 1"),
    "epochs": (_is_count, "an integer of at least 1"),
    "steps": (_is_count, "an integer of at least 1"),
    "clip_norm": (lambda norm: norm is None or (_is_number(norm) and norm > 0), "a gradient norm, a number above 0, or None for no clipping"),
    "seed": (lambda seed: type(seed) is int and -(2**63) <= seed < 2**64, "an integer of at most 64 bits"),
    "drop_last": (lambda drop: type(drop) is bool, "True leaves out the short last batch of each epoch, False trains on it"),
    "name": (lambda name: name is None or isinstance(name, str), "text, or None for the name of the job file"),
    "weights": (lambda path: path is None or isinstance(path, str | Path), "give the path of a file, a checkpoint or a run"),
    "precision": (lambda precision: precision in _PRECISIONS, f"expected one of {', '.join(_PRECISIONS)}"),
    "model": (lambda model: callable(model) or hasattr(model, "forward"), "give an nn.Module or a function that returns one"),
    "optimizer": (callable, "give a function of the parameters: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"),
    **dict.fromkeys(("loss", "inputs", "collate", "lr_schedule"), (_is_function, "give a function")),
    "metrics": (lambda metrics: isinstance(metrics, Mapping), "give each a name, metrics={'accuracy': accuracy}"),
    "warmup_data": (lambda data: not _is_number(data) or 0 < data < 1, "a data set, or the fraction of data= to begin with, above 0 and below 1 (0.05)"),
}  # fmt: skip

#: Names of a Job's fields in earlier versions and other libraries.
_OTHER_NAMES = {
    "batch": "batch_size", "schedule": "lr_schedule", "scheduler": "lr_schedule", "lr_scheduler": "lr_schedule", "clip": "clip_norm",
    "max_grad_norm": "clip_norm", "gradient_clip_val": "clip_norm", "evaluation": "eval_data", "eval_dataset": "eval_data",
    "val_data": "eval_data", "dataset": "data", "train_dataset": "data", "loss_fn": "loss", "criterion": "loss", "collate_fn": "collate",
    "max_epochs": "epochs", "max_steps": "steps", "dtype": "precision",
}  # fmt: skip


def with_torch_format(data: Any) -> Any:
    """Make a Hugging Face data set without a format of its own return tensors: torch collates its Python lists item by item."""
    if type(data).__module__.partition(".")[0] != "datasets" or not hasattr(data, "with_format"):
        return data
    # A stream has no public name for its format.
    current = data.format["type"] if hasattr(data, "format") else getattr(data, "_formatting", None)
    return data.with_format("torch") if current is None else data


def _is_empty(data: Any) -> bool:
    try:
        return data is not None and len(data) == 0
    except Exception:  # a data set without a length, or with one that fails, is reported where it is opened
        return False


def accepts_arguments(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with `count` values; True if Python does not know its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    with suppress(TypeError):
        signature.bind(*[None] * count)
        return True
    return False


def function_location(function: Any) -> str:
    """Where a function is defined: `job.py line 12`, or its name."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename} line {code.co_firstlineno}" if code else getattr(function, "__name__", repr(function))


# How a batch reaches the model, and the loss the engine


def call_model(job: Job, model: nn.Module, batch: Any) -> Any:
    """The model's output for a collated batch: the one place that decides how a batch reaches the model."""
    arguments, keywords = _select_inputs(model, batch) if job.inputs is None else job.inputs(batch)
    if job.loss is None:
        keywords = {**_count_keyword(model, batch), **keywords}
    return model(*arguments, **keywords)


def _select_inputs(model: nn.Module, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        accepted = _accepted_keywords(getattr(model.forward, "__func__", model.forward))
        if accepted is None:
            return (), batch
        keywords = {key: value for key, value in batch.items() if key in accepted}
        if not keywords:
            raise JobError(
                f"the batch has the keys {', '.join(map(str, batch))} and {type(model).__name__}.forward takes {', '.join(sorted(accepted))}: none match; give inputs=lambda batch: (args, kwargs)"
            )
        return (), keywords
    if isinstance(batch, tuple | list):
        if len(batch) < 2:
            raise JobError(
                f"the batch is a {type(batch).__name__} of {len(batch)}: the last element is the target, which leaves nothing for the model; give inputs=lambda batch: (args, kwargs)"
            )
        return batch[:-1], {}
    return (batch,), {}


def call_loss(job: Job, output: Any, batch: Any, model: nn.Module | None = None) -> Tensor | tuple[Tensor, Any]:
    """The batch's loss: a scalar mean, or `(sum, count)`. `model` decides how a model's own loss counts its labels."""
    loss = job.loss(output, batch) if job.loss is not None else _model_loss(output, batch, model)
    if isinstance(loss, tuple):
        if len(loss) == 2 and _is_number(loss[0]):  # (0, 0) where nothing counts
            import torch

            loss = torch.tensor(float(loss[0]), device=getattr(loss[1], "device", None)), loss[1]
        if len(loss) != 2 or getattr(loss[0], "numel", lambda: 0)() != 1:
            raise JobError(f"loss= gave a tuple of {len(loss)}: give a scalar mean, or (sum, count) with a scalar sum")
        total, count = loss
        if getattr(count, "requires_grad", False):  # learned weights: the mean has a gradient through its count too
            return (total / count).reshape(())
        return total.reshape(()), count
    shape = getattr(loss, "shape", None)
    if shape is None:
        raise JobError(f"loss= gave {type(loss).__name__}, not a tensor; give a scalar mean, or (sum, count)")
    if loss.numel() != 1:
        raise JobError(
            f"loss= gave a tensor of shape {tuple(shape)}, not a scalar; average it (.mean()), or give (sum, count): (losses.sum(), losses.numel())"
        )
    return loss.reshape(())


def _model_loss(output: Any, batch: Any, model: nn.Module | None) -> Any:
    """`output.loss`, weighted by the number of labels that count, if there are any: ragged batches then average correctly."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        problem = f"loss=None takes the model's own, but its output ({type(output).__name__}) has no .loss"
        remedy = (
            "give loss=lambda output, batch: ..., or put the labels into the batch under the name that the model knows"
        )
        raise JobError(f"{problem}; {remedy}")
    if loss.numel() != 1:
        return loss
    if loss.requires_grad:
        from echelon.loss_counts import read_counts

        loss_counts = read_counts(loss, accept_sums=False)
        term = loss_counts.only_term
        if term is not None and model is not None and model not in _LABEL_COUNTING and not _is_fake(loss):
            _LABEL_COUNTING[model] = _infer_label_counting(term, batch)
        if loss_counts.terms:
            # Each of several averages has its own count, which the engine reads.
            return loss if term is None or term.counted_by_shape else _mean_to_sum(loss, term.count)
    count = _count_labels(batch, model)
    return loss if count is None else _mean_to_sum(loss, count)


def _mean_to_sum(mean: Tensor, count: Any) -> tuple[Tensor, Any]:
    """A mean as (sum, count). A mean over no label is NaN, but adds nothing to the step's sum."""
    import torch

    count = torch.as_tensor(count, device=mean.device)
    loss_sum = mean * count.to(mean.dtype).where(count > 0, 1)
    return loss_sum.where(count > 0, loss_sum.new_zeros(())), count


#: Which labels a model's own loss was seen to average over, for losses without a graph: "all" that count, "shifted", or "none".
_LABEL_COUNTING: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _is_fake(tensor: Tensor) -> bool:
    import torch

    return type(tensor) is not torch.Tensor or tensor.is_meta


def _infer_label_counting(term: Any, batch: Any) -> str:
    labels = _class_labels(batch)
    if term.counted_by_shape or labels is None:
        return "none"
    count = float(term.count)
    if labels.dim() > 1 and count == float((labels[..., 1:] != -100).sum()):
        return "shifted"
    return "all" if count == float((labels != -100).sum()) else "none"


def _count_keyword(model: nn.Module, batch: Any) -> dict[str, Any]:
    """`num_items_in_batch` for a model that takes it and then divides its sum by that."""
    forward = model.forward
    owner = getattr(forward, "__self__", model)
    accepted = _accepted_keywords(getattr(forward, "__func__", forward))
    if accepted is None:
        # Any keyword may end anywhere: only models that declare it (as HF's do) use this one for their loss.
        accepts_count = getattr(owner, "accepts_loss_kwargs", hasattr(owner, "loss_function"))
    else:
        accepts_count = "num_items_in_batch" in accepted
    count = _count_labels(batch, owner) if accepts_count else None
    return {} if count is None else {"num_items_in_batch": count.clamp(min=1)}


def _count_labels(batch: Any, model: nn.Module | None) -> Any:
    """How many labels of `batch` the model's own loss counts, as a tensor; None: it has no labels that are counted."""
    labels = _class_labels(batch)
    counting = _LABEL_COUNTING.get(model) if model is not None else None
    if labels is None or counting == "none":
        return None
    model_kind = f"{getattr(model, 'loss_type', '')} {type(model).__name__}"
    if counting is None and ("CausalLM" in model_kind or "LMHead" in model_kind):
        counting = "shifted"
    if labels.dim() > 1 and counting == "shifted":
        labels = labels[..., 1:]  # token t predicts token t + 1: the first label is never counted
    return (labels != -100).sum()


def _class_labels(batch: Any) -> Any:
    """Labels that are classes. Those of detection (boxes) and regression (floats) have losses that average over samples."""
    labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if hasattr(labels, "is_floating_point") and not labels.is_floating_point() else None


@lru_cache(maxsize=64)
def _accepted_keywords(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Names that a forward takes by keyword; None: any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)) - {"self"}


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model` in `dtype`, in place; complex tensors stay complex, of twice the width."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(cast)


def disable_sparse_gradients(model: nn.Module, kept_ids: Collection[int] = ()) -> None:
    """Make all gradients dense, since sparse ones cannot be summed over ranks. An optimizer that takes both kinds makes the same update;
    `kept_ids`: ids of weights whose optimizer does not."""
    for _, module in model.named_modules():
        if getattr(module, "sparse", False) is True and hasattr(module, "weight") and id(module.weight) not in kept_ids:
            module.sparse = False


def call_optimizer(job: Job, parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
    """What `optimizer=` returns for parameters or, if it fails on them, for (name, parameter) pairs. Pairs come second: a function that
    tests `getattr(p, "_no_decay", False)` or `id(p) in mine` would take a pair without an error, and group it wrongly."""
    try:
        return job.optimizer(value for _, value in parameters)
    except Exception as parameters_error:
        try:
            return job.optimizer(iter(parameters))
        except Exception as pairs_error:
            # A function that unpacks pairs fails on parameters with a message that does not help.
            is_kind = isinstance(parameters_error, TypeError | ValueError)
            unpacks = is_kind and _UNPACKING_ERROR.search(str(parameters_error))
            raise (pairs_error if unpacks else parameters_error) from None


_UNPACKING_ERROR = re.compile(r"unpack|0-d tensor|update sequence")


def require_trainable(model: nn.Module) -> None:
    """Refuse a model without trainable parameters: torch would fail in backward without naming the reason."""
    parameters = dict(model.named_parameters())
    if any(value.requires_grad for value in parameters.values()):
        return
    model_type = type(model).__name__
    if not parameters:
        raise JobError(
            f"model ({model_type}) has no parameters: there is nothing to train; add a layer that has some, or make the tensors to train nn.Parameter"
        )
    names = ", ".join(list(parameters)[:3]) + (", ..." if len(parameters) > 3 else "")
    raise JobError(
        f"model ({model_type}): all {len(parameters)} parameters have requires_grad=False ({names}): there is nothing to train; call requires_grad_() on those to train"
    )

"""Profiles against closed forms and against a real run."""

from __future__ import annotations

import random
import resource
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.nn import functional as F

from echelon.engine.parallel.fsdp import unit_modules
from echelon.engine.parallel.gradient_allreduce import GradientAllReduce
from echelon.errors import DataError, JobError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.plan.profile import find_fsdp_units
from echelon.profiler import profile
from echelon.simulator.exchange import bucket_messages
from echelon.simulator.plan_layout import lay_out_plan
from echelon.simulator.summarize_profile import summarize_profile
from echelon.testing.models import GPT, MLP, ResNet
from echelon.trials.module_tree import list_modules
from echelon.trials.op_recorder import OpRecorder, record_ops
from tests.sampling import some


def gpt_job(batch: int = 8, **fields: Any) -> Job:
    shape = {"vocab": 128, "context": 32, "width": 64, "layers": 3, "heads": 4} | fields
    rows = [(torch.zeros(32, dtype=torch.long), torch.zeros(32, dtype=torch.long)) for _ in range(16)]
    return Job(
        model=lambda: GPT(**shape),
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        data=rows,
        batch_size=batch,
        steps=1,
    )


def image_job(model: Any, batch: int = 8) -> Job:
    return Job(
        model=model,
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=[(torch.zeros(3, 32, 32), i % 10) for i in range(16)],
        batch_size=batch,
        steps=1,
    )


def vector_job(model: Any, **fields: Any) -> Job:
    values: dict[str, Any] = {
        "loss": lambda output, batch: F.mse_loss(output, batch[-1]),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters),
        "data": [(torch.ones(16), torch.ones(16)) for _ in range(16)],
        "batch_size": 8,
        "steps": 1,
    }
    return Job(model=model, **(values | fields))


def kept_for_real(job: Job, samples: int) -> float:
    """Bytes that a real forward keeps for backward, each storage once, parameters aside."""
    torch.manual_seed(0)
    model = job.model()
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = torch.utils.data.default_collate([job.data[i % len(job.data)] for i in range(samples)])
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.loss(model(*batch[:-1]), batch)
    del loss
    return sum(kept.values())


@pytest.mark.slow
def test_gpt_flops_are_6nd_and_attention() -> None:
    found = profile(gpt_job())
    tokens, width, length, layers = 8 * 32, 64, 32, 3
    products = found.elements - (128 + 32) * width  # embeddings are looked up, not multiplied
    products -= sum(p.elements for p in found.parameters if len(p.shape) == 1)
    # A token sees itself and those before it: half of them on the average. Forward 4, backward 10 (flash computes scores again).
    scores = layers * tokens * (length + 1) / 2 * width * (4 + 10)
    assert found.flops(8) == pytest.approx(6 * products * tokens + scores, rel=0.01)
    assert found.flops(8, "forward") + found.flops(8, "backward") == found.flops(8)


@pytest.mark.parametrize(("queries", "keys", "seen"), [(4, 4, 10), (4, 6, 10), (6, 4, 18)])
def test_attention_that_looks_back_leaves_out_scores_that_no_kernel_computes(
    queries: int, keys: int, seen: int
) -> None:
    q, k = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8)
    flops = []
    for causal in (False, True):
        with OpRecorder(2) as recorder:
            torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal)
        flops.append(sum(call.flops for call in recorder.trace.calls if call.kind == "attention"))
    assert flops == [4 * 6 * 8 * queries * keys, 4 * 6 * 8 * seen]


@pytest.mark.slow
def test_parameters_and_state_are_counted_exactly() -> None:
    found, model = profile(gpt_job()), gpt_job().model()
    assert found.elements == sum(p.numel() for p in model.parameters())
    assert found.bytes == found.gradient_bytes == 4 * found.elements
    assert found.state_bytes == pytest.approx(2 * found.bytes, rel=1e-3)
    assert found.traced == "fake"
    assert found.samples == 16
    assert found.input_bytes == 2 * 32 * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [gpt_job(), image_job(lambda: ResNet(width=8)), vector_job(lambda: MLP(width=16))],
    ids=["gpt", "resnet", "mlp"],
)
@pytest.mark.parametrize("samples", some("kept bytes", [2, 5, 8], 2))
def test_kept_bytes_are_those_of_a_real_run(job: Job, samples: int) -> None:
    assert profile(job).saved_bytes(samples) == pytest.approx(kept_for_real(job, samples), rel=0.02)


@pytest.mark.slow
def test_repeated_blocks_are_folded() -> None:
    found = profile(gpt_job())
    modules = {module.path: module for module in found.modules}
    assert modules["blocks.*"].count == 3
    assert modules["blocks.*.up"].count == 3
    assert not any(path.startswith("blocks.0") for path in modules)
    assert sum(o.count for o in found.operators if o.module == "blocks.*.up" and o.phase == "forward") == 3
    assert found.fsdp_units == ("blocks.0", "blocks.1", "blocks.2")
    deeper = profile(gpt_job(layers=6))
    assert len(deeper.operators) == len(found.operators)
    assert len(deeper.modules) == len(found.modules)


@pytest.mark.slow
def test_blocks_that_differ_are_not_folded() -> None:
    paths = {module.path for module in profile(image_job(lambda: ResNet(width=8))).modules}
    assert {"stages.0", "stages.7"} <= paths


@pytest.mark.slow
def test_shared_parameters_are_found_once() -> None:
    found = profile(gpt_job(tied=True))
    shared = [parameter for parameter in found.parameters if parameter.aliases]
    assert [(p.name, p.aliases) for p in shared] == [("tokens.weight", ("head.weight",))]
    assert found.bytes == profile(gpt_job()).bytes - 128 * 64 * 4


@pytest.mark.slow
def test_batch_norms_are_known_by_name_and_are_no_other_coupling() -> None:
    found = profile(image_job(lambda: ResNet(width=8)))
    assert "stem.1" in found.batch_norms
    assert not found.samples_coupled
    assert not profile(gpt_job()).batch_norms


def test_frozen_parameters_have_no_gradient() -> None:
    def model() -> nn.Module:
        made = MLP(width=16)
        made[0].weight.requires_grad_(False)
        return made

    found = profile(vector_job(model))
    assert found.gradient_bytes == found.bytes - 16 * 16 * 4
    assert max(moment.gradients for moment in found.moments) <= found.gradient_bytes


def test_a_given_module_is_left_as_it_was() -> None:
    model = MLP(width=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = profile(vector_job(model))
    assert found.traced == "fake"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert not model[0]._forward_hooks


class Gated(nn.Module):
    """Looks at values to decide what runs: no trace without them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if x.sum().item() > -1e9 else x


class Skipping(nn.Module):
    """Skips blocks by numbers that are not torch's."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.blocks, self.draw = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.draw() > 0.05 else x
        return x


@pytest.mark.slow
@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_blocks_that_random_numbers_may_skip_are_told(draw: Any) -> None:
    found = profile(vector_job(lambda: Skipping(draw)))
    assert found.traced == "fake"
    assert found.varying_blocks_reason.startswith("forward draws Python's or NumPy's random numbers")
    assert not profile(vector_job(lambda: Skipping(lambda: 1.0))).varying_blocks_reason


def test_modules_that_the_size_of_a_batch_chooses_are_told() -> None:
    class Sized(Skipping):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](x) if len(x) > 2 else self.blocks[0](x)

    assert "blocks.0 does not run for every batch" in profile(vector_job(lambda: Sized(None))).varying_blocks_reason


def test_a_model_that_cannot_be_traced_is_run() -> None:
    found = profile(vector_job(Gated))
    assert found.traced == "real"
    assert "could not be traced" in found.varying_blocks_reason
    assert any("two small steps" in note for note in found.notes)
    assert found.flops(8) == pytest.approx(2 * 2 * 8 * 16 * 16 * 2 + 8 * 2 * 16 * 16, rel=0.01)


class Truncated(nn.Module):
    """Draws again until every value is within bounds, as vision transformers do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 16))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Rates(nn.Module):
    """Reads numbers out of a tensor while it is built, as for stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.rates = [rate.item() for rate in torch.linspace(0.0, 0.1, 3)]
        self.scale = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.layers, self.rates, strict=True):
            x = layer(x) * (1.0 - rate) * self.scale
        return x


class Causal(nn.Module):
    """Leaves it to torch to see that its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4, device=x.device)
        return self.layers(x[:, None].expand(-1, 4, -1), mask=mask).mean(1)


class Likelihood(nn.Module):
    """A distribution, which checks its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(self.linear(x), x.new_ones(16)).log_prob(x)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Truncated, Rates, Causal, Likelihood])
def test_torchs_own_looks_at_values_do_not_stop_a_trace(model: type[nn.Module]) -> None:
    state, validates = torch.get_rng_state(), Distribution._validate_args
    Distribution.set_default_validate_args(True)  # torch.compile, in an earlier test, turns it off
    try:
        found = profile(vector_job(model))
        assert found.traced == "fake", found.notes
        assert torch.equal(torch.get_rng_state(), state)
        assert Distribution._validate_args
    finally:
        Distribution.set_default_validate_args(validates)
    assert found.elements == sum(value.numel() for value in model().parameters())


def test_channels_last_is_traced() -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    found = profile(image_job(model))
    assert found.traced == "fake", found.notes
    assert found.flops(8) == profile(image_job(lambda: model().to(memory_format=torch.contiguous_format))).flops(8)  # type: ignore[call-overload]


@pytest.mark.parametrize("last", [False, True], ids=["fake", "meta"])
def test_weights_are_not_allocated(last: bool) -> None:
    """A billion parameters, on a machine that may have room for none of them."""

    def model() -> nn.Module:
        blocks = nn.Sequential(*(Truncated(2**26) for _ in range(1)), nn.Linear(2**26, 1))
        return blocks.to(memory_format=torch.channels_last) if last else blocks  # type: ignore[call-overload]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = profile(vector_job(model, data=[(torch.ones(16), torch.ones(1)) for _ in range(8)]))
    assert found.elements > 10**9
    assert found.traced == "fake", found.notes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "in KiB"


def test_parameters_that_a_layer_holds_beside_its_module_are_not_traced_past() -> None:
    class Beside(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.mine = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mine[0], self.bias)

    module = Beside()
    found = profile(vector_job(module))
    assert found.traced == "real"
    assert any("weight is held by a layer outside its module" in note for note in found.notes)
    assert module.weight.grad is None


def test_dict_batches_and_own_losses_are_traced() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.linear(x), labels)}

    data = [{"x": torch.ones(4), "labels": 1, "unused": 0} for _ in range(8)]
    found = profile(vector_job(Own, loss=None, data=data))
    assert found.traced == "fake"
    assert found.flops(8, "forward") == 2 * 8 * 4 * 3


def test_bad_jobs_say_so() -> None:
    with pytest.raises(JobError, match=r"shape \(8, 16\)|shape \(2, 16\)"):
        profile(vector_job(lambda: MLP(width=16), loss=lambda output, batch: output))
    with pytest.raises(DataError, match="empty"):
        profile(vector_job(lambda: MLP(width=16), data=[]))
    with pytest.raises(DataError, match="TensorDataset"):
        profile(vector_job(lambda: MLP(width=16), data=(torch.ones(8, 16), torch.ones(8, 16))))
    with pytest.raises(JobError, match=r"not an nn\.Module"):
        profile(vector_job(lambda: 3))


def test_optimizer_state_of_any_optimizer() -> None:
    class Half(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for value in group["params"]:
                    self.state[value].setdefault("half", torch.zeros_like(value[: len(value) // 2]))

    found = profile(vector_job(lambda: MLP(width=16, layers=2), optimizer=Half))
    assert found.state_bytes == found.bytes // 2
    plain = profile(vector_job(lambda: MLP(width=16), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, fused=True)))
    assert plain.state_bytes == 0


def test_units_are_repeated_blocks_of_weight() -> None:
    assert find_fsdp_units(list_modules(nn.Linear(4, 4))) == ()
    assert find_fsdp_units(list_modules(MLP(width=8, layers=3))) == ("0", "2", "4")
    assert find_fsdp_units(list_modules(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()))) == ()
    nested = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    assert find_fsdp_units(list_modules(nested)) == ("0", "1")
    lopsided = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(2, 2))
    assert find_fsdp_units(list_modules(lopsided)) == ("0", "1")


def blocks(*, tie: str = "") -> nn.Module:
    """Three blocks of two layers; `tie`: what the first shares with the second."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3)))
    first, second = model[0], model[1]
    assert isinstance(first, nn.Sequential)
    assert isinstance(second, nn.Sequential)
    if tie == "weight":
        second[0].weight = first[0].weight
    elif tie == "module":
        second[0] = first[0]
    elif tie == "inside":
        first[1].weight = first[0].weight
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tie", "wanted"),
    [("", ("0", "1", "2")), ("weight", ("2",)), ("module", ("2",)), ("inside", ("0", "1", "2"))],
)
def test_blocks_that_share_parameters_are_no_units_of_the_profile_or_the_engine(
    tie: str, wanted: tuple[str, ...]
) -> None:
    found, model = profile(vector_job(lambda: blocks(tie=tie))), blocks(tie=tie)
    assert found.fsdp_units == wanted
    assert [id(unit) for unit in unit_modules(model)] == [id(model.get_submodule(path)) for path in wanted]
    assert sum(found.fsdp_unit_bytes) <= found.bytes


def test_buckets_are_forecast_as_the_engine_lays_them_out() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.layers[1].to(torch.float64)
            self.layers[2].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
            return x.float()

    job = vector_job(Mixed)
    trained = [value for value in job.model().parameters() if value.requires_grad]
    laid_out = GradientAllReduce(trained, 25)._buckets
    sizes = [sum(value.numel() * value.element_size() for value in bucket.parameters) for bucket in laid_out]
    known = profile(job)
    layout = lay_out_plan(summarize_profile(known), known.batch, Plan())
    assert list(bucket_messages(layout, known.gradient_bytes)) == sizes
    assert len(sizes) == 3


def test_a_rule_says_where_its_kernels_are_fused() -> None:
    (rule,) = profile(vector_job(lambda: MLP(width=16), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))).optimizers
    assert (rule.has_fused_kernel(sharded=False), rule.has_fused_kernel(sharded=True)) == (True, False)
    (rule,) = profile(vector_job(lambda: MLP(width=16))).optimizers
    assert (rule.has_fused_kernel(sharded=False), rule.has_fused_kernel(sharded=True)) == (True, True)


@pytest.mark.filterwarnings("ignore:TF32")
def test_a_recurrent_layer_counts_its_products() -> None:
    layer = nn.LSTM(24, 16, num_layers=2, batch_first=True)
    # torch turns oneDNN off for good once it failed, as it does in half precision on some CPUs.
    with torch.backends.mkldnn.flags(enabled=True), record_ops(layer, 4) as recorder:
        layer(torch.randn(4, 10, 24))[0].sum().backward()
    calls = [call for call in recorder.trace.calls if "rnn" in call.name]
    first, second = 2.0 * 4 * 10 * 64 * (24 + 16), 2.0 * 4 * 10 * 64 * (16 + 16)
    assert [call.flops for call in calls] == [first, second, 2 * second, 2 * first]
    assert calls[0].dims == (10.0, 4.0, 64.0, 40.0)

"""Jobs that trained correctly under a plan and that a proof once called wrong, or could not run."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from random import random as named_random
from random import uniform
from typing import Any

import numpy as np
import torch
from numpy.random import rand
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from echelon.errors import EchelonError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.text import from_text
from echelon.verifier.verify import verify
from echelon.world import World

_DRAW = torch.Generator().manual_seed(1)
X = torch.randn(20, 8, generator=_DRAW)
Y = torch.randint(0, 4, (20,), generator=_DRAW)
TOKENS = torch.randint(1, 30, (20, 10), generator=_DRAW)

JOBS: dict[str, Callable[[], Job]] = {}


def _job(make: Callable[[], Job]) -> Callable[[], Job]:
    JOBS[make.__name__] = make
    return make


def _script(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # people still have it
        return torch.jit.script(value)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[-1])


def job(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": net, "loss": cross_entropy, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "data": TensorDataset(X, Y), "batch_size": 8, "epochs": 1,
    }  # fmt: skip
    return Job(**settings | changes)


class _Layers(nn.Module):
    """Two layers; what happens between them is each job's own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def change(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.hidden(x)).relu())


# Optimizers


class _EditsGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for value in group["params"]:
                value.grad.mul_(0.5).add_(value, alpha=0.1)
        return super().step(closure)


@_job
def optimizer_that_edits_gradients() -> Job:
    return job(optimizer=lambda p: _EditsGradients(p, lr=0.1))


class _KeepsMore(torch.optim.SGD):
    """State under a text, and in lists."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            for value in group["params"]:
                self.state[value].setdefault("past", []).append(value.grad.clone())
        return super().step(closure)


@_job
def optimizer_with_state_of_no_parameter() -> Job:
    return job(optimizer=lambda p: _KeepsMore(p, lr=0.1, momentum=0.9))


class _Draws(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for value in group["params"]:
                value.grad.add_(torch.randn_like(value), alpha=float(np.random.rand()))
        return super().step(closure)


@_job
def optimizer_that_draws() -> Job:
    return job(optimizer=lambda p: _Draws(p, lr=0.1))


@_job
def muon() -> Job:
    def make(pairs: Any) -> list[torch.optim.Optimizer]:
        values = [value for _, value in pairs]
        matrices, rest = ([v for v in values if v.ndim == 2], [v for v in values if v.ndim != 2])
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]

    return job(optimizer=make)


# Forward that edits parameters


class _Shortened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(30, 8, max_norm=1.0), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rows(ids).mean(1))


@_job
def embedding_with_max_norm() -> Job:
    return job(model=_Shortened, data=TensorDataset(TOKENS, Y))


class _Clamped(_Layers):
    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return x


@_job
def forward_that_edits_a_parameter() -> Job:
    return job(model=_Clamped)


class _Odd(_Layers):
    """Parameters without elements, and of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)

    def change(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


@_job
def empty_and_integer_parameters() -> Job:
    return job(model=_Odd)


@_job
def script_module() -> Job:
    return job(model=lambda: _script(net()))


@_job
def lazy_modules() -> Job:
    return job(model=lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4)))


# Random numbers


class _NumPy(_Layers):
    def change(self, x: Tensor) -> Tensor:
        if np.random.rand() < 0.5:
            x = x * 1.1
        noise = np.random.uniform(size=(len(x), 8)) + np.random.default_rng().random((len(x), 8))
        return x * torch.from_numpy(noise).to(x)


@_job
def numpy_random_numbers() -> Job:
    return job(model=_NumPy)


class _Python(_Layers):
    def change(self, x: Tensor) -> Tensor:
        factor = random.choice([1.0, 2.0, 3.0]) if random.random() < 0.5 else random.uniform(1, 2)
        return x * factor * random.sample(range(9), 3)[-1]


@_job
def python_random_numbers() -> Job:
    return job(model=_Python)


class _Owned(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.arrays, self.python = np.random.default_rng(0), random.Random(1)
        self.tensors = torch.Generator().manual_seed(3)

    def change(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(self.arrays.random((len(x), 8))).to(x) * self.python.random()
        return x * noise * torch.rand(x.shape, generator=self.tensors, dtype=x.dtype)


@_job
def generators_of_the_model() -> Job:
    return job(model=_Owned)


class _Named(_Layers):
    """Functions that were imported by name, and distributions that a mask of dropout does not show."""

    def change(self, x: Tensor) -> Tensor:
        x = torch.rrelu(x * uniform(1, 2), training=True) * named_random() + torch.from_numpy(rand(len(x), 8)).to(x)
        return x * torch.distributions.Beta(2.0 + x.detach().abs(), 3.0).sample()


@_job
def random_functions_imported_by_name() -> Job:
    return job(model=_Named)


class _Pooled(_Layers):
    def change(self, x: Tensor) -> Tensor:
        return (
            F.fractional_max_pool2d(x.view(len(x), 1, 2, 4), 1, output_size=(2, 3)).flatten(1)
            @ self.head.weight[:, :6].T
            @ self.head.weight
        )


@_job
def random_numbers_that_cannot_be_held() -> Job:
    return job(model=_Pooled)


@_script
def _scale(x: Tensor) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3.0)


class _Scripted(_Layers):
    def change(self, x: Tensor) -> Tensor:
        return x / _scale(x).to(dtype=x.dtype)


@_job
def script_function_that_casts() -> Job:
    return job(model=_Scripted)


# What functions of the job reach


class _Average:
    """Weighs by what it has seen, whatever that is; the same for every call in a step."""

    def __init__(self) -> None:
        self.mean, self.weights = torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.mean = self.mean + 1.0
        return F.cross_entropy(output, batch[-1], weight=self.weights, reduction="sum") / len(output)


@_job
def loss_object_with_state() -> Job:
    return job(loss=_Average())


@_job
def loss_that_reads_the_module() -> Job:
    module = net()
    values = list(module.parameters())

    def loss(output: Tensor, batch: Any) -> Tensor:
        penalty = sum(value.square().sum() for value in module.parameters()) + values[0].abs().sum()
        return F.cross_entropy(output, batch[-1]) + 0.1 * penalty

    return job(model=module, loss=loss)


@_job
def factory_around_a_module() -> Job:
    base = nn.Linear(8, 8)
    return job(model=lambda: nn.Sequential(base, nn.Tanh(), nn.Linear(8, 4)))


class _Holder:
    module = net()


@_job
def factory_that_gives_the_same_module() -> Job:
    return job(model=lambda: _Holder.module)


@_job
def distillation() -> Job:
    teacher = net()

    def loss(output: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0]).softmax(-1)
        return F.cross_entropy(output, target)

    return job(loss=loss)


# Batches


class _Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


@dataclasses.dataclass(frozen=True)
class _Batch:
    x: Tensor
    y: Tensor
    text: list[str]


@_job
def dataclass_batches() -> Job:
    return job(
        data=_Numbers(),
        collate=lambda ids: _Batch(X[ids], Y[ids], [str(each) for each in ids]),
        inputs=lambda batch: ((batch.x,), {}),
        loss=lambda output, batch: F.cross_entropy(output, batch.y),
    )


@_job
def batch_encodings() -> Job:
    from transformers import BatchEncoding

    return job(
        data=_Numbers(),
        collate=lambda ids: BatchEncoding({"input": X[ids], "labels": Y[ids]}),
        loss=lambda output, batch: F.cross_entropy(output, batch["labels"]),
    )


# Models of others


def _hf(kind: str, head: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**settings)
        model: nn.Module = getattr(transformers, f"{kind}{head}")(config)
        return model

    return make


def _texts(ids: list[int]) -> dict[str, Tensor]:
    return {"input_ids": TOKENS[ids], "labels": TOKENS[ids]}


@_job
def hf_qwen2_moe() -> Job:
    model = _hf(
        "Qwen2Moe", "ForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    return job(model=model, loss=None, data=_Numbers(), collate=_texts)


@_job
def hf_deepseek_v3() -> Job:
    model = _hf(
        "DeepseekV3", "ForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    return job(model=model, loss=None, data=_Numbers(), collate=_texts)


@_job
def hf_deberta_v2() -> Job:
    model = _hf(
        "DebertaV2", "ForSequenceClassification", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, relative_attention=True, pos_att_type=["p2c", "c2p"], max_position_embeddings=16, num_labels=4,
        max_relative_positions=8, position_buckets=4,
    )  # fmt: skip
    return job(
        model=model, loss=None, data=_Numbers(), collate=lambda ids: {"input_ids": TOKENS[ids], "labels": Y[ids]}
    )


@_job
def hf_whisper() -> Job:
    model = _hf(
        "Whisper", "ForConditionalGeneration", vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=4,
        max_source_positions=16, max_target_positions=16, apply_spec_augment=True, mask_time_prob=0.3, mask_time_length=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, encoder_layerdrop=0.3,
    )  # fmt: skip
    features = X.repeat(1, 16).view(-1, 4, 32)
    return job(
        model=model,
        loss=None,
        data=_Numbers(),
        collate=lambda ids: {"input_features": features[ids], "labels": TOKENS[ids]},
    )


@_job
def hf_wav2vec2() -> Job:
    model = _hf(
        "Wav2Vec2", "ForSequenceClassification", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, conv_dim=(16, 16), conv_kernel=(4, 3), conv_stride=(2, 2), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_length=2, mask_time_prob=0.3, num_labels=4, layerdrop=0.3,
        num_feat_extract_layers=2, classifier_proj_size=8,
    )  # fmt: skip
    return job(
        model=model, loss=None, data=_Numbers(),
        collate=lambda ids: {"input_values": X[ids].repeat(1, 16), "labels": Y[ids]},
    )  # fmt: skip


@_job
def keras_sequential() -> Job:
    def make() -> nn.Module:
        import keras

        layers = keras.layers
        model: nn.Module = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8, activation="relu"), layers.Dropout(0.3), layers.Dense(4)]
        )
        return model

    return job(model=make)


def prove(world: World, proofs: list[tuple[str, str]]) -> list[str]:
    """The certificates of jobs under plans, as text; the error's text where there is none."""
    texts = []
    for name, plan in proofs:
        made = JOBS[name]()
        try:
            texts.append(verify(made, complete(from_text(plan), made), world=world).to_json())
        except EchelonError as error:
            texts.append(str(error))
    return texts

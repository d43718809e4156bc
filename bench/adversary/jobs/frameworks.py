"""Models of other packages, from tiny configurations without downloads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.adversary.kit import SAMPLES, Samples, integers, numbers, sgd
from bench.adversary.spec import Spec, job

HF = ("transformers",)
VOCABULARY, LENGTH = 40, 6


def tokens(pad: bool = False) -> Samples:
    """Rows of tokens with labels, some of them -100."""
    ids = integers(VOCABULARY - 1, SAMPLES, LENGTH) + 1
    labels = ids.clone()
    mask = torch.ones_like(ids)
    if pad:
        for place in range(SAMPLES):
            labels[place, 3 + place % 4 :] = -100
            mask[place, 3 + place % 4 :] = 0
    return Samples(
        [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)]
    )


def shifted(model: nn.Module, batch: Any) -> Tensor:
    """The token-weighted loss of a causal language model, written out."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def unshifted(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def causal(config: Any, kind: Any, *, pad: bool = True, check: str = "same") -> Spec:
    def model() -> nn.Module:
        return kind(config).double()

    return Spec(
        model=model, loss=None, optimizer=sgd(0.05), data=tokens(pad), steps=5, objective=shifted, tolerance=1e-6, check=check,  # type: ignore[arg-type]
    )  # fmt: skip


@job("HF GPT-2 with padding and its own loss", owner="verifier", needs=HF)
def gpt2() -> Spec:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return causal(config, GPT2LMHeadModel)


@job("HF Llama with grouped heads", owner="verifier", needs=HF)
def llama() -> Spec:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return causal(config, LlamaForCausalLM)


@job("HF BERT for masked language modelling: no shift", owner="inputs", needs=HF)
def bert() -> Spec:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return Spec(
        model=lambda: BertForMaskedLM(config).double(), optimizer=sgd(0.05), data=tokens(True), steps=5,
        objective=unshifted, tolerance=1e-6,
    )  # fmt: skip


@job("HF T5: encoder and decoder", owner="inputs", needs=HF)
def t5() -> Spec:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
    )

    def objective(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**dict(batch)).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return Spec(
        model=lambda: T5ForConditionalGeneration(config).double(), optimizer=sgd(0.05), data=tokens(True), steps=5,
        objective=objective, tolerance=1e-6,
    )  # fmt: skip


@job("HF OPT with layer drop", owner="cuts", needs=HF)
def opt() -> Spec:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=16, dropout=0, layerdrop=0.3,
    )  # fmt: skip
    spec = causal(config, OPTForCausalLM, pad=False, check="consistent")
    import dataclasses

    return dataclasses.replace(spec, eval_data=Samples(tokens().samples[:7]))


@job("HF Qwen2-MoE", owner="verifier", needs=HF)
def qwen2_moe() -> Spec:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip

    def model() -> nn.Module:
        return Qwen2MoeForCausalLM(config)

    return Spec(model=model, optimizer=sgd(0.05), data=tokens(True), steps=4, objective=shifted, tolerance=2e-3)


@job("HF Whisper, which masks by NumPy while it trains", owner="verifier", needs=HF)
def whisper() -> Spec:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=10,
        max_target_positions=16, dropout=0, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
        apply_spec_augment=True, mask_time_prob=0.2, mask_time_length=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = numbers(SAMPLES, 8, 20)
    labels = integers(VOCABULARY - 1, SAMPLES, LENGTH) + 1
    rows = [{"input_features": x, "labels": y} for x, y in zip(features, labels, strict=True)]

    def objective(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return Spec(
        model=lambda: WhisperForConditionalGeneration(config).double(), optimizer=sgd(0.05), data=Samples(rows), steps=4,
        objective=objective, tolerance=1e-6, check="consistent", eval_data=Samples(rows[:5]),
    )  # fmt: skip


@job("HF ViT", owner="verifier", needs=HF)
def vit() -> Spec:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_channels=1, num_labels=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    rows = [
        {"pixel_values": x, "labels": int(y)}
        for x, y in zip(numbers(SAMPLES, 1, 8, 8), integers(4, SAMPLES), strict=True)
    ]

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])

    return Spec(
        model=lambda: ViTForImageClassification(config).double(), optimizer=sgd(0.05), data=Samples(rows), steps=4,
        objective=objective, tolerance=1e-6,
    )  # fmt: skip


@job("torch's nn.Transformer", owner="cuts")
def torch_transformer() -> Spec:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0, batch_first=True)
            self.table, self.encoder = (
                nn.Embedding(VOCABULARY, 16),
                nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            )
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.encoder(self.table(ids)))

    rows = [(row["input_ids"], row["labels"]) for row in tokens().samples]
    return Spec(
        model=lambda: Model().double(), optimizer=sgd(0.05), data=Samples(rows), steps=5,
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[-1].flatten()), tolerance=1e-7,
    )  # fmt: skip


@job("a Keras Sequential on the torch backend", owner="inputs", needs=("keras",))
def keras_sequential() -> Spec:
    import os

    os.environ.setdefault("KERAS_BACKEND", "torch")

    def model() -> nn.Module:
        import keras

        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dense(4),
            ]
        )

    rows = list(zip(numbers(SAMPLES, 8).float(), integers(4, SAMPLES), strict=True))
    return Spec(
        model=model, loss=lambda output, batch: F.cross_entropy(output, batch[-1]), optimizer=sgd(0.05), data=Samples(rows),
        steps=5, tolerance=2e-4,
    )  # fmt: skip

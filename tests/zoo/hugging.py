"""Models of Hugging Face's transformers, from tiny configurations. Nothing is downloaded, and transformers is imported on use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.job import Job
from tests.zoo.data import SAMPLES, numbers, sgd, train, whole


def _rows(**columns: Tensor) -> list[dict[str, Tensor]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _ragged(vocab: int, length: int, seed: int) -> dict[str, Tensor]:
    """Texts padded on the right; what is padding is no label."""
    tokens = whole(vocab, SAMPLES, length, low=3, seed=seed)
    mask = (torch.arange(length) < whole(length + 1, SAMPLES, 1, low=length // 2, seed=seed + 1)).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def gpt2() -> Job:
    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64,
                n_positions=32,
                n_embd=32,
                n_layer=2,
                n_head=4,
                use_cache=False,
                bos_token_id=1,
                eos_token_id=2,
            )
        )

    tokens = whole(64, SAMPLES, 12, low=3, seed=70)
    return train(name="hf-gpt2", model=model, data=_rows(input_ids=tokens, labels=tokens), clip_norm=1.0)


def llama() -> Job:
    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32, use_cache=False, pad_token_id=0, bos_token_id=1,
                eos_token_id=2,
            )
        )  # fmt: skip

    return train(name="hf-llama", model=model, data=_rows(**_ragged(64, 12, seed=71)), clip_norm=1.0)


def mixtral() -> Job:
    def model() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config: dict[str, Any] = {"experts_implementation": "eager"}  # the fused experts refuse float64
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
                use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config,
            )
        )  # fmt: skip

    tokens = whole(64, SAMPLES, 10, low=3, seed=73)
    return train(name="hf-mixtral", model=model, data=_rows(input_ids=tokens, labels=tokens))


def bert() -> Job:
    def model() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                max_position_embeddings=32,
            )
        )  # fmt: skip

    rows = _ragged(64, 12, seed=74)
    hidden = whole(4, SAMPLES, 12, seed=76) == 0
    hidden[:, 0] = True  # of each text something is hidden
    rows["labels"] = torch.where(hidden, rows["labels"], -100)
    rows["input_ids"] = torch.where(hidden & rows["attention_mask"].bool(), 2, rows["input_ids"])
    return train(name="hf-bert", model=model, data=_rows(**rows))


def bert_classifier() -> Job:
    """A frozen encoder under a trained head, as many fine-tune."""

    def model() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        made = BertForSequenceClassification(
            BertConfig(  # type: ignore[call-arg]
                vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                max_position_embeddings=32, num_labels=3,
            )
        )  # fmt: skip
        made.bert.embeddings.requires_grad_(False)
        made.bert.encoder.layer[0].requires_grad_(False)
        return made

    rows = _ragged(64, 12, seed=77) | {"labels": whole(3, SAMPLES, seed=79)}
    return train(name="hf-bert-classifier", model=model, data=_rows(**rows), optimizer=sgd)


def t5() -> Job:
    def model() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(
            T5Config(  # type: ignore[call-arg]
                vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False, pad_token_id=0,
                eos_token_id=1, decoder_start_token_id=0,
            )
        )  # fmt: skip

    rows = _ragged(64, 10, seed=80) | {"labels": _ragged(64, 7, seed=82)["labels"]}
    return train(name="hf-t5", model=model, data=_rows(**rows), clip_norm=1.0)


def vit() -> Job:
    def model() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(
            ViTConfig(  # type: ignore[call-arg]
                image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                intermediate_size=64, num_labels=10,
            )
        )  # fmt: skip

    images, labels = numbers(SAMPLES, 3, 16, 16, seed=84), whole(10, SAMPLES, seed=85)
    return train(name="hf-vit", model=model, data=_rows(pixel_values=images, labels=labels))


def clip() -> Job:
    """Each text against every image of the batch: the loss couples samples."""

    def model() -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        text = {
            "vocab_size": 64,
            "max_position_embeddings": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        vision = {"image_size": 16, "patch_size": 4}
        return CLIPModel(CLIPConfig(text_config=small | text, vision_config=small | vision, projection_dim=24))

    tokens = whole(64, SAMPLES, 8, low=3, seed=86)
    tokens[:, -1] = 2
    return train(
        name="hf-clip",
        model=model,
        data=_rows(input_ids=tokens, pixel_values=numbers(SAMPLES, 3, 16, 16, seed=87)),
        inputs=lambda batch: ((), {**batch, "return_loss": True}),
    )

"""Models that a plan cannot be followed with as it is written: the plan changes by itself, and the numbers are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon import Job
from echelon.flow.job_source import JobSource
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine.odd import outcome, outcomes, settled
from tests.sampling import some

#: (job, plan, the plan that it runs under: None where it is the same, a word of why)
CASES = [
    ("plain", "dp=2 zero=3", None, ""),
    ("outside", "dp=2 zero=3", "dp=2 zero=3 whole", "blocks.1.0.weight is read while its block does not run"),
    ("inner", "dp=2 zero=3", "dp=2 zero=3 whole", "is read while its block does not run"),
    ("adapters", "dp=2 zero=3", "dp=2 zero=3 whole", "batches hold values of type str"),
    ("adapters", "pp=2", "dp=2 zero=3 whole", "its data decide what is called"),
    ("teacher", "dp=2 zero=3", "dp=2", "forward changes teacher.blocks.0.0.weight itself"),
    ("clipped", "dp=2 zero=1", "dp=2", "forward changes blocks.0.0.weight itself"),
    ("growing", "pp=2", "dp=2 zero=3 whole", "pp=2"),
    ("growing outside", "pp=2", "dp=2 zero=3 whole", "pp=2"),
    ("sloped", "tp=2", None, ""),
    ("empty", "dp=2 zero=3", None, ""),
    ("orthogonal", "dp=2 zero=3", None, ""),
    ("averaged", "dp=2 zero=1 batchnorm=sync", None, ""),
    ("lazy", "dp=2 zero=3 batchnorm=sync", None, ""),
    ("lazy", "tp=2", None, ""),
    ("lazy", "pp=2", None, ""),
    ("recorded", "pp=2", None, ""),
    ("record", "pp=2", None, ""),
    ("record", "dp=2", None, ""),
    ("encoding", "pp=2", None, ""),
    ("outside", "pp=2", None, ""),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_odd_models_train_as_on_one_device(ranks: RankPool) -> None:
    drawn = some("odd", CASES, 4)
    plans = [settled(name, plan) for name, plan, _, _ in drawn]
    for (name, plan, instead, why), (found, said) in zip(drawn, plans, strict=True):
        assert (said == "") == (instead is None), (name, plan, said)
        assert instead is None or (str(found), why in said) == (instead, True), (name, plan, said)
    alone = {name: outcome(World(), name, Plan().to_json()) for name, *_ in drawn}
    documents = [(name, plan.to_json()) for (name, *_), (plan, _) in zip(drawn, plans, strict=True)]
    for (name, plan, *_), found in zip(drawn, ranks.run(2, outcomes, documents, timeout=300)[0], strict=True):
        losses, parameters = found
        assert losses == pytest.approx(alone[name][0], rel=1e-12), (name, plan, found)
        for key, value in alone[name][1].items():
            assert torch.allclose(parameters[key], value, rtol=1e-11, atol=1e-12), (name, plan, key)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_train_whole_on_every_rank(ranks: RankPool) -> None:
    alone, _ = outcome(World(), "scripted", Plan().to_json(), own=True)
    for plan in ("dp=2 zero=3", "tp=2"):
        found, said = settled("scripted", plan)
        assert str(found) == "dp=2"
        assert "compiled by torch.jit" in said
    losses, _ = ranks.run(2, outcome, "scripted", found.to_json(), True)[0]
    assert losses == pytest.approx(alone, rel=1e-6)


def test_layer_drop_is_not_cut_into_stages() -> None:
    assert str(settled("dropped", "pp=2")[0]) == "dp=2 zero=3 whole"
    assert str(settled("dropped", "dp=2 zero=3")[0]) == "dp=2 zero=3 whole"


def test_calls_that_change_while_it_trains_end_a_pipeline_in_our_words(ranks: RankPool) -> None:
    """What no trial saw: the error is one of ours, not torch's around it."""
    plan, _ = settled("plain", "pp=2 micro=4")
    found = ranks.run(2, outcome, "late", plan.to_json(), timeout=60)
    kinds = {kind for kind, _ in found}
    assert "DivergenceError" in kinds, found
    said = next(text for kind, text in found if kind == "DivergenceError")
    assert said.startswith("pp: the model called ")
    assert "use pp=1" in said


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["OPT", "Bart"])
def test_layer_drop_of_transformers(kind: str, rate: float) -> None:
    """Drawn at every layer, and read, whatever the rate is: ZeRO gathers the model as one. A rate of zero can still be cut into stages."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, dict[str, Any]] = {
        "OPT": {"hidden_size": 8, "num_hidden_layers": 3, "ffn_dim": 8, "num_attention_heads": 2, "word_embed_proj_dim": 8, "layerdrop": rate},
        "Bart": {
            "d_model": 8, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_layerdrop": rate, "decoder_layerdrop": rate,
        },
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(vocab_size=40, max_position_embeddings=16, **sizes[kind])
    head = getattr(transformers, {"OPT": "OPTForCausalLM", "Bart": "BartForConditionalGeneration"}[kind])
    ids = [{"input_ids": torch.arange(number, number + 6), "labels": torch.arange(6)} for number in range(8)]
    job = Job(
        model=lambda: head(config),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=ids,
        batch_size=4,
        steps=1,
    )
    subject = JobSource(job)
    known = subject.try_profile()
    assert str(subject.adapt_plan(from_text("dp=2 zero=3"), known, None)[0]) == "dp=2 zero=3 whole"
    staged, said = subject.adapt_plan(from_text("pp=2"), known, None)
    assert (staged.mesh.pp, bool(said)) == ((1, True) if rate else (2, False))

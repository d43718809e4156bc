"""Published rows: what the reader refuses, what the models hold, and that two blocks tell of all."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.published.__main__ import worker
from bench.published.cases import cases, outcome, usual_length
from bench.published.models import CONVNETS, Transformer
from bench.published.profiles import TRACED, deepen, job, key_of, shallow
from bench.published.rows import ROWS, TRANSFORMERS, read
from bench.published.scores import quantile, spearman, summary
from echelon.errors import EchelonError
from echelon.profiler import profile as trace
from echelon.simulator.fitted import fitted
from echelon.simulator.work import distil
from tests.whole import only_whole, pairs

SMALL: dict[str, Any] = {
    "arch": "llama", "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 320, "seq_len": 32, "gated_mlp": True,
    "tied_embeddings": False,
}  # fmt: skip


def test_the_committed_rows_are_read_whole() -> None:
    rows = read(ROWS)
    assert len(rows) == 587
    assert sum("time" in row.counts for row in rows) == 389


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("plan.recompute", "half"),
        ("hardware.gpu", "K80"),
        ("measured.mem_kind", "free"),
        ("model.arch", "t5"),
        ("plan.compile", 1),
        ("counts", ["speed"]),
    ],
)
def test_values_outside_the_vocabulary_are_refused(tmp_path: Path, path: str, value: Any) -> None:
    plain = json.loads(ROWS.read_text().splitlines()[0])
    *parts, last = path.split(".")
    found = plain
    for part in parts:
        found = found[part]
    found[last] = value
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(plain) + "\n")
    with pytest.raises(EchelonError, match=f"line 1: {path}="):
        read(file)


@pytest.mark.parametrize(
    ("arch", "core"), pairs(["gpt", "llama", "nemotron", "bert"], ["flash", "fused", "eager"], each=1)
)
def test_two_blocks_tell_of_six(arch: str, core: str) -> None:
    model = SMALL | {"arch": arch, "gated_mlp": arch == "llama", "kv_heads": 2 if arch in ("llama", "nemotron") else 4}
    whole = trace(job(model, core, torch.bfloat16, layers=6, fused_norm=False), device="cpu")
    made = deepen(shallow(key_of(model, core=core, half=True, fused_norm=False)), 6)
    assert {(p.name, p.shape) for p in made.parameters} == {(p.name, p.shape) for p in whole.parameters}
    assert sorted(map(repr, made.operators)) == sorted(map(repr, whole.operators))
    assert [(v.path, v.crossing) for v in made.visits] == [(v.path, v.crossing) for v in whole.visits]
    a, b = distil(made), distil(whole)
    assert (a.layers, a.elements, a.given) == (b.layers, b.elements, b.given)
    assert (astuple(a.kept), a.outside) == (pytest.approx(astuple(b.kept)), pytest.approx(b.outside))
    assert a.loss == pytest.approx(b.loss, rel=0.02)


def test_keys_and_values_are_as_wide_as_the_model_makes_them() -> None:
    work = distil(shallow(key_of(SMALL, core="flash", half=True, fused_norm=True)))
    assert work.keys == 2 * 32 * 2 * 2 * 16  # bytes, tokens, keys and values, heads of them, their size
    assert work.given == 2 * 32 * 64


def test_columns_keep_their_inputs_whole_whatever_tp() -> None:
    """Of each block the residuals and norms keep what is whole, and so do the first products of attention and of the feed-forward part."""
    work = distil(shallow(key_of(SMALL, core="flash", half=True, fused_norm=True)))
    hidden = 2 * 32 * 64
    # Two norms keep what they read, the two columns what the norms gave.
    assert work.kept.whole == pytest.approx(4 * hidden, rel=0.05)


def test_models_have_the_parameters_that_the_rows_print() -> None:
    """Those that say so: within half a percent, biases and positions aside."""
    seen = set()
    for row in read(ROWS):
        model = row.model
        printed = model.get("params_reported") or model.get("params_total_est")
        shape = json.dumps(model, sort_keys=True)
        if model["arch"] not in TRANSFORMERS or model["arch"] == "bert" or shape in seen or not printed:
            continue
        seen.add(shape)
        with torch.device("meta"):
            few, more = (
                sum(p.numel() for p in Transformer(model, "flash", layers=layers, fused_norm=True).parameters())
                for layers in (TRACED, TRACED + 1)
            )
        total = few + (model["layers"] - TRACED) * (more - few)
        assert total == pytest.approx(printed, rel=0.03), row.id


@pytest.mark.parametrize(
    ("arch", "millions"), [("resnet50", 25.6), ("resnet101", 44.5), ("vgg16", 138.4), ("inception_v3", 23.8)]
)
def test_convolutional_models_have_their_published_sizes(arch: str, millions: float) -> None:
    with torch.device("meta"):
        model = CONVNETS[arch]()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_scores_by_hand() -> None:
    assert quantile([0.0, 1.0, 2.0], 0.9) == pytest.approx(1.8)
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert spearman([1.0, 1.0, 2.0], [3.0, 2.0, 1.0]) == pytest.approx(-0.866, abs=1e-3)


def test_samples_of_bert_are_shorter_than_their_frame() -> None:
    assert [usual_length(SMALL | {"arch": "bert", "seq_len": length}) for length in (128, 512)] == [128, 288]
    assert usual_length(SMALL | {"seq_len": 4096}) == 4096


@only_whole
def test_the_scores_that_are_written_down_hold() -> None:
    rows = read(ROWS)
    found = {row.id: outcome(row, cases(row, worker), fitted()) for row in rows}
    scores = summary(rows, found)
    assert scores["time"]["macro_median"] <= 0.05
    assert scores["time"]["p90"] <= 0.15
    assert scores["rank"]["spearman_median"] >= 0.88
    assert scores["rank"]["regret_worst"] <= 0.1
    assert scores["rank"]["oom_choices"] == 0
    assert scores["fit"]["balanced_accuracy"] >= 0.95
    assert scores["fit"]["false_fits"] <= 0.05
    assert scores["memory"]["median_abs"] <= 0.06

"""What a server holds, as documents."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import DocumentError
from echelon.server.protocol.specs import (
    BLOCK_SIZE,
    INIT_KINDS,
    RULE_KINDS,
    Dense,
    Init,
    Rule,
    StoreError,
    Table,
    spec_from_plain,
    spec_to_plain,
)

numbers = st.floats(0, 1e6)
parts = st.floats(0, 1, exclude_max=True)
rules = st.builds(
    Rule,
    kind=st.sampled_from(RULE_KINDS),
    lr=numbers,
    weight_decay=numbers,
    momentum=parts,
    dampening=parts,
    beta1=parts,
    beta2=parts,
    eps=st.none() | numbers,
    initial=numbers,
    steps=st.sampled_from(("row", "given")),
)
inits = st.builds(
    Init, kind=st.sampled_from(INIT_KINDS), scale=numbers, value=st.floats(-9, 9), seed=st.integers(0, 2**63 - 1)
)
names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20)
tables = st.builds(
    Table,
    name=names,
    dim=st.integers(1, 65536),
    rule=rules,
    init=inits,
    stored=st.sampled_from(("f4", "f2", "i2", "i1")),
    admit=st.integers(1, 9),
)
denses = st.builds(
    Dense, name=names, size=st.integers(1, 2**38), rule=rules, init=inits, dtype=st.sampled_from(("f4", "f8"))
)


@given(tables | denses)
def test_specs_go_through_json(spec):
    assert spec_from_plain(json.loads(json.dumps(spec_to_plain(spec)))) == spec


@given(denses)
def test_blocks_cover_a_parameter_once(spec):
    assert (spec.blocks - 1) * BLOCK_SIZE + spec.block_length(spec.blocks - 1) == spec.size
    with pytest.raises(StoreError, match=f"block {spec.blocks} of {spec.blocks}"):
        spec.block_length(spec.blocks)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rule(kind="adamw"), "rule.kind: 'adamw'; use one of sgd"),
        (lambda: Rule(lr=float("nan")), "rule.lr: nan"),
        (lambda: Rule(lr=-1.0), "rule.lr: -1.0"),
        (lambda: Rule(beta2=1.0), "rule.beta2: 1.0"),
        (lambda: Rule(kind="sgd", nesterov=True), "rule.nesterov"),
        (lambda: Rule(kind="sgd", decoupled=True), "rule.decoupled"),
        (lambda: Init(kind="xavier"), "init.kind: 'xavier'"),
        (lambda: Init(seed=-1), "init.seed: -1"),
        (lambda: Table(name="", dim=1), "table.name: ''"),
        (lambda: Table(name="a\0", dim=1), "table.name"),
        (lambda: Table(name="a", dim=0), "a.dim: 0"),
        (lambda: Table(name="a", dim=True), "a.dim: True"),
        (lambda: Table(name="a", dim=1, dtype="f2"), "a.dtype: 'f2'"),
        (lambda: Table(name="a", dim=1, stored="i4"), "a.stored: 'i4'"),
        (lambda: Table(name="a", dim=1, stored="f8"), "a.stored: f8 with dtype f4"),
        (lambda: Table(name="a", dim=1, admit=0), "a.admit: 0"),
        (lambda: Dense(name="w", size=0), "w.size: 0"),
        (lambda: Dense(name="w", size=2**48), "w.size: 281474976710656"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, says):
    with pytest.raises(StoreError, match=says.replace(".", r"\.")):
        make()


def test_a_document_of_neither_kind_is_refused():
    with pytest.raises(DocumentError, match=r"spec\.what: None"):
        spec_from_plain({"name": "a"})
    with pytest.raises(DocumentError, match="unknown field"):
        spec_from_plain({"what": "table", "name": "a", "dim": 3, "colour": 1})

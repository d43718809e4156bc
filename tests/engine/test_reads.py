"""What reads or replaces something of which ranks or micro-batches have a part ends the run; what is the same in parts trains on."""

from __future__ import annotations

import pytest

from echelon.testing.rank_pool import RankPool
from echelon.world import World
from tests.engine import reads


@pytest.mark.slow
def test_reads_and_replacements_of_parts_are_refused(ranks: RankPool) -> None:
    found = ranks.run(2, "tests.engine.reads:outcomes", list(reads.CASES))
    for name, (_, _, said, steps) in reads.CASES.items():
        messages = [each[name][0] for each in found]
        assert any(said in message for message in messages) if said else not any(messages), (name, messages)
        assert any(each[name][1] == steps for each in found), (name, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("global dict", "lr_schedule= reads notes.SEEN, which loss= changes"),
        ("global", "lr_schedule= reads notes.MEAN"),
        ("closure", "lr_schedule= reads notes.mean"),
        ("object", "lr_schedule= reads notes.note.mean"),
        ("tensor", "lr_schedule= reads notes.note.tensor"),
        ("chain", "lr_schedule= reads notes.note.mean"),
        ("optimizer", "optimizer= reads notes.note.mean"),
        ("hook", "optimizer= reads notes.note.mean"),
        ("made late", "lr_schedule= reads notes.value"),
        ("another attribute", ""),
        ("nothing noted", ""),
        ("schedule to loss", ""),
        ("only counted", ""),
        ("like an attribute", ""),
    ],
)
def test_state_that_a_loss_shares_with_what_sets_the_rate(name: str, said: str) -> None:
    message, steps = reads.outcome(World(), reads.shared(name), "dp=1 micro=4")
    assert (said in message) if said else not message
    assert steps == (0 if said else 4)
    assert reads.outcome(World(), reads.shared(name), "dp=1") == ("", 4)

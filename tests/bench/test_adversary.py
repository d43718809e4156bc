"""A small slice of the hostile catalogue, and the judge's own rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.adversary
from bench.adversary.candidate import Outcome, Reused
from bench.adversary.spec import catalogue
from bench.adversary.verdict import Judge, decide, words_of
from echelon.data.order import Order
from echelon.testing.rank_pool import RankPool

FOLDER = Path(bench.adversary.__file__).parent
SLICE = (
    ("losses.sum_and_count", "dp=2", "ok"),
    ("losses.contrastive", "dp=2", "fell back"),
    ("optimizers.clipped", "dp=2 zero=3", "ok"),
)


def test_the_catalogue_is_large_and_imports_no_echelon() -> None:
    assert len(catalogue()) >= 120
    for file in [FOLDER / "judge.py", FOLDER / "spec.py", FOLDER / "kit.py", *(FOLDER / "jobs").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "echelon" for name in names), file


def test_the_judge_knows_the_documented_order() -> None:
    from bench.adversary import judge

    order = Order(samples=30, batch=8, seed=5)
    ours = [int(each) for step in range(4, 8) for each in order.ids(step, 0, order.batch_size(step))]
    assert judge.permutation(30, 5, 1) == ours


def test_what_refusing_is_allowed_for() -> None:
    assert words_of("dp=2 zero=3 micro=2") == {"dp", "zero", "micro"}
    assert words_of("dp=1 pp=2 micro=2 > tp=2") == {"pp", "micro", "tp", "resume"}


@pytest.fixture(scope="module")
def judge_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    judge = Judge(tmp_path_factory.mktemp("judge"))
    yield judge
    judge.close()


@pytest.mark.slow
def test_a_slice_of_the_catalogue(ranks: RankPool, judge_process: Judge, tmp_path: Path) -> None:
    trainer, entries = Reused(tmp_path, timeout=120, pool=ranks), catalogue()
    for number, (job, plan, wanted) in enumerate(SLICE):
        entry = entries[job]
        outcome = trainer.train(job, plan, tmp_path / str(number))
        assert decide(entry, entry.make(), plan, outcome, judge_process)[0] == wanted, outcome.output
    # The same run, judged as another job, is another result.
    other, first = entries["losses.ignored_rarely"], trainer.train("losses.sum_and_count", "dp=2", tmp_path / "other")
    assert decide(other, other.make(), "dp=2", first, judge_process)[0] == "SILENT"


@pytest.mark.parametrize(
    ("code", "said", "plan", "verdict"),
    [
        (None, "", "dp=2", "HANG"),
        (1, "error: TypeError: no\n(--debug shows the traceback)", "dp=2", "CRASH"),
        (-6, "", "tp=2", "CRASH"),
        (1, "error: tp=2: cannot be cut", "tp=2", "refused"),
        (1, "error: dp=2: no", "dp=2", "FALSE ALARM"),
        (1, "error: no", "auto", "FALSE ALARM"),
    ],
)
def test_verdicts_about_failures(code: int | None, said: str, plan: str, verdict: str, tmp_path: Path) -> None:
    entry = catalogue()["losses.sum_and_count"]
    outcome = Outcome(code=code, output=said, folder=tmp_path, seconds=1.0)
    assert decide(entry, entry.make(), plan, outcome, Judge(tmp_path))[0] == verdict

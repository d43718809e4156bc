"""The report: the figures are in it, it is well formed, it needs nobody, and it believes no string."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import EchelonError
from echelon.events import Event
from echelon.observer import write_report
from echelon.observer.event_log import EventLog, log_path
from echelon.observer.report.charts import envelope, fit_scale, smooth, thin

from .runs import NOW, forecast, start, step, training

MakeRun = Callable[..., Path]
VOID = {"meta", "path", "rect", "br"}


class Checker(HTMLParser):
    """Refuses tags that are not closed in order, and collects what a reader would see and what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]
        self.fetched += [f"{tag}.{name}" for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)


def read(path: Path) -> str:
    """The words of the page, once it is found to be well formed and self-contained."""
    html = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert checker.fetched == []
    assert not checker.tags & {"img", "link", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"(https?:)?//\w|@import|url\(", html)
    return re.sub(r"\s+", " ", " ".join(checker.words))


def test_a_finished_run(run_folder: MakeRun) -> None:
    path = write_report(run_folder())
    assert path.name == "report.html"
    words = read(path)
    for expected in (
        "digits", "finished", "dp=2 zero=1 micro=64 threads=1", "2 ranks on cpu", "421,642 parameters", "of 400", "Loss", "Accuracy", "Learning rate",
        "Gradient norm", "Samples per second", "forecast 31.0 ms (27.0 ms to 36.0 ms)", "measured 151 MB (−57 %, outside the interval)", "framework included",
        "Data waits are", "Xeon Platinum 8481C", "float32 91.0 GFLOP/s", "step-00000400", "5 more were saved and later removed", "zero", "2.13.0",
        "echelon train examples/digits.py --plan 'dp=2 zero=1 micro=64 threads=1'", "seed 7", "optimizer state is sharded",
    ):  # fmt: skip
        assert expected in words, expected


def test_the_summary_gives_the_figures_of_the_log(run_folder: MakeRun) -> None:
    words = read(write_report(run_folder()))
    last = [step(number).data["loss"] for number in range(361, 401)]
    assert f"training loss {sum(last) / 40:.4g}" in words
    warm = [step(number).data["seconds"] for number in range(2, 401)]
    rate = 256 * len(warm) / sum(warm)
    assert f"throughput {rate:,.0f} samples/s" in words
    assert f"{100 * rate * 0.027 / 256:.0f} % of 2 × one rank alone" in words


def test_on_a_gpu_the_framework_is_not_part_of_what_is_measured(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for event in (
        start(total=9, device="cuda:0"),
        step(1),
        Event(kind="memory", time=NOW + 1, data={"peak": 151_000_000}),
    ):
        log(event)
    forecast().save(tmp_path / "forecast.json")
    words = read(write_report(tmp_path))
    assert "measured 151 MB (+7.4 %, outside the interval)" in words
    assert "framework included" not in words


@pytest.mark.parametrize(
    ("last", "end", "expected"),
    [
        (130, None, "The log stops at step 130"), (130, "interrupted", "interrupted"), (0, "failed", "No step was finished"),
        (1, None, "steps 1 of 400"), (2, None, "steps 2 of 400"), (30, "failed", "No evaluation was made"),
    ],
)  # fmt: skip
def test_a_run_cut_short(run_folder: MakeRun, last: int, end: str | None, expected: str) -> None:
    assert expected in read(write_report(run_folder(last=last, end=end)))


def test_without_documents_each_gap_is_a_sentence(run_folder: MakeRun) -> None:
    words = read(write_report(run_folder(documents=False)))
    for expected in ("this run was not forecast", "the plan was not saved", "the machine was not measured"):
        assert expected in words
    assert "efficiency" not in words


def test_an_empty_log(tmp_path: Path) -> None:
    log_path(tmp_path).touch()
    assert "The event log is empty" in read(write_report(tmp_path))


def test_a_damaged_document_is_a_sentence(run_folder: MakeRun) -> None:
    folder = run_folder()
    (folder / "forecast.json").write_text(forecast().to_json()[:200])
    assert "forecast.json cannot be read" in read(write_report(folder))


def test_a_resumed_run_is_marked(run_folder: MakeRun) -> None:
    folder = run_folder(last=230, end=None)
    log = EventLog(folder)
    for event in training(first=201, last=400, total=400):
        log(event)
    words = read(write_report(folder))
    assert "resumed" in words
    assert "in 2 parts" in words
    assert "finished" in words


def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for event in (start(total=9), step(1), step(2, loss=float("nan")), step(3, loss=float("nan"))):
        log(event)
    assert "not a number at 2 steps, first at step 2" in read(write_report(tmp_path))


def test_no_string_of_the_run_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script><img src=x onerror=\"alert(1)\">&'"
    names: dict[str, Any] = {
        "job": evil,
        "plan": evil,
        "device": evil,
        "file": evil,
        "seed": evil,
        "versions": {evil: evil},
        "ranks": evil,
    }
    log = EventLog(tmp_path)
    log(start(total=9, **names))
    log(step(1, epoch=evil))
    log(step(2, norm=evil, rate=evil))
    log(Event(kind="evaluation", step=2, time=NOW, data={"metrics": {evil: 0.5, "b": evil}, "seconds": evil}))
    log(Event(kind="checkpoint", step=2, time=NOW, data={"path": evil, "bytes": evil}))
    log(Event(kind="warning", step=2, time=NOW, data={"message": evil}))
    log(Event(kind="memory", step=2, time=NOW, data={"peak": evil}))
    log(Event(kind="end", step=2, time=NOW, data={"reason": evil, "message": evil}))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "plan.json").write_text('{"kind": "' + evil.replace('"', '\\"') + '"}')
    path = write_report(tmp_path)
    html = path.read_text()
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert "alert('x')" not in html
    checker = Checker()
    checker.feed(html)
    assert not checker.fetched
    assert evil in "".join(checker.words)


def test_a_folder_that_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EchelonError, match=r"no events\.jsonl in it"):
        write_report(tmp_path)
    with pytest.raises(EchelonError, match="no such folder"):
        write_report(tmp_path / "nowhere")


def test_a_page_that_cannot_be_written_is_told(run_folder: MakeRun) -> None:
    folder = run_folder()
    (folder / "report.html").mkdir()  # in the way, even for root
    with pytest.raises(EchelonError, match=r"report\.html: cannot be written \(.*make the folder writable"):
        write_report(folder)


def test_of_ranks_that_fail_the_first_is_blamed(run_folder: MakeRun) -> None:
    folder = run_folder(last=30, end=None)
    for rank, message, late in ((0, "connection closed by peer", 2.0), (1, "out of memory in conv2", 1.0)):
        EventLog(folder, rank=rank)(
            Event(kind="end", step=30, rank=rank, time=NOW + 30 + late, data={"reason": "failed", "message": message})
        )
    words = read(write_report(folder))
    assert "failed" in words
    assert "Rank 1: out of memory in conv2" in words


def test_smoothing_keeps_the_start_and_a_constant() -> None:
    points = [(float(i), 2.0 if i else 9.0) for i in range(200)]
    smoothed = smooth(points)
    assert smoothed[0] == (0.0, 9.0)
    assert smoothed[-1] == (199.0, 2.0)
    assert smooth([(0.0, 1.0), (1.0, 2.0), (2.0, 6.0)], window=2)[1] == (1.0, 3.0)


def test_a_long_curve_keeps_its_spikes_and_its_ends() -> None:
    points = [(float(i), 100.0 if i == 7777 else 1.0) for i in range(100_000)]
    assert (7777.0, 100.0) in envelope(points)
    assert len(envelope(points)) <= 800
    kept = thin(points, 300)
    assert (kept[0], kept[-1]) == (points[0], points[-1])


@pytest.mark.parametrize("values", [[1.0], [0.0], [-3.0, 5.0], [1e-9, 1e9], [2.0, 2.0], [-1.0, -1.0], [1e-30, 1.0]])
@pytest.mark.parametrize("log", [False, True])
def test_every_scale_shows_its_values_and_has_ticks(values: list[float], log: bool) -> None:
    made = fit_scale(values, log=log)
    assert all(0 <= made.position(value) <= 1 for value in values)
    ticks = made.ticks()
    assert 1 <= len(ticks) <= 10
    assert all(made.low <= tick * (1 + 1e-9) and tick <= made.high * (1 + 1e-9) for tick in ticks)

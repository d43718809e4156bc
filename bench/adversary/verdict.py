"""The verdict about one training: what echelon did against what the judge computed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.adversary.candidate import ROOT, Outcome, environment
from bench.adversary.spec import Entry, Spec

#: Verdicts that make the catalogue fail.
BAD = ("SILENT", "FALSE ALARM", "HANG", "CRASH")
GOOD = ("ok", "fell back", "refused", "stopped")
#: How an error that is not one of echelon's own reaches the terminal.
_RAW = re.compile(
    r"Traceback \(most recent call last\)|\(--debug shows the traceback\)|killed by SIG|terminate called"
    r"|\b(?:Assertion|Attribute|Index|Key|NotImplemented|Runtime|Type|Unboundlocal|Value)Error: "
)
_CHANGED = re.compile(r"falls? back|fell back|one process|is kept whole|shards? .* as one|gathered|replicated", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One job under one plan."""

    job: str
    plan: str
    verdict: str
    why: str = ""
    #: Largest relative difference of a tensor, a loss or a metric.
    worst: float = 0.0
    #: The plan that was executed.
    ran: str = ""
    seconds: float = 0.0
    #: cli, or fast.
    how: str = ""
    #: Hashes of echelon's source and of the job's.
    code: str = ""

    @property
    def bad(self) -> bool:
        """Whether the catalogue fails because of it."""
        return self.verdict in BAD


class Judge:
    """The judge's process, asked over a pipe; one request at a time."""

    def __init__(self, work: Path) -> None:
        self._work, self._lock, self._count = work, threading.Lock(), 0
        self._process: subprocess.Popen[str] | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def trained(self, job: str, splits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What training `job` on one device gives. `splits`: how batches are divided, from which step on."""
        key = json.dumps([job, splits])
        if key not in self._known:
            self._known[key] = self._ask({"job": job, "splits": splits})
        return self._known[key]

    def metrics(self, job: str, weights: Path) -> dict[str, float]:
        """The metrics of saved weights."""
        return dict(self._ask({"job": job, "weights": str(weights)})["metrics"])

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        with self._lock:
            if self._process is None:
                command = [sys.executable, "-m", "bench.adversary.judge"]
                pipe, variables = subprocess.PIPE, environment(self._work) | {"PYTHONHASHSEED": "0"}  # as ranks have
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=variables)
            self._count += 1
            out = self._work / f"judge-{self._count}.pt"
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps({**request, "out": str(out)}) + "\n")
            self._process.stdin.flush()
            self._process.stdout.readline()
        found = torch.load(out, weights_only=True)
        out.unlink()
        if "error" in found:
            raise RuntimeError(f"the judge cannot train {request['job']}:\n{found['error']}")
        return dict(found)


def split_of(plan: str) -> dict[str, Any]:
    """How a plan divides a batch, for jobs that normalise over micro-batches."""
    dp = int((re.search(r"\bdp=(\d+)", plan) or [0, 1])[1])
    shares = re.search(r"\bshares=([\d:]+)", plan)
    micro = re.search(r"\bmicro=(\d+)", plan)
    return {
        "shares": [int(each) for each in shares[1].split(":")] if shares else [1] * dp,
        "micro": int(micro[1]) if micro else None,
    }


def divided(spec: Spec, outcome: Outcome, plan: str) -> list[dict[str, Any]]:
    """How the processes that ran divided batches, each from its first step on; whole and one process where neither matters."""
    if not spec.splits and spec.restart is None:
        return [{"shares": [1], "micro": None}]
    found = [(int(each["step"] or 0), str(each["plan"])) for each in outcome.events if each["kind"] == "start"]
    return [split_of(ran) | {"from": step} for step, ran in found or [(0, plan)]]


def decide(entry: Entry, spec: Spec, plan: str, outcome: Outcome, judge: Judge) -> tuple[str, str, float, str]:
    """(verdict, why, worst difference, executed plan)."""
    ran = str(outcome.last("start").get("plan", ""))
    tail = outcome.output.strip()[-1500:]
    if outcome.code is None:
        return "HANG", f"no end after {outcome.seconds:.0f} s: {outcome.output.strip()[-6000:]}", 0.0, ran
    if outcome.code != 0:
        return (*_failed(entry, plan, outcome, tail), 0.0, ran)
    try:
        worst, why = compare(entry, spec, ran or plan, outcome, judge)
    except FileNotFoundError as error:
        return "CRASH", str(error), math.inf, ran
    if why:
        return "SILENT", why, worst, ran
    changed = _CHANGED.search(outcome.output) or (
        plan != "auto" and set(plan.split(" > ")[-1].split()) - set(ran.split())
    )
    lines = [line.strip() for line in outcome.output.splitlines() if _CHANGED.search(line)]
    return ("fell back" if changed and plan != "auto" else "ok"), "; ".join(lines)[:400], worst, ran


def _failed(entry: Entry, plan: str, outcome: Outcome, tail: str) -> tuple[str, str]:
    if outcome.raised or _RAW.search(outcome.output) or outcome.code not in (1, 2):
        return "CRASH", (outcome.raised or tail)[-600:]
    said = re.sub(r"\s+", " ", tail[tail.rfind("error:") :])[:600]
    used = words_of(plan)
    if plan == "auto" or (not used & {"tp", "pp"} and not used & entry.refusable):
        return "FALSE ALARM", said
    return ("stopped" if outcome.losses else "refused"), said


def words_of(plan: str) -> set[str]:
    """The kinds of parallelism in a plan: dp, micro, zero, tp, pp, shares."""
    found = {name for name, value in re.findall(r"\b(dp|tp|pp|zero)=(\d+)", plan) if int(value) > 1 or name == "zero"}
    return (
        found
        | {name for name in ("micro", "shares", "recompute") if f"{name}=" in plan}
        | ({"resume"} if ">" in plan else set())
    )


def compare(entry: Entry, spec: Spec, plan: str, outcome: Outcome, judge: Judge) -> tuple[float, str]:
    """(worst relative difference, what differs); nothing differs where the text is empty."""
    from safetensors.torch import load_file

    from echelon.engine.weights import export_weights

    weights = outcome.folder.parent / f"{outcome.folder.name}.safetensors"
    try:
        export_weights(outcome.folder, weights)
        reported = dict(outcome.last("evaluation").get("metrics", {}))
        if not all(math.isfinite(each) for each in outcome.losses):
            return math.inf, f"a loss is not finite: {outcome.losses}"
        if spec.check == "consistent":
            return _worst([_metrics(reported, judge.metrics(entry.name, weights), spec)])
        truth = judge.trained(entry.name, divided(spec, outcome, plan))
        return _worst(
            [
                _tensors(load_file(weights), truth, spec),
                _losses(outcome.losses, truth["losses"], spec),
                _metrics(reported, truth["metrics"], spec),
            ]
        )
    finally:
        weights.unlink(missing_ok=True)


def _worst(found: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return max(each for each, _ in found), "; ".join(text for _, text in found if text)


def _tensors(mine: Mapping[str, Any], truth: Mapping[str, Any], spec: Spec) -> tuple[float, str]:
    state = truth["state"]
    missing = [name for name in truth["parameters"] if name not in mine]
    if missing:
        return math.inf, f"the checkpoint lacks {', '.join(missing[:4])}"
    floor = 1e-3 * max(
        (float(each.to(_wide(each)).abs().max()) for each in state.values() if each.numel()), default=1.0
    )
    worst, names = 0.0, []
    for name, value in mine.items():
        if name not in state:
            continue
        other = state[name]
        if value.shape != other.shape:
            return math.inf, f"{name} is {list(value.shape)}, not {list(other.shape)}"
        if not value.numel():
            continue
        one, two = (each.to("cpu").to(_wide(each)) for each in (value, other))
        gap = float((one - two).abs().max()) / max(float(two.abs().max()), floor)
        gap = gap if math.isfinite(gap) else math.inf
        worst = max(worst, gap)
        if gap > spec.tolerance:
            names.append(f"{name} {gap:.1e}")
    return worst, f"tensors differ: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if names else ""


def _wide(tensor: Any) -> Any:
    import torch

    return torch.complex128 if tensor.is_complex() else torch.float64


def _losses(mine: Sequence[float], truth: Sequence[float], spec: Spec) -> tuple[float, str]:
    if len(mine) != len(truth):
        return math.inf, f"{len(mine)} steps, not {len(truth)}"
    gaps = [abs(one - two) / max(abs(two), 1e-3) for one, two in zip(mine, truth, strict=True)]
    bound = max(spec.tolerance, 1e-6)  # the log may round
    step = next((place for place, gap in enumerate(gaps) if gap > bound), None)
    text = "" if step is None else f"the loss of step {step + 1} is {mine[step]:.9g}, not {truth[step]:.9g}"
    return max(gaps, default=0.0), text


def _metrics(mine: Mapping[str, Any], truth: Mapping[str, float], spec: Spec) -> tuple[float, str]:
    worst, texts = 0.0, []
    for name, value in truth.items():
        if name not in mine or mine[name] is None:
            return math.inf, f"the metric {name} was not reported"
        gap = abs(float(mine[name]) - value) / max(abs(value), 1e-3)
        gap = gap if math.isfinite(gap) else math.inf
        worst = max(worst, gap)
        if gap > max(spec.tolerance, 1e-6):
            texts.append(f"the metric {name} is {float(mine[name]):.9g}, not {value:.9g}")
    return worst, "; ".join(texts)

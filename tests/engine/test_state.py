"""Everything that optimizers, schedules and models keep comes back after a resume, or is refused before it could be lost."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.engine.checkpoint.json_values import UnstorableValue, decode, decode_inline, encode, encode_inline
from echelon.engine.run import Run
from echelon.errors import IncompatibleCheckpointError, JobError
from echelon.job import Job
from echelon.partition.complete_plan import complete
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankError, RankPool
from echelon.world import World
from tests.engine.jobs import mlp
from tests.engine.stateful import STATEFUL, Switching, after, refused, sgd, until
from tests.sampling import some

STEPS = 2
WHOLE = [
    "nested",
    "shared",
    "looking",
    "extra",
    "extra tensor",
    "counting",
    "caching",
    "assorted",
    "shaking",
    "equipped",
    "slow",
    "hooked step",
    "hooked model",
    "counting schedule",
    "holding",
    "switching",
    "refreezing",
    "weighing",
    "centre",
    "proxies",
    "closing",
    "plain",
    "curve",
    "warming",
    "chained",
    "sequence",
    "one cycle",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_resumed_run_goes_on_with_all_state(tmp_path: Path, name: str) -> None:
    unbroken = after(World(), name, "dp=1")
    begun = until(World(), name, "dp=1", str(tmp_path / "here"), STEPS)
    resumed = after(World(), name, "dp=1", str(tmp_path / "here"))
    assert begun + resumed["losses"] == unbroken["losses"]
    assert resumed["facts"] == unbroken["facts"]
    assert all(torch.equal(value, resumed["parameters"][key]) for key, value in unbroken["parameters"].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    some(
        "passing",
        [
            ("nested", "dp=2 zero=3", "dp=1"),
            ("nested", "dp=1", "tp=2"),
            ("nested", "pp=2 micro=2", "dp=2 zero=1"),
            ("shared", "dp=2 zero=2", "pp=2 micro=2"),
            ("looking", "dp=1", "dp=2 zero=3"),
            ("looking", "dp=2 zero=3", "dp=1"),
            ("extra", "dp=2 zero=3", "dp=1"),
            ("extra tensor", "pp=2 micro=2", "tp=2"),
            ("counting", "dp=2 zero=3", "tp=2"),
            ("warming", "pp=2 micro=2", "dp=2"),
            ("equipped", "dp=2", "dp=1"),
            ("equipped", "dp=2 zero=3", "dp=2 zero=3"),
            ("slow", "dp=2", "dp=1"),
            ("holding", "dp=2", "dp=1"),
            ("holding", "dp=1", "pp=2 micro=16"),
            ("holding", "pp=2 micro=16", "dp=2 zero=3"),
            ("weighing", "dp=1", "tp=2"),
            ("weighing", "tp=2", "dp=1"),
            ("proxies", "dp=1", "dp=2"),
            ("proxies", "dp=2 zero=3", "dp=1"),
            ("empty", "tp=2", "dp=2 zero=3"),
        ],
        14,
    ),
)
def test_state_passes_from_plan_to_plan(ranks: RankPool, tmp_path: Path, name: str, writer: str, reader: str) -> None:
    def call(plan: str, function: Any, *arguments: Any) -> Any:
        if plan == "dp=1":
            return function(World(), name, plan, *arguments)
        return ranks.run(2, f"tests.engine.stateful:{function.__name__}", name, plan, *arguments)[0]

    folder = str(tmp_path / "here")
    unbroken = after(World(), name, "dp=1")
    begun = call(writer, until, folder, STEPS)
    resumed = call(reader, after, folder)
    if "extra" in name:  # a module's Python state is each rank's own: it counts calls, of which micro-batches make more
        unbroken = {"losses": [*begun, *resumed["losses"]]}
    assert begun + resumed["losses"] == pytest.approx(unbroken["losses"], rel=2e-5)


def test_several_ranks_cannot_go_on_with_what_one_process_unfroze(ranks: RankPool, tmp_path: Path) -> None:
    until(World(), "switching", "dp=1", str(tmp_path / "here"), STEPS)
    with pytest.raises(RankError, match=r"first.weight was unfrozen during training.* --plan dp=1"):
        ranks.run(2, after, "switching", "dp=2", str(tmp_path / "here"))


def unfrozen_before(world: World, folder: str) -> list[float]:
    """The losses after a checkpoint of a run that unfroze a layer, of a job in which the layer trains from the start."""

    class Free(Switching):
        def __init__(self) -> None:
            super().__init__()
            self.first.requires_grad_(True)

    job = mlp(model=Free, optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
    with Run(job, replace(Plan(), mesh=Mesh(dp=world.size)), world) as run:
        run.load(Path(folder))
        return [float(run.step(batch).loss) for batch in run.batches()]


def test_several_ranks_go_on_once_the_job_unfreezes_it_itself(ranks: RankPool, tmp_path: Path) -> None:
    until(World(), "switching", "dp=1", str(tmp_path / "here"), STEPS)
    whole = after(World(), "switching", "dp=1", str(tmp_path / "here"))["losses"]
    assert ranks.run(2, unfrozen_before, str(tmp_path / "here"))[0] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "words", "steps"),
    [
        ("opaque", "keeps a builtins.object in state_dict() (state/shared/object)", 0),
        ("shy", "keeps a builtins.object in state_dict()", 1),
        ("forgetful", "load_state_dict() does not restore what state_dict() returned (slow)", 0),
        ("slotted", "has neither state_dict() and load_state_dict() nor attributes", 0),
    ],
)
def test_state_that_cannot_be_kept_is_refused_in_time(name: str, words: str, steps: int) -> None:
    message, done = refused(World(), name, "dp=1")
    assert words in message
    assert done <= steps


def test_every_listed_type_comes_back_as_itself() -> None:
    generator = torch.Generator().manual_seed(7)
    value = {
        "none": None, "flags": (True, False), "numbers": [1, 2.5, -0.0, math.inf, -math.inf, 3 + 4j], 5: "five", (1, "a"): b"\0",
        "sets": {1, 2}, "frozen": frozenset({"x"}), "deque": deque([1, 2], maxlen=3), "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {"k": [1]}), "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "scalar": np.float32(0.1), "array": np.arange(6, dtype=np.int16).reshape(2, 3), "bytes": bytearray(b"ab"), "$": "a dollar",
        "tensor": torch.arange(3, dtype=torch.bfloat16), "empty": torch.empty(0, 2), "deep": [{"a": ({"b": [None]},)}],
    }  # fmt: skip
    back = decode(encode(value | {"generator": generator}, "", encode_inline), decode_inline)
    assert torch.equal(back.pop("generator").get_state(), generator.get_state())
    assert list(back) == list(value)
    for key, mine in value.items():
        assert type(back[key]) is type(mine), key
        if isinstance(mine, torch.Tensor):
            assert torch.equal(back[key], mine)
            assert back[key].dtype == mine.dtype
        elif isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(back[key], mine)
        else:
            assert back[key] == mine, key
    assert math.copysign(1, back["numbers"][2]) == -1
    assert back["deque"].maxlen == 3
    assert math.isnan(decode(encode(math.nan, "", encode_inline), decode_inline))


@pytest.mark.parametrize("value", [object(), lambda: 0, {"a": [object()]}, np.array([object()]), range(3)])
def test_other_types_are_refused_by_path(value: Any) -> None:
    with pytest.raises(UnstorableValue, match=r"^top"):
        encode(value, "top", encode_inline)


@pytest.mark.parametrize(
    "plain",
    [
        {"$": "code", "v": 1}, {"$": "array", "v": ["O", [1], ""]}, {"$": "dtype", "v": "load"}, {"$": "float", "v": "1e9"},
        {"$": "tensor", "v": ["load", [1], "cpu", ""]}, {"$": "defaultdict", "v": ["eval", []]}, {"$": "dict", "v": [[[1], 2]]},
    ],
)  # fmt: skip
def test_only_listed_types_are_made(plain: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(plain, decode_inline)


def plateau(**changes: Any) -> Job:
    return mlp(
        optimizer=sgd,
        epochs=2,
        eval_data=mlp().data,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, threshold=10.0, threshold_mode="abs", patience=1
        ),
        **changes,
    )


def test_a_plateau_is_stepped_by_evaluations(tmp_path: Path) -> None:
    run = Run(plateau(), Plan(), World())
    for batch in run.batches(2):
        run.step(batch)
        run.evaluate()
    assert run.schedules[0].num_bad_epochs == 1
    run.evaluate(mlp().data)  # another set's loss does not count
    run.save(tmp_path / "here")
    other = Run(plateau(), Plan(), World())
    other.load(tmp_path / "here")
    for each in (run, other):
        assert each.schedules[0].num_bad_epochs == 1
        each.evaluate()
        assert each.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_plateau_without_evaluation_is_stepped_by_steps(ranks: RankPool) -> None:
    assert plateau_steps(World(), "dp=1") == (4, 1)
    assert ranks.run(2, "tests.engine.test_state:plateau_steps", "dp=2") == [(4, 1)] * 2


def plateau_steps(world: World, plan: str) -> tuple[int, int]:
    """How often the schedule was stepped in 3 steps (once when it was made), and how many of them were no better."""
    with Run(replace(plateau(), eval_data=None), from_text(plan), world) as run:
        for batch in run.batches(3):
            run.step(batch)
        schedule = run.schedules[0]
        return schedule.last_epoch + 1, round(-math.log10(run.optimizers[0].param_groups[0]["lr"] / 1e-2))


def test_a_stage_that_keeps_its_own_slow_weights_is_refused_in_time(ranks: RankPool) -> None:
    for message, steps in ranks.run(2, "tests.engine.stateful:refused", "looking", "pp=2 micro=2"):
        assert "Looking, which keeps state that belongs to no parameter and differs between pipeline stages" in message
        assert steps <= 1


class Timed:
    def step(self, epoch: int) -> None: ...


def test_a_schedule_that_wants_more_than_steps_is_refused() -> None:
    with pytest.raises(JobError, match=r"lr_schedule= returns Timed, whose step\(\) needs epoch"):
        Run(mlp(lr_schedule=lambda optimizer: Timed()), Plan(), World())


def warnings_of(world: World, name: str, plan: str, folder: str, load: bool) -> list[str]:
    """What a run warns of while it loads a checkpoint, or trains two steps and saves one."""
    job, said = STATEFUL[name](), list[str]()
    with Run(job, complete(from_text(plan), job), world, warn=said.append) as run:
        if load:
            run.load(Path(folder))
        else:
            for batch in run.batches(2):
                run.step(batch)
            run.save(Path(folder))
    return said


def test_slow_weights_of_a_rank_are_named_as_lost(ranks: RankPool, tmp_path: Path) -> None:
    sharded, whole = str(tmp_path / "sharded"), str(tmp_path / "whole")
    said = ranks.run(2, warnings_of, "slow", "dp=2 zero=3", sharded, False)[0]
    assert any(each.startswith("optimizer.slow") and "checkpoints do not hold it" in each for each in said), said
    assert warnings_of(World(), "slow", "dp=1", whole, load=False) == []
    with pytest.raises(RankError, match=r"optimizer\.slow.*another plan cannot read.*resume under \"dp=1\""):
        ranks.run(2, warnings_of, "slow", "dp=2 zero=3", whole, True)
    with pytest.raises(IncompatibleCheckpointError, match=r"optimizer\.slow.*cannot hold under the plan that wrote it"):
        warnings_of(World(), "slow", "dp=1", sharded, load=True)


class Following(torch.nn.Linear):
    """Scales its output by the next line of a file, and writes to another file."""

    def __init__(self, lines: Any, log: Any) -> None:
        super().__init__(8, 4)
        self.lines, self.log = lines, log

    def forward(self, rows: Any) -> Any:
        self.log.write("called\n")
        return super().forward(rows) * float(self.lines.readline())


def test_a_place_in_a_file_is_named_as_lost(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("2\n" * 100)
    said: list[str] = []
    with (
        (tmp_path / "lines").open() as lines,
        (tmp_path / "log").open("w") as log,
        Run(mlp(model=Following(lines, log)), Plan(), World(), warn=said.append) as run,
    ):
        for batch in run.batches(2):
            run.step(batch)
        run.save(tmp_path / "step")
    (warning,) = (each for each in said if "checkpoints do not hold it" in each)
    assert warning.startswith("model.lines: ")

"""Damaged and crafted checkpoints: refused by name or without effect; no code runs, nothing outside the folder is touched.

    python -m bench.mutations [--mutations 1000] [--seed 0] [--json mutations.json]

Mutations: one file of a training checkpoint, or of a parameter server's, is damaged at random (bits, bytes, cuts, additions, moved and
exchanged files, JSON keys, digits and values), and the checkpoint is loaded. Either the error names the file, or what was loaded
is equal bit by bit. Payloads: checkpoints and weights files made by somebody who computes the hashes anew (bench/payloads.py).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.common import Row, publish, tell
from echelon.checkpoint_files.tensor_files import tensor_bytes
from echelon.engine.run import Run
from echelon.errors import EchelonError
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.server.protocol.specs import Init, Rule, Table, spec_to_plain
from echelon.server.store import shard_checkpoint as served
from echelon.server.store.store import ParameterStore
from echelon.world import World

SHARDS = 4


class Counted(nn.Linear):
    """A layer with extra state."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def job() -> Job:
    """A training whose checkpoint has tensors, settings, a schedule and extra state."""
    draw = torch.Generator().manual_seed(0)
    return Job(
        model=lambda: nn.Sequential(Counted(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
        data=TensorDataset(torch.randn(32, 8, generator=draw), torch.randint(3, (32,), generator=draw)),
        batch_size=8,
        epochs=2,
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint to damage: where it and an older one are, and what loading one gives."""

    name: str
    folder: Path
    older: Path
    load: Callable[[Path], dict[str, bytes]]


def training(place: Path) -> Subject:
    """A training's checkpoint, loaded into a live run each time."""
    run = Run(job(), Plan(), World())
    for number, batch in enumerate(run.batches(4)):
        run.step(batch)
        if number in (1, 3):
            run.save(place / f"step-{number + 1}")
    other = Run(job(), Plan(), World())

    def load(folder: Path) -> dict[str, bytes]:
        other.load(folder)
        return held(other)

    return Subject("training", place / "step-4", place / "step-2", load)


def held(run: Run) -> dict[str, bytes]:
    """Everything that a run goes on from, as bytes."""
    state = run.gather_full_state()
    assert state is not None
    tensors = state.parameters | state.buffers | {f"optimizer {key}": value for key, value in state.optimizer.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for o in run.optimizers for group in o.param_groups]
    rest = [
        run.step_number,
        groups,
        [each.state_dict() for each in run.schedules],
        run.model[0].calls,
        run.nominal_count,
        run.train_step.step_metrics.buffer_tracker.mutable_buffers,
    ]
    return {key: bytes(tensor_bytes(value)) for key, value in tensors.items()} | {"rest": repr(rest).encode()}


def server(place: Path) -> Subject:
    """A parameter server's checkpoint."""
    store = ParameterStore(num_shards=SHARDS, memory=16 << 20)
    store.declare(Table(name="emb", dim=3, rule=Rule(kind="adam"), init=Init(kind="normal")))
    for lsn in (1, 2):
        ids = np.arange(200) * 7919
        store.apply("emb", ids, np.full((200, 3), float(lsn)), lsn=np.full(SHARDS, lsn, np.int64))
        folder = place / f"server-{lsn}"
        parts = {
            str(s): served.write_shard(served.partial_folder(folder), s, [({"lsn": lsn}, []), *store.snapshot(s)])
            for s in range(SHARDS)
        }
        specs = [spec_to_plain(spec) for spec in store.specs.values()]
        served.complete_checkpoint(
            folder, {"shards": SHARDS, "specs": specs, "settings": {"staleness": None}, "count": lsn, "files": parts}
        )
    return Subject("server", place / "server-2", place / "server-1", load_server)


def load_server(folder: Path) -> dict[str, bytes]:
    """All of a server's checkpoint, as servers read it."""
    manifest = served.verify_checkpoint(folder)
    found = {"manifest": json.dumps({k: v for k, v in manifest.items() if k != "files"}, sort_keys=True).encode()}
    for shard in range(manifest["shards"]):
        for place, (meta, arrays) in enumerate(served.load_shard(folder, shard)):
            found[f"{shard} {place}"] = json.dumps(meta).encode() + b"".join(each.tobytes() for each in arrays)
    return found


# Mutations: each damages one file; `older` is the checkpoint before.


def _bit(path: Path, draw: random.Random, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _byte(path: Path, draw: random.Random, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _append(path: Path, draw: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes() + draw.choice([b"\n", b" ", b"\0" * 64, draw.randbytes(draw.randrange(1, 200))]))


def _insert(path: Path, draw: random.Random, _: Path) -> None:
    data, at = path.read_bytes(), draw.randrange(path.stat().st_size)
    path.write_bytes(data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:])


def _zeros(path: Path, draw: random.Random, _: Path) -> None:
    data, at = bytearray(path.read_bytes()), draw.randrange(path.stat().st_size)
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(data)


def _swap(path: Path, draw: random.Random, _: Path) -> None:
    other = draw.choice([each for each in path.parent.iterdir() if each != path])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _older(path: Path, draw: random.Random, older: Path) -> None:
    """The same file of the checkpoint before, as a copy that was interrupted leaves it."""
    prefix = path.name[:11] if path.name.startswith("shard-") else path.name
    shutil.copy(next(each for each in older.iterdir() if each.name.startswith(prefix)), path)


def _rename(path: Path, draw: random.Random, _: Path) -> None:
    path.rename(path.with_name(draw.choice([f"{path.name}.bak", path.name.upper(), f"x{path.name}"])))


def _delete(path: Path, draw: random.Random, _: Path) -> None:
    path.unlink()


_TEXT: dict[str, Callable[[str, random.Random], str]] = {
    "digit": lambda text, draw: _at(text, draw, r"\d", lambda found: str((int(found) + draw.randrange(1, 10)) % 10)),
    "key away": lambda text, draw: _at(text, draw, r'"[^"\n]+": ?[^,\[\]{}\n]+,', lambda found: ""),
    "key twice": lambda text, draw: _at(text, draw, r'"[^"\n]+": ?[^,\[\]{}\n]+,', lambda found: found + found),
    "value": lambda text, draw: _at(
        text,
        draw,
        r"(?<=:) ?[\d.e-]+",
        lambda found: draw.choice(["null", "NaN", "-1", "1e999", '"x"', "[]", "99999999999"]),
    ),
    "key": lambda text, draw: _at(text, draw, r'"[a-z_]+"(?=:)', lambda found: f'"{found[2:-1]}"'),
    "true": lambda text, draw: _at(text, draw, "true|false", lambda found: "false" if found == "true" else "true"),
}


def _at(text: str, draw: random.Random, pattern: str, change: Callable[[str], str]) -> str:
    found = list(re.finditer(pattern, text))
    if not found:
        return text + " "
    one = draw.choice(found)
    return text[: one.start()] + change(one[0]) + text[one.end() :]


FILE_MUTATIONS: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "bit": _bit, "byte": _byte, "cut": _cut, "append": _append, "insert": _insert, "zeros": _zeros, "swap": _swap, "older": _older,
    "rename": _rename, "delete": _delete,
}  # fmt: skip


def mutate(folder: Path, older: Path, draw: random.Random) -> tuple[str, str]:
    """Damage one file; returns its name and how."""
    path = draw.choice(sorted(folder.iterdir()))
    kinds = [*FILE_MUTATIONS, *(_TEXT if path.suffix == ".json" else ())]
    how = draw.choice(kinds)
    if how in _TEXT:
        path.write_text(_TEXT[how](path.read_text(), draw))
    else:
        FILE_MUTATIONS[how](path, draw, older)
    return path.name, how


def verdict(subject: Subject, expected: dict[str, bytes], folder: Path) -> str:
    """What came of loading a damaged checkpoint: `refused`, `no effect`, or what is wrong."""
    try:
        found = subject.load(folder)
    except EchelonError as error:
        # Of files that do not fit together it may be either.
        names = {each.name for folder in (subject.folder, subject.older) for each in folder.iterdir()}
        return "refused" if any(each in str(error) for each in names) else f"refused without a file's name: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return "no effect" if found == expected else "LOADED WRONG"


def mutations(subject: Subject, count: int, seed: int, place: Path) -> Counter[str]:
    """Damage and load `count` times."""
    draw, expected, found = random.Random(f"{seed} {subject.name}"), subject.load(subject.folder), Counter[str]()
    for number in range(count):
        folder = place / f"{subject.name}-{number}"
        shutil.copytree(subject.folder, folder)
        name, how = mutate(folder, subject.older, draw)
        came = verdict(subject, expected, folder)
        found[came if came in ("refused", "no effect") else f"{name}, {how}: {came}"] += 1
        shutil.rmtree(folder)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """All of it; 0 when nothing was loaded wrong and no code ran."""
    from bench.payloads import PAYLOADS, attack

    parser = argparse.ArgumentParser(prog="python -m bench.mutations", description="damaged and crafted checkpoints")
    parser.add_argument("--mutations", type=int, default=1000, help="in all, over both kinds of checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for make, share in ((training, 0.6), (server, 0.4)):
            subject = make(place / make.__name__)
            found = mutations(subject, round(asked.mutations * share), asked.seed, place)
            bad = {key: value for key, value in found.items() if key not in ("refused", "no effect")}
            text = f"{sum(found.values())} mutations: {found['refused']} refused by name, {found['no effect']} without effect"
            detail = {"wrong": bad}
            for key in bad:
                print(f"  {key}")
            rows.append(
                tell(
                    Row(
                        what={"what": f"{subject.name} checkpoint"},
                        value=sum(bad.values()),
                        text=text,
                        limit=0,
                        detail=detail,
                    )
                )
            )
        came = attack(place / "payloads")
        for name, outcome in came.items():
            print(f"  {name}: {outcome}")
        bad = {name: outcome for name, outcome in came.items() if outcome.startswith("UNSAFE")}
        text = f"{len(PAYLOADS)} payloads, {len(bad)} did harm"
        rows.append(tell(Row(what={"what": "crafted payloads"}, value=len(bad), text=text, limit=0, detail=came)))
    return publish("Damaged and crafted checkpoints", rows, json_path=asked.json)


if __name__ == "__main__":
    raise SystemExit(main())

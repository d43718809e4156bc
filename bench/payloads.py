"""Checkpoints and weights files made by an attacker who computes every hash anew: no code may run, no file outside be read or written.

Each payload is made in a folder of its own and read in every way that a user would: resume, `weights=`, `export`, `verify`'s own reader,
a server's restore. An audit hook watches for code that runs and for files that are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.mutations import job, load_server, server, training
from echelon.checkpoint_files.checkpoint_reader import MANIFEST_FILE
from echelon.checkpoint_files.tensor_files import INDEX_FILE
from echelon.engine.run import Run
from echelon.engine.weights import export_weights, load_weights
from echelon.errors import EchelonError
from echelon.plan.plan import Plan
from echelon.plan.sealed_json import seal
from echelon.server.store import shard_checkpoint as served
from echelon.verifier import job_reader
from echelon.world import World

#: A payload may not take longer.
SECONDS = 20
#: Of file names and events that only a payload causes.
_OUTSIDE, _RAN = "outside", "ran"


class Call:
    """A pickle that runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


class Made:
    """A payload's folder: a copy of a good checkpoint to be changed, an outside that must not be touched, and a mark that code would set."""

    def __init__(self, place: Path, good: Path) -> None:
        self.place, self.folder, self.outside = place, place / "checkpoint", place / _OUTSIDE
        self.mark = self.outside / _RAN
        self.outside.mkdir(parents=True)
        (self.outside / "secret.bin").write_bytes(b"s" * 4096)
        shutil.copytree(good, self.folder)

    @property
    def code(self) -> bytes:
        return pickle.dumps(Call(self.mark))

    def data(self) -> Path:
        """The first data file."""
        return next(self.folder.glob("rank-*.bin"))

    def write(self, name: str, data: bytes) -> None:
        """A file with the hash that the manifest then has for it."""
        (self.folder / name).write_bytes(data)
        self.manifest(
            lambda m: m["files"].update({name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})
        )

    def manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the manifest and seal it again."""
        plain = json.loads((self.folder / MANIFEST_FILE).read_text())
        del plain["sha256"]
        change(plain)
        (self.folder / MANIFEST_FILE).write_bytes(seal(plain))

    def raw_manifest(self, change: Callable[[str], str]) -> None:
        """Change the manifest's text and seal it again, whatever it then is."""
        body = change((self.folder / MANIFEST_FILE).read_text().rpartition(',\n"sha256"')[0]).encode()
        tail = f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'
        (self.folder / MANIFEST_FILE).write_bytes(body + tail.encode())

    def index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the index, with its hash."""
        plain = json.loads((self.folder / INDEX_FILE).read_text())
        change(plain["model/0.weight"])
        self.write(INDEX_FILE, json.dumps(plain).encode())

    def part(self, **changes: Any) -> None:
        """Change the first part of a tensor."""
        self.index(lambda entry: entry["parts"][0].update(changes))


def _link(path: Path, target: Path) -> None:
    """Move a file outside and leave a link to it."""
    path.rename(target)
    path.symlink_to(target)


def _pipe(made: Made) -> None:
    made.data().unlink()
    os.mkfifo(made.folder / "rank-00000.bin")


def _linked_folder(made: Made) -> None:
    (made.folder / "server").symlink_to(made.outside)
    secret = (made.outside / "secret.bin").read_bytes()
    entry = {"bytes": len(secret), "sha256": hashlib.sha256(secret).hexdigest()}
    made.manifest(lambda m: m["files"].update({"server/secret.bin": entry}))


def _old_format(made: Made) -> None:
    (made.folder / ".metadata").write_bytes(made.code)
    (made.folder / MANIFEST_FILE).write_text(json.dumps({"format": 2, "files": {}, "step": 1}))


def _padded(made: Made) -> None:
    """A pickle of just the size that the data file had."""
    size = made.data().stat().st_size
    made.write("rank-00000.bin", made.code + b"\0" * (size - len(made.code)))


def _value(value: Any) -> Callable[[Made], None]:
    """A value in the optimizer's state."""
    return lambda made: made.manifest(lambda m: m["optimizers"][0]["state"]["0.weight"].update({"step": value}))


CHECKPOINTS: dict[str, Callable[[Made], Any]] = {
    "pickle as .metadata": lambda m: (m.folder / ".metadata").write_bytes(m.code),
    "pickle as a listed .metadata": lambda m: m.write(".metadata", m.code),
    "pickle as data file": lambda m: m.write("rank-00000.bin", m.code),
    "pickle of the right size as data file": _padded,
    "pickle as index": lambda m: m.write(INDEX_FILE, m.code),
    "pickle as manifest": lambda m: (m.folder / MANIFEST_FILE).write_bytes(m.code),
    "format 2 with a pickled .metadata": _old_format,
    "absolute path in the manifest": lambda m: m.manifest(
        lambda d: d["files"].update({str(m.outside / "secret.bin"): {"bytes": 4096, "sha256": "0" * 64}})
    ),
    "path with .. in the manifest": lambda m: m.manifest(
        lambda d: d["files"].update({"../outside/secret.bin": {"bytes": 4096, "sha256": "0" * 64}})
    ),
    "part in ../outside": lambda m: m.part(file="../outside/secret.bin"),
    "part at an absolute path": lambda m: m.part(file=str(m.outside / "secret.bin")),
    "part in an unlisted file": lambda m: m.part(file=MANIFEST_FILE),
    "data file links outside": lambda m: _link(m.data(), m.outside / "secret.bin"),
    "index links outside": lambda m: _link(m.folder / INDEX_FILE, m.outside / "secret.json"),
    "manifest links outside": lambda m: _link(m.folder / MANIFEST_FILE, m.outside / "secret.json"),
    "folder links outside": _linked_folder,
    "data file is a pipe": _pipe,
    "huge tensor": lambda m: m.index(lambda e: e.update(shape=[2**50, 8])),
    "huge part": lambda m: m.part(shape=[2**60, 8]),
    "huge empty tensor": lambda m: m.index(lambda e: e.update(shape=[2**61, 2**61, 0], parts=[])),
    "tensor without parts": lambda m: m.index(lambda e: e.update(parts=[])),
    "negative offset": lambda m: m.part(offset=-4096),
    "offset beyond the end": lambda m: m.part(offset=10**9),
    "negative start": lambda m: m.part(start=[-1, 0]),
    "overlapping parts": lambda m: m.index(lambda e: e.update(parts=[{**e["parts"][0], "shape": [3, 8]}] * 2)),
    "dtype of twice the size": lambda m: m.index(lambda e: e.update(dtype="float64", shape=[3, 8])),
    "dtype that is a function": lambda m: m.index(lambda e: e.update(dtype="load")),
    "index of lists": lambda m: m.write(INDEX_FILE, b'{"model/0.weight": [[1], [2]]}'),
    "nested JSON": lambda m: m.write(INDEX_FILE, b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "nested manifest": lambda m: m.raw_manifest(lambda t: t + ',"x":' + "[" * 200_000 + "]" * 200_000),
    "NaN in the manifest": lambda m: m.raw_manifest(lambda t: t.replace('"nominal": null', '"nominal": NaN')),
    "duplicate key in the manifest": lambda m: m.raw_manifest(lambda t: t + ',\n"step": 1'),
    "number of a million digits": lambda m: m.raw_manifest(lambda t: t + ',"x":' + "9" * 1_000_000),
    "array of objects": _value({"$": "array", "v": ["O", [1], "gASVFQAAAAAAAACMAm9z"]}),
    "value of an unknown type": _value({"$": "os.system", "v": "true"}),
    "dict as a class": _value({"$": "defaultdict", "v": ["eval", []]}),
    "settings that are a list": lambda m: m.manifest(lambda d: d.update(optimizers=[[]])),
    "no optimizers": lambda m: m.manifest(lambda d: d.update(optimizers=[])),
    "step that is a text": lambda m: m.manifest(lambda d: d.update(step="4")),
}


def _zipped(made: Made, *, bomb: bool = False) -> Path:
    """A torch archive whose pickle runs code, or that unpacks to far more than it holds."""
    path = made.place / "weights.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if bomb else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (200 << 20) if bomb else made.code)
        archive.writestr("archive/version", "3")
    return path


def _as(name: str, data: Callable[[Made], bytes]) -> Callable[[Made], Path]:
    def write(made: Made) -> Path:
        (made.place / name).write_bytes(data(made))
        return made.place / name

    return write


def _index(target: Callable[[Made], str]) -> Callable[[Made], Path]:
    def write(made: Made) -> Path:
        save_file({"0.weight": torch.zeros(6, 8)}, made.outside / "secret.safetensors")
        (made.place / "weights.pt").write_bytes(made.code)
        path = made.place / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {"0.weight": target(made)}}))
        return path

    return write


def _saved(made: Made) -> bytes:
    stream = io.BytesIO()
    torch.save({"0.weight": torch.zeros(6, 8), "x": Call(made.mark)}, stream)
    return stream.getvalue()


WEIGHTS: dict[str, Callable[[Made], Path]] = {
    "state dict with code (.pt)": _as("weights.pt", _saved),
    "state dict with code (.bin)": _as("weights.bin", _saved),
    "bare pickle as .pt": _as("weights.pt", lambda m: m.code),
    "archive with code": _zipped,
    "archive that unpacks to 200 MiB": lambda m: _zipped(m, bomb=True),
    "pickle as .safetensors": _as("weights.safetensors", lambda m: m.code),
    "safetensors with a huge head": _as("weights.safetensors", lambda m: (2**62).to_bytes(8, "little") + b"{}"),
    "safetensors beyond its end": _as(
        "weights.safetensors",
        lambda m: (lambda head: len(head).to_bytes(8, "little") + head)(
            json.dumps({"0.weight": {"dtype": "F32", "shape": [6, 8], "data_offsets": [0, 2**40]}}).encode()
        ),
    ),
    "index that names ../outside": _index(lambda m: "../outside/secret.safetensors"),
    "index that names an absolute path": _index(lambda m: str(m.outside / "secret.safetensors")),
    "index that names itself": _index(lambda m: "model.safetensors.index.json"),
    "index that names a pickle": _index(lambda m: "weights.pt"),
    "index of numbers": _as("model.safetensors.index.json", lambda m: b'{"weight_map": {"0.weight": 7}}'),
    "index nested": _as("model.safetensors.index.json", lambda m: b'{"weight_map":' + b"[" * 300_000),
}


def _entry(made: Made, name: str, data: bytes | None = None) -> None:
    """Let shard 1 of a server's checkpoint be in `name`."""
    plain = json.loads((made.folder / served.MANIFEST_NAME).read_text())
    del plain["sha256"]
    if data is not None:
        (made.folder / name).write_bytes(data)
    content = data if data is not None else (made.outside / "secret.bin").read_bytes()
    plain["files"]["1"] |= {"file": name, "sha256": hashlib.sha256(content).hexdigest()}
    (made.folder / served.MANIFEST_NAME).write_bytes(seal(plain))


def _server_link(made: Made) -> None:
    _entry(made, "shard.safetensors", b"s" * 4096)
    (made.folder / "shard.safetensors").unlink()
    (made.folder / "shard.safetensors").symlink_to(made.outside / "secret.bin")


SERVERS: dict[str, Callable[[Made], Any]] = {
    "server: shard in ../outside": lambda m: _entry(m, "../outside/secret.bin"),
    "server: shard at an absolute path": lambda m: _entry(m, str(m.outside / "secret.bin")),
    "server: shard is the folder above": lambda m: _entry(m, ".."),
    "server: shard links outside": _server_link,
    "server: pickle as shard": lambda m: _entry(m, "shard.safetensors", m.code),
    "server: shard with a huge head": lambda m: _entry(m, "shard.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "server: pickle as manifest": lambda m: (m.folder / served.MANIFEST_NAME).write_bytes(m.code),
}
PAYLOADS = (*CHECKPOINTS, *WEIGHTS, *SERVERS)


class Watch:
    """Sees files that are opened and code that is run, by Python's audit events."""

    def __init__(self) -> None:
        self.outside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.outside is None:
            return
        if event in ("os.system", "subprocess.Popen", "pickle.find_class", "os.exec", "os.posix_spawn"):
            self.seen.append(f"{event} {arguments[:2]}")
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            with contextlib.suppress(OSError, ValueError):
                # Where a link leads, but not the attempt to open one without following it.
                path, flags = Path(os.fsdecode(arguments[0])), arguments[2] if isinstance(arguments[2], int) else 0
                real = path.parent.resolve() / path.name if flags & os.O_NOFOLLOW else path.resolve()
                if self.outside in real.parents:
                    self.seen.append(f"opened {real}")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attack(place: Path, only: tuple[str, ...] = PAYLOADS) -> dict[str, str]:
    """Read every payload in every way; what came of each. Anything but a named error or a plain load is UNSAFE."""
    good, kept, watch = training(place / "good"), server(place / "kept"), Watch()
    run, model = Run(job(), Plan(), World()), job().model()  # type: ignore[operator]

    def weights(path: Path) -> None:
        load_weights(model, path, tp_shards={}, warn=lambda message: None)

    found = {}
    for number, name in enumerate(only):
        made = Made(place / str(number), (kept if name in SERVERS else good).folder)
        if name in WEIGHTS:
            path = WEIGHTS[name](made)
            ways: list[Callable[[], Any]] = [lambda p=path: weights(p), lambda p=path: job_reader._load_weights(p)]
        elif name in SERVERS:
            SERVERS[name](made)
            ways = [lambda f=made.folder: load_server(f)]
        else:
            CHECKPOINTS[name](made)
            ways = [
                lambda f=made.folder: run.load(f),
                lambda f=made.folder: weights(f),
                lambda f=made.folder, p=made.place: export_weights(f, p / "out.safetensors"),
                lambda f=made.folder: job_reader._load_weights(f),
            ]
        found[name] = _read(made, watch, ways)
        shutil.rmtree(made.place)
    return found


def _read(made: Made, watch: Watch, ways: list[Callable[[], Any]]) -> str:
    before = sorted(made.outside.iterdir())
    watch.outside, watch.seen = made.outside, []
    came = []
    for way in ways:
        try:
            with _limited():
                way()
            came.append("loaded as numbers")
        except EchelonError as error:
            came.append(f"refused ({str(error).replace(str(made.place), '')[:120]})")
        except Exception as error:  # not an error of ours, but an error
            came.append(f"{type(error).__name__}: {str(error)[:80]}")
    watch.outside = None
    if watch.seen or sorted(made.outside.iterdir()) != before:
        return f"UNSAFE: {watch.seen or 'the outside changed'}"
    if any("Timeout" in each or "MemoryError" in each for each in came):
        return f"UNSAFE: {came}"
    return "; ".join(dict.fromkeys(came))

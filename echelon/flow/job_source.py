"""From a file to a job: the file is run once to find the job in it, the same way in every process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echelon.errors import JobError
from echelon.job import Job, place, takes


def load_job(spec: str) -> Job:
    """The job that `file.py` or `file.py:name` describes. `name` is a function that returns a Job, or a Job."""
    file, _, name = spec.rpartition(":") if ":" in spec and not spec.endswith(".py") else (spec, "", "job")
    path = Path(file)
    if path.is_dir():
        raise JobError(f"{file} is a folder: give a job file in it, as {path / 'job.py'}")
    if not path.is_file():
        raise JobError(f"{file}: no such file")
    if not name:
        raise JobError(f"{spec} names no function after the colon: give {file}, or {file}:name")
    module = _import_file(path)
    made = getattr(module, name, None)
    if made is None:
        found = ", ".join(f"{file}:{key}" for key in _jobs_in(module))
        write = f": write `def {name}(): return echelon.Job(...)`" if name.isidentifier() else ""
        raise JobError(f"{file}: no `{name}` in it{write}{f'; it has {found}' if found else ''}")
    return made if isinstance(made, Job) else make_job(made, f"{file}:{name}")


def load_data(spec: str) -> Any:
    """The data set that `file.py:name` names: itself, what a function of that name returns, or the data of a job."""
    file, _, name = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "job")
    path = Path(file)
    if not path.is_file():
        raise JobError(f"{file}: no such file")
    module = _import_file(path)
    if not hasattr(module, name):
        raise JobError(f"{file}: no `{name}` in it; give the name of a data set, or of a function that returns one")
    made = getattr(module, name)
    if callable(made) and not hasattr(made, "__getitem__"):
        _seed()
        made = made()
    return made.data if isinstance(made, Job) else made


def make_job(function: Any, name: str | None = None) -> Job:
    """The job that a function returns, called the same way everywhere: random data that it makes is equal on every rank."""
    name = name or getattr(function, "__name__", type(function).__name__)
    if callable(function):
        if not takes(function, 0):
            raise JobError(
                f"{name} takes {inspect.signature(function)} ({place(function)}): a job function is called without arguments; "
                "give them defaults"
            )
        _seed()
        try:
            made = function()
        except SystemExit as error:
            file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "")
            raise _ended(error, file, f"while {name} was called; let it return an echelon.Job, or raise") from error
    else:
        made = function
    if not isinstance(made, Job):
        raise JobError(f"{name} gives {type(made).__name__}, not an echelon.Job")
    return made


#: Not the usual 0, which is the model's: weights must not be drawn from the very numbers that data was made of.
_SEED = 0xEC4E104


def _seed() -> None:
    import random

    import numpy
    import torch

    random.seed(_SEED)
    numpy.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _ended(error: SystemExit, file: str, rest: str) -> JobError:
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    call = "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"
    return JobError(f"{frame.filename} line {frame.lineno} ended Python ({call}) {rest}")


_VERBS = frozenset({"train", "verify", "parallelize"})


def _jobs_in(module: Any) -> list[str]:
    """Names in a job file that could be meant: jobs, and functions without arguments that make one, directly or by another."""
    things = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    makers = {key for key, value in things.items() if isinstance(value, Job) or _returns_job(value)}
    own = {key: value for key, value in things.items() if getattr(value, "__module__", "") == module.__name__}
    used = {key: frozenset(inspect.unwrap(f).__code__.co_names) for key, f in own.items() if inspect.isfunction(f)}
    makers |= {key for key, names in used.items() if "Job" in names}
    # What calls a maker and then trains is a script's main part, no job.
    while more := {key for key, names in used.items() if names & makers and not names & _VERBS} - makers:
        makers |= more
    return [key for key in things if key in makers and (isinstance(things[key], Job) or takes(things[key], 0))]


def _returns_job(value: Any) -> bool:
    return inspect.isfunction(value) and "Job" in str(inspect.signature(value).return_annotation)


_reading: list[Path] = []


def reading() -> Path | None:
    """The job file that is being read just now: whoever would train then would train in every process that reads it."""
    return _reading[-1] if _reading else None


@contextmanager
def _read(path: Path) -> Iterator[None]:
    _reading.append(path)
    try:
        yield
    except SystemExit as error:
        rest = "while it was read; put that under if __name__ == '__main__':"
        raise _ended(error, str(path), rest) from error
    finally:
        _reading.pop()


def _import_file(path: Path) -> Any:
    """Run the file as a module (not as __main__) with its folder importable, as `python file.py` would have it."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path}: not a Python file")
    _require_free_name(path)
    module = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # so that classes defined there can be found again by name
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    _seed()
    try:
        with _read(path):
            spec.loader.exec_module(module)
    except BaseException:
        # Half a module must not answer a later import.
        del sys.modules[path.stem]
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


#: Set in modules that are job files: one may take another's name, as `job.py` of two folders do.
_MARK = "__echelon_job__"


def _require_free_name(path: Path) -> None:
    """Refuse a file whose name is another module's: whoever imports that one would get the job file."""
    name = path.stem
    if name in sys.stdlib_module_names:
        raise JobError(f"{path}: `{name}` is a module of Python's own, which this file would replace; rename the file")
    loaded = sys.modules.get(name)
    if loaded is not None and hasattr(loaded, _MARK):
        return
    if loaded is None:
        installed = _installed(name, path.parent)
        if installed is not None:
            raise JobError(
                f"{path}: `{name}` is the name of an installed module ({installed}), which this file would replace; rename the file"
            )
        return
    file = getattr(loaded, "__file__", None)
    if file is None or Path(file).resolve() != path:
        raise JobError(
            f"{path}: `{name}` is the name of a module that is loaded already ({file or 'built in'}), which this file would "
            "replace; rename the file"
        )


def _installed(name: str, folder: Path) -> str | None:
    """Where a package that pip installed under this name begins, seen without the job file's own folder."""
    paths = [entry for entry in sys.path if Path(entry).resolve() != folder]
    found = importlib.machinery.PathFinder.find_spec(name, paths)
    origin = found.origin if found is not None else None
    return origin if origin and {"site-packages", "dist-packages"} & set(Path(origin).parts) else None

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
from echelon.job import Job, accepts_arguments, function_location


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
    loaded = getattr(module, name, None)
    if loaded is None:
        candidates = ", ".join(f"{file}:{key}" for key in _find_jobs(module))
        hint = f": write `def {name}(): return echelon.Job(...)`" if name.isidentifier() else ""
        raise JobError(f"{file}: no `{name}` in it{hint}{f'; it has {candidates}' if candidates else ''}")
    return loaded if isinstance(loaded, Job) else make_job(loaded, f"{file}:{name}")


def load_data(spec: str) -> Any:
    """The data set that `file.py:name` names: itself, what a function of that name returns, or the data of a job."""
    file, _, name = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "job")
    path = Path(file)
    if not path.is_file():
        raise JobError(f"{file}: no such file")
    module = _import_file(path)
    if not hasattr(module, name):
        raise JobError(f"{file}: no `{name}` in it; give the name of a data set, or of a function that returns one")
    loaded = getattr(module, name)
    if callable(loaded) and not hasattr(loaded, "__getitem__"):
        _seed_all()
        loaded = loaded()
    return loaded.data if isinstance(loaded, Job) else loaded


def make_job(function: Any, name: str | None = None) -> Job:
    """The job that a function returns, called the same way everywhere: random data that it makes is equal on every rank."""
    name = name or getattr(function, "__name__", type(function).__name__)
    if callable(function):
        if not accepts_arguments(function, 0):
            raise JobError(
                f"{name} takes {inspect.signature(function)} ({function_location(function)}): a job function is called without arguments; "
                "give them defaults"
            )
        _seed_all()
        try:
            result = function()
        except SystemExit as error:
            file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "")
            raise _exit_error(
                error, file, f"while {name} was called; let it return an echelon.Job, or raise"
            ) from error
    else:
        result = function
    if not isinstance(result, Job):
        raise JobError(f"{name} gives {type(result).__name__}, not an echelon.Job")
    return result


#: Not the usual 0, which is the model's: weights must not be drawn from the very numbers that data was made of.
_JOB_SEED = 0xEC4E104


def _seed_all() -> None:
    import random

    import numpy
    import torch

    random.seed(_JOB_SEED)
    numpy.random.seed(_JOB_SEED)
    torch.manual_seed(_JOB_SEED)


def _exit_error(error: SystemExit, file: str, context: str) -> JobError:
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    call = "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"
    return JobError(f"{frame.filename} line {frame.lineno} ended Python ({call}) {context}")


_ENTRY_POINTS = frozenset({"train", "verify", "parallelize"})


def _find_jobs(module: Any) -> list[str]:
    """Names in a job file that could be meant: jobs, and functions without arguments that make one, directly or by another."""
    public_objects = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    job_makers = {key for key, value in public_objects.items() if isinstance(value, Job) or _returns_job(value)}
    own_objects = {
        key: value for key, value in public_objects.items() if getattr(value, "__module__", "") == module.__name__
    }
    called_names = {
        key: frozenset(inspect.unwrap(function).__code__.co_names)
        for key, function in own_objects.items()
        if inspect.isfunction(function)
    }
    job_makers |= {key for key, names in called_names.items() if "Job" in names}
    # What calls a maker and then trains is a script's main part, no job.
    while (
        new_makers := {key for key, names in called_names.items() if names & job_makers and not names & _ENTRY_POINTS}
        - job_makers
    ):
        job_makers |= new_makers
    return [
        key
        for key in public_objects
        if key in job_makers and (isinstance(public_objects[key], Job) or accepts_arguments(public_objects[key], 0))
    ]


def _returns_job(value: Any) -> bool:
    return inspect.isfunction(value) and "Job" in str(inspect.signature(value).return_annotation)


_files_being_read: list[Path] = []


def file_being_read() -> Path | None:
    """The job file that is being read just now: whoever would train then would train in every process that reads it."""
    return _files_being_read[-1] if _files_being_read else None


@contextmanager
def _mark_being_read(path: Path) -> Iterator[None]:
    _files_being_read.append(path)
    try:
        yield
    except SystemExit as error:
        context = "while it was read; put that under if __name__ == '__main__':"
        raise _exit_error(error, str(path), context) from error
    finally:
        _files_being_read.pop()


def _import_file(path: Path) -> Any:
    """Run the file as a module (not as __main__) with its folder importable, as `python file.py` would have it."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path}: not a Python file")
    _require_free_name(path)
    module = importlib.util.module_from_spec(spec)
    setattr(module, _JOB_FILE_MARK, True)
    previous_module = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # so that classes defined there can be found again by name
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    _seed_all()
    try:
        with _mark_being_read(path):
            spec.loader.exec_module(module)
    except BaseException:
        # Half a module must not answer a later import.
        del sys.modules[path.stem]
        if previous_module is not None:
            sys.modules[path.stem] = previous_module
        raise
    return module


#: Set in modules that are job files: one may take another's name, as `job.py` of two folders do.
_JOB_FILE_MARK = "__echelon_job__"


def _require_free_name(path: Path) -> None:
    """Refuse a file whose name is another module's: whoever imports that one would get the job file."""
    name = path.stem
    if name in sys.stdlib_module_names:
        raise JobError(f"{path}: `{name}` is a module of Python's own, which this file would replace; rename the file")
    loaded = sys.modules.get(name)
    if loaded is not None and hasattr(loaded, _JOB_FILE_MARK):
        return
    if loaded is None:
        installed = _find_installed(name, path.parent)
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


def _find_installed(name: str, folder: Path) -> str | None:
    """Where a package that pip installed under this name begins, seen without the job file's own folder."""
    paths = [entry for entry in sys.path if Path(entry).resolve() != folder]
    module_spec = importlib.machinery.PathFinder.find_spec(name, paths)
    origin = module_spec.origin if module_spec is not None else None
    return origin if origin and {"site-packages", "dist-packages"} & set(Path(origin).parts) else None

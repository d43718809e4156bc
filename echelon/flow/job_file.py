"""Load a job from its file, which is run once, the same way in every process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from echelon.errors import JobError
from echelon.job import Job, accepts_arguments, function_location


def load_job(spec: str) -> Job:
    """The job that `file.py` or `file.py:name` describes. `name` is a Job, or a function that returns one."""
    file, name, module = _load_module(spec)
    loaded = getattr(module, name, None)
    if loaded is None:
        candidates = ", ".join(f"{file}:{key}" for key in _find_jobs(module))
        hint = f": write `def {name}(): return echelon.Job(...)`" if name.isidentifier() else ""
        raise JobError(f"{file}: no `{name}` in it{hint}{f'; it has {candidates}' if candidates else ''}")
    return loaded if isinstance(loaded, Job) else make_job(loaded, f"{file}:{name}")


def load_data(spec: str) -> Any:
    """The data set that `file.py:name` names: a data set, a function that returns one, or a job with one."""
    file, name, module = _load_module(spec)
    if not hasattr(module, name):
        raise JobError(f"{file}: no `{name}` in it; give the name of a data set, or of a function that returns one")
    loaded = getattr(module, name)
    if callable(loaded) and not hasattr(loaded, "__getitem__"):
        _seed_all()
        loaded = loaded()
    return loaded.data if isinstance(loaded, Job) else loaded


def _load_module(spec: str) -> tuple[str, str, Any]:
    """The file and the name in `spec`, and the file run as a module."""
    file, _, name = spec.rpartition(":") if ":" in spec and not spec.endswith(".py") else (spec, "", "job")
    path = Path(file)
    if path.is_dir():
        raise JobError(f"{file} is a folder: give a job file in it, as {path / 'job.py'}")
    if not path.is_file():
        raise JobError(f"{file}: no such file")
    if not name:
        raise JobError(f"{spec} names no function after the colon: give {file}, or {file}:name")
    return file, name, _import_file(path)


def make_job(function: Any, name: str | None = None) -> Job:
    """The job that a function returns, called with the same seeds everywhere: random data that it makes is equal on every rank."""
    name = name or getattr(function, "__name__", type(function).__name__)
    if callable(function) and not accepts_arguments(function, 0):
        place = f"{inspect.signature(function)} ({function_location(function)})"
        raise JobError(f"{name} takes {place}: a job function is called without arguments; give them defaults")
    _seed_all()
    try:
        result = function() if callable(function) else function
    except SystemExit as error:
        file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "")
        raise _exit_error(error, file, f"while {name} was called; let it return an echelon.Job, or raise") from error
    if not isinstance(result, Job):
        raise JobError(f"{name} gives {type(result).__name__}, not an echelon.Job")
    return result


#: Not 0, the model's: weights must not be drawn from the numbers that random data was made from.
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
    """Names in a job file that could be meant: jobs, and functions without arguments that make one, directly or through another."""
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    makers = {key for key, value in public.items() if isinstance(value, Job) or _returns_job(value)}
    own = {k: f for k, f in public.items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    called_names = {key: frozenset(inspect.unwrap(function).__code__.co_names) for key, function in own.items()}
    makers |= {key for key, names in called_names.items() if "Job" in names}
    # What calls a maker and then trains is the main part of a script.
    callers = {key: names for key, names in called_names.items() if not names & _ENTRY_POINTS}
    while new_makers := {key for key, names in callers.items() if names & makers} - makers:
        makers |= new_makers
    jobs = {key: value for key, value in public.items() if key in makers}
    return [key for key, value in jobs.items() if isinstance(value, Job) or accepts_arguments(value, 0)]


def _returns_job(value: Any) -> bool:
    return inspect.isfunction(value) and "Job" in str(inspect.signature(value).return_annotation)


_files_being_read: list[Path] = []


def file_being_read() -> Path | None:
    """The job file that is being run now: a training in it would run in every process that reads it."""
    return _files_being_read[-1] if _files_being_read else None


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
    _files_being_read.append(path)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]  # a partial module must not answer a later import
        if previous_module is not None:
            sys.modules[path.stem] = previous_module
        if isinstance(error, SystemExit):
            context = "while it was read; put that under if __name__ == '__main__':"
            raise _exit_error(error, str(path), context) from error
        raise
    finally:
        _files_being_read.pop()
    return module


#: Marks modules that are job files: two may have the same name, as `job.py` in two folders.
_JOB_FILE_MARK = "__echelon_job__"


def _require_free_name(path: Path) -> None:
    """Refuse a file whose name is another module's, which it would replace for all imports."""
    name, loaded = path.stem, sys.modules.get(path.stem)
    owner = None
    if name in sys.stdlib_module_names:
        owner = "a module of Python's own"
    elif loaded is None:
        installed = _find_installed(name, path.parent)
        owner = installed and f"the name of an installed module ({installed})"
    elif not hasattr(loaded, _JOB_FILE_MARK):
        file = getattr(loaded, "__file__", None)
        if file is None or Path(file).resolve() != path:
            owner = f"the name of a module that is loaded already ({file or 'built in'})"
    if owner:
        raise JobError(f"{path}: `{name}` is {owner}, which this file would replace; rename the file")


def _find_installed(name: str, folder: Path) -> str | None:
    """The file of an installed package of this name, without regard to the job file's own folder."""
    paths = [entry for entry in sys.path if Path(entry).resolve() != folder]
    module_spec = importlib.machinery.PathFinder.find_spec(name, paths)
    origin = module_spec.origin if module_spec is not None else None
    return origin if origin and {"site-packages", "dist-packages"} & set(Path(origin).parts) else None

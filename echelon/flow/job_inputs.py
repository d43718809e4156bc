"""Record what a job is made from while its file is run and its function is called.

Files come from Python's audit events, environment variables from `os.environ`, which is watched only while a job is made. Code of
Python itself, of installed packages and of echelon is no input: versions cover it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from echelon.plan.document_cache import user_files
from echelon.plan.input_digests import ABSENT, digest_file, digest_folder, digest_variable, hashed
from echelon.world import WORLD_SIZES, cache_folder

#: So many files and folders are digested by content; a job that opens more (one file per image) is digested by the sizes of the rest.
_FILES, _FOLDERS = 256, 64
#: Parts of the system that no job is made from.
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib", "/run/", "/var/run/")
#: Variables that differ between ranks, launches, shells or machines, or hold secrets.
_PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_SESSION = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "NODE_RANK",
        "NNODES",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HOSTNAME",
        "HOST",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PATH",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "TERM",
        "COLORTERM",
        "LANG",
        "LANGUAGE",
        "COLUMNS",
        "LINES",
        "TMPDIR",
        "TEMP",
        "TMP",
        "DISPLAY",
        "EDITOR",
        "PAGER",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LS_COLORS",
        "MAIL",
        "TZ",
        "NO_COLOR",
        "FORCE_COLOR",
        "CI",
        "TOKENIZERS_PARALLELISM",
    ]
)
_SESSION_PREFIXES = (
    "ECHELON_", "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "NCCL_", "GLOO_", "TORCH", "CUDA_", "NVIDIA_", "HIP_", "ROCR_",
    "SLURM", "PBS_", "OMPI_", "PMI", "PMIX_", "MPI_", "SSH_", "XDG_", "LC_", "DBUS_", "PYTEST", "KUBERNETES_", "VSCODE_", "CONDA_", "GPG_",
    "PIP_", "TMUX", "BASH", "JUPYTER", "JPY_", "TERM_", "WAYLAND_", "WINDOW",
)  # fmt: skip
#: Libraries that read the environment on a user's behalf.
_READERS = frozenset(
    [
        "dotenv",
        "decouple",
        "environs",
        "pydantic_settings",
        "hydra",
        "omegaconf",
        "absl",
        "click",
        "typer",
        "configargparse",
        "jsonargparse",
        "environ",
    ]
)


@dataclass(slots=True)
class Reads:
    """What was read while a job was made, as absolute paths and names of variables."""

    files: dict[str, None] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    variables: dict[str, None] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    #: Variables that hold the number of processes: no input, since a run may go on with another number.
    world_sizes: dict[str, None] = field(default_factory=dict)

    def parts(self, own: Sequence[Path] | None = None) -> dict[str, str]:
        """Every input and its digest. What was written and is gone again was scratch; `own`: so is what was written at all, and what is
        temporary outside these folders."""
        sources = set(map(str, user_files(sys.modules)))
        parts, sizes = {}, []
        for place, path in enumerate(self.files):
            real = os.path.realpath(path)
            if real in sources or Path(path).is_dir() or (own is not None and self._is_scratch(path, own)):
                continue
            if place >= _FILES:
                sizes.append(f"{os.path.basename(path)} {Path(path).stat().st_size if Path(path).exists() else -1}")
                continue
            digest = digest_file(path)
            if digest != ABSENT or not (path in self.written or path.startswith(_temporary())):
                parts[f"file {path}"] = digest
        if sizes:
            parts[f"files {len(sizes)} more"] = hashed("\0".join(sorted(sizes)).encode(errors="surrogatepass"))
        for path in list(self.folders)[:_FOLDERS]:
            if own is not None and self._is_scratch(path, own):
                continue
            digest = digest_folder(path)
            if digest != ABSENT:
                parts[f"folder {path}"] = digest
        parts |= {f"environment {name}": digest_variable(name, os.environ) for name in self.variables}
        return dict(sorted(parts.items()))

    def _is_scratch(self, path: str, own: Sequence[Path]) -> bool:
        temporary = path.startswith(_temporary()) and not any(Path(path).is_relative_to(each) for each in own)
        return temporary or path in self.written


@contextmanager
def recording(reads: Reads) -> Iterator[Reads]:
    """Add to `reads` what this process reads meanwhile."""
    _install()
    _active.append(reads)
    try:
        with _watched_environment(reads):
            yield reads
    finally:
        _active.remove(reads)


@contextmanager
def recording_variables() -> Iterator[set[str]]:
    """The names of environment variables that the user's code reads meanwhile."""
    reads, names = Reads(), set[str]()
    with _watched_environment(reads):
        yield names
    names.update(reads.variables)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Our own reads within a recording."""
    held, _active[:] = list(_active), []
    try:
        yield
    finally:
        _active[:] = held


_active: list[Reads] = []
_installed: list[bool] = []


def _install() -> None:
    """An audit hook cannot be removed: there is one, and it returns at once while nothing is recorded."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or event not in ("open", "os.listdir", "os.scandir"):
        return
    try:
        _note(event, arguments)
    except Exception:  # an exception in a hook would end the user's own call
        return


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    given = arguments[0]
    if given is None:
        given = "."
    if isinstance(given, int):
        return
    path = os.path.abspath(os.fsdecode(given))
    if _ignored(path):
        return
    if event != "open":
        if not _importing(sys._getframe(2)):
            for reads in _active:
                reads.folders.setdefault(path)
        return
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        writes = any(letter in mode for letter in "wax+")
    else:
        writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    for reads in _active:
        if writes:
            reads.written.add(path)
        else:
            reads.files.setdefault(path)


def _importing(frame: Any) -> bool:
    """Whether Python looks for a module or an installed package, which lists every folder of sys.path."""
    while frame is not None and not _reads_for_user(frame.f_code.co_filename):
        if "importlib" in frame.f_code.co_filename or frame.f_code.co_filename.endswith("pkgutil.py"):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1)
def _roots() -> tuple[str, ...]:
    """Folders of Python, installed packages, echelon and caches."""
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {sys.prefix, sys.base_prefix}
    found |= {str(Path(__file__).resolve().parent.parent), str(cache_folder().absolute())}
    return tuple(sorted({str(form) for each in found for form in (Path(each), Path(each).resolve())} - {"/", "/usr"}))


@lru_cache(maxsize=1)
def _home() -> str:
    return os.path.expanduser("~")


def _temporary() -> str:
    return tempfile.gettempdir() + os.sep


def _ignored(path: str) -> bool:
    if path.startswith(_SYSTEM) or path.endswith((".pyc", ".pyi", ".so", ".lock")):
        return True
    if "site-packages" in path or "/.git/" in path or "/__pycache__" in path or "torchinductor" in path:
        return True
    home = _home()
    if home != "/" and path.startswith(f"{home}/."):  # caches and settings of other programs
        return True
    return any(path == root or path.startswith(root + os.sep) for root in _roots())


@contextmanager
def _watched_environment(reads: Reads) -> Iterator[None]:
    kind: Any = type(os.environ)
    usual = kind.__getitem__

    def read(environment: Any, key: Any) -> Any:
        name = os.fsdecode(key) if isinstance(key, str | bytes) else ""
        if name and (name in WORLD_SIZES or not _of_session(name)) and _users(sys._getframe(1)):
            (reads.world_sizes if name in WORLD_SIZES else reads.variables).setdefault(name)
        return usual(environment, key)

    kind.__getitem__ = read
    try:
        yield
    finally:
        kind.__getitem__ = usual


def _of_session(name: str) -> bool:
    return name in _SESSION or name.startswith(_SESSION_PREFIXES) or any(word in name.upper() for word in _PRIVATE)


def _users(frame: Any) -> bool:
    """Whether the user's code reads, directly or through a library that reads settings."""
    while frame is not None and frame.f_code.co_filename in _THROUGH:
        frame = frame.f_back
    return frame is not None and _reads_for_user(frame.f_code.co_filename)


_THROUGH = frozenset({"<frozen os>", "<frozen _collections_abc>", os.__file__})


@lru_cache(maxsize=1024)
def _reads_for_user(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    if file.startswith("<"):
        return True
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in _READERS
    path = os.path.abspath(file)
    return not any(path.startswith(root + os.sep) for root in _roots())


def readable(parts: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """The same with paths relative to the job's folder where they are in it: equal wherever the job lies."""
    return {_short(name, folder): digest for name, digest in parts.items()}


def _short(name: str, folder: Path | None) -> str:
    kind, _, path = name.partition(" ")
    if folder is None or kind not in ("file", "folder", "source") or not Path(path).is_absolute():
        return name
    for form in (folder, folder.resolve()):
        if Path(path).is_relative_to(form):
            return f"{kind} {Path(path).relative_to(form)}"
    return name

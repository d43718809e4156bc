"""Record what is read while a job's file is run and its function is called.

Files come from Python's audit events, environment variables from `os.environ`, which is watched only while a job is made. Code of
Python, of installed packages and of echelon is no input: versions cover it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from echelon.plan.document_cache import user_source_files
from echelon.plan.input_digests import ABSENT, digest_file, digest_folder, digest_variable, hash_bytes
from echelon.world import WORLD_SIZE_VARIABLES, cache_folder

#: Files and folders that are digested by content; of a job that opens more (one file per image), the others are by size.
_MAX_FILES, _MAX_FOLDERS = 256, 64
#: System paths, which are no inputs.
_SYSTEM_PREFIXES = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib", "/run/", "/var/run/")
#: Variables that differ between ranks, launches, shells or machines, or hold secrets.
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_SESSION_VARIABLES = frozenset(
    """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME NODE_RANK
    NNODES MASTER_ADDR MASTER_PORT HOSTNAME HOST HOME USER LOGNAME SHELL PATH PWD OLDPWD SHLVL _ TERM COLORTERM LANG
    LANGUAGE COLUMNS LINES TMPDIR TEMP TMP DISPLAY EDITOR PAGER VIRTUAL_ENV LD_LIBRARY_PATH LD_PRELOAD LS_COLORS MAIL TZ
    NO_COLOR FORCE_COLOR CI TOKENIZERS_PARALLELISM
    """.split()  # noqa: SIM905
)
_SESSION_PREFIXES = (
    "ECHELON_", "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "NCCL_", "GLOO_", "TORCH", "CUDA_", "NVIDIA_", "HIP_", "ROCR_",
    "SLURM", "PBS_", "OMPI_", "PMI", "PMIX_", "MPI_", "SSH_", "XDG_", "LC_", "DBUS_", "PYTEST", "KUBERNETES_", "VSCODE_", "CONDA_", "GPG_",
    "PIP_", "TMUX", "BASH", "JUPYTER", "JPY_", "TERM_", "WAYLAND_", "WINDOW",
)  # fmt: skip
#: Libraries that read the environment on a user's behalf.
_SETTINGS_LIBRARIES = {
    "dotenv", "decouple", "environs", "pydantic_settings", "hydra", "omegaconf", "absl", "click", "typer", "configargparse",
    "jsonargparse", "environ",
}  # fmt: skip
#: Kinds of inputs that are named by a path.
_PATH_KINDS = ("file", "folder", "source")


@dataclass(slots=True)
class RecordedInputs:
    """What was read while a job was made, as absolute paths and names of variables."""

    files: dict[str, None] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    variables: dict[str, None] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    #: Variables that hold the number of processes: no input, since a run may be resumed with another number.
    world_sizes: dict[str, None] = field(default_factory=dict)

    def digest_inputs(self, own_folders: Sequence[Path] | None = None) -> dict[str, str]:
        """The digest of every input. What was written and is gone was scratch; with `own_folders`, so is everything written, and what is
        temporary outside these folders."""
        sources = set(map(str, user_source_files(sys.modules)))
        digests, sizes = {}, []
        for position, path in enumerate(self.files):
            if os.path.realpath(path) in sources or Path(path).is_dir() or self._is_scratch(path, own_folders):
                continue
            if position >= _MAX_FILES:
                sizes.append(f"{os.path.basename(path)} {Path(path).stat().st_size if Path(path).exists() else -1}")
                continue
            digest = digest_file(path)
            if digest != ABSENT or not (path in self.written or path.startswith(_temp_prefix())):
                digests[f"file {path}"] = digest
        if sizes:
            digests[f"files {len(sizes)} more"] = hash_bytes("\0".join(sorted(sizes)).encode(errors="surrogatepass"))
        for path in list(self.folders)[:_MAX_FOLDERS]:
            if not self._is_scratch(path, own_folders) and (digest := digest_folder(path)) != ABSENT:
                digests[f"folder {path}"] = digest
        digests |= {f"environment {name}": digest_variable(name, os.environ) for name in self.variables}
        return dict(sorted(digests.items()))

    def _is_scratch(self, path: str, own_folders: Sequence[Path] | None) -> bool:
        if own_folders is None:
            return False
        is_own = any(Path(path).is_relative_to(folder) for folder in own_folders)
        return path in self.written or (path.startswith(_temp_prefix()) and not is_own)


@contextmanager
def record_inputs(recorded: RecordedInputs) -> Iterator[RecordedInputs]:
    """Add to `recorded` what this process reads meanwhile."""
    _install_hook()
    _active_records.append(recorded)
    try:
        with _watch_environment(recorded):
            yield recorded
    finally:
        _active_records.remove(recorded)


@contextmanager
def record_variables() -> Iterator[set[str]]:
    """Yield a set to which the names of environment variables that the user's code reads meanwhile are added at the end."""
    recorded, names = RecordedInputs(), set[str]()
    with _watch_environment(recorded):
        yield names
    names.update(recorded.variables)


_active_records: list[RecordedInputs] = []


@cache
def _install_hook() -> None:
    """Once: an audit hook cannot be removed. It returns at once while nothing is recorded."""
    sys.addaudithook(_audit_hook)


def _audit_hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active_records and event in ("open", "os.listdir", "os.scandir"):
        with suppress(Exception):  # an exception in a hook would end the user's own call
            _record_event(event, arguments)


def _record_event(event: str, arguments: tuple[Any, ...]) -> None:
    target = "." if arguments[0] is None else arguments[0]
    path = "" if isinstance(target, int) else os.path.abspath(os.fsdecode(target))
    if not path or _is_ignored(path):
        return
    if event != "open":
        if not _is_import(sys._getframe(2)):
            for recorded in _active_records:
                recorded.folders.setdefault(path)
        return
    _, mode, flags = arguments
    is_write = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if isinstance(mode, str):
        is_write = bool(set("wax+") & set(mode))
    for recorded in _active_records:
        if is_write:
            recorded.written.add(path)
        else:
            recorded.files.setdefault(path)


def _is_import(frame: Any) -> bool:
    """Whether Python searches sys.path for a module or an installed package."""
    while frame is not None and not _is_user_file(file := frame.f_code.co_filename):
        if "importlib" in file or file.endswith("pkgutil.py"):
            return True
        frame = frame.f_back
    return False


@cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {sys.prefix, sys.base_prefix}
    folders |= {str(Path(__file__).resolve().parent.parent), str(cache_folder().absolute())}
    variants = {str(variant) for folder in folders for variant in (Path(folder), Path(folder).resolve())}
    return tuple(sorted(variants - {"/", "/usr"}))


def _temp_prefix() -> str:
    return tempfile.gettempdir() + os.sep


def _is_ignored(path: str) -> bool:
    if path.startswith(_SYSTEM_PREFIXES) or path.endswith((".pyc", ".pyi", ".so", ".lock")):
        return True
    if "site-packages" in path or "/.git/" in path or "/__pycache__" in path or "torchinductor" in path:
        return True
    home = os.path.expanduser("~")
    if home != "/" and path.startswith(f"{home}/."):  # caches and settings of other programs
        return True
    return any(path == root or path.startswith(root + os.sep) for root in _library_roots())


@contextmanager
def _watch_environment(recorded: RecordedInputs) -> Iterator[None]:
    environ_type: Any = type(os.environ)
    original_getitem = environ_type.__getitem__

    def recording_getitem(environment: Any, key: Any) -> Any:
        name = os.fsdecode(key) if isinstance(key, str | bytes) else ""
        is_size = name in WORLD_SIZE_VARIABLES
        if name and (is_size or not _is_session_variable(name)) and _is_user_read(sys._getframe(1)):
            (recorded.world_sizes if is_size else recorded.variables).setdefault(name)
        return original_getitem(environment, key)

    environ_type.__getitem__ = recording_getitem
    try:
        yield
    finally:
        environ_type.__getitem__ = original_getitem


def _is_session_variable(name: str) -> bool:
    is_secret = any(word in name.upper() for word in _SECRET_WORDS)
    return is_secret or name in _SESSION_VARIABLES or name.startswith(_SESSION_PREFIXES)


def _is_user_read(frame: Any) -> bool:
    """Whether the user's code reads, directly or through a library for settings."""
    while frame is not None and frame.f_code.co_filename in _STDLIB_READERS:
        frame = frame.f_back
    return frame is not None and _is_user_file(frame.f_code.co_filename)


_STDLIB_READERS = frozenset({"<frozen os>", "<frozen _collections_abc>", os.__file__})


@lru_cache(maxsize=1024)
def _is_user_file(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith("<frozen")
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in _SETTINGS_LIBRARIES
    path = os.path.abspath(file)
    return not any(path.startswith(root + os.sep) for root in _library_roots())


def relative_names(digests: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """`digests` with names relative to the job's folder for paths in it: equal wherever the job lies."""
    folders = [] if folder is None else [folder, folder.resolve()]

    def relative(name: str) -> str:
        kind, _, path = name.partition(" ")
        parent = next((parent for parent in folders if Path(path).is_relative_to(parent)), None)
        return name if parent is None or kind not in _PATH_KINDS else f"{kind} {Path(path).relative_to(parent)}"

    return {relative(name): digest for name, digest in digests.items()}

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

from echelon.plan.document_cache import user_source_files
from echelon.plan.input_digests import ABSENT, digest_file, digest_folder, digest_variable, hash_bytes
from echelon.world import WORLD_SIZE_VARIABLES, cache_folder

#: So many files and folders are digested by content; a job that opens more (one file per image) is digested by the sizes of the rest.
_MAX_FILES, _MAX_FOLDERS = 256, 64
#: Parts of the system that no job is made from.
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
_SETTINGS_LIBRARIES = frozenset(
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
class RecordedInputs:
    """What was read while a job was made, as absolute paths and names of variables."""

    files: dict[str, None] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    variables: dict[str, None] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    #: Variables that hold the number of processes: no input, since a run may go on with another number.
    world_sizes: dict[str, None] = field(default_factory=dict)

    def digest_inputs(self, own_folders: Sequence[Path] | None = None) -> dict[str, str]:
        """Every input and its digest. What was written and is gone again was scratch; `own_folders`: so is what was written at all, and what is
        temporary outside these folders."""
        sources = set(map(str, user_source_files(sys.modules)))
        digests, sizes = {}, []
        for position, path in enumerate(self.files):
            real_path = os.path.realpath(path)
            if (
                real_path in sources
                or Path(path).is_dir()
                or (own_folders is not None and self._is_scratch(path, own_folders))
            ):
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
            if own_folders is not None and self._is_scratch(path, own_folders):
                continue
            digest = digest_folder(path)
            if digest != ABSENT:
                digests[f"folder {path}"] = digest
        digests |= {f"environment {name}": digest_variable(name, os.environ) for name in self.variables}
        return dict(sorted(digests.items()))

    def _is_scratch(self, path: str, own_folders: Sequence[Path]) -> bool:
        is_temporary = path.startswith(_temp_prefix()) and not any(
            Path(path).is_relative_to(folder) for folder in own_folders
        )
        return is_temporary or path in self.written


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
    """The names of environment variables that the user's code reads meanwhile."""
    recorded, names = RecordedInputs(), set[str]()
    with _watch_environment(recorded):
        yield names
    names.update(recorded.variables)


_active_records: list[RecordedInputs] = []
_hook_installed: list[bool] = []


def _install_hook() -> None:
    """An audit hook cannot be removed: there is one, and it returns at once while nothing is recorded."""
    if not _hook_installed:
        _hook_installed.append(True)
        sys.addaudithook(_audit_hook)


def _audit_hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active_records or event not in ("open", "os.listdir", "os.scandir"):
        return
    try:
        _record_event(event, arguments)
    except Exception:  # an exception in a hook would end the user's own call
        return


def _record_event(event: str, arguments: tuple[Any, ...]) -> None:
    target = arguments[0]
    if target is None:
        target = "."
    if isinstance(target, int):
        return
    path = os.path.abspath(os.fsdecode(target))
    if _is_ignored(path):
        return
    if event != "open":
        if not _is_import(sys._getframe(2)):
            for recorded in _active_records:
                recorded.folders.setdefault(path)
        return
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        is_write = any(letter in mode for letter in "wax+")
    else:
        is_write = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    for recorded in _active_records:
        if is_write:
            recorded.written.add(path)
        else:
            recorded.files.setdefault(path)


def _is_import(frame: Any) -> bool:
    """Whether Python looks for a module or an installed package, which lists every folder of sys.path."""
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        if "importlib" in frame.f_code.co_filename or frame.f_code.co_filename.endswith("pkgutil.py"):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1)
def _library_roots() -> tuple[str, ...]:
    """Folders of Python, installed packages, echelon and caches."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {sys.prefix, sys.base_prefix}
    folders |= {str(Path(__file__).resolve().parent.parent), str(cache_folder().absolute())}
    return tuple(
        sorted(
            {str(variant) for folder in folders for variant in (Path(folder), Path(folder).resolve())} - {"/", "/usr"}
        )
    )


@lru_cache(maxsize=1)
def _home_folder() -> str:
    return os.path.expanduser("~")


def _temp_prefix() -> str:
    return tempfile.gettempdir() + os.sep


def _is_ignored(path: str) -> bool:
    if path.startswith(_SYSTEM_PREFIXES) or path.endswith((".pyc", ".pyi", ".so", ".lock")):
        return True
    if "site-packages" in path or "/.git/" in path or "/__pycache__" in path or "torchinductor" in path:
        return True
    home = _home_folder()
    if home != "/" and path.startswith(f"{home}/."):  # caches and settings of other programs
        return True
    return any(path == root or path.startswith(root + os.sep) for root in _library_roots())


@contextmanager
def _watch_environment(recorded: RecordedInputs) -> Iterator[None]:
    environ_type: Any = type(os.environ)
    original_getitem = environ_type.__getitem__

    def recording_getitem(environment: Any, key: Any) -> Any:
        name = os.fsdecode(key) if isinstance(key, str | bytes) else ""
        if (
            name
            and (name in WORLD_SIZE_VARIABLES or not _is_session_variable(name))
            and _is_user_read(sys._getframe(1))
        ):
            (recorded.world_sizes if name in WORLD_SIZE_VARIABLES else recorded.variables).setdefault(name)
        return original_getitem(environment, key)

    environ_type.__getitem__ = recording_getitem
    try:
        yield
    finally:
        environ_type.__getitem__ = original_getitem


def _is_session_variable(name: str) -> bool:
    return (
        name in _SESSION_VARIABLES
        or name.startswith(_SESSION_PREFIXES)
        or any(word in name.upper() for word in _SECRET_WORDS)
    )


def _is_user_read(frame: Any) -> bool:
    """Whether the user's code reads, directly or through a library that reads settings."""
    while frame is not None and frame.f_code.co_filename in _STDLIB_READERS:
        frame = frame.f_back
    return frame is not None and _is_user_file(frame.f_code.co_filename)


_STDLIB_READERS = frozenset({"<frozen os>", "<frozen _collections_abc>", os.__file__})


@lru_cache(maxsize=1024)
def _is_user_file(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    if file.startswith("<"):
        return True
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in _SETTINGS_LIBRARIES
    path = os.path.abspath(file)
    return not any(path.startswith(root + os.sep) for root in _library_roots())


def relative_names(digests: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """The same with paths relative to the job's folder where they are in it: equal wherever the job lies."""
    return {_relative_name(name, folder): digest for name, digest in digests.items()}


def _relative_name(name: str, folder: Path | None) -> str:
    kind, _, path = name.partition(" ")
    if folder is None or kind not in ("file", "folder", "source") or not Path(path).is_absolute():
        return name
    for variant in (folder, folder.resolve()):
        if Path(path).is_relative_to(variant):
            return f"{kind} {Path(path).relative_to(variant)}"
    return name

"""The command as a whole: quick, light, and honest about errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.errors import EchelonError, LaunchError

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def verbs() -> dict[str, object]:
    """Every verb with its parameters, those of groups as `group verb`."""
    found = {}
    for name, command in get_command(app).commands.items():
        if command.hidden:
            continue
        inner = getattr(command, "commands", None)
        found.update({f"{name} {each}": part for each, part in inner.items()} if inner else {name: command})
    return found


@pytest.mark.parametrize(
    "statement", ["import echelon", "from echelon.cli.app import app", "import echelon.flow.train"]
)
def test_torch_is_not_imported_before_it_is_needed(statement: str) -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'matplotlib', 'rich'}"
    code = f"{statement}; import sys; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_help_is_answered_without_torch() -> None:
    code = "import sys; from echelon.cli.app import main; sys.argv = ['echelon', '--help']\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_help_json_and_debug(verb: str) -> None:
    answer = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert answer.exit_code == 0
    for option in ("--json", "--debug", "--help"):
        assert option in answer.output


def test_the_documentation_names_every_verb_and_option() -> None:
    text = DOCS.read_text()
    missing = [verb for verb in verbs() if f"echelon {verb}" not in text]
    for verb, command in verbs().items():
        options = [option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)]  # type: ignore[attr-defined]
        missing += [f"{verb} {option}" for option in options if option.startswith("--") and option not in text]
    assert not missing


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["train"],
        ["train", "x.py", "--keep", "many"],
        ["simulate", "x.py"],
        ["verify", "x.py", "--steps", "0"],
    ],
)
def test_wrong_use_is_exit_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_the_former_name_of_server_start_says_where_it_went() -> None:
    answer = CliRunner().invoke(app, ["serve", "--servers", "2", "--folder", "x"])
    assert (answer.exit_code, answer.stderr) == (
        2,
        "error: `echelon serve` is now `echelon server start`, with the same options\n",
    )


@pytest.mark.parametrize(("error", "code"), [(EchelonError("this, not that"), 2), (LaunchError("rank 1 died"), 1)])
def test_our_errors_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: EchelonError, code: int
) -> None:
    monkeypatch.setattr("echelon.observer.write_report", _raiser(error))
    answer = CliRunner().invoke(app, ["report", "runs/x"])
    assert (answer.exit_code, answer.stderr) == (code, f"error: {error}\n")


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    error = EchelonError("this, not that")
    monkeypatch.setattr("echelon.observer.write_report", _raiser(error))
    assert CliRunner().invoke(app, ["report", "runs/x", "--debug"]).exception is error


def test_an_error_in_the_users_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def job():\n    return missing + 1\n")
    answer = CliRunner().invoke(app, ["simulate", str(file), "--plan", "dp=1"])
    assert answer.exit_code == 1
    assert f"{file}, line 2: NameError: name 'missing' is not defined" in answer.stderr
    assert "Traceback" not in answer.stderr


def _raiser(error: Exception) -> object:
    def fail(*_: object) -> None:
        raise error

    return fail

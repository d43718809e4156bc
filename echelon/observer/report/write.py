"""Render the report: one page per run that needs nothing but a browser."""

from __future__ import annotations

import re
import time
from pathlib import Path

from echelon.errors import EchelonError
from echelon.files import atomic_write
from echelon.observer.report.contents import collect_contents
from echelon.observer.run_reader import read_run
from echelon.plan import format_units


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path. Works for running and killed runs too."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    record = read_run(folder)
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )  # fmt: skip
    environment.globals["units"] = format_units
    environment.filters["date"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    # "3 min 20 s" -> "3", "min", " 20", "s", ""
    environment.filters["split_units"] = lambda text: re.split(r"(?<=\d) ([^\d\s]\S*)", text)
    page = environment.get_template("report.html.j2").render(collect_contents(record), now=time.time())
    path = record.folder / "report.html"
    try:
        atomic_write(path, page)
    except OSError as error:
        remedy = "make the folder writable, or copy the run to one that is"
        raise EchelonError(f"{path}: cannot be written ({error.strerror}); {remedy}") from error
    return path

"""The report: one page per run that needs nothing but a browser."""

from __future__ import annotations

import time
from pathlib import Path

from echelon.errors import EchelonError
from echelon.observer.report import about_run, training_sections
from echelon.observer.report.page import render_page
from echelon.observer.run_reader import read_run


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path. A run that still goes on, or was killed, has a report too."""
    record = read_run(folder)
    body = "\n".join(
        (
            about_run.header(record),
            training_sections.summary_tiles(record),
            training_sections.curves_section(record),
            training_sections.forecast_section(record),
            training_sections.time_section(record),
            about_run.plan_section(record),
            about_run.machine_section(record),
            about_run.checkpoints_section(record),
            about_run.warnings_section(record),
            about_run.repeat_section(record),
            f"<footer>Written by echelon, {about_run.format_time(time.time())}. This page needs no network.</footer>",
        )
    )
    path = record.folder / "report.html"
    partial = path.with_name("report.html.partial")
    try:
        partial.write_text(
            render_page(f"{record.start.get('job') or record.folder.name}: training run", body), encoding="utf-8"
        )
        partial.replace(path)
    except OSError as error:
        raise EchelonError(
            f"{path}: cannot be written ({error.strerror}); make the folder writable, or copy the run to one that is"
        ) from error
    return path

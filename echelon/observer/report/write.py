"""The report: one page per run that needs nothing but a browser."""

from __future__ import annotations

import time
from pathlib import Path

from echelon.errors import EchelonError
from echelon.observer.report import about_run, training_sections
from echelon.observer.report.page import page
from echelon.observer.run_reader import read_record


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path. A run that still goes on, or was killed, has a report too."""
    record = read_record(folder)
    body = "\n".join(
        (
            about_run.header(record),
            training_sections.summary(record),
            training_sections.curves(record),
            training_sections.against_forecast(record),
            training_sections.times(record),
            about_run.plan(record),
            about_run.machine(record),
            about_run.checkpoints(record),
            about_run.warnings(record),
            about_run.repeat(record),
            f"<footer>Written by echelon, {about_run.moment(time.time())}. This page needs no network.</footer>",
        )
    )
    path = record.folder / "report.html"
    partial = path.with_name("report.html.partial")
    try:
        partial.write_text(
            page(f"{record.start.get('job') or record.folder.name}: training run", body), encoding="utf-8"
        )
        partial.replace(path)
    except OSError as error:
        raise EchelonError(
            f"{path}: cannot be written ({error.strerror}); make the folder writable, or copy the run to one that is"
        ) from error
    return path

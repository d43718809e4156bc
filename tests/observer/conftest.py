"""A run folder as a training leaves it: events through the real listeners, documents through the real codec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.observer.event_log import EventLog
from echelon.observer.tensorboard import TensorBoardWriter

from .runs import STEPS_PER_EPOCH, cluster, forecast, plan, training


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder: `run_folder(last=400, total=400)`; the documents are written unless `documents=False`."""

    def make(*, last: int = 400, total: int = 400, end: str | None = "finished", documents: bool = True) -> Path:
        folder = tmp_path / "runs" / "digits"
        listeners: tuple[EventLog, TensorBoardWriter] = (EventLog(folder), TensorBoardWriter(folder))
        for event in training(last=last, total=total, end=end):
            for listener in listeners:
                listener(event)
        for listener in listeners:
            listener.close()
        if documents:
            for document in (plan(), forecast(), cluster()):
                document.save(folder / f"{document.KIND}.json")
        for checkpoint in sorted(range(STEPS_PER_EPOCH, last + 1, STEPS_PER_EPOCH))[-3:]:
            (folder / "checkpoints" / f"step-{checkpoint:08d}").mkdir(parents=True)
        return folder

    return make

"""The trained model comes out of a run as one file that plain PyTorch reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.engine.run import Run
from echelon.flow.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.world import World
from tests.engine.jobs import mlp

States = dict[int, dict[str, torch.Tensor]]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, States]:
    """A run's folder with two checkpoints, the first of which is the best; and the model at each."""
    folder, states = tmp_path / "runs" / "mlp", dict[int, dict[str, torch.Tensor]]()
    checkpoints = folder / "checkpoints"
    with Run(mlp(), Plan(), World()) as training:
        for batch in training.batches(3):
            training.step(batch)
            if training.step_number in (2, 3):
                training.save(checkpoints / f"step-{training.step_number:08d}")
                states[training.step_number] = {k: v.clone() for k, v in training.model.state_dict().items()}
    RunFolder(folder, keep=3).write_best(checkpoints / "step-00000002", 0.5, evaluation_digest="")
    return folder, states


def export(*arguments: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, ["export", *arguments])
    return answer.exit_code, answer.output


@pytest.mark.parametrize(
    ("what", "options", "step"), [("", (), 3), ("", ("--best",), 2), ("checkpoints/step-00000002", (), 2)]
)
def test_the_model_comes_out(
    run: tuple[Path, States], tmp_path: Path, what: str, options: tuple[str, ...], step: int
) -> None:
    out = tmp_path / "model.safetensors"
    code, text = export(str(run[0] / what), str(out), *options, "--json")
    answer = json.loads(text)
    assert (code, answer["step"], answer["bytes"]) == (0, step, out.stat().st_size)
    plain = mlp().model()
    plain.load_state_dict(load_file(out))
    assert all(torch.equal(value, run[1][step][name].cpu()) for name, value in plain.state_dict().items())
    assert f"tensors of step {step}" in export(str(run[0] / what), str(out), *options)[1]


def test_what_cannot_be_exported_is_wrong_use(run: tuple[Path, States], tmp_path: Path) -> None:
    out = str(tmp_path / "model.safetensors")
    assert "no such folder; give a run" in export(str(tmp_path / "absent"), out)[1]
    assert "a folder without a checkpoint" in export(str(tmp_path), out)[1]
    assert "ends in .safetensors" in export(str(run[0]), str(tmp_path / "model.pt"))[1]
    assert "could not be written" in export(str(run[0]), str(tmp_path / "absent" / "model.safetensors"))[1]
    (run[0] / "checkpoints" / "best.json").unlink()
    assert "no checkpoint was evaluated" in export(str(run[0]), out, "--best")[1]
    data = next((run[0] / "checkpoints" / "step-00000003").glob("*.bin"))
    data.write_bytes(data.read_bytes()[:-9])
    code, text = export(str(run[0]), out)
    assert code == 2
    assert "cut short" in text
    assert not Path(out).exists()

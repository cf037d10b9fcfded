import json
from pathlib import Path

import numpy as np
import pytest

from llmtrain.report.curves import read_curve, read_settings
from llmtrain.storage.errors import BadData, InputMissing, UsageError
from tests.report.runs import write_run


def write(folder: Path, *lines: dict) -> Path:
    folder.mkdir()
    text = "".join(json.dumps({"attempt": 1, "tokens": 10 * line["step"], **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
    return folder


def test_compiling_and_pauses_between_attempts_are_no_training_time(tmp_path: Path):
    def line(step: int, step_ms: float, attempt: int = 1) -> dict:
        return {"kind": "train", "step": step, "step_ms": step_ms, "lm_loss": 3.0, "attempt": attempt}

    first = [line(1, 30_000), line(10, 100), line(20, 100)]
    run = write(tmp_path / "run", *first, line(21, 9000, attempt=2), line(30, 200, attempt=2))
    curve = read_curve(run)
    assert curve.tokens.tolist() == [10, 100, 200, 210, 300]
    # The median of the five is 200 ms; it stands in for the first line of either attempt.
    assert curve.seconds == pytest.approx([0.2, 1.1, 2.1, 2.3, 4.1])


def test_what_is_not_finite_or_torn_is_left_out(tmp_path: Path):
    lines = [{"kind": "train", "step": s, "step_ms": 1.0, "lm_loss": x} for s, x in ((1, 5.0), (2, None), (3, 4.0))]
    assert read_curve(write(tmp_path / "run", *lines)).losses.tolist() == [5.0, 4.0]
    with pytest.raises(BadData, match="no lm_loss in it is a finite number"):
        read_curve(write(tmp_path / "nan", lines[1]))
    with pytest.raises(BadData, match="has no train lines"):
        read_curve(write(tmp_path / "none"))
    with pytest.raises(InputMissing, match="name a run directory"):
        read_curve(tmp_path / "nowhere")


def test_held_out_losses_lie_at_their_step_and_time(tmp_path: Path):
    run = write_run(tmp_path / "run", np.linspace(5, 4, 100))
    curve = read_curve(run, "val_loss")
    assert curve.steps.tolist() == [50, 100] and curve.losses[-1] == pytest.approx(4.1)
    assert curve.seconds == pytest.approx([5.0, 10.0])
    with pytest.raises(UsageError, match="held-out sources are held: name one with --source"):
        read_curve(run, "val_loss", "other")


def test_settings_are_named_by_their_table(tmp_path: Path):
    run = write_run(tmp_path / "run", np.ones(2), optimizer="muon", seed=3)
    assert read_settings(run) == {"optimizer.name": "muon", "run.run_dir": str(run), "run.seed": 3}
    assert read_settings(tmp_path) == {}
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(BadData, match="is not TOML"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ["optimizer = 1", "[[optimizer]]\na = 1", "a = " + "[" * 5000, "a = " + "9" * 5000])
def test_a_configuration_that_is_none_is_said(text: str, tmp_path: Path):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(BadData, match="config.toml: .*: correct it"):
        read_settings(tmp_path)

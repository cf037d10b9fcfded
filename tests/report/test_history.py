import json
import math

import numpy as np
import pytest

from llmtrain.report import history
from llmtrain.report.curves import read_curve
from llmtrain.report.history import read_history
from llmtrain.storage.errors import InputMissing
from tests.report.logged import event, train_lines, write_log


def test_figures_become_columns_in_the_order_of_steps(tmp_path):
    run = write_log(tmp_path / "run", train_lines(100))
    train = read_history(run).train
    assert train.steps.tolist() == [1, *range(10, 101, 10)]
    assert len(train.columns["lm_loss"]) == len(train) == 11
    curve = read_curve(run)
    assert curve.steps.tolist() == train.steps.tolist() and np.allclose(curve.seconds, train.seconds)


def test_what_a_line_lacks_or_says_not_finite_is_nan(tmp_path):
    lines = [
        {"kind": "train", "step": 1, "tokens": 1, "lm_loss": 3.0},
        {"kind": "train", "step": 2, "tokens": 2, "lm_loss": None, "grad_norm": 1.0},
        {"kind": "train", "step": 3, "tokens": 3, "lm_loss": math.inf, "note": "words", "flag": True},
    ]
    train = read_history(write_log(tmp_path / "run", lines)).train
    np.testing.assert_array_equal(train.columns["lm_loss"], [3.0, np.nan, np.nan])
    np.testing.assert_array_equal(train.columns["grad_norm"], [np.nan, 1.0, np.nan])
    assert set(train.columns) == {"lm_loss", "grad_norm"}


def test_steps_that_come_again_count_as_they_came_last(tmp_path):
    losses = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 5.0)]
    lines = [{"kind": "train", "step": step, "tokens": step, "lm_loss": loss} for step, loss in losses]
    train = read_history(write_log(tmp_path / "run", lines)).train
    assert train.steps.tolist() == [1, 2, 3] and train.columns["lm_loss"].tolist() == [9.0, 5.0, 7.0]


def test_damage_is_passed_over(tmp_path):
    run = write_log(tmp_path / "run", train_lines(30))
    odd = [
        "not json", "[1, 2]", '{"kind": "train"}', '{"kind": "train", "step": "5", "tokens": 1}',
        '{"kind": "train", "step": -1, "tokens": 1}', f'{{"kind": "train", "step": {1 << 80}, "tokens": 1}}',
        '{"kind": "train", "step": true, "tokens": 1}', '{"kind": "eval", "step": 5, "tokens": 1, "source": [1]}',
        '{"kind": "other", "step": 5, "tokens": 1}', '{"kind": "event", "step": 5, "tokens": 1, "event": {"a": 1}}',
    ]  # fmt: skip
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n".join(odd) + '\n{"kind": "train", "step": 40, "tok')
    found = read_history(run)
    assert found.train.steps.tolist() == [1, 10, 20, 30] and not found.evals


def test_events_are_bounded_and_counted(tmp_path):
    lines = [event(step, "checkpoint", f"saved {step}") for step in range(1, 2001)]
    saves = read_history(write_log(tmp_path / "run", lines)).events["checkpoint"]
    assert saves.count == 2000 and len(saves.kept) == 2 * history.OF_A_KIND
    assert saves.kept[0]["step"] == 1 and saves.kept[-1]["step"] == 2000


def test_no_log_takes_more_columns_than_there_can_be(tmp_path):
    lines = [{"kind": "train", "step": s, "tokens": s, f"x{s}": 1.0} for s in range(1, 500)]
    lines += [{"kind": "eval", "step": s, "tokens": s, "source": f"x{s}", "val_loss": 1.0} for s in range(500)]
    found = read_history(write_log(tmp_path / "run", lines))
    assert len(found.train.columns) == len(found.evals) == history.MOST_COLUMNS
    assert all(len(column) == 499 for column in found.train.columns.values())


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(InputMissing, match="name a run directory"):
        read_history(tmp_path)


def test_a_run_that_died_before_its_first_line_is_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert len(read_history(tmp_path).train) == 0
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event(0, "start", "starts")) + "\n")
    assert read_history(tmp_path).events["start"].count == 1

"""Runs whose numbers go wrong: what is skipped, what stops the run, and what it leaves."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmtrain.cli.main import run as main
from llmtrain.storage.errors import Diverged, StopRequested
from llmtrain.training import checkpoint, run
from tests.training.conftest import config
from tests.training.runs import events, lines, state, tensors_of

NAN = float("nan")


def counts(run_dir: Path, step: int) -> dict:
    return state(run_dir, step)["optimizer"]


def spoil(monkeypatch: pytest.MonkeyPatch, what: str, steps: range, stop_after: int = 0) -> None:
    """The sums, gradients or, once updated, weights of these steps become NaN; a signal comes in step `stop_after`."""
    update = run.start.TrainStep.optimizer_step

    def spoiled(self, lr):
        step = int(self.optimizer.count + self.optimizer.skipped) + 1
        if step in steps:
            if what == "gradients":
                self.flat.grad[7] = NAN
            elif what != "weights":
                self.sums[["lm_loss", "aux_loss"].index(what)] = NAN
        update(self, lr)
        if what == "weights" and step in steps:
            self.flat.master[0] = NAN
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run.start.TrainStep, "optimizer_step", spoiled)


@pytest.mark.parametrize("what", ["lm_loss", "aux_loss", "gradients"])
def test_a_step_that_is_not_finite_is_skipped_counted_and_named(what, corpus, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, what, range(5, 7))
    run.train(config(corpus, tmp_path / "run", run={"log_every": 4, "checkpoint_every": 4}), resume=False)
    assert counts(tmp_path / "run", 12) == {"count": 10, "skipped": 2, "skipped_in_a_row": 0}
    assert [x["skipped"] for x in lines(tmp_path / "run", "train")] == [0, 0, 2, 2]
    (event,) = events(tmp_path / "run", "skipped")
    assert (event["step"], event["skipped"], event["first"], event["samples"]) == (8, 2, 5, [24, 30])
    assert event["lr"] == 1e-2
    name = "grad_norm" if what == "gradients" else what
    assert event[name] is None and f"{name} nan" in event["text"] and "learning rate 1.00e-02" in event["text"]
    out = capsys.readouterr().out
    assert out.count(" skipped 2\n") == 2 and "step 8: 2 updates were skipped; step 5, the first in a row" in out


def test_what_a_person_is_pointed_to_is_what_the_step_saw(corpus, tmp_path, monkeypatch, capsys):
    seen: dict[int, list[int]] = {}
    taken = run.BatchStream.__next__

    def watched(self):
        batch = taken(self)
        for row in batch.ids[: batch.sequences]:
            seen.setdefault(sum(map(len, seen.values())) // 6, []).append(row.tolist())
        return batch

    monkeypatch.setattr(run.BatchStream, "__next__", watched)
    spoil(monkeypatch, "gradients", range(9, 10))
    run.train(config(corpus, tmp_path / "run"), resume=False)
    (event,) = events(tmp_path / "run", "skipped")
    named = re.findall(r"corpus (\d+)", event["text"].partition("windows ")[2])
    ids = np.fromfile(corpus, np.uint16)
    assert seen[8] == [ids[int(w) * 16 :][:16].tolist() for w in named]  # step 9 is the ninth
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run"), "--step", str(event["first"])]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\d+) +corpus window (\d+), tokens from ([\d,]+) on: \[", out, re.MULTILINE) == [
        (str(sample), w, f"{int(w) * 16:,}") for sample, w in zip(range(*event["samples"]), named, strict=True)
    ]


@pytest.mark.parametrize("what", ["lm_loss", "aux_loss", "gradients"])
def test_too_many_in_a_row_end_the_run_a_log_interval_later_at_most(what, corpus, tmp_path, monkeypatch):
    spoil(monkeypatch, what, range(5, 13))  # eight; those after them would be sound again
    settings = {"checkpoint_every": 3, "log_every": 4, "keep_checkpoints": 2}
    asked = config(corpus, tmp_path / "run", total_steps=60, run=settings, optimizer={"max_bad_steps": 7})
    with pytest.raises(Diverged) as failed:
        run.train(asked, resume=False)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (failed.value.exit_code, status["exit_code"], status["step"]) == (79, 79, 12)
    text = str(failed.value)
    assert "more than 7 updates in a row were skipped (--max-bad-steps); step 5," in text
    assert all(words in text for words in ("grad_norm", "learning rate 1.00e-02", "on samples 24 to 29,"))
    assert "the checkpoint of step 3 is from before" in text and "\n" not in text
    # In the row nothing is rotated out: the one from before it is there, however often the row was saved.
    assert checkpoint.list_steps(tmp_path / "run") == [9, 6, 3]
    weights = {step: tensors_of(tmp_path / "run", step)[checkpoint.MODEL] for step in (3, 6, 9)}
    weights = {step: data[-2000:] for step, data in weights.items()}  # the file's head has the step
    assert weights[6] == weights[9] != weights[3]


@pytest.mark.parametrize("log_every", [1, 4, 100])
def test_when_the_host_looks_does_not_change_what_a_row_that_is_too_long_leaves(
    log_every, corpus, tmp_path, monkeypatch
):
    spoil(monkeypatch, "gradients", range(3, 6))
    asked = config(corpus, tmp_path / "run", run={"log_every": log_every}, optimizer={"max_bad_steps": 2})
    with pytest.raises(Diverged, match="step 3, the first in a row"):
        run.train(asked, resume=False)
    last = json.loads((tmp_path / "run/status.json").read_text())["step"]
    assert last == min(12, math.ceil(5 / log_every) * log_every)


def test_weights_that_are_not_finite_never_become_a_checkpoint(corpus, tmp_path, monkeypatch):
    spoil(monkeypatch, "weights", range(5, 6))
    asked = config(corpus, tmp_path / "run", run={"checkpoint_every": 1, "keep_checkpoints": 2})
    with pytest.raises(Diverged, match="after step 5 a weight is not finite.*checkpoint of step 4 is from before"):
        run.train(asked, resume=False)
    assert checkpoint.list_steps(tmp_path / "run") == [4, 3]


def test_a_run_resumed_in_a_row_of_skipped_steps_is_the_undisturbed_one(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        spoil(patched, "gradients", range(4, 8))
        run.train(config(corpus, tmp_path / "whole"), resume=False)
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        spoil(patched, "gradients", range(4, 8), stop_after=5)
        run.train(config(corpus, tmp_path / "run"), resume=False)
    assert counts(tmp_path / "run", 5) == {"count": 3, "skipped": 2, "skipped_in_a_row": 2}
    spoil(monkeypatch, "gradients", range(4, 8))
    run.train(config(corpus, tmp_path / "run"), resume=True)
    assert tensors_of(tmp_path / "run", 12) == tensors_of(tmp_path / "whole", 12)
    assert counts(tmp_path / "run", 12) == counts(tmp_path / "whole", 12)


def test_a_row_goes_on_across_a_resume(corpus, tmp_path, monkeypatch):
    asked = config(corpus, tmp_path / "run", optimizer={"max_bad_steps": 4})
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        spoil(patched, "gradients", range(4, 10), stop_after=5)
        run.train(asked, resume=False)
    spoil(monkeypatch, "gradients", range(4, 10))
    with pytest.raises(Diverged, match="more than 4 updates in a row were skipped .*; step 6,"):
        run.train(asked, resume=True)


def test_a_row_that_is_too_long_for_a_resumed_run_is_no_reason_before_its_first_step(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        spoil(patched, "gradients", range(4, 8), stop_after=6)
        run.train(config(corpus, tmp_path / "run"), resume=False)
    asked = config(corpus, tmp_path / "run", optimizer={"max_bad_steps": 1})
    with monkeypatch.context() as patched, pytest.raises(StopRequested, match="at step 6"):
        patched.setattr(run, "POLL", 0)
        patched.setattr(run.BatchStream, "ready", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        run.train(asked, resume=True)
    with pytest.raises(Diverged, match="more than 1 updates in a row .*; step 7,"):
        run.train(asked, resume=True)


def test_a_learning_rate_that_blows_the_weights_up_is_79(corpus, tmp_path):
    command = [
        sys.executable, "-m", "llmtrain", "train", "--tokens", corpus, "--run-dir", tmp_path / "run",
        "--d-model", "32", "--n-layers", "2", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
        "--seq-len", "16", "--batch-size", "4", "--total-steps", "1000", "--warmup-steps", "0", "--device", "cpu",
        "--precision", "fp32", "--checkpoint-every", "30", "--learning-rate", "1e18", "--max-bad-steps", "5",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 79 and done.stderr.count("\n") == 1, done.stderr
    assert "updates in a row were skipped" in done.stderr and "learning rate 1.00e+18" in done.stderr
    assert json.loads((tmp_path / "run/status.json").read_text())["step"] == 10

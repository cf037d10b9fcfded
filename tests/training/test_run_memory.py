"""Runs and the memory there is: what --batch-size auto chooses, and what a run does that does not fit."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from llmtrain.storage.errors import UsageError
from llmtrain.training import checkpoint, fit, run
from tests.training.conftest import config
from tests.training.runs import lines, state, stop_in, tensors_of


def chosen(run_dir: Path) -> tuple[int, int]:
    """(batch_size, sequences of a step) of config.toml, which must be those of the newest checkpoint."""
    of_run = tomllib.loads((run_dir / "config.toml").read_text())["run"]
    newest = state(run_dir, checkpoint.list_steps(run_dir)[0])["config"]["run"]
    assert (of_run["batch_size"], of_run["global_batch_size"]) == (newest["batch_size"], newest["global_batch_size"])
    return of_run["batch_size"], of_run["global_batch_size"]


def test_auto_chooses_once_and_a_resumed_run_keeps_its_bits_where_more_would_fit_now(corpus, tmp_path, monkeypatch):
    def asked(name: str):
        return config(corpus, tmp_path / name, run={"batch_size": "auto"})

    monkeypatch.setattr(fit, "CPU_TOKENS", 4 * 16)
    run.train(asked("whole"), resume=False)
    assert chosen(tmp_path / "whole") == (3, 6)  # two even micro-batches, as 6 are more than the 4
    (said,) = [line for line in lines(tmp_path / "whole", "event") if line["event"] == "trial"]
    assert said["tried"] == [3] and "micro-batches of 3 fit, as --batch-size auto found" in said["text"]
    stop_in(asked("run"), 5, monkeypatch)
    monkeypatch.setattr(fit, "CPU_TOKENS", 6 * 16)
    run.train(asked("run"), resume=True)
    assert chosen(tmp_path / "run") == (3, 6)
    assert tensors_of(tmp_path / "run", 12) == tensors_of(tmp_path / "whole", 12)


def test_auto_on_another_device_or_with_less_memory_chooses_anew_and_it_is_the_same_run(corpus, tmp_path, monkeypatch):
    asked, plenty = config(corpus, tmp_path / "run", run={"batch_size": "auto"}), fit.Room(1 << 40, 1 << 40)
    for k, (name, room, wanted) in enumerate(
        [("one", plenty, 6), ("one", fit.Room(1 << 29, 1 << 29), 1), ("other", plenty, 6)], 1
    ):
        monkeypatch.setattr(fit, "room", lambda device, room=room: room)
        monkeypatch.setattr(run.devices, "device_name", lambda device, name=name: name)
        stop_in(asked, 1, monkeypatch, resume=True)
        assert checkpoint.list_steps(tmp_path / "run")[0] == k
        assert chosen(tmp_path / "run") == (wanted, 6)
    notes = [line["text"] for line in lines(tmp_path / "run", "event") if line["event"] == "note"]
    assert any("batch_size is 1, was 6: losses may differ in their last bits" in note for note in notes)


class Small:
    """A card that holds micro-batches up to `size`, whatever was predicted."""

    def __init__(self, size: int):
        self.size, self.tried = size, []

    def try_out(self, step, memory, evaluates):
        self.tried.append(len(step.ids))
        if len(step.ids) > self.size:
            torch.empty(1 << 60, dtype=torch.uint8)  # a real want of memory


def test_auto_goes_down_until_a_trial_fits_and_says_what_did_not(corpus, tmp_path, monkeypatch):
    card = Small(2)
    monkeypatch.setattr(run.start, "try_out", card.try_out)
    run.train(config(corpus, tmp_path / "run", total_steps=2, run={"batch_size": "auto"}), resume=False)
    assert card.tried == [6, 3, 2] and chosen(tmp_path / "run") == (2, 6)
    (said,) = [line for line in lines(tmp_path / "run", "event") if line["event"] == "trial"]
    assert "micro-batches of 2 fit, as --batch-size auto found; of 6, 3 did not" in said["text"]


@pytest.mark.parametrize("asked", ["auto", 4])
def test_a_run_that_does_not_fit_leaves_nothing(asked, corpus, tmp_path, monkeypatch):
    card = Small(0)
    monkeypatch.setattr(run.start, "try_out", card.try_out)
    with pytest.raises(UsageError, match=f"--batch-size {1 if asked == 'auto' else 4} x --seq-len 16 does not fit"):
        run.train(config(corpus, tmp_path / "a/run", run={"batch_size": asked}), resume=False)
    assert card.tried == ([6, 3, 2, 1] if asked == "auto" else [4])
    assert not (tmp_path / "a").exists()


def test_memory_that_runs_out_later_ends_the_run_with_the_same_line(corpus, tmp_path, monkeypatch):
    micro_step = run.start.TrainStep.micro_step

    def hungry(self, *arguments, **named):
        micro_step(self, *arguments, **named)
        if len(done) == 2:
            torch.empty(1 << 60, dtype=torch.uint8)
        done.append(1)

    done: list[int] = []
    monkeypatch.setattr(run.start.TrainStep, "micro_step", hungry)
    with pytest.raises(UsageError, match="--batch-size 4 x --seq-len 16 does not fit: it takes about .* MiB"):
        run.train(config(corpus, tmp_path / "run"), resume=False)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 1, 2) and "fit" in status["reason"]

"""What tests of whole runs ask of a run directory, and signals at a chosen step."""

import json
import os
import signal
from pathlib import Path

import pytest

from llmtrain.storage.errors import StopRequested
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint, run
from llmtrain.training.config import TrainConfig


def lines(run_dir: Path, kind: str) -> list[dict]:
    return [line for line in JsonLines.read(run_dir / "metrics.jsonl") if line["kind"] == kind]


def events(run_dir: Path, name: str) -> list[dict]:
    return [line for line in lines(run_dir, "event") if line["event"] == name]


def evaluated(run_dir: Path) -> list[tuple]:
    return [(x["step"], x["source"], x["val_loss"]) for x in lines(run_dir, "eval")]


def figures(run_dir: Path) -> list[tuple]:
    """What must not depend on how often a run was stopped."""
    return [(x["step"], x["lm_loss"], x["grad_norm"], x["lr"], x["epoch"]) for x in lines(run_dir, "train")]


def tensors_of(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = checkpoint.folder_of(run_dir, step)
    return {name: (folder / name).read_bytes() for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)}


def outcome(run_dir: Path, step: int = 12) -> tuple[list[tuple], dict[str, bytes]]:
    """All of a run that has to be the same to the bit."""
    return figures(run_dir), tensors_of(run_dir, step)


def state(run_dir: Path, step: int) -> dict:
    return json.loads((checkpoint.folder_of(run_dir, step) / checkpoint.STATE).read_text())


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A signal that arrives while the `step`-th step of this attempt is running."""
    update = run.start.TrainStep.optimizer_step
    done = [0]

    def counted(self, lr):
        update(self, lr)
        done[0] += 1
        if done[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run.start.TrainStep, "optimizer_step", counted)


def stop_in(settings: TrainConfig, step: int, monkeypatch: pytest.MonkeyPatch, resume: bool = False) -> None:
    """Trains until such a signal stops the run."""
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        stop_at(patched, step)
        run.train(settings, resume)

"""Disks that are full or read-only in the middle of a run: it goes on, and what it lost it makes up for."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.forks import Forks
from tests.storage.processes import small_disk
from tests.training.conftest import write_corpus

STEPS = 30
OPTIONS = [
    "train", "--resume", "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8",
    "--d-ff", "48", "--seq-len", "16", "--batch-size", "2", "--total-steps", STEPS, "--warmup-steps", "4",
    "--learning-rate", "0.01", "--device", "cpu", "--precision", "fp32", "--log-every", "1", "--checkpoint-every", "3",
    "--tokens", "corpus.u16",
]  # fmt: skip

# Calls at(n) before update n.
AT_UPDATE = """
import os, signal, subprocess, time
from llmtrain.training import step
update, done = step.TrainStep.optimizer_step, [0]

def counted(self, lr):
    done[0] += 1
    at(done[0])
    update(self, lr)

step.TrainStep.optimizer_step = counted

def idle(folder):
    # Of the step before the disk goes bad the save is whole.
    while not os.path.exists(folder + "/step-00000009"):
        time.sleep(0.001)

def fill(path):
    idle(os.path.dirname(path) + "/checkpoints")
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass

def remount(path, how):
    idle(path)
    # Busy for as long as a save has a file open there.
    while subprocess.run(["mount", "-o", f"remount,{how}", path], capture_output=True).returncode:
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disks")
    write_corpus(folder / "corpus.u16", 3000)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path, name: str) -> list[int]:
    return [line["step"] for line in lines(run_dir) if line.get("event") == name]


def result(run_dir: Path) -> tuple:
    """What must be the same however often a save failed: tensors and train lines, in their order."""
    folder = run_dir / f"checkpoints/step-{STEPS:08d}"
    names = ("model.safetensors", "optimizer.safetensors")
    tensors = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
    return tensors, [(x["step"], x["lm_loss"], x["grad_norm"], x["lr"]) for x in lines(run_dir) if x["kind"] == "train"]


def left_over(run_dir: Path) -> list[str]:
    return [p.name for p in run_dir.rglob("*") if p.name.endswith((".partial", ".trash", ".corrupt"))]


@pytest.fixture(scope="module")
def undisturbed(here: Path, forks: Forks) -> tuple:
    assert forks.start(here, "whole", *OPTIONS, "--run-dir", "whole").end() == 0
    return result(here / "whole")


def test_a_disk_that_is_full_for_a_while_costs_the_saves_of_that_while(here, forks, undisturbed):
    at = "at = lambda n: fill('full/run/filler') if n == 11 else os.unlink('full/run/filler') if n == 21 else None"
    with small_disk(here / "full", "4m") as disk:
        process = forks.start(
            here, "a", *OPTIONS, "--run-dir", "full/run", "--max-save-failures", 4, before=AT_UPDATE + at
        )
        assert process.end() == 0, process.err
        assert set(events(disk / "run", "save_failed")) >= {12, 15} and process.err == ""
        assert process.out.count("lines are held until it takes them") == 1
        assert not {12, 15, 18} & set(events(disk / "run", "checkpoint"))
        assert result(disk / "run") == undisturbed and left_over(disk / "run") == []


def test_a_disk_that_stays_full_ends_the_run_with_74_and_the_old_checkpoints_stay(here, forks, undisturbed):
    at = "at = lambda n: fill('stays/run/filler') if n == 11 else None"
    with small_disk(here / "stays", "4m") as disk:
        process = forks.start(here, "b", *OPTIONS, "--run-dir", "stays/run", before=AT_UPDATE + at)
        assert process.end() == 74
        assert process.err.count("\n") == 1 and "3 saves in a row failed; steps 10 to" in process.err
        assert "--resume goes on from step 9" in process.err
        assert [p.name for p in sorted((disk / "run/checkpoints").iterdir())] == [
            "step-00000003", "step-00000006", "step-00000009"
        ]  # fmt: skip
        (disk / "run/filler").unlink()
        assert forks.start(here, "b", *OPTIONS, "--run-dir", "stays/run").end() == 0
        assert result(disk / "run") == undisturbed


def test_a_signal_on_a_full_disk_says_what_is_lost(here, forks):
    at = """
def at(n):
    if n == 11:
        fill('asked/run/filler')
        os.kill(os.getpid(), signal.SIGTERM)
"""
    with small_disk(here / "asked", "4m"):
        process = forks.start(here, "c", *OPTIONS, "--run-dir", "asked/run", before=AT_UPDATE + at)
        assert process.end() == 74
        assert process.err.count("\n") == 1 and "stopped by SIGTERM at step 11 of 30, but it cannot" in process.err
        assert "steps 10 to 11 are lost: --resume goes on from step 9" in process.err


def test_a_disk_that_is_read_only_for_a_while_costs_the_saves_of_that_while(here, forks, undisturbed):
    # A mount of its own: metrics.jsonl, which is open for writing, would keep the disk from being remounted.
    at = "at = lambda n: remount('ro/checkpoints', 'ro' if n == 11 else 'rw') if n in (11, 21) else None"
    (here / "ro").mkdir()
    with small_disk(here / "ro/checkpoints", "4m"):
        process = forks.start(here, "d", *OPTIONS, "--run-dir", "ro", "--max-save-failures", 4, before=AT_UPDATE + at)
        assert process.end() == 0, process.err
        assert set(events(here / "ro", "save_failed")) >= {12, 15}
        assert "read-only" in process.out
        assert result(here / "ro") == undisturbed and left_over(here / "ro") == []

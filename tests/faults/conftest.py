"""A run of a second to disturb, and what must come out of it however it is disturbed."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.forks import Forks
from tests.training.conftest import write_corpus

STEPS = 8
OPTIONS = [
    "train", "--resume", "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8",
    "--d-ff", "48", "--seq-len", "16", "--batch-size", "2", "--accumulate", "3", "--total-steps", STEPS,
    "--warmup-steps", "4", "--learning-rate", "0.01", "--device", "cpu", "--precision", "fp32", "--log-every", "1",
    "--checkpoint-every", "4", "--val-tokens", "held=val.u16", "--val-every", "3", "--val-windows", "8",
    "--tokens", "corpus.u16",
]  # fmt: skip

# Wraps a function so that its call number `at` says that it is there and dwells: so many seconds, or until the run is
# sent a signal, however slow the machine is to send it.
DWELL = """
import time
from llmtrain.corpus import batch_stream
from llmtrain.storage import atomic
from llmtrain.training import lifecycle, run, start, step

came = []
def note(flag, number, frame, original=lifecycle.StopFlag._raise_flag):
    came.append(number)
    original(flag, number, frame)
lifecycle.StopFlag._raise_flag = note

def dwell(where, name, at, seconds=None):
    original, calls = getattr(where, name), [0]
    def slow(*arguments, **named):
        calls[0] += 1
        if calls[0] == at:
            print("HERE", flush=True)
            end = time.monotonic() + (seconds or 100)
            while time.monotonic() < end and (seconds or not came):
                time.sleep(0.01)
        return original(*arguments, **named)
    setattr(where, name, slow)
"""


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_corpus(folder / "corpus.u16", 3000)
    write_corpus(folder / "val.u16", 900, seed=3)
    return folder


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="session")
def sharing_forks() -> Iterator[Forks]:
    """For ranks that have parts of one model: what torch needs for that takes seconds to import."""
    with Forks("llmtrain.training.sharded_muon", "llmtrain.training.pipeline") as forks:
        yield forks


def result(run_dir: Path) -> tuple:
    """What must be the same however often a run was stopped."""
    folder = run_dir / f"checkpoints/step-{STEPS:08d}"
    names = ("model.safetensors", "optimizer.safetensors")
    tensors = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [(x["step"], x["lm_loss"], x["grad_norm"], x["lr"]) for x in lines if x["kind"] == "train"]
    return tensors, trained, [(x["step"], x["source"], x["val_loss"]) for x in lines if x["kind"] == "eval"]


@pytest.fixture(scope="session")
def undisturbed(here: Path, forks: Forks) -> tuple:
    assert forks.start(here, "whole", *OPTIONS, "--run-dir", "whole").end() == 0
    return result(here / "whole")

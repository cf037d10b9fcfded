"""Runs that are killed, starved of disk, or lose their folder: what is left goes on to the same bits."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.conftest import write_corpus

OPTIONS = [
    "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
    "--seq-len", "16", "--batch-size", "2", "--accumulate", "2", "--total-steps", "60", "--warmup-steps", "10",
    "--learning-rate", "0.01", "--device", "cpu", "--precision", "fp32", "--log-every", "1", "--checkpoint-every", "3",
    "--val-tokens", "held=val.u16", "--val-every", "9", "--tokens", "corpus.u16",
]  # fmt: skip
FILES = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_corpus(folder / "corpus.u16", 3000)
    write_corpus(folder / "val.u16", 900, seed=3)
    return folder


def start(here: Path, run: str, *more: str, **options) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "llmtrain", "train", "--run-dir", run, "--resume", *OPTIONS, *more]
    # Into a file: nobody reads a pipe while the test waits for something else.
    with open(here / f"{run}.out", "wb") as out:
        return subprocess.Popen(
            command, cwd=here, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, **options
        )


def wait_for(here: Path, run: str, words: bytes, process: subprocess.Popen[bytes]) -> None:
    while words not in (here / f"{run}.out").read_bytes() and process.poll() is None:
        time.sleep(0.005)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, error = process.communicate(timeout=120)
    return process.returncode, error.decode()


def result(here: Path, run: str) -> tuple:
    """What must be the same however often a run was disturbed: the tensors, and every figure of metrics.jsonl."""
    folder = here / run / "checkpoints/step-00000060"
    tensors = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]
    lines = [json.loads(line) for line in (here / run / "metrics.jsonl").read_text().splitlines()]
    trained = [(x["step"], x["lm_loss"], x["grad_norm"], x["lr"]) for x in lines if x["kind"] == "train"]
    return tensors, trained, [(x["step"], x["source"], x["val_loss"]) for x in lines if x["kind"] == "eval"]


@pytest.fixture(scope="module")
def undisturbed(here: Path) -> tuple:
    assert ended(start(here, "whole")) == (0, "")
    return result(here, "whole")


def left_over(run: Path) -> list[str]:
    return [p.name for p in run.rglob("*") if p.name.endswith((".partial", ".trash", ".corrupt"))]


def test_a_run_killed_again_and_again_ends_in_the_same_bits(here: Path, undisturbed: tuple):
    chance = random.Random(0)
    codes = []
    while 0 not in codes:
        process = start(here, "killed")
        wait_for(here, "killed", b"step ", process)
        time.sleep(chance.random() * 0.25)
        if len(codes) < 5:  # a slow machine would be killed for ever
            process.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
        code, error = ended(process)
        assert code in (0, -signal.SIGKILL) or (code == 75 and error.count("\n") == 1), (code, error)
        codes.append(code)
    assert result(here, "killed") == undisturbed
    assert left_over(here / "killed") == []


def test_a_run_that_meets_a_full_disk_says_so_and_goes_on_when_there_is_room(here: Path, undisturbed: tuple):
    optimizer = (here / "whole/checkpoints/step-00000060/optimizer.safetensors").stat().st_size
    for limit in (1, optimizer - 1):

        def full(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        shutil.rmtree(here / "full", ignore_errors=True)
        # The console's file has the limit too: a run does not end for want of a console.
        code, error = ended(start(here, "full", preexec_fn=full))
        assert code == 74 and error.count("\n") == 1 and "ulimit -f" in error
        assert left_over(here / "full") == [] and not list((here / "full/checkpoints").iterdir())
    assert ended(start(here, "full")) == (0, "")
    assert result(here, "full") == undisturbed


def test_a_run_whose_folder_is_removed_ends_at_its_next_checkpoint(here: Path):
    process = start(here, "removed", "--total-steps", "100000")
    wait_for(here, "removed", b"saved", process)
    (here / "removed").rename(here / "gone")
    code, error = ended(process)
    assert code == 73 and error.count("\n") == 1 and "was removed" in error
    assert not (here / "removed/checkpoints").exists()


def test_a_signal_before_the_first_step_is_75_too(here: Path):
    process = start(here, "early")
    caught = 0
    end = time.monotonic() + 60
    while not caught >> (signal.SIGTERM - 1) & 1:  # the interpreter itself has to start
        assert process.poll() is None and time.monotonic() < end
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    process.send_signal(signal.SIGTERM)
    code, error = ended(process)
    assert code == 75 and error.count("\n") == 1


def test_of_processes_that_start_at_once_one_trains_and_the_others_say_so(here: Path, undisturbed: tuple):
    processes = [start(here, "shared") for _ in range(3)]
    ends = [ended(process) for process in processes]
    assert all(code in (0, 78) and error.count("\n") == (code != 0) for code, error in ends), ends
    assert result(here, "shared") == undisturbed

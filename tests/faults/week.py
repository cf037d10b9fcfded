"""Trials: a run whose supervisor has it killed again and again, and runs that log, evaluate and save at other steps."""

import os
import random
import re
import shutil
import signal
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from llmtrain.storage.errors import LlmtrainError
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint, run
from tests.faults.damage import damage
from tests.faults.runs import Runs, Tally
from tests.training.conftest import config, write_corpus


def sound(run_dir: Path) -> list[int]:
    """Steps whose checkpoint holds every byte, newest first."""
    steps = []
    for step in checkpoint.list_steps(run_dir):
        try:
            list(checkpoint.verify(checkpoint.folder_of(run_dir, step)))
            steps.append(step)
        except LlmtrainError:
            pass
    return steps


def logged_step(run_dir: Path) -> int:
    """The newest step in the run's log; 0 where there is none."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            return max((int(found) for found in re.findall(rb'"step": (\d+)', file.read())), default=0)
    except OSError:
        return 0


def week(runs: Runs, steps: int, seed: int) -> Tally:
    """Kills a run within its next `steps` steps (there one time in five with SIGTERM) or while it starts, and starts it
    again until it is through. At times a file of its newest checkpoint is damaged in between."""
    chance, tally = random.Random(seed), Tally()
    run_dir = runs.folder / "week"
    newest = 0
    while True:
        process = runs.start("week")
        at = chance.randint(1, steps) if chance.random() < 0.8 else 0
        while at and process.alive() and " step " not in process.out:
            time.sleep(0.002)
        at += at and logged_step(run_dir)
        while process.alive() and logged_step(run_dir) < at:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.02 if at else 0.3))
        # Before llmtrain has begun, SIGTERM ends the interpreter itself.
        number = signal.SIGTERM if at and chance.random() < 0.2 else signal.SIGKILL
        if process.alive():
            process.send(number)
        if (code := process.end(600)) == 0:
            break
        there = sound(run_dir)
        wrong = None
        if code not in (-signal.SIGKILL, 75):
            wrong = f"it ended with {code}: {process.err.strip()[-300:]}"
        elif max(there, default=0) < newest:
            wrong = f"step {newest} was there, now {there}"
        met = signal.Signals(number).name
        if len(there) > 1 and chance.random() < 0.15:
            damage(chance, checkpoint.folder_of(run_dir, there[0]))
            there = there[1:]
            met += ", newest checkpoint damaged"
        newest = max(there, default=0)
        tally.add(wrong, met)
    for aside in (run_dir / "checkpoints").glob("*.corrupt"):
        shutil.rmtree(aside)
    if wrong := runs.wrong(run_dir, code, process):
        tally.lost.append(wrong)
    return tally


def other_intervals(folder: Path, trials: int, seed: int) -> Tally:
    """Trains with other intervals of logging, evaluating and saving: not a bit of a loss or a weight may differ."""
    chance, tally = random.Random(seed), Tally()
    corpus = write_corpus(folder / "corpus.u16", 600)
    held_out = write_corpus(folder / "val.u16", 200, seed=1)

    def trained(name: str, **settings: int) -> tuple[dict, list[bytes]]:
        run_dir = folder / name
        shutil.rmtree(run_dir, ignore_errors=True)
        asked = config(corpus, run_dir, run=settings)
        asked = replace(asked, data=replace(asked.data, val_tokens=(str(held_out),)))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            run.train(asked, resume=False)
        lines = [line for line in JsonLines.read(run_dir / "metrics.jsonl") if line["kind"] == "train"]
        losses = {line["step"]: (line["lm_loss"], line["grad_norm"]) for line in lines}
        last = checkpoint.folder_of(run_dir, 12)
        return losses, [(last / name).read_bytes() for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)]

    losses, tensors = trained("as it is", log_every=1)
    assert len(losses) == 12
    for _ in range(trials):
        every = {name: chance.randint(1, 13) for name in ("log_every", "checkpoint_every", "val_every")}
        found, ends = trained("other", **every, val_windows=chance.randint(1, 6))
        same = found.items() <= losses.items() and ends == tensors
        tally.add(None if same and len(found) >= 2 else f"{every}: differ")
    return tally

"""A run of a second that checkpoints every three steps, and trials on it: the short forms are tests here, the long ones
are scripts/faults/all.py."""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.training import checkpoint
from tests.faults.forks import Forks, Process
from tests.training.conftest import write_corpus

STEPS, EVERY = 12, 3
SAVE = 9
"""The save that trials meet: one is there from before, one is rotated out by it, one follows."""
OPTIONS = [
    "train", "--resume", "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8",
    "--d-ff", "48", "--seq-len", "16", "--batch-size", "2", "--accumulate", "2", "--total-steps", STEPS,
    "--warmup-steps", "4", "--learning-rate", "0.01", "--device", "cpu", "--precision", "fp32", "--log-every", "1",
    "--checkpoint-every", EVERY, "--keep-checkpoints", "2", "--val-tokens", "held=val.u16", "--val-every", "4",
    "--val-windows", "4", "--tokens", "corpus.u16",
]  # fmt: skip


@dataclass
class Tally:
    """What became of trials."""

    tried: int = 0
    lost: list[str] = field(default_factory=list)
    """What was wrong, a line for each trial that did not hold."""
    met: Counter = field(default_factory=Counter)
    """Where the faults fell."""

    def add(self, wrong: str | None, met: str = "") -> None:
        self.tried += 1
        if met:
            self.met[met] += 1
        if wrong:
            self.lost.append(wrong)


class Runs:
    """Runs in `folder`, all of one configuration."""

    def __init__(self, folder: Path, forks: Forks, steps: int = STEPS, *more: object) -> None:
        self.folder, self.forks, self.steps = folder, forks, steps
        self.options = [*OPTIONS, "--total-steps", steps, *more]
        if not (folder / "corpus.u16").exists():
            write_corpus(folder / "corpus.u16", 3000)
            write_corpus(folder / "val.u16", 900, seed=3)
        self.start("warm-up", "--total-steps", EVERY).end()
        began = time.monotonic()
        process = self.start("whole")
        assert process.end(600) == 0, process.err
        self.seconds = time.monotonic() - began
        """How long a run takes that nobody disturbs."""
        self.undisturbed = self.result(folder / "whole")
        assert len(self.undisturbed[1]) == steps

    def start(self, name: str, *more: object, before: str = "", run_dir: Path | None = None, **env: object) -> Process:
        """`run_dir`: where it is not NAME in the folder."""
        asked = [*self.options, "--run-dir", run_dir or name, *more]
        return self.forks.start(self.folder, name, *asked, before=before, **{k: str(v) for k, v in env.items()})

    def result(self, run_dir: Path) -> tuple:
        """What must be the same however a run was disturbed: the tensors and the figures, each step's once."""
        folder = checkpoint.folder_of(run_dir, self.steps)
        files = (folder / checkpoint.MODEL, folder / checkpoint.OPTIMIZER)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        trained = [(x["step"], x["lm_loss"], x["grad_norm"], x["lr"]) for x in lines if x["kind"] == "train"]
        evaluated = [(x["step"], x["source"], x["val_loss"]) for x in lines if x["kind"] == "eval"]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files], trained, evaluated

    def wrong(self, run_dir: Path, code: int, process: Process) -> str | None:
        """What is wrong with a run that has come to its end."""
        if code != 0:
            return f"it ended with {code}: {process.err.strip()[-300:]}"
        left = [path.name for path in run_dir.rglob("*") if path.suffix in (".partial", ".trash", ".corrupt")]
        if left:
            return f"left over: {', '.join(left)}"
        names = ("tensors", "losses of training", "losses of evaluations")
        pairs = zip(names, self.result(run_dir), self.undisturbed, strict=True)
        different = [name for name, found, expected in pairs if found != expected]
        return f"differ: {', '.join(different)}" if different else None

    def goes_on(self, name: str, run_dir: Path | None = None) -> str | None:
        """Resumes a run to its end; what is wrong with it then."""
        run_dir = run_dir or self.folder / name
        if wrong := self.nothing_lost(run_dir):
            return wrong
        process = self.start(name, run_dir=run_dir)
        return self.wrong(run_dir, process.end(), process)

    @staticmethod
    def nothing_lost(run_dir: Path) -> str | None:
        """Whether the checkpoint before the newest step that was logged as saved, or a newer one, is there."""
        path = run_dir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        saved = [line["step"] for line in map(json.loads, lines) if line.get("event") == "checkpoint"]
        there = max(checkpoint.list_steps(run_dir), default=0)
        return f"step {max(saved)} was saved, {there} is the newest" if saved and there < max(saved) else None

    def template(self) -> Path:
        """A run that was killed when it began to save step SAVE, to copy."""
        if not (self.folder / "template").exists():
            assert self.start("template", before=AT_CALL, AT_CALL=1).end() == -9
            assert checkpoint.list_steps(self.folder / "template") == [SAVE - EVERY, SAVE - 2 * EVERY]
        return self.folder / "template"

    def copy(self, name: str) -> Path:
        """A copy of the template, to go on with and disturb."""
        run_dir = self.folder / name
        shutil.rmtree(run_dir, ignore_errors=True)
        return Path(shutil.copytree(self.template(), run_dir))


@contextmanager
def runs_in(folder: Path) -> Iterator[Runs]:
    with Forks() as forks:
        yield Runs(folder, forks)


# Does something (kills, unless `act` is another function) before call number $AT_CALL into the system in the threads
# that write the checkpoint of step SAVE, and says when that save has ended.
AT_CALL = f"""
import io, os, signal, sys, threading
from llmtrain.training import saving

NOT_OF_THE_SYSTEM = ("fspath", "getpid", "register_at_fork")
at, calls, lock, armed = int(os.environ["AT_CALL"]), [0], threading.Lock(), [False]

def act(call):
    os.kill(os.getpid(), signal.SIGKILL)

def profile(frame, event, call):
    if event != "c_call" or not armed[0] or threading.current_thread().name == "batches":
        return
    of_a_file = isinstance(getattr(call, "__self__", None), io.IOBase)
    if of_a_file or (call.__module__ == "posix" and call.__name__ not in NOT_OF_THE_SYSTEM):
        with lock:
            calls[0] += 1
            now = calls[0] == at
            armed[0] = armed[0] and not now
        if now:
            act(call)

write = saving.Saver._write
def watched(self, step, state):
    armed[0] = step == {SAVE}
    try:
        return write(self, step, state)
    finally:
        armed[0] = False

saving.Saver._write = watched
threading.setprofile(profile)
"""

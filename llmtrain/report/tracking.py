"""The process beside a run (see `report/trackers.py`): hands each line of RUN/metrics.jsonl on to TensorBoard or
Weights & Biases, until its standard input ends. What a person should know it prints, a line each.

    python -m llmtrain.report.tracking RUN wandb --project=llmtrain --attempt=2 --step=1000
"""

import argparse
import os
import secrets
import select
import signal
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from llmtrain.report.follow import Lines
from llmtrain.storage import atomic
from llmtrain.storage.errors import STOP_SIGNALS, LlmtrainError
from llmtrain.storage.journal import is_number
from llmtrain.storage.manifest import read_json

EVERY = 1.0
"""Seconds between two looks for new lines."""
GIVE_UP = 600.0
"""Seconds after the end of the run at which whatever is still not sent is left where it is, in the run directory."""
KEEP_EVERY = 60.0
"""Seconds between two writes of RUN/wandb.json, each of which waits for the disk."""
POSITION = ("step", "tokens", "time", "attempt")
"""Fields that say where a line belongs, and are no curves."""


class Tracker(Protocol):
    goes_on: bool
    """Whether lines of earlier attempts have been handed on already."""

    def add(self, line: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def finish(self, exit_code: int) -> None: ...


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The curves that a line belongs to, by name: train/lm_loss, eval/SOURCE/val_loss, checkpoint/delay_ms."""
    kind = line.get("kind")
    if kind == "event" and line.get("event") != "checkpoint":
        return {}
    place = {"train": "train", "eval": f"eval/{line.get('source')}", "event": "checkpoint"}.get(str(kind))
    numbers = {name: value for name, value in line.items() if name not in POSITION and is_number(value)}
    return {f"{place}/{name}": float(value) for name, value in numbers.items()} if place else {}


class TensorBoard:
    """Event files in RUN/tensorboard, by TensorBoard's own writer, which needs neither TensorFlow nor torch."""

    def __init__(self, run_dir: Path, at_step: int) -> None:
        """at_step: where this attempt begins; what earlier ones wrote of later steps is void."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run_dir / "tensorboard"
        self.goes_on = folder.is_dir() and any(".tfevents." in name for name in os.listdir(folder))
        self._event = event_pb2.Event
        self._writer = EventFileWriter(str(folder), flush_secs=int(GIVE_UP))
        if self.goes_on:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=at_step + 1, session_log=start))
        self._write_text("config", 0, time.time(), _indented(run_dir / "config.toml"))

    def add(self, line: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if line.get("kind") == "event":
            self._write_text("events", line["step"], line["time"], str(line.get("text")))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()]
        if values:
            event = self._event(wall_time=line["time"], step=line["step"], summary=Summary(value=values))
            self._writer.add_event(event)

    def _write_text(self, tag: str, step: int, when: float, text: str) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
        value = summary_pb2.Summary.Value(
            tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        self._writer.add_event(self._event(wall_time=when, step=step, summary=summary_pb2.Summary(value=[value])))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def _indented(path: Path) -> str:
    """A file as a block of Markdown code, "" where it cannot be read."""
    with suppress(OSError):
        return "".join(f"    {line}\n" for line in path.read_text(errors="replace").splitlines())
    return ""


class Wandb:
    """A run of Weights & Biases, whose id is kept in RUN/wandb.json, so that the next attempt goes on with it. Where it
    cannot be reached it is written to RUN/wandb alone, for `wandb sync`."""

    def __init__(self, run_dir: Path, project: str, say: Callable[[str], None]) -> None:
        import wandb

        self._file = run_dir / "wandb.json"
        try:
            self._kept = read_json(self._file)
        except LlmtrainError:
            self._kept = {}
        self.goes_on = isinstance(self._kept.get("id"), str) and type(self._kept.get("step")) is int
        if not self.goes_on:
            self._kept = {"id": secrets.token_hex(4), "step": -1}
        self._kept["project"] = self._kept.get("project", project)
        settings = wandb.Settings(console="off", silent=True, init_timeout=60, disable_git=True, save_code=False)
        asked = {
            "project": self._kept["project"],
            "id": self._kept["id"],
            "name": run_dir.name,
            "resume": "allow",
            "dir": str(run_dir),
            "config": _tables(run_dir / "config.toml"),
            "settings": settings,
        }
        try:
            self._run = wandb.init(**asked)
        except Exception as error:
            say(
                f"Weights & Biases cannot be reached ({_first_line(error)}): what is logged is kept in "
                f"{run_dir}/wandb, `wandb sync` sends it"
            )
            self._run = wandb.init(**asked, mode="offline")
        self._keep()

    def _keep(self) -> None:
        atomic.write_json(self._file, self._kept)
        self._kept_at = time.monotonic()

    def add(self, line: dict[str, Any]) -> None:
        # Their steps never go back. What a resumed run does again is the same to the last bits.
        if line["step"] < self._kept["step"]:
            return
        if values := scalars(line):
            self._kept["step"] = line["step"]
            values |= {"tokens": line["tokens"], "_timestamp": line["time"]}
            self._run.log(values, step=line["step"])

    def flush(self) -> None:
        if time.monotonic() > self._kept_at + KEEP_EVERY:
            self._keep()

    def finish(self, exit_code: int) -> None:
        self._keep()
        self._run.finish(exit_code=exit_code)


def _tables(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return tomllib.loads(path.read_text(encoding="utf-8"))
    return {}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def until_the_end_of(descriptor: int) -> Iterator[bool]:
    """False every EVERY seconds, and True when the other end of the pipe is closed."""
    while True:
        readable, _, _ = select.select([descriptor], [], [], EVERY)
        over = bool(readable) and not os.read(descriptor, 4096)
        yield over
        if over:
            return


def follow(run_dir: Path, tracker: Tracker, attempt: int, ends: Iterator[bool]) -> None:
    """Hands on every line until `ends` says that there will be no more."""
    lines = Lines(run_dir / "metrics.jsonl")
    for _ in ends:
        anew, new = lines.new()
        if anew:  # the next attempt has begun, with a process of its own
            return
        for line in new:
            if type(line.get("step")) is not int or not is_number(line.get("time")):
                continue
            if not tracker.goes_on or line.get("attempt") == attempt:
                tracker.add(line)
        if new:
            tracker.flush()


def exit_code_of(run_dir: Path) -> int:
    """How the run ended; 1 where its process was killed."""
    try:
        code = read_json(run_dir / "status.json").get("exit_code")
    except LlmtrainError:
        code = None
    return code if type(code) is int else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("tracker", choices=["tensorboard", "wandb"])
    parser.add_argument("--project", default="llmtrain")
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    asked = parser.parse_args()
    for number in STOP_SIGNALS:  # it ends when the run does
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(10)
    # What libraries print goes to the log: standard output is for what a person should know.
    words = open(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}[asked.tracker]

    def say(text: str) -> None:
        with suppress(OSError):  # the run's process may be gone
            words.write(" ".join(text.split()) + "\n")

    def failed(error: Exception) -> int:
        say(f"{name} has failed, nothing more is sent there: {type(error).__name__}: {_first_line(error)}")
        traceback.print_exception(error)
        return 0

    run_dir = asked.run_dir
    try:
        if asked.tracker == "wandb":
            tracker: Tracker = Wandb(run_dir, asked.project, say)
        else:
            tracker = TensorBoard(run_dir, asked.step)
        follow(run_dir, tracker, asked.attempt, until_the_end_of(sys.stdin.fileno()))
        give_up = threading.Timer(GIVE_UP, os._exit, (1,))
        give_up.daemon = True
        give_up.start()
        tracker.finish(exit_code_of(run_dir))
    except Exception as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""TensorBoard and Weights & Biases beside a run: curves that go on, and failures that are a line."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.report import trackers
from llmtrain.report.trackers import Trackers, require_installed
from llmtrain.storage.errors import UsageError
from llmtrain.storage.journal import JsonLines


def lines(attempt: int, first: int, last: int) -> Iterator[dict]:
    common = {"attempt": attempt, "time": time.time()}
    yield {"kind": "event", "step": first - 1, "tokens": 0, "event": "start", "text": "starts", **common}
    for step in range(first, last + 1):
        yield {"kind": "train", "step": step, "tokens": 10 * step, "lm_loss": 9 - step / 10, "mfu": None, **common}
    yield {"kind": "eval", "step": last, "tokens": 10 * last, "source": "held", "val_loss": 4.5, **common}


def attempt(run_dir: Path, number: int, first: int, last: int, **asked) -> list[str]:
    """Writes an attempt's lines while it is tracked; what was said of it."""
    with JsonLines(run_dir / "metrics.jsonl") as journal:
        if number > 1:
            journal.rewrite(lambda line: line["kind"] == "event" or line["step"] < first)
        tracked = Trackers(run_dir, number, first - 1, **asked)
        for line in lines(number, first, last):
            journal.append(line)
        return tracked.close()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(trackers, "GRACE", 120.0)  # so that a busy machine does not end the test early
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("[run]\nseed = 7\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished", "exit_code": 0}))
    return folder


def test_tensorboard_has_each_step_once_though_the_run_went_back(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert attempt(run_dir, 1, 1, 8, tensorboard=True) == []
    assert attempt(run_dir, 2, 6, 12, tensorboard=True) == []
    read = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"train/lm_loss", "eval/held/val_loss"}
    loss = read.Scalars("train/lm_loss")
    assert [one.step for one in loss] == list(range(1, 13))
    assert [one.value for one in loss] == pytest.approx([9 - step / 10 for step in range(1, 13)])
    assert b"seed = 7" in read.Tensors("config")[0].tensor_proto.string_val[0]
    assert read.Tensors("events")[0].tensor_proto.string_val[0] == b"starts"


def test_a_run_that_is_tracked_late_has_its_whole_course(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert attempt(run_dir, 1, 1, 4) == []
    assert attempt(run_dir, 2, 5, 6, tensorboard=True) == []
    read = EventAccumulator(str(run_dir / "tensorboard"))
    read.Reload()
    assert [one.step for one in read.Scalars("train/lm_loss")] == [1, 2, 3, 4, 5, 6]


def wandb_history(run_dir: Path) -> dict[str, list[dict]]:
    """Id -> the rows of the attempts that were logged offline, out of the files that `wandb sync` sends."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[dict]] = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        rows = found.setdefault(path.stem, [])
        while at + 7 <= len(data):  # blocks of 32 KiB, in which records are cut into chunks
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):
                record = Record.FromString(whole)
                whole = b""
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def test_wandb_goes_on_with_the_same_run_and_needs_no_network(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert attempt(run_dir, 1, 1, 8, wandb="cats") == []
    kept = json.loads((run_dir / "wandb.json").read_text())
    assert (kept["project"], kept["step"]) == ("cats", 8)
    assert attempt(run_dir, 2, 6, 12, wandb="cats") == []
    assert json.loads((run_dir / "wandb.json").read_text())["id"] == kept["id"]
    ((name, rows),) = wandb_history(run_dir).items()
    assert name == f"run-{kept['id']}"
    losses = {row["_step"]: row["train/lm_loss"] for row in rows if "train/lm_loss" in row}
    assert sorted(losses) == list(range(1, 13)) and losses[12] == pytest.approx(9 - 1.2)
    assert all(row["tokens"] == 10 * row["_step"] for row in rows if "train/lm_loss" in row)


class Broken:
    """A package that stands in for a tracker's, first on the path of the process beside the run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
        package = folder / "broken"
        package.mkdir()
        (package / "wandb.py").write_text(body)
        monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('broken\\nin two')", "has failed, nothing more is sent there: RuntimeError: broken"),
        ("import os; os._exit(9)", "its process ended with 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended with -11"),
    ],
    ids=["raises", "exits", "crashes"],
)  # fmt: skip
def test_a_tracker_that_fails_is_one_line(body, said, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Broken(tmp_path, monkeypatch, body)
    (told,) = attempt(run_dir, 1, 1, 3, wandb="cats")
    assert said in told and "\n" not in told


UNREACHABLE = """
import types
def Settings(**named): return named
def init(mode="online", **named):
    if mode == "online":
        raise ConnectionError("no network")
    return types.SimpleNamespace(log=lambda values, step: None, finish=lambda exit_code: None)
"""


def test_a_network_that_is_not_there_is_one_line_and_the_run_is_kept(run_dir: Path, tmp_path: Path, monkeypatch):
    Broken(tmp_path, monkeypatch, UNREACHABLE)
    (told,) = attempt(run_dir, 1, 1, 3, wandb="cats")
    assert "cannot be reached (no network)" in told and "wandb sync" in told
    assert json.loads((run_dir / "wandb.json").read_text())["step"] == 3


HANGS = """
import os, time
pid = os.environ["HOME"] + "/pid"
with open(pid + ".partial", "w") as file:
    file.write(str(os.getpid()))
os.rename(pid + ".partial", pid)
time.sleep(1000)
"""


def test_a_tracker_that_hangs_holds_nothing_up(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Broken(tmp_path, monkeypatch, HANGS)
    monkeypatch.setattr(trackers, "GRACE", 0.2)
    with JsonLines(run_dir / "metrics.jsonl") as journal:
        tracked = Trackers(run_dir, wandb="cats")
        try:
            end = time.monotonic() + 60
            while tracked.trouble() == [] and not (tmp_path / "pid").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            since = time.monotonic()
            for line in lines(1, 1, 3):
                journal.append(line)
                assert tracked.trouble() == []
            (told,) = tracked.close()
            assert "still on their way to wandb" in told and time.monotonic() - since < 30
        finally:
            os.kill(int((tmp_path / "pid").read_text()), 9)


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended, though nobody may have asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_lines_of_a_run_that_is_killed_arrive_too(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = (
        "import os, sys, pathlib\nfrom llmtrain.report.trackers import Trackers\n"
        "from llmtrain.storage.journal import JsonLines\nfrom tests.report.test_trackers import lines\n"
        "run = pathlib.Path(sys.argv[1])\njournal = JsonLines(run / 'metrics.jsonl')\n"
        "tracked = Trackers(run, tensorboard=True)\n[journal.append(line) for line in lines(1, 1, 5)]\n"
        "print(tracked._running[0]._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert done.returncode == -9
    end = time.monotonic() + 120
    while is_running(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.02)
    read = EventAccumulator(str(run_dir / "tensorboard"))
    read.Reload()
    assert [one.step for one in read.Scalars("train/lm_loss")] == [1, 2, 3, 4, 5]


def test_a_package_that_is_missing_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--wandb: wandb is missing: pip install 'llmtrain\[wandb\]'"):
        require_installed(False, "cats")
    with pytest.raises(UsageError, match="--tensorboard: tensorboard is missing"):
        require_installed(True, "")
    require_installed(False, "")

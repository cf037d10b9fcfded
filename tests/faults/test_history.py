"""One run has one history, and one process, however often it was killed."""

import json
import signal
import socket
import time
from collections import Counter
from pathlib import Path

from llmtrain.cli.main import run as run_cli
from tests.faults.conftest import DWELL, OPTIONS, STEPS, result

# Where each attempt in turn is killed, and the newest checkpoint that it leaves.
KILLS = [
    ("dwell(start, 'start', 1)", None),
    ("dwell(step.TrainStep, 'evaluate', 2)", None),
    ("dwell(step.TrainStep, 'optimizer_step', 6)", 4),
    ("dwell(step.TrainStep, 'micro_step', 8)", 4),
    ("dwell(atomic, 'publish_folder', 1)", 4),
    ("dwell(step.TrainStep, 'evaluate', 2)", 8),
]


def status_of(run_dir: Path) -> tuple:
    status = json.loads((run_dir / "status.json").read_text())
    return status["state"], status["step"], status["pid"]


def test_a_run_that_is_killed_again_and_again_has_one_history(here: Path, forks, undisturbed, capfd):
    run_dir = here / "history"
    for dwells, newest in KILLS:
        process = forks.start(here, "history", *OPTIONS, "--run-dir", "history", before=DWELL + dwells)
        process.says("HERE")
        end = time.monotonic() + 30
        while newest is not None and status_of(run_dir) != ("running", newest, process.pid):
            assert time.monotonic() < end, status_of(run_dir)  # a thread saves
            time.sleep(0.01)
        process.send(signal.SIGKILL)
        assert process.end() == -signal.SIGKILL
        if newest is not None:
            assert status_of(run_dir) == ("running", newest, process.pid)
            assert run_cli(["inspect", str(run_dir)]) == 0
            assert f"but process {process.pid} is gone" in capfd.readouterr().out
    assert forks.start(here, "history", *OPTIONS, "--run-dir", "history").end() == 0
    assert result(run_dir) == undisturbed
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("finished", STEPS, 0)

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all({"kind", "step", "tokens", "time", "attempt"} <= set(line) for line in lines)
    figures = Counter((x["kind"], x["step"], x.get("source")) for x in lines if x["kind"] != "event")
    assert set(figures.values()) == {1}
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts)
    # The first was killed before it had a line; every other one has said where it starts.
    starts = [(x["attempt"], x["step"]) for x in lines if x.get("event") == "start"]
    assert starts == [(1, 0), (2, 0), (3, 4), (4, 4), (5, 4), (6, 8)]


def test_a_second_process_is_told_who_is_at_work_and_disturbs_nothing(here, forks, undisturbed, capfd, monkeypatch):
    dwells = "dwell(step.TrainStep, 'micro_step', 8, seconds=1000)"
    process = forks.start(here, "second", *OPTIONS, "--run-dir", "second", before=DWELL + dwells)
    process.says("HERE")
    before = {name: (here / "second" / name).read_bytes() for name in ("metrics.jsonl", "status.json", "config.toml")}
    monkeypatch.chdir(here)
    capfd.readouterr()
    assert run_cli([*map(str, OPTIONS), "--run-dir", "second"]) == 78
    error = capfd.readouterr().err
    assert f"in use by process {process.pid} on {socket.gethostname()} since" in error and error.count("\n") == 1
    assert {name: (here / "second" / name).read_bytes() for name in before} == before
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    assert forks.start(here, "second", *OPTIONS, "--run-dir", "second").end() == 0  # the lock of the dead
    assert result(here / "second") == undisturbed

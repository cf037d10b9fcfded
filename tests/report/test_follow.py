"""A run followed by its files: lines as they come, and whether anyone is there."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.report.follow import Lines, look, require_run
from llmtrain.report.state import FAILED, FINISHED, GONE, RUNNING, STARTING, STOPPED, UNKNOWN, RunState
from llmtrain.storage.errors import BadData, InputMissing
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.lock import RunLock


def test_lines_come_once_and_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    assert lines.new() == (False, [])
    path.write_bytes(b'{"a": 1}\nno json\n[2]\n{"b"')
    assert lines.new() == (False, [{"a": 1}])
    with open(path, "ab") as file:
        file.write(b': 2}\n{"c": 3}\n')
    assert lines.new() == (False, [{"b": 2}, {"c": 3}])
    assert lines.new() == (False, [])
    lines.close()


def test_a_journal_that_was_rewritten_begins_anew(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as journal:
        for step in range(4):
            journal.append({"step": step})
        lines = Lines(path)
        assert len(lines.new()[1]) == 4
        journal.rewrite(lambda line: line["step"] < 2)
        journal.append({"step": 2})
        anew, new = lines.new()
    assert anew and [line["step"] for line in new] == [0, 1, 2]
    path.unlink()
    assert lines.new() == (True, [])
    lines.close()


def said(run_dir: Path, state: str, reason: str = "because", pid: int | None = None) -> None:
    text = json.dumps({"state": state, "reason": reason, "step": 3, "exit_code": None, "pid": pid or os.getpid()})
    (run_dir / "status.json").write_text(text)


def looked(run_dir: Path) -> RunState:
    state = RunState(str(run_dir))
    look(run_dir, state)
    return state


def a_dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def named(run_dir: Path, pid: int, host: str = "", when: str = "") -> None:
    now = when or time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    (run_dir / "lock").write_text(json.dumps({"pid": pid, "host": host or socket.gethostname(), "time": now}) + "\n")


def test_a_run_that_runs(tmp_path: Path):
    with RunLock(tmp_path / "lock"):
        assert looked(tmp_path).state == STARTING
        said(tmp_path, RUNNING)
        state = looked(tmp_path)
    assert (state.state, state.reason, state.process) == (RUNNING, "", f"process {os.getpid()}")


@pytest.mark.parametrize("state", [FINISHED, STOPPED, FAILED])
def test_a_run_that_has_ended_says_why_and_one_that_goes_on_starts(state: str, tmp_path: Path):
    said(tmp_path, state)
    assert (looked(tmp_path).state, looked(tmp_path).reason) == (state, "because")
    with RunLock(tmp_path / "lock"):
        assert looked(tmp_path).state == state  # its own process, about to end
        said(tmp_path, state, pid=a_dead_process())
        assert looked(tmp_path).state == STARTING


def test_a_status_that_nobody_keeps_is_stale(tmp_path: Path):
    dead = a_dead_process()
    said(tmp_path, RUNNING, pid=dead)
    assert looked(tmp_path).state == GONE  # nobody holds the lock
    named(tmp_path, dead)
    state = looked(tmp_path)
    assert state.state == GONE and f"process {dead} is gone" in state.reason and "--resume" in state.reason


def test_since_a_boot_the_number_may_be_another_process(tmp_path: Path):
    said(tmp_path, RUNNING)
    named(tmp_path, os.getpid(), when="2001-01-01T00:00:00+00:00")
    assert looked(tmp_path).state == GONE


def test_a_process_of_another_machine_is_named_and_believed(tmp_path: Path):
    said(tmp_path, RUNNING)
    named(tmp_path, 1, host="elsewhere", when="2001-01-01T00:00:00+00:00")
    state = looked(tmp_path)
    assert (state.state, state.process) == (RUNNING, "process 1 on elsewhere")


def test_what_is_no_run(tmp_path: Path):
    assert looked(tmp_path).state == UNKNOWN
    with pytest.raises(InputMissing, match="no such folder"):
        require_run(tmp_path / "none")
    with pytest.raises(BadData, match="no run directory"):
        require_run(tmp_path)
    (tmp_path / "lock").write_text("")
    require_run(tmp_path)

"""`llmtrain watch` on files that a test writes: one frame in a pipe, a dashboard on a terminal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.storage.journal import JsonLines
from llmtrain.storage.lock import RunLock
from tests.report.runs import falling, write_run
from tests.terminals import Terminal, frame_of


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "llmtrain", "watch", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color"} | more


def status(run_dir: Path, state: str, reason: str = "", pid: int = 0) -> None:
    fields = {"state": state, "reason": reason, "step": 100, "exit_code": None, "pid": pid or os.getpid()}
    (run_dir / "status.json.new").write_text(json.dumps(fields))
    os.rename(run_dir / "status.json.new", run_dir / "status.json")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", falling(100, 0))


@pytest.mark.parametrize(("columns", "options"), [(60, []), (120, ["--once"])])
def test_one_frame_goes_into_a_pipe(columns: int, options: list[str], run_dir: Path):
    status(run_dir, "stopped", "stopped by SIGTERM at step 100 of 200, saved: --resume goes on")
    done = subprocess.run(
        command(run_dir, *options), capture_output=True, text=True, env=environment(COLUMNS=str(columns))
    )
    assert (done.returncode, done.stderr) == (0, "")
    frame = frame_of(done.stdout)
    assert {len(line) for line in frame} == {columns} and "stopped" in frame[0] and "\x1b" not in done.stdout
    assert "by SIGTERM" in done.stdout and "step 100: held val_loss" in done.stdout.partition("╭")[0]


def test_a_run_whose_process_is_gone_is_said_to_be(run_dir: Path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    status(run_dir, "running", pid=process.pid)
    done = subprocess.run(command(run_dir), capture_output=True, text=True, env=environment())
    assert "gone" in frame_of(done.stdout)[0] and f"process {process.pid} is gone" in done.stdout


@pytest.mark.parametrize("columns", [60, 120])
def test_on_a_terminal_it_follows_a_run_to_its_end(columns: int, run_dir: Path):
    with Terminal(columns, 30) as terminal, RunLock(run_dir / "lock"):
        status(run_dir, "running")
        tty = terminal.slave
        process = subprocess.Popen(command(run_dir), stdin=tty, stdout=tty, stderr=tty, env=environment())
        assert "running" in terminal.frame(r"│ step +100")[0]
        with JsonLines(run_dir / "metrics.jsonl") as journal:
            line = {"step": 101, "tokens": 0, "time": 0.0, "attempt": 1}
            journal.append({**line, "kind": "train", "lm_loss": 1.2345, "step_ms": 1.0})
            journal.append({**line, "kind": "event", "event": "note", "text": "something has happened"})
        terminal.shows("something has happened")
        frame = terminal.frame(r"│ step +101")
        assert "1.2345" in "\n".join(frame)
        status(run_dir, "finished", "all steps are done")
        assert process.wait(60) == 0
        assert "finished" in terminal.frame("finished")[0] and not terminal.cursor_hidden


def test_leaving_it_is_no_error_and_leaves_the_run_alone(run_dir: Path):
    with Terminal(80, 24) as terminal, RunLock(run_dir / "lock"):
        status(run_dir, "running")
        before = {path: path.read_bytes() for path in run_dir.iterdir()}
        tty = terminal.slave
        process = subprocess.Popen(command(run_dir), stdin=tty, stdout=tty, stderr=tty, env=environment())
        terminal.shows("running")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "llmtrain: error" not in terminal.screen
        assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_what_is_no_run_is_one_line(tmp_path: Path):
    for path, code in ((tmp_path / "none", 66), (tmp_path, 65)):
        done = subprocess.run(command(path), capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)


def test_it_needs_no_torch(run_dir: Path):
    look = "import sys; from llmtrain.cli.main import run; run(['watch', sys.argv[1]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look, str(run_dir)], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_frame_that_cannot_be_written_is_said_and_a_reader_that_has_read_enough_is_not(run_dir: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(run_dir), stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 74 and "standard output: cannot be written: the disk is full" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command(run_dir), stdout=writer, stderr=subprocess.PIPE, text=True, env=environment())
    os.close(writer)
    assert (done.returncode, done.stderr) == (74, "")

"""`train` on a real terminal: what stands on it while it trains, and that every end leaves it sound."""

import json
import os
import re
import signal
import time

import pytest

from tests.faults.conftest import DWELL, OPTIONS, result
from tests.terminals import Terminal, frame_of

# Takes the place of the output files that a forked process has.
ON_TERMINAL = """
import os, sys
for number in (0, 1, 2):
    os.dup2(os.open({name!r}, os.O_RDWR), number)
sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
os.environ["TERM"] = "xterm-256color"
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
"""
HOLDS = "dwell(step.TrainStep, 'optimizer_step', 7, seconds=1000)"  # with step 6 logged


def start(forks, here, terminal: Terminal, name: str, before: str = "", *more: object):
    ready = ON_TERMINAL.format(name=terminal.name) + DWELL + before
    return forks.start(here, name, *OPTIONS, "--run-dir", name, *more, before=ready)


@pytest.mark.parametrize("columns", [60, 120])
def test_the_dashboard_shows_the_run_and_the_lines_stay_above_it(columns, here, forks, undisturbed):
    name = f"dashboard {columns}"
    with Terminal(columns, 40) as terminal:
        process = start(forks, here, terminal, name, HOLDS)
        frame = terminal.frame("held, step 6")
        assert {len(line) for line in frame} == {columns}
        text = "\n".join(frame)
        lines = [json.loads(line) for line in (here / name / "metrics.jsonl").read_text().splitlines()]
        newest = [line for line in lines if line["kind"] == "train"][-1]
        assert newest["step"] == 6 and f"{newest['lm_loss']:.4f}" in text and f"lr {newest['lr']:.2e}" in text
        assert "75.0%" in text and "running" in text and "held, step 6" in text and "tok/s" in text
        assert "step 6: held val_loss" in terminal.all.partition("╭")[0]
        process.send(signal.SIGTERM)
        terminal.shows("SIGTERM: saves and stops")
        process.send(signal.SIGTERM)
        assert process.end() == 128 + signal.SIGTERM  # a second one, in the middle of a frame's life
        assert not terminal.cursor_hidden and b"\x1b[?1049" not in terminal.raw and b"\x1b[?25l" not in terminal.raw
    assert forks.start(here, name, *OPTIONS, "--run-dir", name).end() == 0
    assert result(here / name) == undisturbed


def test_a_stop_leaves_the_last_frame_and_its_line(here, forks):
    with Terminal(80, 40) as terminal:
        process = start(forks, here, terminal, "stopped", "dwell(step.TrainStep, 'micro_step', 19)")
        terminal.shows("HERE")
        process.send(signal.SIGINT)
        assert process.end() == 75
        screen = terminal.shows("--resume goes on")
    frame, after = frame_of(screen), screen.rpartition("╯")[2]
    stopped = re.fullmatch(r"llmtrain: error: stopped by SIGINT at step (\d).*goes on", "".join(after.split("\n")))
    assert stopped is not None, screen
    assert "stopped" in frame[0] and any(f"step  {stopped[1]} of 8" in line for line in frame)
    assert "SIGINT: saves and stops as soon as it can" in terminal.all


def test_an_error_is_one_line_below_the_last_frame(here, forks):
    with Terminal(80, 40) as terminal:
        fails = "\ndef fails(*arguments): raise ValueError('the step is broken')\n"
        fails += "from llmtrain.training import metrics\nmetrics.Throughput.take = fails\n"
        process = start(forks, here, terminal, "broken", fails)
        assert process.end() == 70
        screen = terminal.shows("the step is broken")
    assert "failed" in frame_of(screen)[0]
    assert screen.count("llmtrain: error:") == 1 and "Traceback" not in terminal.all


def test_the_end_of_a_run_stays_on_the_screen(here, forks, undisturbed):
    with Terminal(100, 30) as terminal:
        assert start(forks, here, terminal, "whole on a terminal").end() == 0
        screen = terminal.shows("finished: 8 steps")
        frame = terminal.frame("finished")
    assert "finished" in frame[0] and any("8 of 8" in line and "100.0%" in line for line in frame), screen
    assert any("saved step 8" in line for line in frame)
    assert result(here / "whole on a terminal") == undisturbed


def test_lines_are_shown_where_they_are_asked_for(here, forks):
    with Terminal(200, 60) as terminal:
        assert start(forks, here, terminal, "lines", "", "--console", "lines").end() == 0
        screen = terminal.shows("finished: 8 steps")
    assert "╭" not in terminal.all and "step 3/8 loss" in screen and "step 8/8 loss" in screen


def test_a_terminal_that_takes_nothing_holds_no_step_up(here, forks, undisturbed):
    with Terminal(80, 24) as terminal:
        process = start(forks, here, terminal, "halted", "dwell(step.TrainStep, 'optimizer_step', 2, seconds=2)")
        terminal.shows("HERE")
        terminal.type(b"\x13")  # Ctrl-S
        end = f"{here}/halted/checkpoints/step-00000008/MANIFEST.json"
        while not os.path.exists(end):
            assert process.alive()
            time.sleep(0.01)
        terminal.type(b"\x11")
        assert process.end() == 0
    assert result(here / "halted") == undisturbed

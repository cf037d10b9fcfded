"""The frame at every size: what it says, and that it never leaves its bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.report.dashboard import LEAST_HEIGHT, LEAST_WIDTH, WIDEST, frame
from llmtrain.report.state import FAILED, FINISHED, GONE, RUNNING, STARTING, STOPPED, UNKNOWN, RunState

NOW = 10_000.0


def a_run(state: str = RUNNING, reason: str = "", **fields) -> RunState:
    """At step 600 of 1,000, on a card."""
    run = RunState("runs/default", state, reason)
    base = {"tokens": 0, "attempt": 2}
    run.add({**base, "kind": "event", "event": "start", "step": 0, "time": NOW - 3725, "total_steps": 1000,
             "total_tokens": 1_000_000, "parameters": 101_700_000, "card_gib": 139.8,
             "environment": {"device": "NVIDIA H200"}})  # fmt: skip
    run.add({**base, "kind": "eval", "step": 500, "time": NOW - 60, "source": "held", "val_loss": 3.2145})
    run.add({**base, "kind": "event", "event": "checkpoint", "step": 500, "time": NOW - 192, "text": "saved",
             "delay_ms": 3.2})  # fmt: skip
    for step in range(10, 610, 10):
        run.add({**base, "kind": "train", "step": step, "tokens": 1000 * step, "time": NOW - 12,
                 "lm_loss": 9 - step / 100, "ppl": 20.0, "grad_norm": 0.41,
                 "aux_loss": 0.0, "lr": 4e-4, "epoch": 0.5, "tok_per_s": 667_111.0,
                 "mfu": 0.448, "step_ms": 98.2, "data_ms": 98.2, "peak_gib": 61.2, "host_rss_mib": 2048.0,
                 "card_c": 71.0, "card_w": 648.0, "card_busy": 0.99, **fields})  # fmt: skip
    return run


def shown(run: RunState, width: int = 120, height: int = 30, **options) -> str:
    return frame(run, width, height, NOW, **options).plain


EVERYTHING = [
    "runs/default", "running", "600 of 1,000", "60.0%", "left", "3.0000", "ppl 20.00", "grad 0.41", "667,111 tok/s",
    "mfu 44.8%", "98.2 ms/step", "wait 10.0%", "lr 4.00e-04", "61.2 of 139.8 GiB", "71 °C", "648 W", "99% busy",
    "3.2145 held, step 500", "step 500", "3m12s ago", "101.70M parameters", "NVIDIA H200", "last line 12s ago",
    "attempt 2",
]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_is_there_on_a_narrow_and_on_a_wide_terminal(width):
    text = shown(a_run(), width)
    missing = [words for words in EVERYTHING if words not in text]
    assert not missing, f"{missing}\n{text}"
    assert {len(line) for line in text.splitlines()} == {width}
    assert any(block in text for block in "▁▂▃▄▅▆▇█")  # the curve


def test_a_short_terminal_keeps_what_matters_most():
    text = shown(a_run(), 60, 6)
    assert len(text.splitlines()) == 6 and "600 of 1,000" in text and "3.0000" in text and "667,111" in text


@settings(max_examples=40)
@given(
    st.integers(0, 300),
    st.integers(0, 60),
    st.sampled_from([RUNNING, STARTING, FINISHED, STOPPED, FAILED, GONE, UNKNOWN]),
    st.text(max_size=200),
    st.booleans(),
)
def test_a_frame_never_leaves_its_bounds(width, height, state, reason, ascii_only):
    for run in (a_run(state, reason), RunState(reason or "run", state, reason)):
        lines = frame(run, width, height, NOW, ascii_only).split("\n")
        assert len(lines) <= max(LEAST_HEIGHT, height)
        assert {line.cell_len for line in lines} == {max(LEAST_WIDTH, min(width, WIDEST))}


@pytest.mark.parametrize("state", [STOPPED, FAILED, GONE])
def test_a_run_that_does_not_train_says_why_in_full(state):
    reason = "process 4711 is gone, so it was killed or the machine went down: --resume goes on"
    text = " ".join(shown(a_run(state, reason), 60).replace("│", " ").split())
    assert reason in text and state in text and "left" not in text


def test_what_is_not_known_is_left_out():
    run = a_run(mfu=None, tflops=0.5, peak_gib=0.0, card_c=None, lm_loss=None, step_ms=None)
    text = shown(run)
    assert "0.5 TFLOP/s" in text and "mfu" not in text and "GiB free" not in text and "None" not in text
    empty = shown(RunState("runs/new", STARTING))
    assert "runs/new" in empty and "starting" in empty and "None" not in empty


def test_trouble_stays_in_sight():
    run = a_run()
    run.add({"kind": "event", "event": "save_failed", "step": 550, "time": NOW, "text": "not saved: the disk is full"})
    assert "step 550: not saved: the disk is full" in shown(run, 60)


def test_a_terminal_without_unicode_gets_ascii():
    text = shown(a_run(), ascii_only=True)
    assert text.isascii() and "600 of 1,000" in text

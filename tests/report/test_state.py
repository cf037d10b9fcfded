"""Where a run stands, out of its lines: the model that both the run itself and `watch` draw."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.report.state import MOST_POINTS, Losses, RunState, said


def line(kind: str, step: int, **fields) -> dict:
    return {"kind": kind, "step": step, "tokens": 100 * step, "time": 1000.0 + step, "attempt": 1, **fields}


def start(step: int, attempt: int = 1) -> dict:
    of_run = {"total_steps": 100, "total_tokens": 10_000, "parameters": 7, "environment": {"device": "a card"}}
    return line("event", step, event="start", text="starts", **of_run) | {"attempt": attempt}


def train(step: int, loss: float, **fields) -> dict:
    return line("train", step, lm_loss=loss, tok_per_s=50.0, step_ms=200.0, data_ms=100.0, **fields)


def state_of(*lines: dict) -> RunState:
    state = RunState("run")
    for one in lines:
        state.add(one)
    return state


def test_the_newest_lines_say_where_it_stands():
    state = state_of(
        start(0),
        train(1, 5.0),
        train(11, 4.0),
        line("eval", 11, source="held", val_loss=4.5),
        line("event", 11, event="checkpoint", text="saved", delay_ms=3.0),
        line("eval", 21, source="held", val_loss=4.7),
        line("event", 22, event="save_failed", text="not saved"),
    )
    assert (state.at_step, state.total_steps, state.parameters, state.device) == (22, 100, 7, "a card")
    assert state.train["lm_loss"] == 4.0 and state.saved["step"] == 11 and state.trouble["text"] == "not saved"
    assert state.evals["held"]["step"] == 21 and state.best["held"]["step"] == 11
    assert state.seconds_left == (10_000 - 1100) / 50.0
    assert state.data_wait == pytest.approx(100 / (200 * 10))


def test_an_attempt_that_goes_on_forgets_what_was_not_saved():
    state = state_of(
        start(0), train(10, 5.0), train(20, 4.0), line("eval", 20, source="held", val_loss=4.0), start(10, attempt=2)
    )
    assert (state.at_step, state.attempt, state.train, state.evals, state.best) == (10, 2, {}, {}, {})
    assert state.losses.steps == (10, 10)
    state.add(train(15, 4.5))
    assert state.steps_of_line == 5 and state.losses.steps == (10, 15)


@pytest.mark.parametrize("odd", [{}, {"step": "x"}, {"step": 3}, {"step": 3, "kind": "train"}, {"step": 3, "kind": [1]},
                                 {"step": 3, "kind": "event", "event": "start", "attempt": "x", "total_steps": None},
                                 {"step": 3, "kind": "eval", "source": 4, "val_loss": "x"}])  # fmt: skip
def test_lines_of_others_do_no_harm(odd):
    state = state_of(start(0), train(1, 5.0), odd)
    assert state.at_step in (1, 3) and state.losses.steps == (1, 1)


def test_a_loss_that_is_no_number_is_no_point():
    state = state_of(start(0), train(1, 5.0), line("train", 2, lm_loss=None), line("train", 3, lm_loss=math.nan))
    assert state.losses.steps == (1, 1) and state.at_step == 3 and state.seconds_left is None


@settings(max_examples=40)
@given(st.integers(2, 4 * MOST_POINTS), st.integers(2, 200), st.integers(1, 50), st.integers(0, 99))
def test_the_course_of_the_loss_keeps_within_its_bounds_at_any_width(n, width, every, seed):
    values = np.random.default_rng(seed).uniform(0, 20, n).tolist()
    losses = Losses()
    for i, value in enumerate(values):
        losses.add(1 + i * every, value)
    columns = losses.columns(width)
    assert len(columns) == width
    slack = 1e-9
    assert min(values) - slack <= min(columns) and max(columns) <= max(values) + slack
    assert losses.steps == (1, 1 + (len(values) - 1) * every)


def test_a_long_course_is_the_mean_of_its_stretches():
    losses = Losses()
    for step in range(1, 8 * MOST_POINTS + 1):
        losses.add(step, 2.0 if step <= 4 * MOST_POINTS else 1.0)
    assert losses.columns(2) == [2.0, 1.0]
    losses.cut(2 * MOST_POINTS)
    assert losses.steps[1] <= 2 * MOST_POINTS and set(losses.columns(10)) == {2.0}


def test_what_is_said_to_people():
    assert said(line("event", 3, event="note", text="a note")) == "step 3: a note"
    assert said(line("eval", 3, source="held", val_loss=1.5, ppl=4.4817)) == "step 3: held val_loss 1.5000, ppl 4.4817"
    assert said(train(3, 1.0)) == ""


def test_lines_in_disorder_and_figures_that_no_float_holds_are_passed_over():
    losses = Losses()
    for step in (100, 5, 4, 6):
        losses.add(step, float(step))
    assert losses.steps == (4, 6) and losses.columns(2) == [4.0, 6.0]
    large = 10**400
    state = state_of(train(1, large, mfu=large), line("eval", 1, source="held", val_loss=large), train(2, 3.0))
    assert state.losses.steps == (2, 2) and said(line("eval", 1, source="held", val_loss=large)) == ""

"""What counts as a rank's own time in a step."""

import time

import pytest
import torch
from torch import nn

from llmtrain.training import own_time
from llmtrain.training.own_time import OwnTime, time_forward


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds, which pass where the test says so."""
    now = [0.0]
    monkeypatch.setattr(own_time.time, "perf_counter", lambda: now[0])
    return now


def test_a_step_takes_the_sum_of_its_stretches_and_the_median_of_steps_counts(clock):
    own = OwnTime(on_card=False)
    for seconds in (100.0, 1.0, 50.0, 3.0):
        for _ in range(2):
            own.begin()
            clock[0] += seconds
            own.end()
            clock[0] += 1000.0  # a wait
        own.end_step()
    assert own.ms() == 6000.0, "of 2, 100 and 6 s; the first step does not count"
    assert own.steps == 4


def test_a_stretch_that_has_not_begun_and_a_step_without_any_count_for_nothing(clock):
    own = OwnTime(on_card=False)
    for _ in range(3):
        own.end()
        own.end_step()
    assert own.ms() is None and own.steps == 3


class Sleeps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x + 1


def test_the_forward_is_timed_within_the_hooks_that_are_there(clock, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    module, own = Sleeps(), OwnTime(on_card=False)
    module.register_forward_pre_hook(lambda *_: time.sleep(1.0), prepend=True)  # a gather
    module.register_forward_hook(lambda *_: time.sleep(1.0))
    time_forward([module], own)
    for _ in range(2):
        assert module(module(torch.zeros(1))) == 2
        own.end_step()
    assert own.ms() == pytest.approx(100)

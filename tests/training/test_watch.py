"""Who of the ranks is named when the run does not go on, or one of them holds it up."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from torch import nn

from llmtrain.training import watch
from llmtrain.training.config import RunConfig
from llmtrain.training.watch import Watch


@pytest.fixture
def ranks_of(tmp_path: Path, monkeypatch) -> Callable[[int], list[Watch]]:
    """So many ranks, none of which gives signs of life but where the test lets it."""
    monkeypatch.setattr(watch, "BEAT", 0.2)
    store, run = dist.HashStore(), RunConfig(run_dir=tmp_path)
    return lambda size: [Watch(rank, size, store, run, torch.device("cpu")) for rank in range(size)]


@pytest.fixture
def pair(ranks_of) -> list[Watch]:
    """Two that have reached the same sum."""
    ranks = ranks_of(2)
    for rank in ranks:
        rank._beat()
    return ranks


def test_two_that_look_at_the_same_time_name_the_one_that_does_not_wait_and_not_each_other(pair):
    hangs, waits = pair
    waits.waits = True
    waits._beat()
    both = Barrier(2)

    def look(rank: Watch) -> str:
        both.wait()
        return rank._stuck(3.0)

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(look, pair))
    assert all(line.startswith("rank 0 on ") and " has not gone on for 3 s" in line for line in said), said


def test_one_whose_signs_of_life_have_ended_is_named_as_dead_or_frozen(pair):
    assert pair[1]._stuck(3.0).startswith("rank 0 on ")
    assert " is dead or frozen: nobody has gone on for 3 s" in pair[1]._stuck(3.0)


def test_one_that_was_lost_before_its_first_sign_of_life_is_named(ranks_of):
    ranks = ranks_of(2)
    ranks[0]._beat()
    assert ranks[0]._stuck(3.0).startswith("rank 1 on ")
    assert " has given no sign of life yet: nobody has gone on for 3 s" in ranks[0]._stuck(3.0)


def test_the_first_sign_of_life_does_not_wait_for_a_beat(ranks_of, monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 60.0)
    rank = ranks_of(1)[0]
    rank.start()
    ends = time.monotonic() + 20
    while not rank._read_beats() and time.monotonic() < ends:
        time.sleep(0.01)
    rank._over.set()
    assert 0 in rank._read_beats()


def test_of_stages_that_have_not_reached_a_sum_that_another_has_the_one_is_named_that_does_not_wait(ranks_of):
    waits, hangs, done = ranks_of(3)
    waits.waits = True
    done.before_sum()
    for rank in (waits, hangs, done):
        rank._beat()
    with ThreadPoolExecutor(1) as threads:
        said = threads.submit(hangs._stuck, 3.0)
        while not said.done():
            waits._beat()
            time.sleep(watch.BEAT / 10)
    assert said.result().startswith("rank 1 on ") and "more" not in said.result(), said.result()


def take_steps(rank: Watch, seconds_a_layer: float, monkeypatch) -> None:
    """Two steps, of which the first does not count, each once through its layers."""
    now = [0.0]
    monkeypatch.setattr("llmtrain.training.own_time.time.perf_counter", lambda: now[0])
    for _ in range(2):
        for _ in range(rank._layers):
            rank._own.begin()
            now[0] += seconds_a_layer
            rank._own.end()
        rank.before_sum()
        now[0] += 100.0
        rank.after_sum()
    rank._beat()


def test_a_stage_with_more_layers_is_not_slow_and_one_without_any_is_not_waited_for(ranks_of, monkeypatch):
    ranks = ranks_of(4)
    for rank, n_layers in zip(ranks, (4, 3, 2, 0), strict=True):
        rank.time_layers([nn.Identity() for _ in range(n_layers)], even=9 / 4)
    for rank in ranks[:2]:
        take_steps(rank, 0.1, monkeypatch)
    assert ranks[0].pace() == ({}, ""), "the third has said nothing yet"
    for rank in ranks[2:]:
        take_steps(rank, 0.1, monkeypatch)
    for _ in range(3):
        figures, slow = ranks[0].pace()
        assert figures["rank_ms"] == pytest.approx(225) == figures["slowest_rank_ms"] and not slow
    for _ in range(16):
        take_steps(ranks[2], 0.15, monkeypatch)
    assert [ranks[0].pace()[1][:6] for _ in range(3)] == ["", "rank 2", ""], "named once, the second time"
    assert ranks[0].pace()[0] == pytest.approx({"rank_ms": 225, "slowest_rank_ms": 337.5, "slowest_rank": 2})

"""Who of the ranks is named when the run does not go on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.distributed as dist

from llmtrain.training import watch
from llmtrain.training.config import RunConfig
from llmtrain.training.watch import Watch


@pytest.fixture
def pair(tmp_path: Path, monkeypatch) -> list[Watch]:
    """Two ranks that have reached the same sum, neither of which gives signs of life but where the test lets it."""
    monkeypatch.setattr(watch, "BEAT", 0.2)
    store, run = dist.HashStore(), RunConfig(run_dir=tmp_path)
    ranks = [Watch(rank, 2, store, run, torch.device("cpu")) for rank in range(2)]
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

"""When a run of several ranks stops that one of them was told to."""

import signal

import pytest
import torch.distributed as dist

from llmtrain.training.agreed_stop import AHEAD, AgreedStop
from llmtrain.training.lifecycle import StopFlag

TOLD, NOT_TOLD = StopFlag(), StopFlag()
TOLD.signal = signal.SIGTERM


@pytest.fixture
def ranks() -> list[AgreedStop]:
    store = dist.HashStore()
    return [AgreedStop(rank, store) for rank in range(2)]


def test_all_stop_after_the_same_step_some_ahead_of_where_one_was_told(ranks):
    other, told = ranks
    assert not told.is_due(TOLD, 7, begun=False) and not other.is_due(NOT_TOLD, 7, begun=False)
    for rank in ranks:
        assert rank.is_asked_for(NOT_TOLD, 7 + AHEAD - 1) and not rank.is_due(NOT_TOLD, 7 + AHEAD - 1, begun=False)
        assert rank.is_due(NOT_TOLD, 7 + AHEAD, begun=False)
        assert rank.by.startswith("SIGTERM, which rank 1 on ")


def test_a_step_that_has_begun_is_carried_through(ranks):
    assert not ranks[0].is_due(TOLD, 7, begun=False)
    assert not ranks[1].is_due(NOT_TOLD, 7 + AHEAD, begun=True)


def test_ranks_that_have_all_come_to_know_of_it_stop_where_they_are(ranks):
    assert ranks[1].is_asked_for(TOLD, 7)
    for rank in ranks:
        rank.put_at(7)
        assert rank.is_due(NOT_TOLD, 7, begun=False) and "rank 1" in rank.by


def test_a_process_alone_stops_at_once():
    alone = AgreedStop()
    assert alone.is_due(TOLD, 7, begun=True) and alone.is_asked_for(TOLD, 7)
    assert not alone.is_due(NOT_TOLD, 7, begun=False)
    alone.put_at(7)

"""The short forms of scripts/faults/all.py, whose long forms docs/reliability.md tells."""

import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import disks, kills, week
from tests.faults.damage import State, damaged
from tests.faults.forks import Forks
from tests.faults.runs import Runs, Tally
from tests.storage.conftest import in_memory
from tests.storage.processes import in_child

__all__ = ["in_memory"]  # a fixture


@pytest.fixture(scope="module")
def runs(forks: Forks) -> Iterator[Runs]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Runs(Path(folder), forks)


def holds(tally: Tally, at_least: int = 1) -> bool:
    assert tally.lost == [] and tally.tried >= at_least, tally
    return True


def test_killed_at_random_moments_a_run_goes_on_to_the_same_bits(runs: Runs):
    assert holds(kills.at_moments(runs, 8, seed=0), 8)


def test_killed_in_a_save_a_run_goes_on_to_the_same_bits(runs: Runs):
    assert holds(kills.at_calls(runs, [2, 90, disks.last_call(runs) - 20]), 3)


@pytest.mark.skipif(bool(kills.why_no_strace()), reason=kills.why_no_strace())
def test_killed_at_a_system_call_and_with_one_that_fails(runs: Runs):
    assert holds(kills.at_system_calls(runs, step=50), 3)
    assert holds(kills.failing_system_calls(runs, "EIO", step=12), 3)


def killed_at_calls(work, start: int, step: int) -> Iterator[int]:
    """Runs `work` in one process after another, each killed before a call into the system, `step` calls further on;
    ends after the process that came through."""

    def run(n: int) -> None:
        left = [n]

        def profile(frame, event, call):
            if event == "c_call" and (
                call.__module__ == "posix" or isinstance(getattr(call, "__self__", None), io.IOBase)
            ):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(profile)
        sys.setprofile(profile)
        work()
        sys.setprofile(None)

    for n in range(start, 5000, step):
        if (status := in_child(lambda n=n: run(n))) == 0:
            return
        assert status == -signal.SIGKILL
        yield n


def test_killed_at_any_call_of_a_save_there_is_the_old_checkpoint_or_the_new_one(in_memory: Path):
    before, after, found = State(1), State(2), State(3)
    before.save(in_memory, 1)
    seen = []
    for _ in killed_at_calls(lambda: after.save(in_memory, 2), 1, 5):
        step, said = found.restore(in_memory)
        assert found.equals({1: before, 2: after}[step]) and said == []
        seen.append(step)
        if step == 2:  # and it is replaced like any other
            after.save(in_memory, 2)
            assert found.restore(in_memory) == (2, [])
            assert in_child(lambda: _remove(in_memory, 2)) == 0
    assert len(seen) > 20 and set(seen) == {1, 2}


def _remove(run_dir: Path, step: int) -> None:
    from llmtrain.storage import atomic
    from llmtrain.training import checkpoint

    atomic.remove_tree(checkpoint.folder_of(run_dir, step))


def test_a_disk_that_fills_up_in_a_save_costs_that_save(runs: Runs):
    tally = disks.full_at_calls(runs, [20, 100])
    assert holds(tally, 2) and tally.met["save failed"]


def test_power_that_goes_in_a_save_costs_that_save_at_most(runs: Runs):
    if reason := disks.why_no_images():
        pytest.skip(reason)
    last = disks.last_call(runs)
    assert holds(disks.power_lost_at_calls(runs, [60, last]), 2)
    careless = "os.fsync = lambda descriptor: None\n"
    assert disks.power_lost_at_calls(runs, [last - 40], careless).lost, "a loss would not be seen"


def test_damage_anywhere_in_a_checkpoint_is_seen_and_the_one_before_loaded(in_memory: Path):
    assert holds(damaged(in_memory, 60, seed=0), 60)


def test_other_intervals_change_no_bit(in_memory: Path):
    assert holds(week.other_intervals(in_memory, 5, seed=0), 5)


def test_a_week_in_small_ends_in_the_same_bits(in_memory: Path, forks: Forks):
    many = Runs(in_memory, forks, 200, "--checkpoint-every", 10, "--val-every", 50)
    assert holds(week.week(many, 80, seed=1), 3)

"""The short forms of scripts/faults/all.py, whose long forms docs/reliability.md tells."""

import io
import itertools
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.storage import atomic
from llmtrain.training import checkpoint
from tests.faults import disks, kills, week
from tests.faults.damage import State, damaged
from tests.faults.forks import ROOT, Forks
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


def killed_at_call(work, n: int) -> int:
    """Runs `work` in a process that is killed before its n-th call into the system; how many calls there were."""
    heard, say = os.pipe()

    def run() -> None:
        calls = [0]

        def profile(frame, event, call):
            of_a_file = isinstance(getattr(call, "__self__", None), io.IOBase)
            if event == "c_call" and (of_a_file or call.__module__ == "posix"):
                calls[0] += 1
                if calls[0] == n:
                    os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(profile)
        sys.setprofile(profile)
        work()
        sys.setprofile(None)
        os.write(say, str(calls[0]).encode())

    status = in_child(run)
    os.close(say)
    with open(heard) as pipe:
        through = pipe.read()
    assert status == (0 if through else -signal.SIGKILL)
    return int(through or n)


def test_killed_at_any_call_of_a_save_there_is_the_old_checkpoint_or_the_new_one(in_memory: Path):
    before, after, found = State(1), State(2), State(3)
    before.save(in_memory, 1)
    last = killed_at_call(lambda: after.save(in_memory, 2), 10**9)
    seen = []
    for n in itertools.chain(range(1, last, 6), itertools.count(last)):  # what a killed one leaves makes some more
        atomic.remove_tree(checkpoint.folder_of(in_memory, 2))
        if killed_at_call(lambda: after.save(in_memory, 2), n) < n:
            break
        step, said = found.restore(in_memory)
        assert found.equals({1: before, 2: after}[step]) and said == []
        seen.append(step)
    after.save(in_memory, 2)
    assert found.restore(in_memory) == (2, []) and found.equals(after)
    assert {path.name for path in (in_memory / "checkpoints").iterdir()} == {"step-00000001", "step-00000002"}
    assert len(seen) > 30 and set(seen) == {1, 2}


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


def test_the_page_says_what_its_json_says():
    script = runpy.run_path(str(ROOT / "scripts/faults/all.py"))
    page = ROOT / "docs/reliability.md"
    assert page.read_text() == script["page"](page), "run scripts/faults/all.py --render"

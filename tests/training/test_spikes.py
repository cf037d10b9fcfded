"""The rule of spikes against plain Python, and runs that meet spikes."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.storage.errors import Diverged, StopRequested
from llmtrain.training import run, spikes
from llmtrain.training.config import TrainConfig
from llmtrain.training.spikes import SpikeRule
from tests.training.conftest import config
from tests.training.runs import events, tensors_of
from tests.training.test_health import counts, spoil
from tests.training.test_step import build, data, feed

CPU = torch.device("cpu")


class Reference:
    """The rule as its docstring says it."""

    def __init__(self, z: float, window: int, row: int) -> None:
        self.z, self.size, self.row = z, window, row
        self.values: list[tuple[float, float]] = []
        self.in_a_row = self.total = 0

    def far(self, values: tuple[float, float]) -> bool:
        if len(self.values) < self.size:
            return False
        found = []
        for x, column in zip(values, zip(*self.values, strict=True), strict=True):
            mean = statistics.fmean(column)
            limit = mean + self.z * max(statistics.stdev(column), 1e-3 * abs(mean))
            assume(x == 0 == limit or abs(x - limit) > 1e-9 * abs(limit))  # no tie, which rounding decides
            found.append(x > limit)
        return any(found)

    def judge(self, values: tuple[float, float], may_apply: bool) -> bool:
        if not may_apply:
            return False
        far = self.far(values)
        if far and self.in_a_row < self.row:
            self.in_a_row += 1
            self.total += 1
            return False
        if far:
            self.values = []
        self.values = [*self.values, values][-self.size :]
        self.in_a_row = 0
        return True


quiet = st.floats(0.5, 1.5)
value = st.one_of(quiet, quiet, quiet, st.sampled_from([0.0, 1.0, 30.0, 1e6]))
steps = st.lists(st.tuples(value, value, st.sampled_from([True] * 9 + [False])), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps=steps, z=st.sampled_from([0.5, 2.0, 6.0]), window=st.integers(2, 6), row=st.integers(1, 3))
def test_the_rule_on_the_device_is_the_rule_in_words(steps, z, window, row):
    ours, reference = SpikeRule(z, CPU, window, row), Reference(z, window, row)
    for i, (loss, norm, sound) in enumerate(steps):
        if i % 7 == 3:  # through a checkpoint
            again = SpikeRule(z, CPU, window, row)
            again.set_counts(ours.counts(ours.small))
            assert all(torch.equal(a, b) for a, b in zip(ours.small, again.small, strict=True))
            ours = again
        seen = (loss, norm) if sound else (math.nan, norm)
        applied = ours.judge(torch.tensor(seen, dtype=torch.float64), torch.tensor(sound))
        assert bool(applied) == reference.judge((loss, norm), sound), i
        assert [int(ours.in_a_row), int(ours.total)] == [reference.in_a_row, reference.total]
        assert int(ours.entered) >= window or int(ours.entered) == len(reference.values)


def test_a_lasting_change_of_level_costs_a_row_and_is_then_usual():
    rule = SpikeRule(6.0, CPU)
    chance = np.random.default_rng(0)
    levels = [2.0] * 400 + [5.0] * 400 + [5.0, 50.0] * 1  # two thirds of the way to another corpus, say; then a spike
    applied = [
        bool(rule.judge(torch.tensor([level + 0.1 * chance.standard_normal(), 1.0]).double(), torch.tensor(True)))
        for level in levels
    ]
    assert [i for i, one in enumerate(applied) if not one] == [*range(400, 400 + spikes.ROW), 801]


def test_even_values_make_no_spike_of_a_rounding():
    rule = SpikeRule(3.0, CPU, window=4)
    for x in (0.1, 0.1, 0.1, 0.1, 0.1 + 1e-15, 0.1002, 0.1004):
        rule.judge(torch.tensor([x, 0.0]).double(), torch.tensor(True))
    assert int(rule.total) == 1  # 0.1004 is, at 3 times a thousandth of 0.10005


def test_without_the_option_there_is_no_rule_and_with_it_no_bit_changes_until_a_spike():
    plain, watched = build(4, "fp32"), build(4, "fp32", skip_spikes=6.0)
    assert plain.optimizer.spikes is None and "spikes" not in plain.optimizer.counts()
    for i in range(5):
        for step in (plain, watched):
            feed(step, *data(4, seed=i), 4)
            step.optimizer_step(1e-2)
    assert torch.equal(plain.flat.master, watched.flat.master) and plain.metrics() == watched.metrics()
    assert int(watched.optimizer.spikes.entered) == 5


def test_a_window_that_a_checkpoint_lacks_begins_empty():
    step = build(4, "fp32", skip_spikes=6.0)
    feed(step, *data(4), 4)
    step.optimizer_step(1e-2)
    step.optimizer.set_counts({"count": 7, "skipped": 1})  # of a run without the option
    assert step.optimizer.tally.tolist() == [7, 1, 0] and int(step.optimizer.spikes.entered) == 0


# A run on ids that follow a rule, but for the windows that these steps read, which are noise.
STEPS, NOISY = 195, (165, 166, 190)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noisy") / "noisy.u16"
    ids = np.zeros(16 * 6 * STEPS + 1, np.uint16)
    ids[0] = 1
    for i in range(1, len(ids)):
        ids[i] = ids[i - 1] * 5 % 95 + 1
    ids.tofile(path)
    order = SampleOrder([Source("noisy", TokenFile.open(path, 96), 1.0)], 16, seed=0)
    chance = np.random.default_rng(0)
    for step in NOISY:
        for window in order.locate(np.arange(6 * (step - 1), 6 * step))[1].tolist():
            ids[16 * window + 1 : 16 * window + 16] = chance.integers(1, 96, 15)  # what two windows share stays
    ids.tofile(path)
    return path


def on(noisy: Path, run_dir: Path, z: float, **optimizer) -> TrainConfig:
    of_run = {"batch_size": 6, "log_every": 5, "checkpoint_every": 1000}
    made = config(noisy, run_dir, total_steps=STEPS, run=of_run, optimizer={"skip_spikes": z, **optimizer})
    return replace(made, model=replace(made.model, vocab_size=96))


@pytest.fixture(scope="module")
def undisturbed(noisy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("spikes") / "run"
    run.train(on(noisy, run_dir, 6.0), resume=False)
    return run_dir


def test_a_run_skips_the_steps_whose_data_is_noise_and_says_which(undisturbed):
    said = events(undisturbed, "skipped")
    looks = [(x["step"], x["first"], x["skipped"], x["spikes"]) for x in said]
    assert looks == [(165, 165, 1, 1), (170, 165, 1, 1), (190, 190, 1, 1)]
    assert "1 update was skipped, 1 as a spike; step 165, the first in a row, has lm_loss" in said[0]["text"]
    assert said[0]["samples"] == [6 * 164, 6 * 165] and said[0]["lm_loss"] > 1.0
    left = counts(undisturbed, STEPS)
    assert (left["count"], left["skipped"], left["spikes"]["total"]) == (STEPS - 3, 3, 3)


@pytest.mark.parametrize("stop_after", [60, 165])
def test_a_run_resumed_with_spikes_behind_it_or_in_the_midst_of_them_is_the_undisturbed_one(
    stop_after, noisy, undisturbed, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        spoil(patched, "nothing", range(0), stop_after=stop_after)
        run.train(on(noisy, tmp_path / "run", 6.0), resume=False)
    run.train(on(noisy, tmp_path / "run", 6.0), resume=True)
    assert tensors_of(tmp_path / "run", STEPS) == tensors_of(undisturbed, STEPS)
    assert counts(tmp_path / "run", STEPS) == counts(undisturbed, STEPS)


def test_a_run_that_did_not_skip_spikes_trains_to_the_same_bits_and_may_begin_to_when_it_is_resumed(
    noisy, undisturbed, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        spoil(patched, "nothing", range(0), stop_after=30)
        run.train(on(noisy, tmp_path / "run", 0.0), resume=False)
    assert counts(tmp_path / "run", 30) == {"count": 30, "skipped": 0, "skipped_in_a_row": 0}
    run.train(on(noisy, tmp_path / "run", 6.0), resume=True)
    assert [x["first"] for x in events(tmp_path / "run", "skipped")] == [165, 165, 190]
    assert tensors_of(tmp_path / "run", STEPS) == tensors_of(undisturbed, STEPS)


def test_spikes_count_as_bad_steps(noisy, tmp_path):
    with pytest.raises(Diverged, match="more than 1 updates in a row were skipped .*; step 165,"):
        run.train(on(noisy, tmp_path / "run", 6.0, max_bad_steps=1), resume=False)

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.report.compare import (
    BETTER,
    CANNOT_TELL,
    WORSE,
    Verdict,
    changes,
    compare,
    cut,
    judge,
    reached,
    refuse_no_replicate,
    student_t,
    trailing,
)
from llmtrain.report.curves import read_curve
from llmtrain.storage.errors import BadData, ConfigMismatch
from tests.report.runs import TOKENS, falling, write_run

BLOCKS = 20


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 10, 2.228), (0.95, 40, 2.021), (0.99, 3, 5.841), (0.5, 1, 1.0)],
)
def test_student_t_is_that_of_the_tables(confidence: float, freedom: int, expected: float):
    assert student_t(confidence, freedom) == pytest.approx(expected, rel=2e-4)


def arms(kind: str, runs: int, rng: np.random.Generator) -> np.ndarray:
    """(runs, BLOCKS) of runs between which there is no difference but chance of some kind, with batches in common."""
    white = rng.normal(0, 0.004, (runs, BLOCKS))
    offset = rng.normal(0, 0.004, (runs, 1))
    wander = np.empty((runs, BLOCKS))
    wander[:, 0] = rng.normal(0, 0.004, runs)
    for k in range(1, BLOCKS):
        wander[:, k] = 0.8 * wander[:, k - 1] + rng.normal(0, 0.004 * 0.6, runs)
    noise = {"white": white, "offset": offset + 0.02 * white, "wander": wander, "all": white + offset + wander}[kind]
    return 3.0 + rng.normal(0, 0.03, BLOCKS) + noise


@pytest.mark.parametrize("replicates", [2, 3])
@pytest.mark.parametrize("kind", ["white", "offset", "wander", "all"])
def test_chance_alone_is_called_a_difference_in_five_of_a_hundred_at_most(kind: str, replicates: int):
    rng = np.random.default_rng(7)
    draws = [arms(kind, replicates + 1, rng) for _ in range(1000)]
    wrong = sum(judge(draw[:-1], draw[-1]).verdict != CANNOT_TELL for draw in draws)
    assert wrong / len(draws) < 0.07  # 0.05 and three standard deviations of 1,000 draws
    if kind == "offset":
        assert wrong / len(draws) > 0.03  # the bound is met there: no laxer, and no stricter than it says


@pytest.mark.parametrize("kind", ["white", "offset", "wander", "all"])
def test_a_difference_far_beyond_chance_is_found_and_has_its_sign(kind: str):
    rng = np.random.default_rng(8)
    for _ in range(100):
        draw = arms(kind, 4, rng)
        assert judge(draw[:3], draw[3] - 0.25).verdict == BETTER
        assert judge(draw[:3], draw[3] + 0.25).verdict == WORSE


def test_a_third_replicate_tells_what_a_pair_cannot():
    rng = np.random.default_rng(9)
    found = {2: 0, 3: 0}
    for _ in range(300):
        draw = arms("offset", 4, rng)
        for runs in found:
            found[runs] += judge(draw[:runs], draw[3] - 0.025).verdict == BETTER
    assert found[2] < 0.5 * 300 < 0.75 * 300 < found[3]


def test_replicates_that_agree_by_luck_do_not_make_their_noise_a_difference():
    noise = np.tile([0.01, -0.01], BLOCKS // 2)
    result = judge(np.stack([3 + noise, 3 - noise]), np.full(BLOCKS, 2.999))
    assert result.verdict == CANNOT_TELL and result.rests_on == "the blocks of the replicates"


def test_a_run_that_is_better_in_one_block_alone_is_not_better():
    replicates = np.full((2, BLOCKS), 3.0)
    one = np.full(BLOCKS, 3.0)
    one[3] = 1.0
    result = judge(replicates, one)
    assert result.verdict == CANNOT_TELL and result.rests_on == "the blocks of the difference"


def test_equal_runs_have_no_difference_and_any_beyond_equal_replicates_counts():
    flat = np.full((2, BLOCKS), 3.0)
    assert judge(flat, flat[0]) == Verdict(CANNOT_TELL, 0.0, 0.0, 0.0, 0.0, "the means of the replicates")
    assert judge(flat, flat[0] - 0.5).verdict == BETTER


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-0.2, 0.2), st.floats(0.5, 10))
def test_the_verdict_does_not_hang_on_level_scale_or_direction(seed: int, effect: float, scale: float):
    draw = arms("all", 3, np.random.default_rng(seed))
    draw[-1] += effect
    plain = judge(draw[:2], draw[2])
    moved = judge(5 + scale * draw[:2], 5 + scale * draw[2])
    mirrored = judge(-draw[:2], -draw[2])
    swapped = judge(draw[1::-1], draw[2])
    assert moved.floors == pytest.approx(plain.floors, rel=1e-6) == -mirrored.floors
    assert swapped.floors == pytest.approx(plain.floors, rel=1e-9)
    assert plain.verdict == moved.verdict == swapped.verdict


def curves(tmp_path: Path, **of_b: float):
    runs = {
        "a": falling(2000, 0), "a2": falling(2000, 1), "a3": falling(2000, 2), "b": falling(2000, 3, **of_b),
    }  # fmt: skip
    return [read_curve(write_run(tmp_path / name, losses)) for name, losses in runs.items()]


def test_whole_runs_are_judged_and_the_difference_is_the_one_that_was_put_in(tmp_path: Path):
    *replicates, better = curves(tmp_path, offset=-0.05)
    result = compare(replicates, better)
    assert result["verdict"] == BETTER
    assert result["difference"] == pytest.approx(-0.05, abs=0.002) and result["floor"] < 0.01
    assert result["tail"]["paired"] and result["tail"]["lines"] == 500
    assert compare(replicates[:2], replicates[2])["verdict"] == CANNOT_TELL
    assert result["runs"][-1]["loss"] == pytest.approx(np.mean(result["block_means"][-1]))


def test_a_run_that_learns_faster_needs_as_many_times_fewer_tokens(tmp_path: Path):
    *replicates, faster = curves(tmp_path, speed=1.3)
    same = compare(replicates, faster)["same_loss"]
    assert same["tokens_ratio"] == pytest.approx(1.3, rel=0.07)
    assert same["seconds_ratio"] == pytest.approx(1.3, rel=0.07)
    slower = compare([faster, faster], replicates[0])["same_loss"]
    assert slower["tokens_ratio"] == pytest.approx(1 / 1.3, rel=0.07)
    assert slower["changed"]["tokens"] == 2000 * TOKENS


def test_runs_that_never_meet_have_no_ratio(tmp_path: Path):
    *replicates, above = curves(tmp_path, offset=90)
    assert compare(replicates, above)["same_loss"]["tokens_ratio"] is None


def test_blocks_hold_what_lies_in_them(tmp_path: Path):
    ramp = np.arange(1, 101.0)
    curve = read_curve(write_run(tmp_path / "ramp", ramp))
    half = cut([curve, curve], 0.5, 5)
    assert half.means[0].tolist() == [55.5, 65.5, 75.5, 85.5, 95.5] and half.paired and half.lines == 50
    assert trailing(curve, 10 * TOKENS)[[0, 9, 99]].tolist() == [1, 5.5, 95.5]
    assert reached(read_curve(write_run(tmp_path / "down", ramp[::-1])), 50.25, 1) == {
        "step": 50.75, "tokens": 50.75 * TOKENS, "seconds": pytest.approx(5.075),
    }  # fmt: skip


def test_the_longer_run_is_cut_and_other_log_intervals_are_said(tmp_path: Path):
    dense = read_curve(write_run(tmp_path / "dense", falling(1000, 0)))
    sparse = read_curve(write_run(tmp_path / "sparse", falling(1200, 1), every=7))
    both = cut([dense, sparse], 0.25, 5)
    assert both.edges[-1] == 1000 * TOKENS and not both.paired
    assert cut([dense, dense], 0.25, 0).means.shape == (2, 20)
    held_out = read_curve(tmp_path / "dense", "val_loss")
    assert cut([held_out, held_out], 0.25, 0).means.shape == (2, 5)
    with pytest.raises(BadData, match="has no loss between .* lower --blocks"):
        cut([dense, sparse], 0.25, 200)
    with pytest.raises(BadData, match="has no loss between .* tokens: raise --tail"):  # where nobody gave a number
        cut([held_out, held_out], 0.001, 0)


def test_settings_that_differ_are_named_and_a_replicate_may_differ_in_its_seed_alone():
    one = {"run.seed": 0, "run.run_dir": "a", "optimizer.beta1": 0.9}
    assert changes(one, {**one, "run.run_dir": "b", "run.log_every": 1}) == {}
    shown = {"run.tensorboard": True, "run.wandb": "project", "run.console": "lines"}
    assert changes({**one, "run.tensorboard": False}, {**one, **shown}) == {}
    refuse_no_replicate("a", "b", changes(one, {**one, "run.seed": 1}))
    with pytest.raises(ConfigMismatch, match="b: is no replicate of a: its optimizer.beta1 is 0.8, not 0.9"):
        refuse_no_replicate("a", "b", changes(one, {**one, "optimizer.beta1": 0.8}))

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.benchmark.statistics import (
    Times,
    block_ratios,
    compare,
    geometric_mean,
    noise_floor,
    range_line,
    rotation,
)


def blocks(*medians: float) -> Times:
    """Blocks of three samples each with the given median."""
    return Times(tuple((m * 0.9, m, m * 3) for m in medians))


def test_medians_ignore_the_outliers_of_a_block():
    times = Times(((1.0, 2.0, 100.0), (2.0, 4.0, 3.0)))
    assert times.medians == (2.0, 3.0)
    assert times.pooled == 2.5
    assert times.spread == 0.5
    assert times.noisy


def test_a_spread_of_five_percent_is_not_yet_marked():
    assert not blocks(100, 105).noisy
    assert blocks(100, 105.01).noisy


@pytest.mark.parametrize("bad", [(), ((),), ((1.0,), ()), ((0.0,),), ((-1.0,),), ((math.nan,),), ((math.inf,),)])
def test_samples_that_are_no_times_are_refused(bad):
    with pytest.raises(ValueError, match="blocks"):
        Times(bad)


def test_the_floor_is_the_worst_block_in_either_direction():
    assert noise_floor([(blocks(1.0, 1.0), blocks(1.01, 0.96))]) == pytest.approx(1 / 0.96 - 1)
    assert noise_floor([(blocks(1.0), blocks(1.0)), (blocks(2.0), blocks(2.06))]) == pytest.approx(0.03)


def test_without_a_replicate_there_is_no_floor():
    with pytest.raises(ValueError, match="replicates"):
        noise_floor([])


def test_a_win_needs_every_block_beyond_the_floor():
    ours = blocks(1.0, 1.0, 1.0)
    assert compare(ours, blocks(1.1, 1.1, 1.1), 0.05).verdict == "+"
    assert compare(ours, blocks(1.1, 1.1, 1.04), 0.05).verdict == "="
    assert compare(ours, blocks(0.9, 0.9, 0.9), 0.05).verdict == "-"
    assert compare(ours, blocks(0.9, 0.9, 0.96), 0.05).verdict == "="


def test_a_comparison_prints_ratio_verdict_and_noise():
    assert str(compare(blocks(1.0, 1.0), blocks(1.5, 1.5), 0.02)) == "1.50+"
    assert str(compare(blocks(1.0, 1.0), blocks(1.5, 1.8), 0.02)).endswith("+~")


def test_arms_with_different_numbers_of_blocks_are_not_compared():
    with pytest.raises(ValueError, match="blocks"):
        block_ratios(blocks(1.0), blocks(1.0, 1.0))


def test_the_summary_of_ratios_counts_the_slower_rows():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert range_line([2.0, 0.5]) == "geometric mean 1.00, least 0.50, largest 2.00, 1 of 2 below 1"


@given(st.integers(1, 9), st.booleans())
def test_every_arm_holds_every_place_once_in_as_many_rounds_as_arms(count, backwards):
    orders = [rotation(count, turn, backwards=backwards) for turn in range(count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert all(sorted(place) == list(range(count)) for place in zip(*orders, strict=True))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.floats(0, 0.5))
def test_an_arm_never_beats_itself(medians, floor):
    comparison = compare(blocks(*medians), blocks(*medians), floor)
    assert comparison.verdict == "=" and comparison.ratio == 1

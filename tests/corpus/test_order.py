import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.corpus import order
from llmtrain.corpus.order import SampleOrder, Source, absolute_spec, amount_of, block_counts, parse_sources, permute
from llmtrain.storage.errors import BadData, UsageError
from tests.corpus.files import counting_file

KEYS = st.integers(0, 2**64 - 1)


def sources(folder: Path, *parts: tuple[int, float], seq_len: int = 8) -> list[Source]:
    """One source for each (windows, weight)."""
    return [
        Source(f"s{i}", counting_file(folder / f"s{i}.u16", windows * seq_len + 1), weight)
        for i, (windows, weight) in enumerate(parts)
    ]


@given(n=st.integers(1, 3000), key=KEYS)
def test_a_permutation_meets_each_index_once(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_every_small_n_is_permuted():
    for n in range(1, 400):
        for key in (0, 1, 2**64 - 1):
            assert np.bincount(permute(np.arange(n), n, key), minlength=n).tolist() == [1] * n


@given(n=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_a_permutation_of_any_size_stays_inside_and_tells_indices_apart(n, key, data):
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=50, unique=True)), np.int64)
    out = permute(index, n, key)
    assert out.dtype == np.int64 and len(set(out.tolist())) == len(index)
    assert all(0 <= i < n for i in out.tolist())


def test_an_index_outside_is_refused():
    for index in (-1, 7):
        with pytest.raises(ValueError, match="outside"):
            permute(np.array([index]), 7, 0)


def test_one_element_is_permuted_as_in_a_crowd_and_with_a_key_each():
    keys = np.arange(100, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    together = permute(np.arange(100), 1000, keys)
    assert together.tolist() == [int(permute(np.array([i]), 1000, int(key))[0]) for i, key in enumerate(keys)]
    assert permute(np.arange(12).reshape(3, 4), 12, 5).tolist() == permute(np.arange(12), 12, 5).reshape(3, 4).tolist()


def test_the_order_is_the_same_on_every_machine_and_version():
    assert permute(np.arange(8), 50_000_000, 12345).tolist() == [
        31906339, 23122910, 13402575, 41847746, 27591567, 19961349, 38753990, 17232595,
    ]  # fmt: skip


def test_different_keys_give_different_permutations():
    n = 1000
    first = permute(np.arange(n), n, 0)
    for key in range(1, 50):
        # The number of places where two random permutations agree is Poisson(1): above 12 once in 10^10.
        assert int((permute(np.arange(n), n, key) == first).sum()) <= 12


def test_neighbours_are_spread_over_the_whole_range():
    for n in (10_007, 1 << 20, 48_828_124):
        for key in range(5):
            out = permute(np.arange(10_000), n, key) / n
            gaps = np.abs(np.diff(out))
            # Two uniform points are 1/3 apart on average, standard error 0.0024 (here: neighbours share a point).
            assert abs(gaps.mean() - 1 / 3) < 0.015
            assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.05
            cells = np.bincount((out * 100).astype(int), minlength=100)
            assert 40 < cells.min() and cells.max() < 160  # mean 100, deviation 10


def test_each_index_goes_everywhere_as_the_key_changes():
    n = 10
    seen = np.zeros((n, n), int)
    for key in range(5000):
        seen[np.arange(n), permute(np.arange(n), n, key)] += 1
    assert 380 < seen.min() and seen.max() < 620  # mean 500, deviation 21


@pytest.mark.parametrize("n", [3, 7, 1000, 1025, 10_001])
def test_a_walk_is_short(n, monkeypatch):
    passes = []
    inner = order._rounds
    monkeypatch.setattr(order, "_rounds", lambda x, *rest: passes.append(x.size) or inner(x, *rest))
    for key in range(20):
        passes.clear()
        permute(np.arange(n), n, key)
        assert len(passes) <= 12 and sum(passes[1:]) <= 3 * np.sqrt(n)


def test_each_window_of_an_epoch_is_seen_exactly_once(tmp_path):
    one = SampleOrder(sources(tmp_path, (37, 1.0)), 8, seed=3)
    assert one.samples_per_epoch == 37
    epochs = []
    for epoch in range(4):
        source, window = one.locate(np.arange(epoch * 37, (epoch + 1) * 37))
        assert set(source) == {0} and sorted(window) == list(range(37))
        epochs.append(window.tolist())
    assert all(epochs[a] != epochs[b] for a in range(4) for b in range(a))


def test_the_seed_and_not_the_name_decides_the_order(tmp_path):
    [source] = sources(tmp_path, (500, 1.0))
    window = SampleOrder([source], 8, seed=0).locate(np.arange(500))[1].tolist()
    renamed = Source("other", source.file, 5.0)
    assert SampleOrder([renamed], 8, seed=0).locate(np.arange(500))[1].tolist() == window
    assert SampleOrder([source], 8, seed=1).locate(np.arange(500))[1].tolist() != window


def test_two_sources_of_one_length_are_shuffled_differently(tmp_path):
    mix = SampleOrder(sources(tmp_path, (500, 1.0), (500, 1.0)), 8, seed=0)
    source, window = mix.locate(np.arange(1000))
    assert window[source == 0].tolist() != window[source == 1].tolist()


@given(
    parts=st.lists(st.tuples(st.integers(1, 900), st.floats(0.1, 10)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 10**6),
)
@settings(max_examples=30, deadline=None)
def test_a_mixture_keeps_its_counts_in_every_block_and_its_windows_in_every_epoch(tmp_path_factory, parts, seed, first):
    mix = SampleOrder(sources(tmp_path_factory.mktemp("mix"), *parts), 8, seed)
    counts = block_counts([weight for _, weight in parts])
    source, window = mix.locate(np.arange(first * 1000, (first + 2) * 1000))
    for block in (source[:1000], source[1000:]):
        assert np.bincount(block, minlength=len(parts)).tolist() == counts
    for s, (windows, _) in enumerate(parts):
        # Where in its epochs the source stands when the block begins; whole epochs inside of it are whole.
        turns = np.arange(first * counts[s], (first + 2) * counts[s])
        for epoch in np.unique(turns // windows):
            of_epoch = window[source == s][turns // windows == epoch]
            assert len(set(of_epoch)) == len(of_epoch) and set(of_epoch) <= set(range(windows))


def test_a_sources_epoch_is_whole_wherever_blocks_end(tmp_path):
    mix = SampleOrder(sources(tmp_path, (130, 0.7), (77, 0.3)), 8, seed=1)
    source, window = mix.locate(np.arange(3000))
    for s, windows in enumerate((130, 77)):
        mine = window[source == s]
        for epoch in range(len(mine) // windows):
            assert sorted(mine[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_the_place_of_a_sample_does_not_depend_on_its_company(tmp_path):
    mix = SampleOrder(sources(tmp_path, (300, 3), (100, 1), (50, 0.1)), 8, seed=9)
    asked = np.random.default_rng(0).integers(0, 10**9, 60)
    source, window = mix.locate(asked)
    for i, sample in enumerate(asked):
        alone = mix.locate(np.array([sample]))
        assert (source[i], window[i]) == (alone[0][0], alone[1][0])


def test_blocks_are_dealt_in_different_orders(tmp_path):
    mix = SampleOrder(sources(tmp_path, (10, 1), (10, 1)), 8, seed=0)
    source, _ = mix.locate(np.arange(10_000))
    blocks = {tuple(block) for block in source.reshape(10, 1000)}
    assert len(blocks) == 10
    assert max(np.convolve(source, np.ones(20), "valid")) > 12  # dealt, not alternated


def test_what_is_drawn_of_each_source_is_counted(tmp_path):
    mix = SampleOrder(sources(tmp_path, (300, 7), (20, 3)), 8, seed=2)
    for samples in (0, 1, 999, 1000, 1001, 54_321):
        drawn = Counter(mix.locate(np.arange(samples))[0].tolist())
        assert mix.drawn(samples).tolist() == [drawn[0], drawn[1]]


def test_weights_become_thousandths_by_largest_remainder():
    assert block_counts([1]) == [1000]
    assert block_counts([0.7, 0.2, 0.1]) == [700, 200, 100]
    assert block_counts([1, 1, 1]) == [334, 333, 333]
    assert block_counts([2, 2, 3]) == [286, 286, 428]  # 285.7, 285.7, 428.6
    assert block_counts([0.9996, 0.0004]) == [1000, 0]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_thousandths_sum_up_and_stay_next_to_their_share(weights):
    counts = block_counts(weights)
    assert sum(counts) == 1000
    assert all(abs(count - 1000 * weight / sum(weights)) <= 1 for count, weight in zip(counts, weights, strict=True))


def test_what_cannot_be_mixed_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"--tokens s1: its weight is below 1/1000"):
        SampleOrder(sources(tmp_path, (10, 1.0), (10, 1e-4)), 8, 0)
    short = Source("short", counting_file(tmp_path / "short.u16", 1024), 1.0)
    with pytest.raises(BadData, match=r"short.u16: holds 1,024 tokens, .*--seq-len 1024 needs 1,025"):
        SampleOrder([short], 1024, 0)
    assert SampleOrder([short], 1023, 0).samples_per_epoch == 1
    held_out = Source("held", counting_file(tmp_path / "short.val.u16", 37), 1.0)
    with pytest.raises(BadData, match=r"short.val.u16: .*shorten --seq-len or tokenize with a larger --holdout$"):
        SampleOrder([held_out], 128, 0)


def test_sources_are_read_from_their_specifications():
    assert parse_sources(["data/corpus.u16"]) == [("corpus", "data/corpus.u16", 1.0, None)]
    assert parse_sources(["code=a.u16:0.7", "b.u16:3", "m=x/c.bin"]) == [
        ("code", "a.u16", 0.7, None),
        ("b", "b.u16", 3.0, None),
        ("m", "x/c.bin", 1.0, None),
    ]
    assert parse_sources(["runs/lr=1/a.u16"]) == [("a", "runs/lr=1/a.u16", 1.0, None)]
    assert parse_sources(["host:dir/a.u16"]) == [("a", "host:dir/a.u16", 1.0, None)]


def test_a_number_with_a_unit_is_how_many_tokens_to_take():
    assert parse_sources(["code=a.u16:2.5B", "b.u16:300m", "c.u16:.5T", "d.u16:7K"]) == [
        ("code", "a.u16", 2.5e9, 2_500_000_000),
        ("b", "b.u16", 3e8, 300_000_000),
        ("c", "c.u16", 5e11, 500_000_000_000),
        ("d", "d.u16", 7e3, 7_000),
    ]
    assert parse_sources(["x:2B/a.u16"]) == [("a", "x:2B/a.u16", 1.0, None)]
    absolute = parse_sources([absolute_spec("code=a.u16:2.5B")])
    assert absolute == [("code", os.path.abspath("a.u16"), 2.5e9, 2_500_000_000)]
    with pytest.raises(UsageError, match="--tokens b: says no number of tokens as others do"):
        parse_sources(["a.u16:2.5B", "b.u16:0.3"])
    with pytest.raises(UsageError, match="a.u16: 9{40} tokens are more than there are"):
        parse_sources(["a.u16:" + "9" * 400 + "T"])
    assert [amount_of(text) for text in ("9" * 5000, "9" * 17 + "T", "1T")] == [None, None, 10**12]


@pytest.mark.parametrize("spec", ["", "name=", ":3", "=a.u16", "a.u16:0", "a.u16:-1", "a.u16:nan", "a.u16:inf", "a:0B"])
def test_a_specification_that_makes_no_sense_is_refused(spec):
    with pytest.raises(UsageError, match="--tokens"):
        parse_sources([spec])


def test_two_sources_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two sources are called a"):
        parse_sources(["x/a.u16", "y/a.u16"])
    with pytest.raises(UsageError, match="--tokens is missing"):
        parse_sources([])

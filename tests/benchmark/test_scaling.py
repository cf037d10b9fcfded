import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.benchmark.scaling import (
    Cluster,
    Link,
    SumPoint,
    bubble,
    data_parallel_s,
    fit_link,
    fsdp_s,
    hop_bytes,
    pipeline_s,
    pipelines_s,
    ring,
)

SCRIPT = Path(__file__).parents[2] / "scripts/bench/parallel.py"
FAR = Link(1e-5, 50e9)


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12), st.sampled_from([2, 4, 8]))
def test_the_link_of_exact_sums_is_found_again(latency, rate, ranks):
    link = Link(latency, rate)
    sizes = [rate * latency * ranks * factor for factor in (0.1, 1, 10)]
    found = fit_link([SumPoint(ranks, int(size) + 1, ring(ranks, int(size) + 1, link)) for size in sizes])
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((latency, rate), rel=0.02)


def test_sums_that_grow_faster_than_their_size_give_no_negative_latency():
    link = fit_link([SumPoint(2, 1000, 1e-4), SumPoint(2, 2000, 1e-3), SumPoint(2, 4000, 9e-3)])
    assert link.latency_s == 0 and link.bytes_per_s > 0


@given(st.floats(1e-3, 10), st.integers(10**6, 10**10), st.sampled_from([8, 64, 1024]))
def test_no_cluster_is_faster_than_its_cards_and_more_of_them_take_no_less(compute, parameters, cards):
    near = Link(1e-6, 300e9)
    one, many = (Cluster(n, 8, near, FAR) for n in (1, cards))
    assert data_parallel_s(compute, parameters, one) == fsdp_s(compute, parameters, 16, 1, one) == compute
    assert data_parallel_s(compute, parameters, many) > compute
    assert fsdp_s(compute, parameters, 16, 1, many) > compute
    assert many.sum_s(4 * parameters) >= Cluster(8, 8, near, FAR).sum_s(4 * parameters)


@given(st.integers(1, 64), st.integers(10**6, 10**10), st.sampled_from([2, 8, 64]))
def test_weights_that_are_kept_are_gathered_once_a_step(micro_batches, parameters, cards):
    cluster, layers = Cluster(cards, 8, Link(0.0, 300e9), FAR), 16
    share = (cards - 1) / cards * parameters / cluster.slowest().bytes_per_s  # seconds of a byte for each parameter
    if cards <= 8:  # where no latency counts
        freed, kept = (fsdp_s(0.0, parameters, layers, micro_batches, cluster, reshard) for reshard in (True, False))
        assert freed == pytest.approx((8 + 6 / layers) * micro_batches * share)
        assert kept == pytest.approx((2 + 4 * micro_batches) * (1 + 1 / layers) * share)
    freed, kept = (fsdp_s(1.0, parameters, layers, micro_batches, cluster, reshard) for reshard in (True, False))
    assert 1 < kept <= freed


def test_a_pipeline_waits_less_with_more_micro_batches_and_better_schedules():
    assert pipeline_s(8.0, 4, 12) == pytest.approx(2.0 * 1.25)
    assert bubble(8, 16, "1f1b") > bubble(8, 32, "1f1b")
    assert bubble(8, 16, "1f1b") > bubble(8, 16, "interleaved") > bubble(8, 16, "zero-bubble") > 0


def test_a_pipeline_waits_for_what_it_exchanges_and_for_its_dearest_rank():
    even, link = pipeline_s(8.0, 4, 12), Link(0.0, 1e9)
    assert pipeline_s(8.0, 4, 12, dearest=0.3) == pytest.approx(1.2 * even)
    hop = hop_bytes(2048, 1000) / 1e9
    assert pipeline_s(8.0, 4, 12, hop_s=hop) == pytest.approx(even + 2 * 15 * 2048 * 2000 / 1e9)
    assert pipeline_s(8.0, 4, 12, "interleaved", hop_s=hop) == pipeline_s(8.0, 4, 12, "interleaved")
    assert pipeline_s(8.0, 4, 12, "interleaved", hop_s=1.0) == 60
    one, two = (pipelines_s(even, 10**9, 4, Cluster(cards, 8, link, FAR)) for cards in (4, 8))
    assert one == even and two == pytest.approx(even + ring(2, 1e9, link))


def test_the_script_measures_two_ranks_and_writes_its_page(tmp_path):
    output = tmp_path / "docs" / "scaling.md"
    command = [sys.executable, str(SCRIPT), "--smoke", "--seconds", "0.02", "--bursts", "2", "--rows", "weak-1"]
    command += ["ddp", "pipeline", "fsdp-kept"]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "docs/data/scaling.json").read_text())
    assert [row["name"] for row in data["rows"]] == ["weak-1", "ddp", "pipeline", "fsdp-kept"]
    for row in data["rows"]:
        assert row["ranks"] == 2 and row["times_one"] > 0 and len(row["step_s"]) == 2 and len(row["single_s"]) == 8
    assert len(data["sums"]) == 4 and all(point["seconds"] > 0 for point in data["sums"])
    page = output.read_text()
    assert "| weak-1 | weak | ddp | 2 | 4 x 64 x 1 |" in page
    assert "| pipeline | strong | pipeline, 1f1b | 2 | 4 x 64 x 4 |" in page
    assert "| fsdp-kept | weak | fsdp, kept | 2 | 4 x 64 x 1 |" in page
    assert "tokens | fp32 | none | pipeline, 1f1b | 2 |" in page.split("## Pipelines against data parallel")[1]

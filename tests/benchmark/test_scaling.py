import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.benchmark.config import Shape
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
from llmtrain.benchmark.scaling_tables import SIZES, modelled
from llmtrain.model.config import ModelConfig

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


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("script_parallel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_parallel", module)  # where dataclasses look a module up
    spec.loader.exec_module(module)
    return module


def test_rows_before_one_in_which_ranks_fail_are_kept_and_it_is_told(script, tmp_path, monkeypatch, capsys):
    asked = []

    def on_ranks(ranks: int, command: list[str], quiet: bool = False) -> str:
        rows = command[command.index("--rows") + 1 :]
        asked.append((ranks, rows))
        lines = [{"sums": [{"ranks": ranks, "bytes": 4, "seconds": 1.0}]}] if ranks > 1 else []
        for name in rows:
            if ranks > 1 and name == "pipeline":
                half = json.dumps({"row": name})[:5]
                raise script.RanksEnded("ranks ended", "".join(json.dumps(line) + "\n" for line in lines) + half)
            shape = asdict(script.rows_of(smoke=True)[0].shape)
            taken = {"step_s": {"apart": [1.0, 1.0], "together": [1.0, 1.0]}, "single_s": [1.0, 1.0]}
            lines.append({"row": name, "shape": shape, **taken})
        return "".join(json.dumps(line) + "\n" for line in lines)

    monkeypatch.setattr(script, "on_ranks", on_ranks)
    output = tmp_path / "scaling.md"
    words = ["parallel.py", "--smoke", "--rows", "weak-1", "pipeline", "fsdp", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="1"):
        script.main()
    assert "FAILED: pipeline, fsdp" in capsys.readouterr().out
    assert asked == [(1, words[3:6]), (2, words[3:6]), (1, ["weak-1"])]
    data = json.loads((tmp_path / "data/scaling.json").read_text())
    assert [row["name"] for row in data["rows"]] == ["weak-1"] and "| weak-1 | weak |" in output.read_text()


def test_a_row_of_two_and_of_four_is_one_line_of_clusters():
    shape = asdict(Shape(ModelConfig(vocab_size=64, max_seq_len=16), batch_size=8, seq_len=16))
    row = {"name": "weak-1", "strong": False, "parallel": "ddp", "one_shape": shape, "one_step_s": [0.1, 0.1]}
    lines = modelled([row | {"ranks": 4}, row | {"ranks": 2}], Link(1e-6, 300e9))
    assert [line[:2] for line in lines] == [["weak-1", str(cards)] for cards in SIZES]

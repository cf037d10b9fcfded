import json
from pathlib import Path
from statistics import median

import pytest

from llmtrain.model.cards import card_named
from llmtrain.storage.errors import BadData, InputMissing
from llmtrain.training import pace

DATA = Path(__file__).parents[2] / "docs" / "data"
H200 = card_named("H200")


def measured_rows() -> list[tuple[int, int, float]]:
    """(parameters, tokens of a micro-batch, MFU) of whole steps of ours in the committed artifacts."""
    rows = []
    for case in json.loads((DATA / "peers.json").read_text())["cases"]:
        for row in case["rows"]:
            if row["arm"] == "llmtrain" and row["status"] == "ok":
                assert "H200" in row["device_name"]
                rate = median(row["tokens_per_step"] * one["steps"] / one["wall_s"] for one in row["bursts"])
                tokens = row["shape"]["batch_size"] * row["shape"]["seq_len"]
                rows.append((row["parameters"], tokens, rate * row["flops_per_token"] / H200.bf16))
    sweep = json.loads((DATA / "baseline.json").read_text())
    assert "H200" in sweep["machine"]["card"]["name"]
    for row in sweep["rows"]:
        if row["status"] == "ok":
            rows.append((row["parameters"], row["shape"]["batch_size"] * row["shape"]["seq_len"], row["mfu"]))
    return rows


def test_what_a_run_is_expected_to_reach_is_what_the_committed_artifacts_say():
    rows = measured_rows()
    for (parameters, tokens), (mfu, page) in pace.MEASURED.items():
        close = [v for p, t, v in rows if abs(p / parameters - 1) < 0.01 and t == tokens]
        assert any(mfu == pytest.approx(value, abs=6e-4) for value in close), (parameters, tokens, mfu, close)
        assert (DATA.parents[1] / page).exists()


def test_the_nearest_shape_counts_and_another_card_is_told_apart():
    small, large = pace.usual(101_671_680, 4096, "bf16", H200), pace.usual(101_671_680, 65_536, "bf16", H200)
    assert small.mfu < large.mfu and large.flops == large.mfu * H200.bf16
    assert "101.7M in micro-batches of 65,536 tokens on an H200, docs/peers.md" in large.why
    other = pace.usual(101_671_680, 65_536, "bf16", card_named("4090"))
    assert other.mfu == large.mfu and "NOT MEASURED HERE" in other.why
    assert pace.usual(101_671_680, 65_536, "fp32", H200) is None
    assert "in bf16" in pace.usual(101_671_680, 65_536, "fp8", H200).why


def write_run(folder: Path, device: str, mfus: list[float | None], tflops: float = 300.0) -> Path:
    folder.mkdir()
    start = {"kind": "event", "event": "start", "step": 0, "tokens": 0, "environment": {"device": device}}
    train = [{"kind": "train", "step": i, "tokens": i, "tflops": tflops, "mfu": mfu} for i, mfu in enumerate(mfus)]
    lines = [start, *train]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_runs_own_lines_are_its_pace_and_its_share_holds_for_another_card(tmp_path):
    run = write_run(tmp_path / "run", "NVIDIA H200", [0.1, 0.4, 0.42, 0.41])
    mine = pace.measured(run, H200)
    assert mine.mfu == pytest.approx(0.405) and mine.flops == pytest.approx(0.405 * H200.bf16)
    other = pace.measured(run, card_named("A100"))
    assert other.flops == pytest.approx(0.405 * 312e12) and "measured on NVIDIA H200" in other.why


def test_a_run_on_a_processor_says_nothing_of_a_card(tmp_path):
    run = write_run(tmp_path / "run", "Some CPU", [None, None, None], tflops=0.1)
    assert pace.measured(run, None).flops == pytest.approx(1e11)
    with pytest.raises(BadData, match="was measured on Some CPU"):
        pace.measured(run, H200)


def test_the_json_of_a_bench_is_read_and_what_is_none_is_one_line(tmp_path):
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"tflops": 300.0, "mfu": 0.31, "machine": {"card": {"name": "NVIDIA H200"}}}))
    assert pace.measured(file, H200).flops == 3e14
    assert pace.measured(file, card_named("4090")).flops == pytest.approx(0.31 * 165e12)
    for text in ("{}", "[1]", "nonsense", '{"tflops": "x"}', '{"tflops": NaN}'):
        file.write_text(text)
        with pytest.raises(BadData, match="step.json"):
            pace.measured(file, H200)
    with pytest.raises(InputMissing):
        pace.measured(tmp_path / "nowhere", H200)
    with pytest.raises(BadData, match="fewer than 2"):
        pace.measured(write_run(tmp_path / "short", "NVIDIA H200", [0.4]), H200)


def test_hours_and_energy_follow_from_the_flops():
    given = pace.given(0.5, H200.bf16)
    hour = 0.5 * H200.bf16 * 3600
    time, energy = pace.time_lines(given, 2 * hour, 2, H200, 3.6e9)
    assert time.startswith("time        1.00 hours at 1,000,000 tokens/s: 50.0% of the peak (as given)")
    assert energy.startswith("energy      1.4 kWh if 2 cards drew 700 W")
    minute = list(pace.time_lines(given, hour / 40, 1, H200, 1.0))
    assert minute[0].startswith("time        1m30s at ") and minute[1].startswith("energy      0.0175 kWh if the card")
    moment = list(pace.time_lines(given, hour / 7200, 1, H200, 1.0))
    assert moment[0].startswith("time        less than a second at ") and moment[1].startswith("energy      0.097 Wh ")
    assert "(5.0 days)" in next(pace.time_lines(given, 120 * hour, 1, H200, 1.0))
    assert "known from the first log line on" in next(pace.time_lines(None, hour, 1, H200, 1.0))

"""The scripts that measure experts, eight bits and half-precision sums: what they do without a card."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.model.config import ModelConfig

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"
SHAPE = Shape(ModelConfig(vocab_size=64, max_seq_len=16), batch_size=8, seq_len=16)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["kernel_ladder", "half_accumulate"])
def test_a_script_smokes(name, tmp_path, monkeypatch, capsys):
    output = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", [name, "--smoke", "--output", str(output)])
    assert script(name).main() == 0, capsys.readouterr().out
    data = json.loads((tmp_path / "data" / "page.json").read_text())
    text = output.read_text()
    if name == "kernel_ladder":
        assert [r["status"] for r in data["rungs"]] == ["ok"] * 5
        assert all((r["relative_error"] > 0.01) == r["eight_bit"] for r in data["rungs"])
        assert "times grouped and fused, bf16" in text and text.count("times loop over experts, bf16") == 1
    else:
        errors = {(r["dtype"], r["sums"], r["parts"]): r["error"] for r in data["rows"]}
        halves = [errors["float16", "fp16, Triton", parts] for parts in (8, 4, 1)]
        assert errors["float16", "FP32, Triton", 1] < halves[0] < halves[1] < halves[2], "the longer the sum, the worse"


def test_each_precision_climbs_to_its_own_best_micro_batch(monkeypatch):
    precision = script("precision")
    rates = {1: 5, 2: 10, 4: 20, 8: 30, 16: 25, 32: 99}

    def measured(fits: int):
        def run_row(row, timing, timeout):
            size = row.shape.batch_size
            if size > fits:
                return {"status": "oom", "reason": "full"}
            return {"status": "ok", "tok_per_s": rates[size], "allocated_gib": 1.0, "mfu": 0.4, "flops_per_token": 1e9}

        return run_row

    runs = {}
    for fits, sizes, best in ((64, [8, 16, 4], 8), (2, [8, 4, 2, 1], 2), (0, [8, 4, 2, 1], None)):
        monkeypatch.setattr(precision, "run_row", measured(fits))
        runs[fits] = precision.climb("moe-1b", SHAPE, TimingConfig(precision="bf16"), quick=False)
        assert [r["batch_size"] for r in runs[fits]] == sizes
        found = precision.best(runs[fits])
        assert (found and found["batch_size"]) == best
    machine = {"card": None, "cpu": "a", "cores": 1, "versions": {}, "system": "b", "contended": [], "taken": "now"}
    eight = [dict(r, precision="fp8", tok_per_s=2 * r["tok_per_s"]) for r in runs[64]]
    dense = [dict(runs[64][0], name="200m", tok_per_s=40)]
    data = {"machine": machine, "precisions": ("bf16", "fp8"), "runs": [*runs[64], *eight, *dense]}
    text = precision.markdown(data, "x.json")
    assert "| 2.000 |" in text and "moe-1b in bf16 trains at 0.750 of the rate of 200m" in text
    assert "none fits" in text, "200m in fp8 was not measured"

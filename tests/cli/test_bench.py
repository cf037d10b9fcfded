import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmtrain.cli.bench import command, what_to_run
from llmtrain.cli.presets import preset_path
from llmtrain.storage.errors import InputMissing, UsageError

ROOT = Path(__file__).parents[2]
TINY = (
    "--d-model 16 --n-layers 1 --n-heads 2 --n-kv-heads 1 --head-dim 8 --d-ff 32 --vocab-size 64 --batch-size 2 "
    "--seq-len 8 --accumulate 2 --device cpu --precision fp32 --seconds 0.02 --bursts 2 --warmup 1"
).split()


def bench(*arguments: str):
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False, standalone_mode=False)


def test_a_step_is_measured_and_written_with_its_json(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "step.md"
    ran = bench("step", *TINY, "--output", str(output))
    shown = ran.stdout
    data = json.loads((tmp_path / "data" / "step.json").read_text())
    assert data["tokens_per_step"] == 32
    assert data["tok_per_s"] == pytest.approx(32 / data["step_ms"] * 1e3)
    assert data["last_loss"] < data["first_loss"]
    assert output.read_text() == shown and f"{data['tok_per_s']:,.0f}" in shown
    assert re.fullmatch(r"first step after \d+\.\d s; 4 or more to go\n", ran.stderr)


def test_the_steps_to_go_are_those_that_are_taken_at_least(monkeypatch):
    monkeypatch.chdir(ROOT)
    from llmtrain.benchmark import step

    taken: list[int] = []
    one = step.RandomSteps.__call__
    monkeypatch.setattr(step.RandomSteps, "__call__", lambda self: taken.append(one(self) or 1))
    ran = bench("step", *TINY, "--seconds", "1e-9", "--warmup", "3", "--bursts", "4")
    told = re.search(r"(\d+) or more", ran.stderr)
    assert told and int(told[1]) == len(taken) - 1 == 10


def test_a_profile_names_the_ops_of_a_step_and_what_share_they_take(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = bench("profile", *TINY, "--output", str(tmp_path / "profile.md")).output
    data = json.loads((tmp_path / "data" / "profile.json").read_text())
    assert sum(row["share"] for row in data["kernels"]) == pytest.approx(1)
    assert any(row["name"] == "aten::mm" and row["part"] == "matmul" for row in data["kernels"])
    assert {"matmul", "attention"} <= {row["part"] for row in data["parts"]}
    assert "| aten::mm | matmul |" in shown


def test_a_preset_is_found_by_its_name_and_the_command_line_goes_before_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert preset_path("102m") == Path("configs/102m.toml")
    shape, timing = what_to_run({}, "102m", None, None, None)
    assert (shape.batch_size, shape.seq_len, shape.accumulate, shape.model.n_layers) == (64, 1024, 1, 16)
    assert timing.precision == "bf16"
    shape, timing = what_to_run({"n_layers": 2, "precision": "fp32"}, "1b", 8, 512, None)
    assert (shape.batch_size, shape.seq_len, shape.accumulate) == (8, 512, 16)  # the same sequences a step
    assert (shape.model.n_layers, shape.model.d_model, timing.precision) == (2, 2048, "fp32")


def test_what_does_not_fit_and_what_is_not_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError, match="does not fit the device: lower --batch-size"):
        bench("step", *TINY, "--vocab-size", str(2**20), "--d-model", str(2**24))
    with pytest.raises(InputMissing, match="nowhere"):
        bench("step", "--config", "nowhere")

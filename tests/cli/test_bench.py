import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmtrain.cli.bench import command, what_to_run
from llmtrain.cli.presets import preset_path
from llmtrain.storage.errors import ConfigMismatch, InputMissing, UsageError
from tests.training.conftest import VOCAB, write_corpus

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
    one = step.TimedSteps.__call__
    monkeypatch.setattr(step.TimedSteps, "__call__", lambda self: taken.append(one(self) or 1))
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


def test_batches_of_a_token_file_are_what_the_step_sees_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    from llmtrain.benchmark import step
    from llmtrain.corpus.batches import assemble

    file = write_corpus(tmp_path / "some.u16", 8 * 40 + 1)
    seen: list[torch.Tensor] = []
    one = step.TrainStep.micro_step
    monkeypatch.setattr(
        step.TrainStep, "micro_step", lambda self, ids, *rest, **more: seen.append(ids) or one(self, ids, *rest, **more)
    )
    given = (*TINY, "--vocab-size", str(VOCAB), "--tokens", str(file))
    shown = bench("step", *given, "--output", str(tmp_path / "step.md")).stdout
    _, _, order = what_to_run({"tokens": (str(file),), "vocab_size": VOCAB}, "31m", 2, 8, 2)
    for i in range(4):
        assert torch.equal(seen[i], assemble(order, np.arange(2 * i, 2 * i + 2)).ids)
    data = json.loads((tmp_path / "data" / "step.json").read_text())
    assert data["distinct_batches"] == 128
    (read,) = data["corpus"]
    assert (read["file"], read["tokens"], len(read["sha256"])) == ("some.u16", 321, 64)
    assert "; batch 2 x 8, accumulate 2 of some.u16, fp32, on cpu." in shown
    assert "accumulate 2 of some.u16, fp32" in bench("profile", *given).stdout


def test_without_a_token_file_tokens_are_random(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = bench("step", *TINY, "--output", str(tmp_path / "step.md")).stdout
    assert json.loads((tmp_path / "data" / "step.json").read_text())["corpus"] is None
    assert "; batch 2 x 8, accumulate 2, fp32, on cpu." in shown


def test_the_vocabulary_is_the_files_where_none_is_named_and_covers_it_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = str(write_corpus(tmp_path / "some.u16", 400))
    config = tmp_path / "none.toml"
    config.write_text("[run]\nseed = 5\n")
    shape, _, order = what_to_run({"tokens": (file,)}, str(config), 2, 8, 1)
    assert (shape.model.vocab_size, order.seed, order.seq_len) == (VOCAB, 5, 8)
    with pytest.raises(ConfigMismatch, match="the model's vocabulary is 64"):
        bench("step", *TINY, "--tokens", file)
    with pytest.raises(InputMissing, match="nowhere"):
        bench("profile", *TINY, "--tokens", str(tmp_path / "nowhere.u16"))


def test_a_preset_is_found_by_its_name_and_the_command_line_goes_before_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert preset_path("102m") == Path("configs/102m.toml")
    shape, timing, order = what_to_run({}, "102m", None, None, None)
    assert (shape.batch_size, shape.seq_len, shape.accumulate, shape.model.n_layers) == (64, 1024, 1, 16)
    assert timing.precision == "bf16" and order is None
    shape, timing, order = what_to_run({"n_layers": 2, "precision": "fp32"}, "1b", 8, 512, None)
    assert (shape.batch_size, shape.seq_len, shape.accumulate) == (8, 512, 16)  # the same sequences a step
    assert (shape.model.n_layers, shape.model.d_model, timing.precision) == (2, 2048, "fp32")


def test_what_does_not_fit_and_what_is_not_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError, match="does not fit the device: lower --batch-size"):
        bench("step", *TINY, "--vocab-size", str(2**20), "--d-model", str(2**24))
    with pytest.raises(InputMissing, match="nowhere"):
        bench("step", "--config", "nowhere")

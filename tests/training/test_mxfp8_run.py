"""Steps and runs whose matmul operands are rounded to MXFP8."""

import dataclasses

import pytest
import torch

from llmtrain.kernels.mxfp8 import rounded
from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import UsageError
from llmtrain.training import run
from llmtrain.training.config import OptimizerConfig, TrainConfig
from llmtrain.training.step import TrainStep
from tests.training.conftest import config
from tests.training.runs import outcome, stop_in

MODEL = ModelConfig(
    vocab_size=96, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96, max_seq_len=64
)  # fmt: skip


def losses(precision: str, optimizer: str = "adamw") -> tuple[TrainStep, list[float]]:
    settings = OptimizerConfig(optimizer=optimizer, learning_rate=1e-2)
    step = TrainStep.build(MODEL, settings, batch_size=4, seq_len=32, precision=precision)
    found = []
    for i in range(12):
        start = torch.randint(0, 96, (4, 1), generator=torch.Generator().manual_seed(i))
        ids = (start + 7 * torch.arange(33)) % 96
        step.micro_step(ids[:, :-1], ids[:, 1:], first=True)
        step.optimizer_step(1e-2)
        found.append(step.metrics()["lm_loss"])
    return step, found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_follows_bf16_and_its_operands_the_weights(optimizer: str):
    step, found = losses("mxfp8", optimizer)
    _, plain = losses("bf16", optimizer)
    assert found != plain and found[-1] < 0.7 * found[0]
    assert found[:4] == pytest.approx(plain[:4], rel=0.03)  # later on any rounding leads elsewhere
    assert len(step.flat.mx) == 2 * 4
    for weight in step.flat.mx:
        assert torch.equal(weight.rows, rounded(weight.narrow, 1)) and weight.rows.any()
        assert torch.equal(weight.columns, rounded(weight.narrow, 0))


def test_a_stopped_and_resumed_run_ends_in_the_same_bits(corpus, tmp_path, monkeypatch, capsys):
    def settings(name: str) -> TrainConfig:
        of_run = config(corpus, tmp_path / name, run={"precision": "mxfp8"}, total_steps=6)
        return dataclasses.replace(of_run, data=dataclasses.replace(of_run.data, seq_len=32))

    run.train(settings("whole"), resume=False)
    assert "mxfp8 (emulated: operands rounded to MXFP8 and multiplied in bf16)" in capsys.readouterr().out
    stop_in(settings("run"), 3, monkeypatch)
    run.train(settings("run"), resume=True)
    assert outcome(tmp_path / "run", 6) == outcome(tmp_path / "whole", 6)


def test_a_length_that_blocks_do_not_fill_is_refused(corpus, tmp_path):
    with pytest.raises(UsageError, match="--seq-len 16 is no multiple of 32, as --precision mxfp8 needs"):
        run.train(config(corpus, tmp_path / "run", run={"precision": "mxfp8"}), resume=False)

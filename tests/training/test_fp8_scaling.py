"""Steps and runs in eight bits with a scale a row, or for 128 numbers: neither has a history."""

from dataclasses import replace

import pytest
import torch

from llmtrain.benchmark.config import TimingConfig
from llmtrain.kernels.fp8_fine import BLOCK, TILES, dequantised
from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import ConfigMismatch
from llmtrain.training import checkpoint, run
from llmtrain.training.config import OptimizerConfig, RunConfig, TrainConfig
from llmtrain.training.plan_words import precision_words
from llmtrain.training.step import TrainStep
from tests.training.conftest import config
from tests.training.runs import lines, outcome, state, stop_in

CONFIG = ModelConfig(
    vocab_size=64, d_model=128, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=128, max_seq_len=128
)
T = 128
SCALINGS = pytest.mark.parametrize("scaling", ["rowwise", "block"])


def build(scaling: str | None, mode: str = "none", moe: bool = False) -> TrainStep:
    return TrainStep.build(
        replace(CONFIG, moe=moe), OptimizerConfig(), batch_size=1, seq_len=T, seed=3, checkpoint_activations=mode,
        precision="fp8" if scaling else "bf16", fp8_scaling=scaling or "tensorwise",
    )  # fmt: skip


def train(step: TrainStep, steps: int, micro_batches: int = 1) -> None:
    for i in range(steps):
        generator = torch.Generator().manual_seed(i % 3)
        for j in range(micro_batches):
            ids = torch.randint(0, 64, (1, T + 1), generator=generator)
            step.micro_step(ids[:, :-1], ids[:, 1:], first=j == 0)
        step.optimizer_step(1e-2)


@SCALINGS
def test_it_follows_bf16_and_twice_is_the_same_bits(scaling):
    losses, steps = {}, []
    for precision in (None, scaling, scaling):
        step = build(precision)
        train(step, 12)
        losses[precision] = step.metrics()["lm_loss"]
        steps.append(step)
    assert losses[scaling] == pytest.approx(losses[None], rel=0.1) and losses[scaling] != losses[None]
    assert torch.equal(steps[1].flat.master, steps[2].flat.master)


@SCALINGS
def test_operands_are_of_the_blocks_matrices_and_follow_the_weights(scaling):
    step = build(scaling)
    names = {name.split(".", 2)[2] for name in step.flat.eight_bit}
    assert names == {"attention.qkv.weight", "attention.out.weight", "feed_forward.gate_up.weight",
                     "feed_forward.down.weight"}  # fmt: skip
    assert step.flat.scaling is None and not step.flat.eight_bit_experts
    before = step.flat.master.clone()
    train(step, 2, micro_batches=2)
    assert not torch.equal(step.flat.master, before)
    for name, operands in step.flat.eight_bit.items():
        weight = step.flat.parameters[name].detach()
        for operand, turned in ((operands.rows, weight), (operands.columns, weight.T)):
            held = dequantised(operand, TILES if scaling == BLOCK else scaling)
            assert (held - turned).norm() <= 0.04 * weight.norm(), name


def test_matrices_with_sides_that_are_cut_stay_in_bf16_and_the_plan_says_so():
    odd = replace(CONFIG, d_ff=144)
    step = TrainStep.build(odd, OptimizerConfig(), batch_size=1, seq_len=T, precision="fp8", fp8_scaling="block")
    assert {name.split(".", 2)[2] for name in step.flat.eight_bit} == {"attention.qkv.weight", "attention.out.weight"}
    of_run = RunConfig(precision="fp8", fp8_scaling="block")
    assert precision_words(CONFIG, of_run) == "fp8 (a scale for 128 numbers of a row, of weights 128 x 128)"
    assert precision_words(odd, of_run).endswith("; 2 of 4 MATRICES STAY IN BF16: a side is no multiple of 128)")
    assert precision_words(odd, RunConfig(precision="fp8")) == "fp8 (a scale a tensor)"
    assert precision_words(odd, RunConfig()) == "bf16"


@SCALINGS
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("moe", [False, True])
def test_operands_made_again_are_those_that_were_kept(scaling, mode, moe):
    steps = [build(scaling, one, moe) for one in ("none", mode)]
    for step in steps:
        train(step, 2, micro_batches=2)
    assert torch.equal(steps[0].flat.master, steps[1].flat.master)
    assert bool(steps[0].flat.eight_bit_experts) == moe


@SCALINGS
def test_a_trial_and_an_evaluation_leave_no_trace(scaling):
    fresh, tried = build(scaling), build(scaling)
    tried.try_out()
    tried.optimizer.reset()
    tried.flat.refresh_narrow()
    for step in (fresh, tried):
        train(step, 1)
    with torch.no_grad():
        tried.model.loss((tried.ids + 1) % 64, tried.targets)
    for step in (fresh, tried):
        train(step, 1)
    assert torch.equal(fresh.flat.master, tried.flat.master)


@SCALINGS
@pytest.mark.parametrize("moe", [False, True])
def test_a_run_ends_in_the_same_bits_after_a_stop(corpus, tmp_path, monkeypatch, scaling, moe):
    monkeypatch.setattr(run.devices, "check_precision", lambda *_, **__: None)  # tests emulate what a CPU has not

    def settings(name: str, **other) -> TrainConfig:
        of_run = {"precision": "fp8", "fp8_scaling": scaling, "deterministic": True, "verify_every": 3}
        made = config(corpus, tmp_path / name, run={**of_run, "batch_size": 1, "global_batch_size": 1} | other,
                      total_steps=6, warmup_steps=2)  # fmt: skip
        return replace(made, model=replace(CONFIG, vocab_size=0, moe=moe), data=replace(made.data, seq_len=T))

    run.train(settings("whole"), resume=False)
    stop_in(settings("run"), 3, monkeypatch)
    assert "magnitudes" not in state(tmp_path / "run", checkpoint.list_steps(tmp_path / "run")[0])["optimizer"]
    with pytest.raises(ConfigMismatch, match=f"fp8_scaling is {scaling} in the checkpoints and tensorwise in"):
        run.train(settings("run", fp8_scaling="tensorwise"), resume=True)
    run.train(settings("run"), resume=True)
    assert outcome(tmp_path / "run", 6) == outcome(tmp_path / "whole", 6)
    assert len(lines(tmp_path / "run", "train")) == 6


@pytest.mark.parametrize("made", [RunConfig, TimingConfig])
def test_scales_of_eight_bits_without_eight_bits_are_refused(made):
    with pytest.raises(ValueError, match="fp8_scaling block is of precision fp8: precision is bf16"):
        made(fp8_scaling="block")
    assert made(precision="fp8", fp8_scaling="block").fp8_scaling == "block"

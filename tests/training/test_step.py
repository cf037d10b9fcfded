import dataclasses
import os

import pytest
import torch

from llmtrain.kernels.cross_entropy import IGNORED
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.step import WORKSPACE, TrainStep, make_deterministic, spare_workspace

CONFIG = ModelConfig(
    vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=32, z_loss=1e-4
)
T = 12


def build(batch_size: int, precision: str, **optimizer) -> TrainStep:
    return TrainStep.build(
        CONFIG, OptimizerConfig(**optimizer), batch_size=batch_size, seq_len=T, precision=precision, seed=3
    )


def data(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (rows, T + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    return ids[:, :-1].contiguous(), targets


def feed(step: TrainStep, ids: torch.Tensor, targets: torch.Tensor, batch_size: int) -> None:
    """A step's rows in micro-batches; missing rows have no targets."""
    for begin in range(0, len(ids), batch_size):
        short = batch_size - len(ids[begin : begin + batch_size])
        part = torch.cat([ids[begin : begin + batch_size], torch.zeros(short, T, dtype=torch.int64)])
        wanted = torch.cat([targets[begin : begin + batch_size], torch.full((short, T), IGNORED)])
        step.micro_step(part, wanted, first=begin == 0)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-6), ("fp64", 1e-12)])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 7])
def test_gradients_of_any_split_equal_those_of_the_whole_batch(batch_size: int, precision: str, bound: float):
    ids, targets = data(10)
    whole, split = build(10, precision), build(batch_size, precision)
    for step, size in ((whole, 10), (split, batch_size)):
        feed(step, *data(10, seed=9), size)  # what an earlier step left in the buffers must not show
        feed(step, ids, targets, size)
    for name, parameter in whole.flat.parameters.items():
        other = split.flat.parameters[name].grad
        assert parameter.grad is not None and other is not None
        assert (parameter.grad - other).norm() <= bound * parameter.grad.norm(), name
    assert torch.allclose(whole.sums, split.sums, rtol=bound)
    assert split.sums[2] == (targets != IGNORED).sum()


def test_documents_in_one_window_give_the_gradients_of_each_alone():
    lengths = [5, 1, 4, 2]
    ids, targets = data(1, seed=5)
    starts = torch.tensor([sum(lengths[:i]) for i in range(4)])
    doc_start = starts.repeat_interleave(torch.tensor(lengths)).int()[None]
    together, alone = (
        TrainStep.build(CONFIG, OptimizerConfig(), batch_size=b, seq_len=T, precision="fp64", document_mask=mask)
        for b, mask in ((1, True), (4, False))
    )
    together.micro_step(ids, targets, first=True, doc_start=doc_start)
    rows, wanted = torch.zeros(4, T, dtype=torch.int64), torch.full((4, T), IGNORED)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        rows[i, :length] = ids[0, start : start + length]
        wanted[i, :length] = targets[0, start : start + length]
    alone.micro_step(rows, wanted, first=True)
    assert torch.allclose(together.sums, alone.sums, rtol=1e-12)
    assert (together.flat.grad - alone.flat.grad).norm() <= 1e-6 * alone.flat.grad.norm()  # the rotary tables are FP32


def test_the_update_is_torchs_adamw_on_the_mean_with_decay_on_matrices_only():
    settings = {"learning_rate": 1e-2, "weight_decay": 0.3, "grad_clip": 0.5, "beta2": 0.99}
    ours, theirs = build(4, "fp64", **settings), build(4, "fp64", **settings)
    parameters = theirs.flat.parameters.values()
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    for i in range(5):
        ids, targets = data(4, seed=i)
        feed(ours, ids, targets, 4)
        ours.optimizer_step(1e-2)

        theirs.flat.grad.zero_()
        loss = theirs.model.loss(ids, targets)
        (loss.lm + loss.aux).backward()
        theirs.flat.grad.div_(loss.n_targets)
        norm = torch.nn.utils.clip_grad_norm_(list(parameters), 0.5)
        reference.step()
        assert ours.metrics()["grad_norm"] == pytest.approx(float(norm.detach()), rel=1e-9)
        assert ours.metrics()["lm_loss"] == pytest.approx(float((loss.lm / loss.n_targets).detach()), rel=1e-12)
    for name, parameter in ours.flat.parameters.items():
        torch.testing.assert_close(parameter, theirs.flat.parameters[name], rtol=1e-6, atol=1e-8)


def test_narrow_copies_follow_the_masters():
    step = build(4, "bf16")
    for i in range(2):
        feed(step, *data(4, seed=i), 4)
        step.optimizer_step(1e-2)
    assert step.flat.narrow is not None and step.flat.narrow.dtype == torch.bfloat16
    assert torch.equal(step.flat.narrow, step.flat.master.bfloat16())


def test_a_step_whose_gradient_is_not_finite_changes_no_weight_and_is_counted():
    step = build(4, "fp32")
    feed(step, *data(4), 4)
    step.optimizer_step(1e-2)
    before = [t.clone() for t in (step.flat.master, step.optimizer.exp_avg, step.optimizer.exp_avg_sq)]
    feed(step, *data(4), 4)
    step.flat.grad[7] = float("nan")
    step.optimizer_step(1e-2)
    for old, new in zip(before, (step.flat.master, step.optimizer.exp_avg, step.optimizer.exp_avg_sq), strict=True):
        assert torch.equal(old, new)
    assert (int(step.optimizer.count), int(step.optimizer.skipped)) == (1, 1)


def test_a_step_without_a_single_target_changes_nothing():
    step = build(4, "fp32")
    before = step.flat.master.clone()
    ids, targets = data(4)
    feed(step, ids, torch.full_like(targets, IGNORED), 4)
    step.optimizer_step(1e-2)
    assert torch.equal(step.flat.master, before)


def test_bf16_follows_fp32():
    losses = {}
    for precision in ("fp32", "bf16"):
        step = build(8, precision)
        for i in range(30):
            feed(step, *data(8, seed=i % 3), 8)
            step.optimizer_step(1e-2)
        losses[precision] = step.metrics()["lm_loss"]
    assert losses["fp32"] < 3.5
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)


def test_a_step_that_was_tried_out_is_as_one_that_was_not():
    fresh, tried = build(4, "bf16"), build(4, "bf16")
    tried.try_out()
    assert torch.equal(tried.last, fresh.last) and torch.equal(tried.sums, fresh.sums)
    tried.optimizer.reset()  # a run does, or loads, after the trial
    for step in (fresh, tried):
        for seed in range(3):
            feed(step, *data(10, seed=seed), 4)
            step.optimizer_step(1e-2)
    for name in ("exp_avg", "exp_avg_sq", "count", "skipped"):
        assert torch.equal(getattr(fresh.optimizer, name), getattr(tried.optimizer, name)), name
    assert torch.equal(fresh.flat.master, tried.flat.master) and fresh.metrics() == tried.metrics()


def test_a_trial_reaches_every_weight_and_changes_none():
    step = build(4, "fp32")
    before = step.flat.master.clone()
    step.flat.grad.fill_(7.0)
    step.try_out()
    assert torch.equal(step.flat.master, before)
    assert all(not parameter.grad.any() for parameter in step.flat.parameters.values())  # written, with zeros


# --- eight bits -------------------------------------------------------------------------------------------------------


def test_eight_bits_follow_bf16_and_the_same_run_twice_is_the_same_bits():
    losses, steps = {}, []
    for precision in ("bf16", "fp8", "fp8"):
        step = build(4, precision)
        for i in range(15):
            feed(step, *data(8, seed=i % 3), 4)
            step.optimizer_step(1e-2)
        losses[precision] = step.metrics()["lm_loss"]
        steps.append(step)
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.12) and losses["fp8"] != losses["bf16"]
    assert torch.equal(steps[1].flat.master, steps[2].flat.master)


def test_eight_bit_operands_are_of_the_blocks_matrices_and_follow_the_weights():
    step = build(4, "fp8")
    names = {name.split(".", 2)[2] for name in step.flat.eight_bit}
    assert names == {"attention.qkv.weight", "attention.out.weight", "feed_forward.gate_up.weight",
                     "feed_forward.down.weight"}  # fmt: skip
    for i in range(2):
        feed(step, *data(4, seed=i), 4)
        step.optimizer_step(1e-2)
    for name, operands in step.flat.eight_bit.items():
        weight = step.flat.parameters[name].detach()
        assert (operands.rows.float() * operands.own.inverse - weight).norm() <= 0.05 * weight.norm(), name
        assert torch.equal(operands.rows.view(torch.uint8).T, operands.columns.view(torch.uint8))


def test_the_magnitude_of_a_step_is_the_highest_of_its_micro_batches_and_of_no_evaluation():
    whole, split = build(8, "fp8"), build(2, "fp8")
    for step, size in ((whole, 8), (split, 2)):
        feed(step, *data(8), size)
        before = step.flat.scaling.largest.clone()
        with torch.no_grad():
            step.model.loss((step.ids + 1) % 64, step.targets)  # another batch
        assert torch.equal(step.flat.scaling.largest, before) and before.all()
        step.optimizer_step(1e-2)
        assert not step.flat.scaling.largest.any() and torch.equal(step.flat.scaling.history[0], before)
    # The first layer's input is the same in any split; what follows differs by the scales of the calibration.
    assert whole.flat.scaling.history[0, 0] == split.flat.scaling.history[0, 0]


def test_magnitudes_of_other_ranks_count_before_they_are_entered():
    step = build(4, "fp8")
    step.take_highest = lambda magnitudes: magnitudes.clamp_(min=100.0)  # as if another rank had met 100 everywhere
    feed(step, *data(4), 4)
    assert (step.flat.scaling.history[0] >= 100).all(), "those of the calibration too"
    step.optimizer_step(1e-2)
    assert (step.flat.scaling.history[:2] >= 100).all()


def test_a_step_that_is_not_finite_does_not_reach_the_scales():
    step = build(4, "fp8")
    feed(step, *data(4), 4)
    step.optimizer_step(1e-2)
    feed(step, *data(4), 4)
    step.flat.scaling.largest[3], step.flat.grad[7] = float("inf"), float("nan")
    before = step.flat.master.clone()
    step.optimizer_step(1e-2)
    assert torch.equal(step.flat.master, before) and step.flat.scaling.scale.isfinite().all()
    assert int(step.optimizer.skipped) == 1


def test_a_trial_in_eight_bits_leaves_no_trace():
    fresh, tried = build(4, "fp8"), build(4, "fp8")
    tried.try_out()
    tried.optimizer.reset()
    tried.flat.refresh_narrow()
    for step in (fresh, tried):
        for seed in range(2):
            feed(step, *data(10, seed=seed), 4)
            step.optimizer_step(1e-2)
    assert torch.equal(fresh.flat.master, tried.flat.master)
    assert torch.equal(fresh.flat.scaling.history, tried.flat.scaling.history)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("routed", [False, True])
def test_eight_bits_made_again_are_those_that_were_kept(mode, routed):
    steps = []
    for checkpointing in ("none", mode):
        config = dataclasses.replace(CONFIG, moe=routed, d_ff=64)
        step = TrainStep.build(config, OptimizerConfig(), batch_size=4, seq_len=T, precision="fp8", seed=3,
                               checkpoint_activations=checkpointing)  # fmt: skip
        for i in range(2):
            feed(step, *data(8, seed=i), 4)
            step.optimizer_step(1e-2)
        steps.append(step)
    assert torch.equal(steps[0].flat.master, steps[1].flat.master)
    assert torch.equal(steps[0].flat.scaling.history, steps[1].flat.scaling.history)


def environment(monkeypatch, workspace: str | None) -> None:
    """With that workspace for cuBLAS, and as it was after the test."""
    monkeypatch.setenv(WORKSPACE, workspace or "")
    if workspace is None:
        monkeypatch.delenv(WORKSPACE)


BF16 = {"dtype": torch.bfloat16, "eight_bit": False}


@pytest.mark.parametrize(
    ("before", "tokens", "after"),
    [(None, 16_384, ":0:0"), (None, 16_385, None), (":4096:2", 512, ":4096:2")],
)
def test_few_tokens_take_no_workspace_unless_the_environment_says_one(monkeypatch, before, tokens, after):
    environment(monkeypatch, before)
    spare_workspace(tokens, d_model=768, **BF16)
    assert os.environ.get(WORKSPACE) == after
    spare_workspace(512, d_model=2048, **BF16)
    assert os.environ.get(WORKSPACE) == after


@pytest.mark.parametrize("other", [{"eight_bit": True}, {"dtype": torch.float32}])
def test_other_arithmetic_than_bf16_keeps_its_workspace(monkeypatch, other):
    environment(monkeypatch, None)
    spare_workspace(512, d_model=768, **BF16 | other)
    assert WORKSPACE not in os.environ


def deterministic_after(monkeypatch, before: str | None, in_use: bool) -> tuple[str, int]:
    """The workspace that there is then, and how often those of streams were given up, CUDA being in use or not."""
    given_up = []
    environment(monkeypatch, before)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: given_up.append(1), raising=False)
    make_deterministic()
    return os.environ[WORKSPACE], len(given_up)


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":0:0", ":4096:8"), (":16:8", ":16:8")])
def test_a_deterministic_run_has_a_workspace_that_torch_takes_for_one(monkeypatch, before, after):
    assert deterministic_after(monkeypatch, before, in_use=False) == (after, 0)


@pytest.mark.parametrize(("before", "given_up"), [(None, 0), (":0:0", 1), (":16:8", 0)])
def test_a_workspace_of_no_bytes_is_not_taken_for_one_of_the_new_size(monkeypatch, before, given_up):
    assert deterministic_after(monkeypatch, before, in_use=True)[1] == given_up

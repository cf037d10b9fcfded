"""What a pipeline rests on, in one process: products that are put off, and stages that are views of a rank's model.
Whole pipelines are in tests/faults/test_pipeline.py."""

import pytest
import torch

from llmtrain.kernels.weight import make_up, put_off
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.step import TrainStep

SHAPE = dict(vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48, max_seq_len=32)
MODELS = {
    "tied": ModelConfig(**SHAPE),
    "untied with QK-norm": ModelConfig(**SHAPE, tie_embeddings=False, qk_norm=True),
    "experts": ModelConfig(**SHAPE, moe=True, n_experts=4, moe_d_ff=16),
}


def build(model: ModelConfig, precision: str, mode: str = "none") -> TrainStep:
    return TrainStep.build(
        model, OptimizerConfig(), batch_size=2, seq_len=32, precision=precision, checkpoint_activations=mode
    )


def losses(step: TrainStep, micro_batches: int) -> list[torch.Tensor]:
    """The forwards of as many micro-batches, as the last stage of a pipeline may have them in flight."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (micro_batches, 2, 33), generator=generator)
    found = [step.model.loss(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids]
    return [loss.lm + loss.aux for loss in found]


@pytest.mark.parametrize(
    ("name", "precision", "mode"),
    [
        ("tied", "fp64", "none"), ("tied", "bf16", "selective"), ("tied", "fp32", "full"), ("tied", "fp8", "selective"),
        ("tied", "mxfp8", "full"), ("untied with QK-norm", "fp8", "full"), ("untied with QK-norm", "bf16", "none"),
        ("experts", "fp32", "full"), ("experts", "fp8", "none"), ("experts", "bf16", "selective"),
    ],
)  # fmt: skip
def test_products_that_are_put_off_give_the_same_bits(name, precision, mode):
    steps = [build(MODELS[name], precision, mode) for _ in range(2)]
    for step in steps:
        step.flat.mark_gradients_stale()
    for loss in losses(steps[0], 3):
        loss.backward()
    waiting = []
    for loss in losses(steps[1], 3):
        with put_off() as of_one:
            loss.backward()
        waiting.append(of_one)
    assert not torch.equal(steps[0].flat.grad, steps[1].flat.grad)
    for of_one in waiting:  # after all the backwards
        make_up(of_one)
    assert torch.equal(steps[0].flat.grad, steps[1].flat.grad)

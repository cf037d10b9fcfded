"""Small trained runs, made by the product: text in, a run directory out."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.model.config import ModelConfig
from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from llmtrain.training.run import train
from tests.inference.runs import write_corpus

SHAPE = ModelConfig(
    d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=48, max_seq_len=64, rope_theta=500.0,
    norm_eps=1e-5, init_std=0.1,
)  # fmt: skip
SHAPES = {
    "llama": SHAPE,
    "untied": replace(SHAPE, tie_embeddings=False, vocab_size=320),
    "qwen3": replace(SHAPE, qk_norm=True, n_kv_heads=4),
    "mixtral": replace(SHAPE, moe=True, n_experts=4, n_shared_experts=0, moe_layers=2, moe_d_ff=16),
    "qwen2_moe": replace(SHAPE, moe=True, n_experts=4, moe_layers=1, n_shared_experts=2, moe_d_ff=16),
    "qwen2_moe, none shared": replace(SHAPE, moe=True, n_experts=3, moe_layers=1, n_shared_experts=0, moe_d_ff=16),
    "qwen3_moe": replace(
        SHAPE, moe=True, n_experts=4, moe_layers=1, n_shared_experts=0, moe_d_ff=16, qk_norm=True, tie_embeddings=False
    ),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each of SHAPES, all on one corpus."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder)
    for name, shape in SHAPES.items():
        train(
            TrainConfig(
                model=shape,
                data=DataConfig((f"text={corpus}",), seq_len=16, val_tokens=(f"held={corpus}",)),
                optimizer=OptimizerConfig(learning_rate=1e-2),
                schedule=ScheduleConfig(total_steps=8, warmup_steps=2),
                run=RunConfig(folder / name, batch_size=8, precision="fp32", device="cpu", val_windows=4, log_every=2),
            ),
            resume=False,
        )
    return {name: folder / name for name in SHAPES}

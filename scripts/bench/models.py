"""Models that several scripts measure, out of configs/."""

import tomllib
from pathlib import Path

from llmtrain.model.config import ModelConfig


def preset(name: str, max_seq_len: int) -> ModelConfig:
    table = tomllib.loads((Path(__file__).parents[2] / "configs" / f"{name}.toml").read_text())["model"]
    return ModelConfig(**table | {"max_seq_len": max_seq_len})


MODEL_102M = preset("102m", 1024)
MODEL_361M = preset("361m", 1024)
MODEL_1B = preset("1b", 2048)
MODEL_SMOKE = ModelConfig(
    vocab_size=512, d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=128, max_seq_len=64
)

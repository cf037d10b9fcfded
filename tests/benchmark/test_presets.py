import tomllib
from pathlib import Path

import pytest

from llmtrain.cli.options import build
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import parameter_counts
from llmtrain.training.config import SECTIONS

CONFIGS = Path(__file__).parents[2] / "configs"


MILLIONS = {
    "31m": 30.94, "102m": 101.74, "361m": 361.8, "1b": 1038.4, "200m": 200, "500m": 481, "1.5b": 1525, "moe-55m": 55.18,
    "moe-1b": 1082, "moe-2b": 2009, "moe-3b": 2885, "moe-5b": 4993, "moe-8b": 7572,
}  # fmt: skip


def model_of(name: str) -> ModelConfig:
    tables = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    assert set(tables) == set(SECTIONS)
    built = {section: build(SECTIONS[section], {}, table, name) for section, table in tables.items()}
    model = built["model"]
    assert isinstance(model, ModelConfig)
    return model


@pytest.mark.parametrize("name, millions", MILLIONS.items())
def test_a_preset_has_the_size_it_is_named_after(name, millions):
    assert parameter_counts(model_of(name)).total / 1e6 == pytest.approx(millions, rel=5e-3)


def test_the_ladders_are_what_they_say():
    routed = [model_of(name) for name in MILLIONS if name.startswith("moe-") and name != "moe-55m"]
    assert all((c.n_experts, c.experts_per_token, c.n_routed) == (64, 8, c.n_layers) for c in routed)
    assert all(c.qk_norm and c.z_loss == 1e-4 for c in (*routed, *map(model_of, ("200m", "500m", "1.5b"))))
    for name, dense in (("moe-1b", "200m"), ("moe-3b", "500m")):
        assert parameter_counts(model_of(name)).active / parameter_counts(model_of(dense)).total == pytest.approx(
            1, abs=0.06
        )
    counts = parameter_counts(model_of("moe-55m"))
    assert round(counts.total / 1e6, 2) == 55.18 and round(counts.active / 1e6, 1) == 35.7

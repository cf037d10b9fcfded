import tomllib
from pathlib import Path

import pytest

from llmtrain.cli.options import build
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import parameter_counts
from llmtrain.training.config import SECTIONS

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name, millions", [("31m", 30.94), ("102m", 101.74), ("361m", 361.8), ("1b", 1038.4)])
def test_a_preset_has_the_size_it_is_named_after(name, millions):
    tables = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    assert set(tables) == set(SECTIONS)
    built = {section: build(SECTIONS[section], {}, table, name) for section, table in tables.items()}
    model = built["model"]
    assert isinstance(model, ModelConfig)
    assert parameter_counts(model).total / 1e6 == pytest.approx(millions, rel=1e-3)

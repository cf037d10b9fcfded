"""The script that holds a run against its step."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmtrain.cli.main import run as llmtrain
from tests.training.conftest import write_corpus

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "train_rate.py"
TINY = """
[model]
d_model = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
head_dim = 8
d_ff = 32
vocab_size = 128

[run]
device = "cpu"
precision = "fp32"
"""
RESULT = {
    "config": "tiny.toml",
    "batch_size": 2,
    "seq_len": 16,
    "steps": 100,
    "tok_per_s": {"train": [970.0, 974.0], "bench step": [1000.0, 1000.0], "bench step --tokens": [980.0, 981.0]},
    "median_data_ms_a_line": 0.07,
    "train_lines": [[{"card_w": 690.0, "card_c": 60.0}, {"card_w": 694.0}], [{"card_c": 63.0}]],
}


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_rate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "headline", lambda machine: "A card.")
    return module


def test_the_page_says_the_share_of_each_step_and_how_the_card_was(script):
    page = script.markdown(RESULT | {"machine": {}}, "data/train-rate.json")
    assert "`train` reaches 97.2% of `bench step` and 99.1% of `bench step --tokens`; it waited 0.07 ms" in page
    assert page.count("Meanwhile the card was at 692 W and 62 °C in the mean.") == 1
    assert "| bench step --tokens | 980 | 981 | 980 |" in page
    assert "Meanwhile" not in script.markdown(RESULT | {"machine": {}, "train_lines": []}, "data/train-rate.json")


def test_the_three_take_turns_and_the_json_holds_every_line_of_the_runs(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    write_corpus(tmp_path / "corpus.u16", 16 * 37 + 5)
    ran: list[tuple[str, ...]] = []

    def run(*arguments: str) -> None:
        ran.append(arguments)
        assert llmtrain(list(arguments)) == 0

    monkeypatch.setattr(script, "run", run)
    output = tmp_path / "page.md"
    options = (
        f"--config {tmp_path}/tiny.toml --tokens {tmp_path}/corpus.u16 --batch-size 2 --seq-len 16 --steps 41 "
        f"--seconds 0.01 --output {output}"
    )
    monkeypatch.setattr(sys, "argv", ["train_rate.py", *options.split()])
    script.main()
    kinds = [" ".join(words[:2]) + " --tokens" * ("--tokens" in words) for words in ran]
    train, step, fed = "train --config --tokens", "bench step", "bench step --tokens"
    assert kinds == [train, step, fed, step, fed, train]
    data = json.loads((tmp_path / "data/page.json").read_text())
    assert list(data["tok_per_s"]) == ["train", step, fed] and all(map(len, data["tok_per_s"].values()))
    assert [[line["step"] for line in lines] for lines in data["train_lines"]] == [[40, 41]] * 2
    assert all(line["step_ms"] > 0 for lines in data["train_lines"] for line in lines)
    assert all(len(bursts) == 3 for turns in data["burst_step_ms"].values() for bursts in turns)
    assert output.read_text() == script.markdown(data, "data/page.json")

"""An error about what an option names says that option, and none that its command has not."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from llmtrain.cli.main import run as llmtrain
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from llmtrain.training.run import train
from llmtrain.training.run_corpus import open_corpus
from tests.cli.examples import ALL
from tests.corpus.files import write_ids
from tests.inference.runs import write_corpus

BEFORE = {
    "evaluate": "--run-dir run",
    "train": "--run-dir new --device cpu --seq-len 16 --tokens web=corpus.u16",
    "service": "--run-dir new --output new.service --tokens web=corpus.u16",
    "plan": "--device cpu",
    "bench step": "--device cpu",
    "bench profile": "--device cpu",
}
NOT_READ = {("plan", name) for name in ("--val-tokens", "--val-choices", "--val-text")}
"""A plan is of the training alone."""
NAMING = [
    (name, option.opts[0])
    for name, command in ALL.items()
    for option in command.params
    if (option.metavar or "").startswith("[NAME=]") and (name, option.opts[0]) not in NOT_READ
]
"""Each option whose value is a name and a file."""


def settings(folder: Path, val_tokens: tuple[str, ...] = ()) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48),
        data=DataConfig((f"{folder}/corpus.u16",), seq_len=16, document_mask=True, val_tokens=val_tokens),
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(total_steps=1, warmup_steps=0),
        run=RunConfig(folder / "run", precision="fp32", device="cpu"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a run that was trained on it with a document mask, and files of other kinds."""
    folder = tmp_path_factory.mktemp("named")
    write_corpus(folder)
    train(settings(folder), resume=False)
    (folder / "plain.txt").write_text("text")
    (folder / "lines.jsonl").write_text('{"text": "x = 1"}\n')
    write_ids(folder / "flat.u16", np.arange(40) % 30)
    return folder


@pytest.fixture
def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(folder)

    def refusal(name: str, *words: str) -> str:
        """The error of the command with these words behind those that it needs."""
        code = llmtrain([*name.split(), *BEFORE[name].split(), *words])
        said = capfd.readouterr().err
        assert code and said.startswith("llmtrain: error: ") and said.count("\n") == 1
        known = {option for parameter in ALL[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", said)) <= known, said
        return said.removeprefix("llmtrain: error: ").strip()

    yield refusal
    assert not os.path.lexists("new") and not os.path.lexists("new.service")


def test_the_options_are_found():
    assert {("evaluate", "--choices"), ("train", "--val-text"), ("bench step", "--tokens")} <= set(NAMING)
    assert {name for name, _ in NAMING} == set(BEFORE)


@pytest.mark.parametrize(("name", "option"), NAMING, ids=map(" ".join, NAMING))
def test_a_value_that_names_no_file_is_an_error_of_its_option(name, option, refusal):
    assert refusal(name, option, "a=") == f"{option} a=: names no file: write [NAME=]PATH"
    assert refusal(name, option, "corpus.u16:0").startswith(f"{option} corpus.u16:0: the weight 0 is not above 0")


@pytest.mark.parametrize(("name", "before"), [("evaluate", "--"), ("train", "--val-")])
def test_text_that_cannot_be_read_is_an_error_of_text(name, before, refusal):
    text, fields = f"{before}text", f"{before}text-field or {before}kind-field"
    assert refusal(name, text, "none").endswith(f"none: no such file or folder: put text there, or name it with {text}")
    assert refusal(name, text, "none*").endswith(f"none*: no file matches: check the pattern given as {text}")
    kind = (f"{before}kind-field", "kind")
    assert refusal(name, text, "lines.jsonl", *kind).endswith(f"name the field with {fields}")
    assert refusal(name, text, "plain.txt", *kind).endswith("leave it out, or name it X.jsonl or X.parquet")


def test_held_out_files_of_one_name_are_an_error_of_their_option(refusal):
    twice = ("--val-tokens", "a=corpus.u16", "--val-tokens", "a=corpus.u16")
    assert refusal("train", *twice) == "--val-tokens: two sources are called a: tell them apart with NAME=PATH"


def test_a_trained_model_asks_for_no_option_of_its_training(refusal):
    assert refusal("evaluate", "--tokens", "flat.u16").startswith("flat.u16: does not say where documents end, and ")


def test_held_out_files_are_no_mixture_whatever_their_weights(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    held_out = ("corpus.u16", "rare=corpus.u16:0.0001")
    assert llmtrain(["evaluate", "--run-dir", "run", *(word for one in held_out for word in ("--tokens", one))]) == 0
    first, second = (line.split()[1:] for line in capfd.readouterr().out.splitlines()[1:])
    assert first == second
    assert [one.name for one in open_corpus(settings(folder, held_out))[2]] == ["corpus", "rare"]

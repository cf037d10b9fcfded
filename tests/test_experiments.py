import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from llmtrain.cli import train
from llmtrain.cli.main import run as llmtrain
from llmtrain.training import run as training
from llmtrain.training.config import TrainConfig
from tests.training.conftest import write_corpus

FOLDER = Path(__file__).parents[1] / "scripts" / "experiments"
TINY = [
    "--vocab-size", "96", "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2",
    "--head-dim", "8", "--d-ff", "48", "--seq-len", "16", "--batch-size", "4", "--device", "cpu", "--precision", "fp32",
    "--total-steps", "8", "--warmup-steps", "0", "--log-every", "1", "--val-every", "1", "--checkpoint-every", "4",
    "--keep-every", "4",
]  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> ModuleType:
    spec = importlib.util.spec_from_file_location("experiments_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def in_process(*command: str) -> str:
        capsys.readouterr()
        assert llmtrain(list(command)) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(module, "llmtrain", in_process)
    monkeypatch.setattr(module, "has_matplotlib", lambda: False)  # whose import would take most of the time
    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/experiment.toml")), ids=lambda path: path.parent.name)
def test_every_experiment_names_runs_that_exist_and_options_that_train_takes(path: Path, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    plan = tomllib.loads(path.read_text())
    names = [run["name"] for run in plan["runs"]]
    assert len(set(names)) == len(names)
    for entry in plan["compare"]:
        for arm in ("a", "a2", "b"):
            assert {entry[arm]} <= set(names) if isinstance(entry[arm], str) else set(entry[arm]) <= set(names)
        assert set(entry.get("replicates", [])) <= set(names)
    for entry in plan.get("evaluate", []):
        assert set(entry["runs"]) <= set(names)
    configs: list[TrainConfig] = []
    monkeypatch.setattr(training, "train", lambda config, *_: configs.append(config))
    for run in plan["runs"]:
        options = [*plan["common"], *run["options"]]
        train.command.main([o.format(runs="runs/x") for o in options], standalone_mode=False)
    assert len(configs) == len(names)
    assert f"| `{path.parent.name}` |" in (FOLDER / "README.md").read_text()


def test_an_experiment_is_done_in_pieces_and_ends_with_its_verdict(script, tmp_path, capsys, monkeypatch):
    data, folder = tmp_path / "data", tmp_path / "small"
    data.mkdir(), folder.mkdir()
    write_corpus(data / "corpus.u16", 2000)
    write_corpus(data / "corpus.val.u16", 400, seed=1)
    (data / "corpus.json").write_text('{"text_sha256": "of a test"}')
    (folder / "experiment.toml").write_text(f"""
question = "Does it learn faster at a rate that is not 0?"
common = {json.dumps(TINY)}
runs = [
    {{name = "slow", options = ["--learning-rate", "1e-9"]}},
    {{name = "slower", options = ["--learning-rate", "1e-10"]}},
    {{name = "again", like = ["slow", "slower"], options = ["--seed", "0"]}},
    {{name = "third", like = ["slow", "slower"], options = ["--seed", "0"]}},
    {{name = "fast", options = ["--learning-rate", "1e-2"]}},
    {{name = "branch", options = ["--branch-from", "{{runs}}/fast:4", "--learning-rate", "1e-2"]}},
]
evaluate = [{{runs = ["fast"], options = ["--weights", "last"]}}]
compare = [{{name = "fast or not", a = ["slow", "slower"], a2 = "again", replicates = ["third"], b = "fast"}}]
""")
    args = argparse.Namespace(
        data=data, runs=tmp_path / "runs", gathered=tmp_path / "gathered", override=["--no-qk-norm"], output=None
    )
    first = script.Experiment(folder, args)
    first.train("again")  # like a run that is not there yet: not now
    first.train("slow")
    assert first.result()["missing"] == ["slower", "again", "third", "fast", "branch"] and first.compare() == []
    shutil.rmtree(tmp_path / "runs")  # another lease, which has what was gathered
    second = script.Experiment(folder, args)
    for name in second.by_name:
        second.train(name)
    second.evaluate()
    result = second.result()
    assert result["missing"] == [] and not (tmp_path / "runs/small/slow").exists()
    (verdict,) = result["comparisons"]
    assert verdict["verdict"] == "better" and verdict["arms"]["a2"] == "again" and verdict["arms"]["b"] == "fast"
    assert len(verdict["runs"]) == 4, "three replicates and the change"
    assert result["runs"]["again"]["options"][-2:] == ["--seed", "0"]
    assert result["runs"]["fast"]["evaluations"]["--weightslast"][0]["step"] == 8
    assert result["runs"]["branch"]["val_loss"]["step"][-1] == 8
    json.dumps(result)


def small(folder: Path, runs: str, more: str = "") -> None:
    folder.mkdir()
    (folder / "experiment.toml").write_text(
        f'question = "?"\ncommon = {json.dumps(TINY)}\nruns = [{runs}]\n{more or "compare = []"}\n'
    )


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    data = tmp_path / "data"
    data.mkdir()
    write_corpus(data / "corpus.u16", 2000)
    write_corpus(data / "corpus.val.u16", 400, seed=1)
    (data / "corpus.json").write_text('{"text_sha256": "of a test"}')
    return argparse.Namespace(
        data=data, runs=tmp_path / "runs", gathered=tmp_path / "gathered", override=["--no-qk-norm"], output=None
    )


def test_a_branch_whose_stem_was_trained_elsewhere_has_it_trained_again(script, args, tmp_path):
    branch = '{name = "branch", options = ["--branch-from", "{runs}/stem:4"]}'
    small(tmp_path / "small", f'{{name = "stem", options = []}}, {branch}')
    first = script.Experiment(tmp_path / "small", args)
    first.train("stem")
    gathered = (args.gathered / "small/stem/facts.json").read_bytes()
    shutil.rmtree(args.runs)
    script.Experiment(tmp_path / "small", args).train("branch")
    assert script.Experiment(tmp_path / "small", args).finished("branch")
    assert (args.gathered / "small/stem/facts.json").read_bytes() == gathered


def test_what_is_kept_of_a_run_counts_when_all_of_it_is_there(script, args, tmp_path, monkeypatch):
    small(tmp_path / "small", '{name = "one", options = []}')
    experiment = script.Experiment(tmp_path / "small", args)
    write, left = script.write_bytes, list(script.KEPT)

    def ended(path: Path, data: bytes) -> None:
        if path.name == left[-1]:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(script, "write_bytes", ended)
    with pytest.raises(KeyboardInterrupt):
        experiment.train("one")
    assert not experiment.finished("one") and experiment.result()["missing"] == ["one"]
    monkeypatch.setattr(script, "write_bytes", write)
    experiment.train("one")
    assert experiment.result()["missing"] == []


def test_a_run_that_fails_keeps_no_other_from_being_trained(script, args, tmp_path, monkeypatch, capsys):
    small(tmp_path / "small", '{name = "bad", options = []}, {name = "good", options = []}')
    train = script.Experiment.train

    def fails(self, name: str) -> None:
        if name == "bad":
            raise subprocess.CalledProcessError(79, "llmtrain")
        train(self, name)

    monkeypatch.setattr(script.Experiment, "train", fails)
    words = ["--data", args.data, "--runs", args.runs, "--gathered", args.gathered, "--override=--no-qk-norm"]
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "small"), *map(str, words)])
    assert script.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: bad: exit 79"
    assert json.loads((tmp_path / "small/result.json").read_text())["missing"] == ["bad"]


def test_experiments_that_are_begun_at_once_tokenize_once(script, tmp_path, monkeypatch):
    data, calls = tmp_path / "data", []
    data.mkdir()
    (data / "text.jsonl.gz").write_bytes(b"text")

    def slowly(*command: str) -> str:
        calls.append(command[0])
        (data / "tokenizer.json").write_text("{}")
        time.sleep(0.2)
        for name in ("corpus.u16.json", "corpus.val.u16.json"):
            (data / name).write_text('{"tokens": 1, "documents": 1, "vocab_size": 1, "engine": {}}')
        return ""

    monkeypatch.setattr(script, "llmtrain", slowly)
    threads = [threading.Thread(target=script.prepare, args=(data,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["train-tokenizer", "tokenize-corpus"]


def test_a_tokenizer_that_came_along_is_taken_where_it_is_of_the_same_text(script, tmp_path, monkeypatch):
    data, calls = tmp_path / "data", []
    data.mkdir()
    text, tokenizer, record = data / "text.jsonl.gz", data / "tokenizer.json", data / "tokenizer.origin.json"
    text.write_bytes(b"text")

    def quickly(*command: str) -> str:
        calls.append(command[0])
        if command[0] == "train-tokenizer":
            tokenizer.write_bytes(b"of " + text.read_bytes())
        for name in ("corpus.u16.json", "corpus.val.u16.json"):
            (data / name).write_text('{"tokens": 1, "documents": 1, "vocab_size": 1, "engine": {}}')
        return ""

    def trained_anew() -> bool:
        """On a machine that has the text and what lies beside it, but no corpus."""
        (data / "corpus.json").unlink(missing_ok=True)
        calls.clear()
        script.prepare(data)
        assert calls[-1] == "tokenize-corpus" and (data / "corpus.json").exists()
        return calls[:-1] == ["train-tokenizer"]

    monkeypatch.setattr(script, "llmtrain", quickly)
    assert trained_anew() and not trained_anew()
    for spoil in (
        lambda: text.write_bytes(b"another text"),
        lambda: tokenizer.write_bytes(b"of something else"),
        tokenizer.unlink,
        record.unlink,
        lambda: record.write_bytes(b"torn"),
        lambda: monkeypatch.setattr(script, "VOCAB_SIZE", "4096"),
    ):
        spoil()
        assert trained_anew() and not trained_anew()

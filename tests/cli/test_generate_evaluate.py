"""`generate` and `evaluate` on a run that the product itself made: text in, a trained model, text out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.cli import trained
from llmtrain.cli.main import run as llmtrain
from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.model.config import ModelConfig
from llmtrain.storage.journal import JsonLines
from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from llmtrain.training.run import train
from tests.inference.runs import TEXT, write_corpus

SHAPE = ModelConfig(d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=40)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("product")
    corpus = write_corpus(folder)
    train(
        TrainConfig(
            model=SHAPE,
            data=DataConfig((str(corpus),), seq_len=16, val_tokens=(f"held={corpus}",)),
            optimizer=OptimizerConfig(learning_rate=1e-2),
            schedule=ScheduleConfig(total_steps=12, warmup_steps=2),
            run=RunConfig(folder / "run", batch_size=8, precision="fp32", device="cpu", val_windows=0),
        ),
        resume=False,
    )
    return folder / "run"


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `llmtrain args`, within this process."""
    capsys.readouterr()
    code = llmtrain([str(arg) for arg in args])
    return code, *capsys.readouterr()


# --- generate ---------------------------------------------------------------------------------------------------------


def test_what_is_generated_can_be_kept_for_the_report(run_dir, capsys):
    args = ("generate", "--run-dir", run_dir, "--max-new-tokens", "12", "--prompt", "def a(")
    try:
        _, one, _ = command(capsys, *args, "--keep")
        command(capsys, *args, "--prompt", "class", "--keep", "--seed", "3")
        command(capsys, *args)
        kept = list(JsonLines.read(run_dir / "samples.jsonl"))
    finally:
        (run_dir / "samples.jsonl").unlink(missing_ok=True)
    assert [(line["step"], line["prompt"]) for line in kept] == [(12, "def a("), (12, "def a("), (12, "class")]
    assert kept[0]["prompt"] + kept[0]["text"] + "\n" == one and "seed 3" in kept[1]["how"]



def test_a_prompt_is_continued_and_the_seed_decides_how(run_dir, capsys):
    args = ("generate", "--run-dir", run_dir, "--prompt", "def caf\u00e9(", "--max-new-tokens", "20")
    code, text, said = command(capsys, *args)
    assert (code, said) == (0, "")
    assert text.startswith("def caf\u00e9(") and text.endswith("\n") and len(text) > 20
    assert command(capsys, *args)[1] == text
    assert command(capsys, *args, "--seed", "7")[1] != text
    assert command(capsys, *args, "--temperature", "0", "--seed", "7") == command(capsys, *args, "--temperature", "0")


def test_a_checkpoint_can_be_named_in_place_of_a_run(run_dir, capsys):
    by_run = command(capsys, "generate", "--run-dir", run_dir, "--max-new-tokens", "9")
    by_folder = command(
        capsys, "generate", "--checkpoint", run_dir / "checkpoints/step-00000012", "--max-new-tokens", "9"
    )
    assert by_run == by_folder and by_run[0] == 0


def test_several_prompts_are_what_the_first_is_alone_and_each_is_shown(run_dir, capsys):
    args = ("generate", "--run-dir", run_dir, "--max-new-tokens", "12", "--prompt", "import os")
    _, alone, _ = command(capsys, *args)
    code, together, _ = command(capsys, *args, "--prompt", "a somewhat longer prompt: ")
    first, second, rest = together.split("\n-----\n")
    assert code == 0 and first == alone.removesuffix("\n")
    assert second.startswith("a somewhat longer prompt: ") and rest == ""


def test_a_text_that_fills_the_context_ends_and_says_so(run_dir, capsys):
    code, _, said = command(capsys, "generate", "--run-dir", run_dir, "--prompt", "x", "--temperature", "0")
    assert code == 0 and "max_seq_len of 40" in said


def test_a_prompt_from_a_file_or_standard_input_is_taken_as_it_is(run_dir, tmp_path):
    (tmp_path / "prompt.txt").write_text("if a:\n    \u20ac = [", encoding="utf-8")
    base = [sys.executable, "-m", "llmtrain", "generate", "--run-dir", str(run_dir), "--max-new-tokens", "8"]
    file = subprocess.run([*base, "--prompt-file", str(tmp_path / "prompt.txt")], capture_output=True, timeout=120)
    with open(tmp_path / "prompt.txt", "rb") as given:
        # Also where the terminal's encoding is not UTF-8.
        env = os.environ | {"PYTHONIOENCODING": "latin-1"}
        piped = subprocess.run([*base, "--prompt-file", "-"], stdin=given, capture_output=True, timeout=120, env=env)
    assert file.returncode == piped.returncode == 0, file.stderr + piped.stderr
    assert file.stdout.decode().startswith("if a:\n    \u20ac = [")
    assert piped.stdout.startswith(b"if a:\n    ? = [")


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate_says_what_the_run_said_at_its_end(run_dir, capsys):
    at_the_end = [line for line in JsonLines.read(run_dir / "metrics.jsonl") if line["kind"] == "eval"][-1]
    code, text, _ = command(capsys, "evaluate", "--run-dir", run_dir, "--json")
    (line,) = map(json.loads, text.splitlines())
    assert code == 0
    assert (line["step"], line["source"]) == (at_the_end["step"], at_the_end["source"]) == (12, "held")
    for name in ("val_loss", "ppl", "bits_per_byte"):
        assert line[name] == pytest.approx(at_the_end[name], rel=1e-6), name
    assert 0 < line["bits_per_byte"] < line["val_loss"] / 0.69


def test_evaluate_prints_a_line_for_each_file(run_dir, capsys):
    corpus = run_dir.parent / "corpus.u16"
    code, text, _ = command(
        capsys, "evaluate", "--run-dir", run_dir, "--tokens", f"a={corpus}", "--tokens", f"b={corpus}",
        "--seq-len", "32", "--max-windows", "2",
    )  # fmt: skip
    head, a, b = text.splitlines()
    assert code == 0 and head.split() == ["source", "step", "targets", "loss", "perplexity", "bits/byte"]
    assert a.split()[:3] == ["a", "12", "64"] and a.split()[1:] == b.split()[1:]


def test_evaluate_without_the_tokenizer_leaves_bits_per_byte_unknown(run_dir, capsys, tmp_path):
    (tmp_path / "checkpoints").symlink_to(run_dir / "checkpoints")
    code, text, _ = command(capsys, "evaluate", "--run-dir", tmp_path)
    assert code == 0 and text.split()[-1] == "unknown"
    code, _, said = command(capsys, "generate", "--run-dir", tmp_path, "--prompt", "a")
    assert code == 66 and "--tokenizer" in said
    code, text, _ = command(capsys, "evaluate", "--run-dir", tmp_path, "--tokenizer", run_dir / "tokenizer.json")
    assert code == 0 and float(text.split()[-1]) > 0


# --- what a person may get wrong --------------------------------------------------------------------------------------


KINDS = ("--text", "{tmp}/t.jsonl", "--kind-field", "kind")


@pytest.mark.parametrize(
    "code, words, args",
    [
        (66, ["nowhere"], ["generate", "--run-dir", "{tmp}/nowhere"]),
        (66, ["nowhere"], ["evaluate", "--checkpoint", "{tmp}/nowhere"]),
        (66, ["prompt.txt"], ["generate", "--run-dir", "{run}", "--prompt-file", "{tmp}/prompt.txt"]),
        (65, ["bytes.txt", "UTF-8"], ["generate", "--run-dir", "{run}", "--prompt-file", "{tmp}/bytes.txt"]),
        (65, ["bytes.txt"], ["generate", "--run-dir", "{run}", "--tokenizer", "{tmp}/bytes.txt"]),
        (2, ["prompt"], ["generate", "--run-dir", "{run}", "--prompt", "a", "--prompt-file", "b"]),
        (2, ["temperature", "-1"], ["generate", "--run-dir", "{run}", "--temperature", "-1"]),
        (2, ["40", "shorten"], ["generate", "--run-dir", "{run}", "--prompt", "x = 1; " * 40]),
        (2, ["--seq-len 41", "40"], ["evaluate", "--run-dir", "{run}", "--seq-len", "41"]),
        (66, ["no.u16"], ["evaluate", "--run-dir", "{run}", "--tokens", "{tmp}/no.u16"]),
        (78, ["big.json", "--tokenizer"], ["generate", "--run-dir", "{run}", "--tokenizer", "{tmp}/big.json"]),
        (65, ["'kind'", "name the field with"], ["evaluate", "--run-dir", "{run}", *KINDS]),
        (78, ["another tokenizer"], ["evaluate", "--run-dir", "{run}", "--tokenizer", "{tmp}/other.json"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_each_mistake_is_one_line_and_its_exit_code(run_dir, tmp_path, capsys, code, words, args):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "t.jsonl").write_text('{"text": "x = 1", "domain": "code"}\n')
    if "big.json" in words[0]:
        (tmp_path / "big.json").write_bytes(tokenizers.train([TEXT], 400))
    if words == ["another tokenizer"]:
        (tmp_path / "other.json").write_bytes(tokenizers.train([TEXT[:3000]], 280))
    got, text, said = command(capsys, *(arg.format(tmp=tmp_path, run=run_dir) for arg in args))
    assert (got, text) == (code, "")
    assert said.startswith("llmtrain: error: ") and said.count("\n") == 1
    assert all(word in said for word in words), said


def test_a_damaged_checkpoint_is_bad_data(run_dir, tmp_path, capsys):
    import shutil

    shutil.copytree(run_dir / "checkpoints/step-00000012", tmp_path / "checkpoints/step-00000012")
    path = tmp_path / "checkpoints/step-00000012/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    code, text, said = command(capsys, "generate", "--run-dir", tmp_path, "--tokenizer", run_dir / "tokenizer.json")
    assert (code, text) == (65, "") and "model.safetensors" in said


def test_a_prompt_that_is_no_text_is_one_line(run_dir, capsys):
    code, text, said = command(capsys, "generate", "--run-dir", run_dir, "--prompt", os.fsdecode(b"a\xff"))
    assert (code, text) == (2, "") and "not UTF-8" in said and said.count("\n") == 1


def test_a_batch_larger_than_the_file_is_the_file(run_dir, capsys):
    args = ("evaluate", "--run-dir", run_dir, "--json", "--batch-size")
    small, large = (json.loads(command(capsys, *args, size)[1]) for size in (7, 10**12))
    assert large == pytest.approx(small)


def test_the_tokenizer_of_another_corpus_in_the_run_directory_is_refused(run_dir, tmp_path, capsys):
    other = tmp_path / "run"
    shutil.copytree(run_dir, other)
    (other / "tokenizer.json").write_bytes(tokenizers.train(["quite another text, another, another text"], 280))
    code, text, said = command(capsys, "generate", "--run-dir", other)
    assert (code, text) == (78, "") and "is not the tokenizer of the corpus" in said and said.count("\n") == 1


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used_untouched(run_dir, tmp_path, capsys):
    shutil.copytree(run_dir, tmp_path / "run")
    steps = tmp_path / "run/checkpoints"
    shutil.copytree(steps / "step-00000012", steps / "step-00000013")
    with open(steps / "step-00000013/model.safetensors", "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\xff")
    shutil.copytree(steps / "step-00000012", steps / "step-00000014")
    (steps / "step-00000014/MANIFEST.json").unlink()
    before = sorted(path for path in tmp_path.rglob("*"))
    wanted = command(capsys, "generate", "--run-dir", run_dir, "--max-new-tokens", "9")
    code, text, said = command(capsys, "generate", "--run-dir", tmp_path / "run", "--max-new-tokens", "9")
    assert (code, text) == wanted[:2] == (0, text)
    first, second = said.splitlines()
    assert "step-00000014: has no MANIFEST.json" in first and "step-00000012 is used instead" in first
    assert "step-00000013/model.safetensors: is damaged" in second and "step-00000012 is used instead" in second
    assert sorted(path for path in tmp_path.rglob("*")) == before
    code, _, said = command(capsys, "evaluate", "--run-dir", tmp_path / "run", "--device", "cpu")
    assert code == 0 and said.count("step-00000012 is used instead") == 2
    shutil.rmtree(steps / "step-00000012")
    code, _, said = command(capsys, "generate", "--run-dir", tmp_path / "run")
    assert code == 65 and said.count("\n") == 1 and "step-00000014" in said


def test_a_run_that_goes_on_may_replace_all_its_checkpoints_while_one_is_read(run_dir, tmp_path, capsys, monkeypatch):
    shutil.copytree(run_dir, tmp_path / "run")
    steps, real = tmp_path / "run/checkpoints", trained.load_model

    def slow(folder: Path, *args: object):
        if folder.name != "step-00000020":
            shutil.copytree(steps / "step-00000012", steps / "step-00000020")
            for old in [path for path in steps.iterdir() if path.name != "step-00000020"]:
                shutil.rmtree(old)
        return real(folder, *args)

    monkeypatch.setattr(trained, "load_model", slow)
    code, _, said = command(capsys, "generate", "--run-dir", tmp_path / "run", "--max-new-tokens", "9")
    assert (code, said) == (0, "") and [path.name for path in steps.iterdir()] == ["step-00000020"]

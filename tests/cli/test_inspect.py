import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.cli.main import run
from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import docs_path, manifest_path
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage import atomic
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters
from llmtrain.training.optimizer import AdamW
from llmtrain.training.snapshot import Snapshot
from tests.corpus.files import some_documents, write_documents, write_flat, write_ids

TEXTS = ["some words", "and more words", "some words", "x", "a much longer document " * 20, "some words"]

MODEL = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, max_seq_len=32)


def make_run(run_dir: Path) -> Path:
    """Two checkpoints of a small model, and what a run writes beside them."""
    run_dir.mkdir()
    flat = FlatParameters(Transformer(MODEL, device="meta"), "cpu", torch.bfloat16)
    snapshot = Snapshot(flat, AdamW(flat, OptimizerConfig()))
    for step in (5, 10):
        state = {
            "samples": 4 * step,
            "tokens": 64 * step,
            "config": {"model": asdict(MODEL), "data": {"tokens": ["data/code.u16:0.7", "data/web.u16:0.3"]}},
            "corpus": [{"tokens": 1234}, {"tokens": 5678}],
            "environment": {"torch": "2.13.0", "threads": 2},
        }
        checkpoint.save(run_dir, step, snapshot, state)
    atomic.write_json(run_dir / "status.json", {"state": "stopped", "reason": "SIGTERM", "step": 10})
    with JsonLines(run_dir / "metrics.jsonl") as journal:
        for step in (5, 10):
            journal.append({"kind": "train", "step": step, "lm_loss": 10.0 / step, "ppl": 2.7, "lr": 1e-3})
            journal.append({"kind": "eval", "step": step, "source": "held", "val_loss": 12.5 / step})
    return run_dir


def outcome(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Exit code, and the output or the one line of the error."""
    code = run([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert (code == 0) == (err == "") and err.count("\n") <= 1
    return code, out if code == 0 else err


def test_a_token_file_is_described_from_its_manifest(tmp_path, capsys):
    inputs = [
        {"path": "a.txt", "bytes": 3000, "documents": 2, "tokens": 900, "skipped": {"empty": 2}},
        {"path": "b.txt", "bytes": 1000, "documents": 1, "tokens": 100, "skipped": {"empty": 1, "utf-8": 4}},
    ]
    ids = np.random.default_rng(0).integers(1, 500, 1000)
    ids[[10, 500, 999]] = 0
    path = write_flat(tmp_path / "a.u16", ids, inputs=inputs)
    code, out = outcome(capsys, "inspect", path)
    assert code == 0
    for text in (
        "with a manifest and a document index",
        "2.00 kB",
        "1,000\n",
        "3, 333.3 tokens each",
        f"512; largest id {ids.max()}, EOS 0",
        "tokenizer.json (sha256 0000000000000000)",
        "2 files, 4.00 kB\n",
        "3 empty, 4 utf-8",
    ):
        assert text in out
    docs_path(path).unlink()
    assert "no document index" in outcome(capsys, "inspect", path)[1]


def test_a_flat_file_is_described_from_its_ids(tmp_path, capsys):
    code, out = outcome(capsys, "inspect", write_ids(tmp_path / "a.u16", [*range(7, 5000), 7]))
    assert code == 0 and "no manifest" in out and "4,993 different ones, from 7 to 4999\n" in out
    assert "     7   0.04%\n" in out and "begins with [7, 8, 9" in out and "document" not in out
    code, out = outcome(capsys, "inspect", tmp_path / "a.u16", "--eos-id", 9, "--limit", 100)
    assert "the first 100 tokens; --limit 0 takes all" in out
    assert "of 1 document in tokens, the longest has 3" in out and "document 2  [10, 11" in out


def test_text_lengths_and_documents_that_are_the_same_are_said(tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    corpus, tokenizer = tmp_path / "a.u16", tmp_path / "tokenizer.json"
    outcome(capsys, "train-tokenizer", "--input", tmp_path / "text.jsonl", "--output", tokenizer, "--vocab-size", 280)
    arguments = ("--input", tmp_path / "text.jsonl", "--tokenizer", tokenizer, "--holdout", 0)
    assert outcome(capsys, "tokenize-corpus", *arguments, "--output", corpus)[0] == 0
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in (TEXTS[1], "new", "new")))
    arguments = ("--input", tmp_path / "more.jsonl", "--tokenizer", tokenizer, "--holdout", 0)
    assert outcome(capsys, "tokenize-corpus", *arguments, "--output", tmp_path / "a.val.u16")[0] == 0

    file = TokenFile.open(corpus)
    sizes = tokenizers.token_bytes(tokenizers.load(tokenizer))
    code, out = outcome(capsys, "inspect", corpus)
    assert code == 0
    assert f"{sum(map(len, TEXTS)) / file.tokens:.3f} bytes a token; " in out
    assert f"{np.mean(sizes[file.ids] == 1):.2%} of the tokens are one byte" in out
    assert "2 documents (33.33%) the same as one before" in out
    assert f"1 of 3 documents of {tmp_path / 'a.val.u16'} are among these" in out
    assert f'document 1  "{TEXTS[0]}<|endoftext|>"' in out
    longest = int(np.diff(file.doc_ends, prepend=0).max())
    assert f"of 6 documents in tokens, the longest has {longest}\n" in out
    assert f"6 of 6 documents of {corpus} are among these" in outcome(capsys, "inspect", corpus, "--against", corpus)[1]
    tokenizer.unlink()
    assert "document 1  [" in outcome(capsys, "inspect", corpus)[1]


def test_a_checkpoint_and_a_run_are_described(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    folder = run_dir / "checkpoints" / "step-00000010"
    code, out = outcome(capsys, "inspect", folder)
    parameters = sum(p.numel() for p in Transformer(MODEL, device="meta").parameters())
    assert code == 0
    for text in (
        "step 10\n",
        "40 samples, 640 tokens",
        f"{parameters:,} parameters: d_model 32",
        "data/code.u16:0.7 (1,234 tokens), data/web.u16:0.3 (5,678 tokens)",
        "torch 2.13.0",
        "optimizer.safetensors",
    ):
        assert text in out

    (folder / "model.safetensors").write_bytes(b"short")
    code, out = outcome(capsys, "inspect", run_dir)
    assert code == 0
    for text in (
        "stopped at step 10: SIGTERM",
        "step 10: lm_loss 1, ppl 2.7, lr 0.001",
        "step 10: held: val_loss 1.25",
        "step-00000005 ",
        "step-00000010 damaged: ",
    ):
        assert text in out
    code, out = outcome(capsys, "inspect", folder)
    assert code == 65 and "model.safetensors: holds 5 bytes" in out


def test_inspecting_changes_nothing(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    with open(run_dir / "metrics.jsonl", "ab") as journal:
        journal.write(b'{"kind": "train", "st')  # a run is writing at this moment
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run_dir.rglob("*") if path.is_file()}
    for command in ("inspect", "verify"):
        assert outcome(capsys, command, run_dir)[0] == 0
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run_dir.rglob("*") if path.is_file()
    }


def test_what_is_nothing_of_ours_is_one_line_and_its_exit_code(tmp_path, capsys):
    path = write_documents(tmp_path / "a.u16", some_documents(3))
    (tmp_path / "empty.u16").touch()
    for command in ("inspect", "verify"):
        for target, code, line in (
            (tmp_path / "no", 66, "no such file or folder"),
            (tmp_path, 65, "is neither a checkpoint nor a run directory"),
            (tmp_path / "empty.u16", 65, "is empty"),
            (docs_path(path), 2, "belongs to the token file"),
            (manifest_path(path), 2, "belongs to the token file"),
        ):
            found = outcome(capsys, command, target)
            assert found[0] == code and line in found[1] and str(target) in found[1]


def test_the_samples_of_a_step_are_shown_as_text(tmp_path, capsys):
    names = [tmp_path / name for name in ("text.txt", "tokenizer.json", "corpus.u16", "run")]
    text, tokenizer, corpus, run_dir = names
    text.write_text("".join(f"line {i} says what the one before said\n" for i in range(600)))
    outcome(capsys, "train-tokenizer", "--input", text, "--output", tokenizer, "--vocab-size", 300)
    outcome(capsys, "tokenize-corpus", "--input", text, "--tokenizer", tokenizer, "--output", corpus, "--holdout", 0)
    shape = ["--d-model", 16, "--n-layers", 1, "--n-heads", 2, "--n-kv-heads", 1, "--head-dim", 8, "--d-ff", 16]
    of_run = ["--run-dir", run_dir, "--tokens", corpus, "--seq-len", 64, "--batch-size", 3, "--total-steps", 2]
    assert outcome(capsys, "train", *of_run, *shape, "--device", "cpu")[0] == 0
    code, out = outcome(capsys, "inspect", run_dir, "--step", 2)
    assert code == 0 and out.startswith("step        2 trains on samples 3 to 5\n3           corpus window ")
    shown = [json.loads(line.partition(" on: ")[2]) for line in out.splitlines()[1:]]
    assert len(shown) == 3 and all(len(part) > 64 and part in text.read_text() for part in shown)
    for target, step, words in ((run_dir, 3, "ends at step 2"), (corpus, 1, "is a token file")):
        code, line = outcome(capsys, "inspect", target, "--step", step)
        assert code == 2 and words in line


def test_a_run_that_goes_on_says_since_when_and_how_far_it_is(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    atomic.write_json(run_dir / "status.json", {"state": "running", "reason": "since step 5", "step": 5})
    code, out = outcome(capsys, "inspect", run_dir)
    assert code == 0 and "state       running since step 5\n" in out and "train       step 10: " in out


def test_a_state_that_was_altered_is_not_described(tmp_path, capsys):
    folder = make_run(tmp_path / "run") / "checkpoints" / "step-00000005"
    state = (folder / "state.json").read_text()
    (folder / "state.json").write_text(state.replace("samples", "sampled"))
    assert json.loads((folder / "state.json").read_text())
    code, out = outcome(capsys, "inspect", folder)
    assert code == 65 and "state.json: is damaged" in out


def test_figures_that_are_no_numbers_are_left_out(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "step": 11, "lm_loss": 10**400, "lr": 0.5, "ppl": True}) + "\n")
    code, out = outcome(capsys, "inspect", run_dir)
    assert code == 0 and "step 11: lr 0.5\n" in out

"""Runs on prompts and completions, and what evaluations by questions and by kind say within a run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.cli.main import run as llmtrain
from llmtrain.corpus import tokenizer as tokenizers
from llmtrain.corpus.batches import assemble
from llmtrain.corpus.token_manifest import BlockHashes, docs_path, mask_path, write_manifest
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import BadData, InputMissing, UsageError
from llmtrain.training import run
from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from llmtrain.training.run_corpus import open_corpus
from tests.training.test_run import figures, lines, tensors_of

SMALL = ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
PAIRS = [(f"Question {n}: what is {n} plus {n}?\n", f"It is {2 * n}, {'truly ' * (n % 4)}I think.") for n in range(60)]
KINDS = [{"text": p + c, "kind": "even" if n % 2 == 0 else "odd"} for n, (p, c) in enumerate(PAIRS)]
QUESTIONS = [{"question": p.strip(), "choices": [f"It is {n}", c], "answer": 1} for n, (p, c) in enumerate(PAIRS[:7])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file with a mask, its tokenizer, questions and text by kind."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "tokenizer.json").write_bytes(tokenizers.train([p + c for p, c in PAIRS], 400))
    for name, records in (("kinds.jsonl", KINDS), ("questions.jsonl", QUESTIONS)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = tokenizers.load(folder / "tokenizer.json")
    rows = [tokenizer.encode_batch(pair) for pair in PAIRS]
    ids = np.concatenate([[*read, *learned, tokenizer.eos_id] for read, learned in rows]).astype("<u2")
    mask = np.concatenate([[0] * len(read) + [1] * (len(learned) + 1) for read, learned in rows]).astype(np.uint8)
    ids.tofile(folder / "pairs.u16")
    mask.tofile(mask_path(folder / "pairs.u16"))
    (np.flatnonzero(ids == tokenizer.eos_id) + 1).astype("<u8").tofile(docs_path(folder / "pairs.u16"))
    hashes = BlockHashes(), BlockHashes()
    hashes[0].update(ids)
    hashes[1].update(mask)
    write_manifest(
        folder / "pairs.u16", tokens=ids.size, documents=len(PAIRS), max_id=int(ids.max()), inputs=[],
        vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, engine={"name": "tokenizers", "version": "0"},
        tokenizer={"file": str(folder / "tokenizer.json"), "sha256": tokenizer.sha256}, sha256=hashes[0].hexdigests(),
        mask={"loss_tokens": int(mask.sum()), "sha256": hashes[1].hexdigests()},
    )  # fmt: skip
    return folder


def settings(folder: Path, run_dir: Path, of_run: dict | None = None, **data) -> TrainConfig:
    usual = {"batch_size": 3, "global_batch_size": 6, "precision": "fp32", "device": "cpu", "log_every": 1}
    return TrainConfig(
        model=SMALL,
        data=DataConfig((str(folder / "pairs.u16"),), 48, packing="documents", document_mask=True, **data),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(total_steps=4, warmup_steps=1),
        run=RunConfig(run_dir, **{**usual, **(of_run or {})}),
    )


def test_the_loss_is_the_sum_over_completions_by_their_number_whatever_the_split(folder, tmp_path):
    run.train(settings(folder, tmp_path / "three"), resume=False)
    for size in (1, 4, 6):
        run.train(settings(folder, tmp_path / str(size), {"batch_size": size}), resume=False)
        for one, other in zip(figures(tmp_path / "three"), figures(tmp_path / str(size)), strict=True):
            assert one[1] == pytest.approx(other[1], rel=1e-5)
    config, order, _ = open_corpus(settings(folder, tmp_path / "three"))
    batch = assemble(order, np.arange(6), document_mask=True)
    model = Transformer(config.model)
    model.init_weights(0)
    nats = count = 0
    mask = np.fromfile(mask_path(folder / "pairs.u16"), np.uint8)
    (cut,) = order.cuts
    _, windows = order.locate(np.arange(6))
    for row, window in enumerate(windows):
        _, starts, lengths = cut.pieces(np.array([window]))
        column = 0
        for start, length in zip(starts, lengths, strict=True):  # each document by itself
            ids = torch.from_numpy(cut.file.ids[start : start + length].astype(np.int64))
            assert torch.equal(batch.ids[row, column : column + length][: 48 - column], ids[: 48 - column])
            with torch.no_grad():
                logits = model.logits(model(ids[None, :-1]))[0].double()
            losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            counted = torch.from_numpy(mask[start + 1 : start + length] == 1)
            nats, count = nats + losses[counted].sum().item(), count + int(counted.sum())
            column += length
    assert int((batch.targets != -100).sum()) == count
    assert figures(tmp_path / "three")[0][1] == pytest.approx(nats / count, rel=1e-5)


def test_evaluations_of_a_run_are_those_of_the_command_and_change_no_bit(folder, tmp_path, capsys):
    held = {
        "val_tokens": (f"pairs={folder}/pairs.u16",), "val_choices": (f"quiz={folder}/questions.jsonl",),
        "val_text": (str(folder / "kinds.jsonl"),), "val_kind_field": "kind",
    }  # fmt: skip
    run.train(settings(folder, tmp_path / "plain"), resume=False)
    run.train(settings(folder, tmp_path / "run", {"val_every": 2, "val_windows": 0}, **held), resume=False)
    assert figures(tmp_path / "plain") == figures(tmp_path / "run")
    assert tensors_of(tmp_path / "plain", 4) == tensors_of(tmp_path / "run", 4)
    evals = lines(tmp_path / "run", "eval")
    names = ["pairs", "quiz", "kinds/even", "kinds/odd", "kinds"]
    assert [(line["step"], line["source"]) for line in evals] == [(s, name) for s in (0, 2, 4) for name in names]
    capsys.readouterr()
    assert llmtrain(["evaluate", "--run-dir", str(tmp_path / "run"), "--json", "--device", "cpu"]) == 0
    found = {line["source"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    for line in evals[-5:]:
        for name in ("val_loss", "bits_per_byte", "accuracy", "accuracy_norm", "accuracy_norm_stderr", "questions"):
            assert (name in line) == (name in found[line["source"]])
            if name in line:
                assert found[line["source"]][name] == pytest.approx(line[name], rel=1e-5)
    even, odd, whole = (found[f"kinds{kind}"] for kind in ("/even", "/odd", ""))
    assert whole["targets"] == even["targets"] + odd["targets"]
    mean = (even["val_loss"] * even["targets"] + odd["val_loss"] * odd["targets"]) / whole["targets"]
    assert whole["val_loss"] == pytest.approx(mean)
    assert 0 < found["pairs"]["targets"] < whole["targets"], "only completions count there"
    assert llmtrain(["evaluate", "--run-dir", str(tmp_path / "run"), "--choices", str(folder / "questions.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "questions" in text.splitlines()[0] and "+-" in text.splitlines()[1] and "loss" not in text
    run.train(settings(folder, tmp_path / "run", {"val_every": 2, "val_windows": 0}, **held), resume=True)
    assert lines(tmp_path / "run", "eval") == evals, "a finished run has nothing to add"


def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(folder, tmp_path):
    def refused(error, match, **data):
        with pytest.raises(error, match=match):
            run.train(settings(folder, tmp_path / "run", **data), resume=False)
        assert not (tmp_path / "run").exists()

    refused(InputMissing, "none.jsonl", val_choices=(str(tmp_path / "none.jsonl"),))
    twice = (str(folder / "questions.jsonl"), f"questions={folder}/questions.jsonl")
    refused(UsageError, "two held-out files are called questions", val_choices=twice)
    lone = tmp_path / "lone"
    lone.mkdir()
    np.arange(1, 400, dtype="<u2").tofile(lone / "flat.u16")
    config = settings(folder, tmp_path / "run", val_choices=(str(folder / "questions.jsonl"),))
    flat = dataclasses.replace(config.data, tokens=(str(lone / "flat.u16"),), packing="concat", document_mask=False)
    config = dataclasses.replace(config, data=flat, model=dataclasses.replace(SMALL, vocab_size=400))
    with pytest.raises(InputMissing, match="--val-choices and --val-text need it"):
        run.train(config, resume=False)
    with pytest.raises(ValueError, match="val_kind_field kind is of val_text"):
        settings(folder, tmp_path, val_kind_field="kind")


def test_prompts_without_anything_to_learn_are_said_to_be_that(folder, tmp_path):
    def masked(name: str) -> str:
        """pairs.u16 with a mask that leaves everything out."""
        tokenizer = tokenizers.load(folder / "tokenizer.json")
        ids = np.fromfile(folder / "pairs.u16", "<u2")
        ids.tofile(tmp_path / name)
        np.zeros(ids.size, np.uint8).tofile(mask_path(tmp_path / name))
        hashes = BlockHashes(), BlockHashes()
        hashes[0].update(ids)
        hashes[1].update(np.zeros(ids.size, np.uint8))
        write_manifest(
            tmp_path / name, tokens=ids.size, documents=len(PAIRS), max_id=int(ids.max()), inputs=[],
            vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, engine={"name": "tokenizers", "version": "0"},
            tokenizer={"file": "t", "sha256": tokenizer.sha256}, sha256=hashes[0].hexdigests(),
            mask={"loss_tokens": 0, "sha256": hashes[1].hexdigests()},
        )  # fmt: skip
        return str(tmp_path / name)

    with pytest.raises(BadData, match="none of its .* windows that were read has a token that counts in the loss"):
        run.train(settings(folder, tmp_path / "held", val_tokens=(masked("held.u16"),)), resume=False)
    config = settings(folder, tmp_path / "run")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokens=(masked("none.u16"),)))
    with pytest.raises(BadData, match="more than 3 updates .* step 1, the first in a row, has no token that counts"):
        run.train(config, resume=False)

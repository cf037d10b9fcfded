"""Evaluation: every window counted once, whatever the batch; nothing of a training run touched; misfits refused."""

import math
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.tokenizer import EOS, Tokenizer
from llmtrain.inference.config import EvaluateConfig
from llmtrain.inference.evaluate import evaluate_sources, open_sources
from llmtrain.model.config import ModelConfig
from llmtrain.model.transformer import Transformer
from llmtrain.storage.errors import BadData, ConfigMismatch, InputMissing, UsageError
from tests.corpus.files import write_flat, write_ids

VOCAB, T = 40, 16


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
                         max_seq_len=20, init_std=0.2, z_loss=1e-2)  # fmt: skip
    model = Transformer(config)
    model.init_weights(3)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Token i has i bytes; id 0 is EOS."""
    vocab = {EOS: 0, **{"a" * i: i for i in range(1, 31)}}
    library = Library(models.WordLevel(vocab, unk_token=EOS))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return Tokenizer(library.to_str().encode(), "tokenizer.json")


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    """23 windows and a tail of 5 ids."""
    ids = np.random.default_rng(0).integers(1, 31, 23 * T + 1 + 5)
    ids[::13] = 0
    ids[-1] = 0
    return ids


@pytest.fixture()
def file(tmp_path, ids, tokenizer):
    made_by = {"file": "tokenizer.json", "sha256": tokenizer.sha256}
    return write_flat(tmp_path / "val.u16", ids, vocab_size=31, tokenizer=made_by)


def evaluate(model, path, **settings):
    settings = {"seq_len": T, "batch_size": 4, **settings}
    sources = open_sources([str(path)], model.config, settings["seq_len"], settings.get("tokenizer"))
    return list(evaluate_sources(model, sources, **settings))


@torch.no_grad()
def nats_by_hand(model, ids, windows) -> float:
    nats = 0.0
    for i in windows:
        row = torch.from_numpy(ids[i * T : (i + 1) * T + 1].astype(np.int64))
        logits = model.logits(model(row[None, :-1]))[0].double()
        nats += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return nats


@pytest.mark.parametrize("batch_size", [1, 4, 23, 64])
def test_the_loss_is_the_mean_over_every_window_whatever_the_batch(model, file, ids, tokenizer, batch_size):
    (result,) = evaluate(model, file, batch_size=batch_size, tokenizer=tokenizer)
    nats = nats_by_hand(model, ids, range(23))
    assert (result.source, result.windows, result.targets) == ("val", 23, 23 * T)
    assert result.val_loss == pytest.approx(nats / (23 * T), rel=1e-6)
    assert result.ppl == pytest.approx(math.exp(nats / (23 * T)), rel=1e-5)
    # The token i has i bytes, so the bytes of the targets are their sum.
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / int(ids[1 : 23 * T + 1].sum()), rel=1e-6)


def test_fewer_windows_are_spread_evenly_over_the_file(model, file, ids):
    (result,) = evaluate(model, file, max_windows=4)
    assert result.windows == 4 and result.bits_per_byte is None
    assert result.val_loss == pytest.approx(nats_by_hand(model, ids, [0, 5, 11, 17]) / (4 * T), rel=1e-6)


def test_each_file_gets_its_own_result_in_order(model, file, tmp_path, ids):
    write_ids(tmp_path / "other.u16", ids[: 3 * T + 1])
    sources = open_sources([f"first={file}", str(tmp_path / "other.u16")], model.config, T)
    one, two = evaluate_sources(model, sources, seq_len=T, batch_size=4)
    assert (one.source, one.windows, two.source, two.windows) == ("first", 23, "other", 3)
    assert two.val_loss == pytest.approx(nats_by_hand(model, ids, range(3)) / (3 * T), rel=1e-6)


def test_evaluation_changes_no_bit_of_a_training_run(model, file, tokenizer):
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
        parameter.grad_stale = True  # type: ignore[attr-defined]
    before = [(p.detach().clone(), p.grad.clone(), p._version) for p in parameters]
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert torch.is_grad_enabled()
    evaluate(model, file, tokenizer=tokenizer)
    assert torch.is_grad_enabled()
    for parameter, (value, gradient, version) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value) and torch.equal(parameter.grad, gradient)
        assert parameter._version == version and parameter.grad_stale  # type: ignore[attr-defined]
        parameter.grad = None
    assert torch.equal(generators[0], torch.get_rng_state())
    assert (generators[1] == np.random.get_state()[1]).all() and generators[2] == random.getstate()


def test_what_does_not_fit_the_model_is_refused_before_anything_is_evaluated(model, file, tmp_path, ids, tokenizer):
    with pytest.raises(UsageError, match="21.*20"):
        evaluate(model, file, seq_len=21)
    with pytest.raises(InputMissing, match="nothing.u16"):
        open_sources([str(file), str(tmp_path / "nothing.u16")], model.config, T)
    with pytest.raises(BadData, match="short.u16"):
        write_ids(tmp_path / "short.u16", ids[:T])
        evaluate(model, tmp_path / "short.u16")
    with pytest.raises(ConfigMismatch, match="beyond.u16"):
        evaluate(model, write_flat(tmp_path / "beyond.u16", np.where(ids, ids + VOCAB, 0), vocab_size=100))
    with pytest.raises(ConfigMismatch, match="another tokenizer than tokenizer.json"):
        evaluate(model, write_flat(tmp_path / "foreign.u16", ids, vocab_size=31), tokenizer=tokenizer)


def test_an_id_beyond_the_vocabulary_of_a_flat_file_is_met_by_name(model, tmp_path, ids):
    wrong = ids.copy()
    wrong[100] = 1000
    path = write_ids(tmp_path / "flat.u16", wrong)
    assert TokenFile.open(path, VOCAB).manifest is None
    with pytest.raises(BadData, match="1000"):
        evaluate(model, path)


def test_the_result_has_the_names_of_metrics_jsonl(model, file):
    assert {"source", "val_loss", "ppl", "bits_per_byte"} <= set(asdict(evaluate(model, file)[0]))


@pytest.mark.parametrize("fields", [{"seq_len": -1}, {"batch_size": 0}, {"max_windows": -2}], ids=str)
def test_settings_that_make_no_sense_are_refused_by_name_and_value(fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        EvaluateConfig(**fields)


def test_a_file_without_a_target_is_refused(model, tmp_path):
    only_ends = write_ids(tmp_path / "ends.u16", [0] * 40)
    sources = open_sources([str(only_ends)], model.config, T, eos_id=0)
    with pytest.raises(BadData, match="none of its 2 windows that were read has a token that counts in the loss"):
        list(evaluate_sources(model, sources, seq_len=T, batch_size=4, document_mask=True))

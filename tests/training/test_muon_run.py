"""Whole runs with Muon: what holds of AdamW's holds of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.model.flops import parameter_counts
from llmtrain.model.memory import hidden_elements, training_memory
from llmtrain.storage.errors import ConfigMismatch
from llmtrain.training import checkpoint, run
from tests.training.conftest import SMALL, config
from tests.training.runs import lines, outcome, stop_in, tensors_of

MUON = {"optimizer": "muon", "muon_lr": 0.02, "skip_spikes": 6}


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("muon") / "run"
    run.train(config(corpus, run_dir, optimizer=MUON), resume=False)
    return run_dir


def test_a_stopped_and_resumed_run_ends_in_the_same_bits(corpus, undisturbed, tmp_path, monkeypatch, capsys):
    stop_in(config(corpus, tmp_path / "run", optimizer=MUON), 5, monkeypatch)
    assert "optimizer   Muon, momentum 0.95, lr up to 2.00e-02, for the " in capsys.readouterr().out
    run.train(config(corpus, tmp_path / "run", optimizer=MUON), resume=True)
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    first, *_, last = lines(undisturbed, "train")
    assert last["lm_loss"] < 0.9 * first["lm_loss"]
    with pytest.raises(ConfigMismatch, match="optimizer is muon in the checkpoints and adamw in"):
        run.train(config(corpus, tmp_path / "run"), resume=True)


def test_the_file_of_the_optimizer_holds_a_momentum_or_two_moments_of_each_tensor(undisturbed):
    saved = load_file(checkpoint.folder_of(undisturbed, 12) / checkpoint.OPTIMIZER)
    assert saved["momentum.layers.1.attention.qkv.weight"].shape == (64, 32)
    assert torch.any(saved["exp_avg.embedding.weight"]) and torch.any(saved["exp_avg_sq.norm.weight"])
    names = load_file(checkpoint.folder_of(undisturbed, 12) / checkpoint.MODEL)
    of_momentum = {name.removeprefix("momentum.") for name in saved if name.startswith("momentum.")}
    of_adamw = {name.removeprefix("exp_avg.") for name in saved if name.startswith("exp_avg.")}
    assert of_momentum.isdisjoint(of_adamw) and of_momentum | of_adamw == names.keys()


def test_a_step_that_is_run_again_changes_no_bit(corpus, undisturbed, tmp_path):
    again = {"deterministic": True, "verify_every": 4}
    run.train(config(corpus, tmp_path / "run", optimizer=MUON, run=again), resume=False)
    assert not [x for x in lines(tmp_path / "run", "event") if x["event"] == "mismatch"]
    assert tensors_of(tmp_path / "run", 12) == tensors_of(undisturbed, 12)


def test_the_plan_counts_one_moment_for_the_matrices_and_what_the_update_takes():
    model = replace(SMALL, vocab_size=96, max_seq_len=32)
    counts, hidden = parameter_counts(model).total, hidden_elements(model)
    muon = training_memory(model, 4, 16, optimizer="muon", verify=True)
    adamw = training_memory(model, 4, 16, verify=True)
    assert adamw.fixed["moments"] - muon.fixed["moments"] == 4 * hidden
    assert muon.fixed["copy to verify"] == 4 * counts + muon.fixed["moments"]
    # The largest stack is that of gate, up and down of both layers: 6 of 32 x 48, as bf16, twice, and two products.
    update = 2 * 6 * 2 * (32 * 48 + 32 * 32)
    assert muon.passing["update"] == update - sum(muon.activations.values())

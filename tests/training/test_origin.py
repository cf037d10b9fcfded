"""Runs that begin with another's weights or as a branch of one, and the average of the weights."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.cli.main import run as llmtrain
from llmtrain.storage.errors import ConfigMismatch, InputMissing, UsageError
from llmtrain.training import checkpoint, run
from llmtrain.training.config import TrainConfig
from tests.training.conftest import config
from tests.training.runs import figures, lines, outcome, stop_in, tensors_of

STABLE = {"schedule": "wsd", "decay_share": 0.0, "warmup_steps": 2}
EMA = {"ema_decay": 0.8}


@pytest.fixture(scope="module")
def stable(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps at the peak, with checkpoints of 4 and 8."""
    run_dir = tmp_path_factory.mktemp("stable") / "run"
    saving = {"checkpoint_every": 4, "keep_every": 4}
    run.train(config(corpus, run_dir, optimizer=EMA, run=saving, **STABLE), resume=False)
    return run_dir


def branch(corpus: Path, run_dir: Path, of: str, *, optimizer: dict | None = None, **schedule) -> TrainConfig:
    optimizer = EMA if optimizer is None else optimizer
    return config(corpus, run_dir, optimizer=optimizer, run={"branch_from": of}, **{**STABLE, **schedule})


def notes(run_dir: Path) -> str:
    return "\n".join(x["text"] for x in lines(run_dir, "event"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_every_optimizer_and_schedule_goes_on_to_the_bit(optimizer, schedule, corpus, tmp_path, monkeypatch):
    def settings(name: str) -> TrainConfig:
        of_optimizer = {"optimizer": optimizer, **EMA}
        falls = {"schedule": schedule, "decay_share": 0.6, "total_steps": 9}
        return config(corpus, tmp_path / name, optimizer=of_optimizer, **falls)

    run.train(settings("whole"), resume=False)
    stop_in(settings("run"), 6, monkeypatch)
    run.train(settings("run"), resume=True)
    assert outcome(tmp_path / "run", 9) == outcome(tmp_path / "whole", 9)
    average = checkpoint.folder_of(tmp_path / "run", 9) / checkpoint.EMA
    assert average.read_bytes() == (checkpoint.folder_of(tmp_path / "whole", 9) / checkpoint.EMA).read_bytes()


def test_a_branch_that_changes_nothing_is_the_run_itself(corpus, stable, tmp_path):
    run.train(branch(corpus, tmp_path / "same", f"{stable}:8"), resume=False)
    assert figures(tmp_path / "same") == figures(stable)[8:]
    assert tensors_of(tmp_path / "same", 12) == tensors_of(stable, 12)
    assert "goes on with its data at step 8" in notes(tmp_path / "same")


def test_a_branch_decays_from_where_it_left_and_can_be_stopped_and_resumed(corpus, stable, tmp_path, monkeypatch):
    decays = branch(corpus, tmp_path / "run", f"{stable}:8", total_steps=11, decay_share=3 / 11, min_lr_ratio=0.0)
    stop_in(decays, 1, monkeypatch)
    run.train(decays, resume=True)
    rates = [lr for _, _, _, lr, _ in figures(tmp_path / "run")]
    assert rates == pytest.approx([1e-2, 1e-2 * (1 - (1 / 3) ** 0.5), 1e-2 * (1 - (2 / 3) ** 0.5)])
    whole = dataclasses.replace(decays, run=dataclasses.replace(decays.run, run_dir=tmp_path / "whole"))
    run.train(whole, resume=True)  # as a supervisor gives it: there is nothing yet
    assert tensors_of(tmp_path / "run", 11) == tensors_of(tmp_path / "whole", 11)


def test_weights_alone_begin_a_run_on_other_data_with_another_optimizer(corpus, stable, tmp_path):
    settings = config(corpus, tmp_path / "run", run={"init_from": stable}, optimizer={"optimizer": "muon"})
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, seq_len=32),
        model=dataclasses.replace(settings.model, max_seq_len=128, rope_theta=5e5),
    )
    run.train(settings, resume=False)
    first, *_ = figures(tmp_path / "run")
    (_, at_first, *_), *_, (_, at_last, *_) = figures(stable)
    assert first[0] == 1 and abs(first[1] - at_last) < 0.5 * abs(first[1] - at_first)
    assert f"weights of {checkpoint.folder_of(stable, 12)}, step 12; all else begins anew" in notes(tmp_path / "run")
    untouched = dataclasses.replace(settings, run=dataclasses.replace(settings.run, run_dir=tmp_path / "still"))
    still = dataclasses.replace(untouched.optimizer, learning_rate=1e-30, muon_lr=0.0, weight_decay=0.0)
    run.train(dataclasses.replace(untouched, optimizer=still), resume=False)
    mine, theirs = (load_file(checkpoint.folder_of(d, 12) / checkpoint.MODEL) for d in (tmp_path / "still", stable))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_branch_to_longer_windows_keeps_the_optimizer_and_begins_the_data_anew(corpus, stable, tmp_path):
    settings = branch(corpus, tmp_path / "run", f"{stable}:8", total_steps=3)
    settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, seq_len=32))
    run.train(settings, resume=False)
    assert [x["step"] for x in lines(tmp_path / "run", "train")] == [1, 2, 3]
    assert "seq_len is 32, was 16, so the data begin anew at step 0" in notes(tmp_path / "run")
    state = json.loads((checkpoint.folder_of(tmp_path / "run", 3) / checkpoint.STATE).read_text())
    assert (state["step"], state["samples"], state["optimizer"]["count"]) == (3, 18, 11)


def test_what_cannot_be_begun_with_is_refused_before_anything_is_written(corpus, stable, tmp_path):
    def refused(error, match, settings):
        with pytest.raises(error, match=match):
            run.train(settings, resume=False)
        assert not (tmp_path / "run").exists()

    folder = tmp_path / "run"
    refused(InputMissing, "no such checkpoint; those of the run are 4, 8, 12", branch(corpus, folder, f"{stable}:7"))
    refused(UsageError, "has 8 steps in all and would begin at 8", branch(corpus, folder, f"{stable}:8", total_steps=8))
    muon = branch(corpus, folder, f"{stable}:8", optimizer={"optimizer": "muon"})
    refused(ConfigMismatch, "has the moments of adamw, this run's optimizer is muon: .* --init-from", muon)
    wider = branch(corpus, folder, f"{stable}:8")
    wider = dataclasses.replace(wider, model=dataclasses.replace(wider.model, d_ff=64))
    refused(ConfigMismatch, "its model has d_ff 48, this run's has 64: give --d-ff 48", wider)
    nowhere = config(corpus, folder, run={"init_from": tmp_path / "nothing"})
    refused(InputMissing, "is neither a checkpoint nor a run that has one", nowhere)
    with pytest.raises(ValueError, match="both say what to begin with"):
        config(corpus, folder, run={"init_from": stable, "branch_from": f"{stable}:8"})
    with pytest.raises(ValueError, match="must be RUN:STEP"):
        config(corpus, folder, run={"branch_from": str(stable)})


def test_the_average_is_that_of_the_weights_after_each_step(corpus, tmp_path):
    def weights(file: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(checkpoint.folder_of(tmp_path / "run", step) / file)

    saving = {"checkpoint_every": 1, "keep_every": 1}
    run.train(config(corpus, tmp_path / "run", optimizer={"ema_decay": 0.25}, run=saving, total_steps=5), resume=False)
    average = weights(checkpoint.EMA, 1)
    for step in range(2, 6):
        decay = min(0.25, (1 + step) / (10 + step))  # 3/12, and then 4/13 and more
        now = weights(checkpoint.MODEL, step)
        average = {name: decay * average[name] + (1 - decay) * now[name] for name in now}
        saved = weights(checkpoint.EMA, step)
        assert all(torch.allclose(average[name], saved[name], rtol=1e-5, atol=1e-8) for name in now)
    assert not any(torch.equal(average[name], now[name]) for name in ("embedding.weight", "norm.weight"))


def test_the_average_can_be_evaluated_and_where_there_is_none_a_line_says_so(corpus, stable, tmp_path, capsys):
    def loss(*more: str) -> float:
        command = ["evaluate", "--run-dir", str(stable), "--tokens", str(corpus), "--device", "cpu", "--json", *more]
        assert llmtrain(command) == 0
        return json.loads(capsys.readouterr().out)["val_loss"]

    capsys.readouterr()
    assert loss() != loss("--weights", "ema")
    run.train(branch(corpus, tmp_path / "run", f"{stable}:8", optimizer={}, total_steps=9), resume=False)
    capsys.readouterr()
    assert llmtrain(["evaluate", "--run-dir", str(tmp_path / "run"), "--tokens", str(corpus), "--weights", "ema"]) == 66
    assert "holds no average of the weights: train with --ema-decay" in capsys.readouterr().err


def test_an_average_that_a_branch_asks_for_begins_at_the_weights_it_branches_off(corpus, tmp_path):
    run.train(config(corpus, tmp_path / "plain", **STABLE, total_steps=4), resume=False)
    run.train(branch(corpus, tmp_path / "run", f"{tmp_path / 'plain'}:4", total_steps=5), resume=False)
    before = load_file(checkpoint.folder_of(tmp_path / "plain", 4) / checkpoint.MODEL)
    after, average = (
        load_file(checkpoint.folder_of(tmp_path / "run", 5) / name) for name in (checkpoint.MODEL, checkpoint.EMA)
    )
    decay = 6 / 15
    for name in before:
        assert torch.allclose(average[name], decay * before[name] + (1 - decay) * after[name], rtol=1e-5, atol=1e-8)

"""Steps that are run again, on a machine that computes right and on one that does not."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.model.flops import parameter_counts
from llmtrain.model.memory import training_memory
from llmtrain.storage.errors import HardwareFault
from llmtrain.training import checkpoint, replay, run
from llmtrain.training.config import RunConfig, TrainConfig
from tests.training.conftest import SMALL, config
from tests.training.runs import events, lines, tensors_of
from tests.training.test_health import spoil

EVERY = 3


def deterministic(corpus: Path, run_dir: Path, every: int, **of_run) -> TrainConfig:
    return config(corpus, run_dir, run={"deterministic": True, "verify_every": every, **of_run})


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run.train(deterministic(corpus, run_dir, 0), resume=False)
    torch.use_deterministic_algorithms(False)
    return run_dir


def flip(
    monkeypatch: pytest.MonkeyPatch, updates: set[int], buffer: str = "master", bits: Iterator[int] | None = None
) -> list[int]:
    """Flips the lowest bit, or the next of `bits`, in one number after each of these updates, counted from 1 with those
    that are run again. The list grows by every update."""
    update = run.start.TrainStep.optimizer_step
    done: list[int] = []

    def flipping(self, lr):
        update(self, lr)
        done.append(1)
        if len(done) in updates:
            owner = self.flat if buffer == "master" else self.optimizer
            getattr(owner, buffer).view(torch.int32)[100] ^= 1 << (next(bits) if bits else 0)

    monkeypatch.setattr(run.start.TrainStep, "optimizer_step", flipping)
    return done


def test_a_step_that_is_run_again_changes_no_bit_of_the_run(corpus, undisturbed, tmp_path, monkeypatch):
    done = flip(monkeypatch, set())
    run.train(deterministic(corpus, tmp_path / "run", EVERY), resume=False)
    assert len(done) == 12 + 4
    assert tensors_of(tmp_path / "run", 12) == tensors_of(undisturbed, 12)
    for one, other in zip(lines(tmp_path / "run", "train"), lines(undisturbed, "train"), strict=True):
        assert [one[name] for name in ("step", "lm_loss", "grad_norm")] == [
            other[name] for name in ("step", "lm_loss", "grad_norm")
        ]
    assert not events(tmp_path / "run", "mismatch")


def test_a_skipped_step_and_a_partial_one_are_run_again_as_they_were(corpus, tmp_path, monkeypatch):
    spoil(monkeypatch, "lm_loss", range(6, 7))
    asked = config(corpus, tmp_path / "run", run={"deterministic": True, "verify_every": 1}, total_steps=None, epochs=1)
    run.train(asked, resume=False)  # 37 windows, 6 a step
    assert not events(tmp_path / "run", "mismatch") and [x["first"] for x in events(tmp_path / "run", "skipped")] == [6]
    assert [x["step"] for x in lines(tmp_path / "run", "train")] == [*range(1, 8)]


# Of the updates 3 and 4 are step 3, and 7 and 8 are step 6, which the third run is of if they differ: 9.
@pytest.mark.parametrize("update", [7, 8])
@pytest.mark.parametrize("buffer", ["master", "exp_avg", "exp_avg_sq"])
def test_one_flipped_bit_is_an_event_and_does_not_reach_the_weights(
    update, buffer, corpus, undisturbed, tmp_path, monkeypatch, capsys
):
    done = flip(monkeypatch, {update}, buffer)
    run.train(deterministic(corpus, tmp_path / "run", EVERY), resume=False)
    (event,) = events(tmp_path / "run", "mismatch")
    kind = "weight" if buffer == "master" else buffer
    assert (event["step"], event["tensors"], len(done)) == (6, [f"{kind} of layers.0.attention.qkv.weight"], 12 + 4 + 1)
    assert "step 6: the step, run again from the same state, gave other bits: 1 of" in capsys.readouterr().out
    assert tensors_of(tmp_path / "run", 12) == tensors_of(undisturbed, 12)


def test_a_machine_that_errs_again_ends_the_run_and_the_checkpoint_from_before_is_kept(corpus, tmp_path, monkeypatch):
    flip(monkeypatch, {8, 12}, bits=iter((30, 30)))  # the second run of steps 6 and 9
    asked = deterministic(corpus, tmp_path / "run", EVERY, checkpoint_every=1, keep_checkpoints=2)
    with pytest.raises(HardwareFault) as failed:
        run.train(asked, resume=False)
    text = str(failed.value)
    assert text.startswith("step 6 and step 9, run again") and "\n" not in text
    assert text.endswith("the checkpoint of step 3 is from before, later ones may be damaged: move them away")
    assert checkpoint.list_steps(tmp_path / "run") == [8, 7, 3]
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (failed.value.exit_code, status["exit_code"], status["step"]) == (71, 71, 9)
    assert [x["step"] for x in events(tmp_path / "run", "mismatch")] == [6, 9]


def test_three_results_of_one_step_end_the_run_at_once(corpus, tmp_path, monkeypatch):
    flip(monkeypatch, {3, 4, 5}, bits=itertools.count())
    with pytest.raises(HardwareFault, match="step 3, run again .*no checkpoint is from before"):
        run.train(deterministic(corpus, tmp_path / "run", EVERY), resume=False)
    assert "agreed with neither" in events(tmp_path / "run", "mismatch")[0]["text"]


def test_a_resumed_run_keeps_the_checkpoint_that_it_went_on_from_until_a_step_is_verified(corpus, tmp_path):
    run.train(deterministic(corpus, tmp_path / "run", 0, checkpoint_every=4), resume=False)
    for step in (12, 8):
        checkpoint.atomic.remove_tree(checkpoint.folder_of(tmp_path / "run", step))
    run.train(deterministic(corpus, tmp_path / "run", 1000, checkpoint_every=1, keep_checkpoints=2), resume=True)
    assert checkpoint.list_steps(tmp_path / "run") == [12, 11, 4]


def test_without_determinism_it_is_refused(corpus, tmp_path):
    command = [sys.executable, "-m", "llmtrain", "train", "--tokens", corpus, "--run-dir", tmp_path / "run"]
    done = subprocess.run([*map(str, command), "--verify-every", "5"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needs --deterministic" in done.stderr
    assert not (tmp_path / "run").exists()
    assert RunConfig(deterministic=True, verify_every=5).verify_every == 5


def test_the_copy_is_in_the_plan(corpus, tmp_path, capsys):
    model = replace(SMALL, vocab_size=96, max_seq_len=32)
    plain, verifying = (training_memory(model, 4, 16, device="cpu", verify=verify) for verify in (False, True))
    assert verifying.peak - plain.peak == 12 * parameter_counts(model).total
    run.train(deterministic(corpus, tmp_path / "run", 12), resume=False)
    assert "copy to verify 0.2" in capsys.readouterr().out


numbers = st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(values=numbers, where=st.integers(0, 10**6), bit=st.integers(0, 31), wide=st.booleans())
def test_a_change_of_any_bit_changes_the_hash(values, where, bit, wide):
    one = torch.tensor(values, dtype=torch.float64 if wide else torch.float32)
    other = one.clone()
    words = other.view(torch.int32)
    words[where % len(words)] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert replay.bit_hash(one) == replay.bit_hash(one.clone()) != replay.bit_hash(other)


def test_the_hash_knows_places_and_no_pieces(monkeypatch):
    values = torch.arange(1000, dtype=torch.float32)
    whole = replay.bit_hash(values)
    assert whole != replay.bit_hash(values.roll(1)) and whole != replay.bit_hash(values.flip(0))
    assert replay.bit_hash(torch.zeros(3)) != replay.bit_hash(torch.tensor([0.0, -0.0, 0.0]))
    monkeypatch.setattr(replay, "PIECE", 7)
    assert replay.bit_hash(values) == whole

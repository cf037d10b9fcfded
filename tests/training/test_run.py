import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.corpus.batches import assemble
from llmtrain.kernels import choice
from llmtrain.model.flops import flops_per_token, rerun_flops_per_token
from llmtrain.storage.errors import BadData, ConfigMismatch, StopRequested, StorageFailure, UsageError
from llmtrain.training import checkpoint, run, validate
from llmtrain.training.config import TrainConfig
from llmtrain.training.run_corpus import open_corpus
from tests.corpus.files import write_sparse
from tests.training.conftest import config, write_corpus
from tests.training.runs import evaluated, figures, lines, outcome, state, stop_at, stop_in, tensors_of


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run.train(config(corpus, run_dir), resume=False)
    return run_dir


def test_a_run_learns_and_leaves_what_the_contract_says(undisturbed: Path):
    trained = lines(undisturbed, "train")
    assert [x["step"] for x in trained] == list(range(1, 13))
    assert trained[-1]["lm_loss"] < 0.9 * trained[0]["lm_loss"]
    named = "lm_loss aux_loss ppl lr grad_norm epoch tok_per_s mfu hfu step_ms data_ms peak_gib host_rss_mib"
    assert set(named.split()) <= set(trained[0])
    assert {p.name for p in checkpoint.folder_of(undisturbed, 12).iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"
    }  # fmt: skip
    status = json.loads((undisturbed / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("finished", 12, 0)


# 37 windows, 6 a step: the first epoch ends within step 7. Warmup ends at 5.
@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(k: int, corpus, undisturbed, tmp_path, monkeypatch):
    stop_in(config(corpus, tmp_path / "run"), k, monkeypatch)
    assert checkpoint.list_steps(tmp_path / "run") == [k]
    run.train(config(corpus, tmp_path / "run"), resume=True)
    assert outcome(tmp_path / "run") == outcome(undisturbed)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_a_run_within_documents_ends_in_the_same_bits_after_a_stop(
    packing, corpus, undisturbed, tmp_path, monkeypatch, capsys
):
    def settings(name: str) -> TrainConfig:
        of_run = config(corpus, tmp_path / name)
        data = replace(of_run.data, document_mask=True, packing=packing, val_tokens=(str(corpus),))
        return replace(of_run, data=data)

    monkeypatch.setattr(run.devices, "device_name", lambda device: "NVIDIA H200")  # one whose peak is known
    run.train(settings("whole"), resume=False)
    out = capsys.readouterr().out
    assert ("windows of whole documents" in out) == (packing == "documents") and "; within documents, " in out
    stop_in(settings("run"), 7, monkeypatch)
    run.train(settings("run"), resume=True)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole") != figures(undisturbed)
    assert tensors_of(tmp_path / "run", 12) == tensors_of(tmp_path / "whole", 12)
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")
    # Attention costs what the documents in the batches of that very line attend to.
    batches = assemble(open_corpus(settings("run"))[1], np.arange(6), document_mask=True)
    flops = flops_per_token(replace(settings("run").model, vocab_size=96), 16, batches.pairs / 96)
    first = lines(tmp_path / "run", "train")[0]
    assert first["tflops"] == pytest.approx(first["tok_per_s"] * flops / 1e12)
    with pytest.raises(ConfigMismatch, match="(packing is documents|document_mask is True) in"):
        run.train(config(corpus, tmp_path / "run"), resume=True)


def test_a_run_with_windows_counts_the_pairs_that_its_layers_see(corpus, tmp_path):
    settings = config(corpus, tmp_path / "run", total_steps=1)
    settings = replace(settings, model=replace(settings.model, window=5, global_every=2))
    run.train(settings, resume=False)
    (line,) = lines(tmp_path / "run", "train")
    flops = flops_per_token(replace(settings.model, vocab_size=96), 16)
    assert line["tflops"] == pytest.approx(line["tok_per_s"] * flops / 1e12)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_routed_run_ends_in_the_same_bits_after_a_stop(corpus, tmp_path, monkeypatch, capsys, mode):
    def settings(name: str) -> TrainConfig:
        of_run = config(corpus, tmp_path / name, run={"precision": "bf16", "checkpoint_activations": mode})
        model = replace(of_run.model, moe=True, n_experts=6)
        return replace(of_run, model=model, data=replace(of_run.data, val_tokens=(str(corpus),)))

    run.train(settings("whole"), resume=False)
    assert "2 layers of 6 experts of 12, of which a token meets 2 and 1 that all share" in capsys.readouterr().out
    stop_in(settings("run"), 5, monkeypatch)
    run.train(settings("run"), resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")
    assert all(line["aux_loss"] > 0 for line in lines(tmp_path / "run", "train"))
    with pytest.raises(ConfigMismatch, match="moe is True"):
        run.train(config(corpus, tmp_path / "run", run={"precision": "bf16"}), resume=True)


@pytest.mark.parametrize("moe", [False, True])
def test_a_run_in_eight_bits_ends_in_the_same_bits_after_a_stop(corpus, tmp_path, monkeypatch, moe):
    monkeypatch.setattr(run.devices, "check_precision", lambda *_, **__: None)  # tests emulate what a CPU has not

    def settings(name: str) -> TrainConfig:
        of_run = config(corpus, tmp_path / name, run={"precision": "fp8", "deterministic": True, "verify_every": 3})
        return replace(of_run, model=replace(of_run.model, moe=moe, d_ff=64))

    run.train(settings("whole"), resume=False)
    stop_in(settings("run"), 5, monkeypatch)
    assert any(map(any, state(tmp_path / "run", checkpoint.list_steps(tmp_path / "run")[0])["optimizer"]["magnitudes"]))
    run.train(settings("run"), resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_eight_bits_are_refused_where_there_are_none(corpus, tmp_path):
    with pytest.raises(UsageError, match="has no 8-bit matmuls: .*H100, H200.*: give --precision bf16"):
        run.train(config(corpus, tmp_path / "run", run={"precision": "fp8"}), resume=False)
    assert not (tmp_path / "run").exists()


def test_resumed_twice_ends_in_the_same_bits(corpus, undisturbed, tmp_path, monkeypatch):
    for k in (2, 5):
        stop_in(config(corpus, tmp_path / "run"), k, monkeypatch, resume=True)
    run.train(config(corpus, tmp_path / "run"), resume=True)
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    assert [x["attempt"] for x in lines(tmp_path / "run", "train")] == [1] * 2 + [2] * 5 + [3] * 5


def test_a_killed_run_loses_only_what_came_after_its_last_checkpoint(corpus, undisturbed, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(self, lr):
        done.append(1)
        if len(done) == 7:  # two steps after that of the checkpoint were run and logged
            raise Killed
        return update(self, lr)

    done: list[int] = []
    update = run.start.TrainStep.optimizer_step
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(run.start.TrainStep, "optimizer_step", die)
        run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=False)
    assert figures(tmp_path / "run")[-1][0] == 6
    run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=True)
    assert outcome(tmp_path / "run") == outcome(undisturbed)


def test_each_window_of_an_epoch_is_seen_once_across_a_resume(corpus, tmp_path, monkeypatch):
    seen: list[int] = []
    fill = run.BatchStream.__next__

    def taken(self):
        batch = fill(self)
        seen.extend(int(row[0]) * 100000 + int(row.sum()) for row in batch.ids[: batch.sequences])
        return batch

    monkeypatch.setattr(run.BatchStream, "__next__", taken)
    stop_in(config(corpus, tmp_path / "run", total_steps=None, epochs=1), 3, monkeypatch)
    run.train(config(corpus, tmp_path / "run", total_steps=None, epochs=1), resume=True)
    assert len(seen) == 37
    assert len(set(seen)) == 37


def test_a_corpus_of_50_billion_tokens_is_planned_and_trained_on(tmp_path, capsys):
    sparse = write_sparse(tmp_path / "sparse.u16", 50_000_000_000)
    began = time.monotonic()
    run.train(config(sparse, tmp_path / "run", total_steps=None, epochs=1e-9, warmup_steps=1), resume=False)
    assert time.monotonic() - began < 20
    assert [x["step"] for x in lines(tmp_path / "run", "train")] == [1]  # 3 of its 3,124,999,999 windows
    assert "50,000,000,000 tokens, 9.6e-10 epochs" in capsys.readouterr().out


def test_another_number_of_batches_ahead_changes_no_bit(corpus, undisturbed, tmp_path, monkeypatch):
    stop_in(config(corpus, tmp_path / "run"), 5, monkeypatch)
    monkeypatch.setattr(run, "BatchStream", functools.partial(run.BatchStream, depth=1))
    run.train(config(corpus, tmp_path / "run"), resume=True)
    assert outcome(tmp_path / "run") == outcome(undisturbed)


def test_another_split_into_micro_batches_gives_the_same_run_up_to_rounding(corpus, undisturbed, tmp_path):
    run.train(config(corpus, tmp_path / "run", run={"batch_size": 2}), resume=False)
    for one, other in zip(figures(tmp_path / "run"), figures(undisturbed), strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-5)


def test_intervals_change_no_loss_by_one_bit(corpus, undisturbed, tmp_path):
    held_out = write_corpus(tmp_path / "val.u16", 200, seed=1)
    changed = config(corpus, tmp_path / "run", run={"checkpoint_every": 3, "val_every": 2})
    changed = replace(changed, data=replace(changed.data, val_tokens=(str(held_out),)))
    run.train(changed, resume=False)
    assert figures(tmp_path / "run") == figures(undisturbed)
    assert [x["step"] for x in lines(tmp_path / "run", "eval")] == [0, 2, 4, 6, 8, 10, 12]
    assert tensors_of(tmp_path / "run", 12) == tensors_of(undisturbed, 12)
    assert checkpoint.list_steps(tmp_path / "run") == [12, 9, 6]


def test_a_long_first_step_says_how_long_before_it_is_done(corpus, tmp_path, monkeypatch, capsys):
    ticks = iter(range(10**6))
    monkeypatch.setattr(run, "LONG_STEP", 0)
    micro_step = run.start.TrainStep.micro_step
    said: list[str] = []

    def watched(self, *args, **named):
        said.append(capsys.readouterr().out)
        micro_step(self, *args, **named)

    monkeypatch.setattr(run.start.TrainStep, "micro_step", watched)
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: 100.0 * next(ticks)))
    run.train(config(corpus, tmp_path / "run", run={"batch_size": 2}), resume=False)
    # 12 steps of 3 micro-batches; each look at the clock is 100 s after the one before.
    paces = ["the first of 3 micro-batches took 100.0 s, so a step about 5m00s, the run 1h00m" in text for text in said]
    assert paces == [False, True] + [False] * 34


def test_the_first_evaluation_says_what_it_reads_and_no_later_one(corpus, tmp_path, capsys):
    held_out = write_corpus(tmp_path / "val.u16", 200, seed=1)
    asked = config(corpus, tmp_path / "run", run={"val_every": 4, "val_windows": 5})
    run.train(replace(asked, data=replace(asked.data, val_tokens=(str(held_out),))), resume=False)
    out = capsys.readouterr().out
    assert out.count("evaluates") == 1 and "step 0: evaluates val on 5 windows of 16 tokens\n" in out


def test_a_finished_run_resumed_is_finished(corpus, undisturbed, tmp_path):
    before = tensors_of(undisturbed, 12)
    run.train(config(corpus, undisturbed), resume=True)
    assert tensors_of(undisturbed, 12) == before
    assert json.loads((undisturbed / "status.json").read_text())["state"] == "finished"


def test_a_run_directory_with_checkpoints_is_refused_without_resume(corpus, undisturbed):
    with pytest.raises(ConfigMismatch, match="--resume"):
        run.train(config(corpus, undisturbed), resume=False)


def test_another_corpus_is_refused_on_resume(undisturbed, tmp_path):
    other = write_corpus(tmp_path / "other.u16", 16 * 37 + 5, seed=7)
    with pytest.raises(ConfigMismatch, match="not the corpus"):
        run.train(config(other, undisturbed), resume=True)


def test_the_same_corpus_elsewhere_is_the_same_corpus(corpus, undisturbed, tmp_path):
    for suffix in ("", ".json", ".docs"):
        (tmp_path / f"moved.u16{suffix}").write_bytes(Path(f"{corpus}{suffix}").read_bytes())
    run.train(config(tmp_path / "moved.u16", undisturbed), resume=True)


def test_blocks_that_run_again_change_no_bit_and_raise_hfu_alone(corpus, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(run.devices, "device_name", lambda device: "NVIDIA H200")  # one whose peak is known
    settings = config(corpus, tmp_path / "run", run={"checkpoint_activations": "full"})
    run.train(settings, resume=False)
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    model = replace(settings.model, vocab_size=96)
    ratio = 1 + rerun_flops_per_token(model, 16, "full") / flops_per_token(model, 16)
    assert all(x["hfu"] == pytest.approx(x["mfu"] * ratio) for x in lines(tmp_path / "run", "train"))


def test_another_attention_goes_on_with_the_run_and_says_so(corpus, tmp_path, monkeypatch):
    def asked(attention: str):
        settings = config(corpus, tmp_path / "run", run={"attention": attention})
        return replace(settings, model=replace(settings.model, head_dim=16))  # one our kernel has

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    stop_in(asked("auto"), 2, monkeypatch)
    assert state(tmp_path / "run", 2)["environment"]["attention"] == "reference"
    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        stop_at(patched, 1)
        with choice.forced(choice.TRITON, "document_attention"):
            run.train(asked("triton"), resume=True)
    assert state(tmp_path / "run", 3)["environment"]["attention"] == "triton"
    notes = [line["text"] for line in lines(tmp_path / "run", "event") if line["event"] == "note"]
    assert any("attention is triton, was reference" in note for note in notes)


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(corpus, undisturbed, tmp_path):
    settings = config(corpus, tmp_path / "run", run={"checkpoint_every": 6})
    run.train(settings, resume=False)
    damaged = checkpoint.folder_of(tmp_path / "run", 12) / checkpoint.OPTIMIZER
    data = bytearray(damaged.read_bytes())
    data[-20] ^= 4
    damaged.write_bytes(data)
    run.train(settings, resume=True)
    assert tensors_of(tmp_path / "run", 12) == tensors_of(undisturbed, 12)
    assert figures(tmp_path / "run") == figures(undisturbed)
    assert (tmp_path / "run/checkpoints/step-00000012.corrupt").is_dir()
    assert any("set aside" in x["text"] for x in lines(tmp_path / "run", "event"))


def test_what_an_attempt_without_a_checkpoint_said_of_step_0_is_not_another_runs(corpus, tmp_path, monkeypatch):
    """Killed before its first checkpoint, then begun anew with another seed."""
    settings = config(corpus, tmp_path / "run", run={"val_every": 6})
    settings = replace(settings, data=replace(settings.data, val_tokens=(f"held={corpus}",)))
    first = replace(settings, run=replace(settings.run, seed=5))
    monkeypatch.setattr(run, "BatchStream", lambda *_, **__: (_ for _ in ()).throw(KeyError("killed here")))
    with pytest.raises(KeyError):
        run.train(first, resume=False)
    monkeypatch.undo()
    (before,) = evaluated(tmp_path / "run")
    run.train(settings, resume=False)
    again = evaluated(tmp_path / "run")
    assert [x[:2] for x in again] == [(0, "held"), (6, "held"), (12, "held")] and again[0] != before


@pytest.mark.parametrize("before", ["running", "finished"])
def test_why_a_killed_run_does_not_go_on_is_in_its_status(before, corpus, tmp_path):
    settings = config(corpus, tmp_path / "run", run={"checkpoint_every": 6})
    run.train(settings, resume=False)
    status = tmp_path / "run/status.json"
    status.write_text(status.read_text().replace("finished", before))  # as kill -9 leaves it
    for step in (6, 12):
        (checkpoint.folder_of(tmp_path / "run", step) / checkpoint.MODEL).write_bytes(b"damaged")
    with pytest.raises(BadData, match="none of the 2"):
        run.train(settings, resume=True)
    found = json.loads(status.read_text())
    assert found["state"] == ("failed" if before == "running" else "finished")
    assert before == "finished" or found["exit_code"] == 65 and "none of the 2" in found["reason"]


def test_an_eval_line_that_lost_its_source_keeps_no_run_from_going_on(corpus, tmp_path):
    settings = config(corpus, tmp_path / "run")
    settings = replace(settings, data=replace(settings.data, val_tokens=(f"held={corpus}",)))
    run.train(settings, resume=False)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 12, "sourcf": "held", "val_loss": 1.0}\n')
    run.train(settings, resume=True)


def test_sigterm_saves_and_exits_75_and_resume_goes_on(corpus, tmp_path):
    arguments = [
        sys.executable, "-m", "llmtrain", "train", "--tokens", corpus, "--run-dir", tmp_path / "run",
        "--d-model", "32", "--n-layers", "2", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
        "--seq-len", "16", "--batch-size", "4", "--total-steps", "100000", "--warmup-steps", "5", "--log-every", "1",
        "--device", "cpu",
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(100, process.kill)
    killer.start()
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if " step 3/" in line:
            process.send_signal(signal.SIGTERM)
            break
    asked = time.monotonic()
    assert "SIGTERM: saves and stops as soon as it can" in process.stdout.read()
    error = process.stderr.read()
    assert process.wait() == 75, error
    killer.cancel()
    assert time.monotonic() - asked < 20
    (stopped,) = checkpoint.list_steps(tmp_path / "run")
    assert stopped >= 3
    assert error.count("\n") == 1 and f"step {stopped}" in error and "--resume" in error
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", stopped, 75)


@pytest.mark.parametrize("at", [0, 2, 4, 6])
def test_a_signal_does_not_wait_for_an_evaluation_whose_lines_are_there_once_in_the_end(
    at, corpus, tmp_path, monkeypatch
):
    def settings(name: str) -> TrainConfig:
        of_run = config(corpus, tmp_path / name, total_steps=6, run={"val_every": 2, "batch_size": 2})
        return replace(of_run, data=replace(of_run.data, val_tokens=(f"a={corpus}", f"b={corpus}")))

    run.train(settings("whole"), resume=False)
    batches = validate.held_out_batches
    seen = [0]

    def interrupted(*arguments):
        for batch in batches(*arguments):
            seen[0] += 1
            if seen[0] == at // 2 * 38 + 25:  # 19 batches a source: in the second of the two
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patched, pytest.raises(StopRequested):
        patched.setattr(validate, "held_out_batches", interrupted)
        run.train(settings("run"), resume=False)
    assert seen[0] <= at // 2 * 38 + 26 and checkpoint.list_steps(tmp_path / "run")[0] == at
    run.train(settings("run"), resume=True)
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole") != []
    run.train(settings("run"), resume=True)  # a finished run has nothing to add
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")


def test_garbage_in_metrics_jsonl_does_not_keep_a_run_from_going_on(corpus, undisturbed, tmp_path, monkeypatch):
    stop_in(config(corpus, tmp_path / "run"), 4, monkeypatch)
    with open(tmp_path / "run/metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "step": null}\n{"attempt": "x"}\n[1]\n\xff\n{"kind": "eval", "step": "9"}\n' * 2)
        file.write(b'{"kind": "train", "step": 3')
    run.train(config(corpus, tmp_path / "run"), resume=True)
    assert figures(tmp_path / "run") == figures(undisturbed)
    assert {line["attempt"] for line in lines(tmp_path / "run", "train")} == {1, 2}


def test_a_console_that_is_gone_does_not_end_a_run(corpus, undisturbed, tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as gone:
        monkeypatch.setattr("sys.stdout", gone)
        run.train(config(corpus, tmp_path / "run"), resume=False)
    assert tensors_of(tmp_path / "run", 12) == tensors_of(undisturbed, 12)
    assert [line["event"] for line in lines(tmp_path / "run", "event")].count("console") == 1


def test_what_a_killed_save_left_is_cleared_at_the_next_start(corpus, tmp_path):
    folder = tmp_path / "run/checkpoints"
    (folder / "step-00000003.partial").mkdir(parents=True)
    (folder / "step-00000003.partial/model.safetensors").write_bytes(b"half")
    (folder / ".step-00000001.77.trash").mkdir()
    (folder / "notes.partial").write_text("a person's own")
    run.train(config(corpus, tmp_path / "run", total_steps=1), resume=True)
    assert sorted(p.name for p in folder.iterdir()) == ["notes.partial", "step-00000001"]


def test_a_run_whose_disk_has_no_room_for_a_checkpoint_ends_before_its_first_step(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("llmtrain.storage.disk.free_bytes", lambda folder: 1 << 20)
    with pytest.raises(StorageFailure, match="a checkpoint takes"):
        run.train(config(corpus, tmp_path / "run"), resume=True)
    assert lines(tmp_path / "run", "train") == []


def test_a_finished_run_needs_no_room(corpus, undisturbed, monkeypatch):
    monkeypatch.setattr("llmtrain.storage.disk.free_bytes", lambda folder: 0)
    run.train(config(corpus, undisturbed), resume=True)

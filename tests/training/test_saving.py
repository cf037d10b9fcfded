"""Saves beside the training: what they hold, what they wait for, and what their failure does."""

import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtrain.storage import atomic
from llmtrain.storage.errors import LlmtrainError, StopRequested, StorageFailure
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint, run, saving
from tests.training.conftest import config
from tests.training.runs import events, tensors_of
from tests.training.test_checkpoint import save as save_random


def at_update(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Calls `before` with the number of each update, from 1 on, before it is made."""
    update = run.start.TrainStep.optimizer_step
    done = [0]

    def counted(self, lr):
        done[0] += 1
        before(done[0])
        update(self, lr)

    monkeypatch.setattr(run.start.TrainStep, "optimizer_step", counted)


def failing(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The saves of these steps meet a full disk."""
    save = checkpoint.save

    def full(run_dir, step, *rest):
        if step in steps:
            raise atomic.write_error(OSError(errno.ENOSPC, "full"), run_dir / "x")
        return save(run_dir, step, *rest)

    monkeypatch.setattr(saving.checkpoint, "save", full)


@pytest.fixture(scope="module")
def every_step(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all of its checkpoints."""
    run_dir = tmp_path_factory.mktemp("saves") / "run"
    run.train(config(corpus, run_dir, run={"checkpoint_every": 1, "keep_checkpoints": 99}), resume=False)
    assert checkpoint.list_steps(run_dir) == list(range(12, 0, -1))
    return run_dir


def test_training_goes_on_while_a_save_is_written_and_the_save_is_of_its_own_step(
    corpus, every_step, tmp_path, monkeypatch
):
    write, gone_on = checkpoint.pieces.tensors.write, threading.Event()

    def slow(*arguments):
        assert gone_on.wait(60)
        return write(*arguments)

    def before(number: int) -> None:
        if number == 8:
            assert checkpoint.list_steps(tmp_path / "run") == []  # 5 to 7 are done, the save of 4 is not
            gone_on.set()

    monkeypatch.setattr(checkpoint.pieces.tensors, "write", slow)
    at_update(monkeypatch, before)
    run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=False)
    for step in (4, 8, 12):
        assert tensors_of(tmp_path / "run", step) == tensors_of(every_step, step)
        name = checkpoint.folder_of(Path(), step) / checkpoint.STATE
        counts = [json.loads((d / name).read_text())["optimizer"] for d in (tmp_path / "run", every_step)]
        assert counts[0] == counts[1] and counts[0]["count"] == step


def test_a_save_waits_for_the_one_before_and_says_so(corpus, tmp_path, monkeypatch):
    write, at_work = checkpoint.save, threading.Lock()
    begin, asked_again, begun = saving.Saver.save, threading.Event(), []

    def noted(saver):
        begun.append(saver)
        if len(begun) == 2:
            asked_again.set()
        begin(saver)

    def slow(*arguments):
        assert at_work.acquire(blocking=False)
        assert asked_again.wait(60)  # the step between may take its time
        time.sleep(0.3)
        folder = write(*arguments)
        at_work.release()
        return folder

    monkeypatch.setattr(saving.Saver, "save", noted)
    monkeypatch.setattr(saving.checkpoint, "save", slow)
    run.train(config(corpus, tmp_path / "run", total_steps=3, run={"checkpoint_every": 1}), resume=False)
    saved = events(tmp_path / "run", "checkpoint")
    assert [x["step"] for x in saved] == [1, 2, 3]
    assert saved[1]["delay_ms"] > 250
    assert all(x["delay_ms"] == x["host_ms"] and x["device_ms"] is None and x["seconds"] >= 0.3 for x in saved)
    assert f"training waited {saved[1]['delay_ms']:.1f} ms" in saved[1]["text"]


def test_the_lines_of_a_step_are_on_the_disk_before_its_checkpoint_is_published(corpus, tmp_path, monkeypatch):
    synced: list[int] = []
    sync, publish = JsonLines.sync, atomic.publish_folder

    def noted(self):
        sync(self)
        synced.append(max((x["step"] for x in JsonLines.read(self.path) if x["kind"] == "train"), default=0))

    def checked(work, final):
        assert synced[-1] >= int(final.name[5:])
        publish(work, final)

    monkeypatch.setattr(JsonLines, "sync", noted)
    monkeypatch.setattr(atomic, "publish_folder", checked)
    run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=False)
    assert checkpoint.list_steps(tmp_path / "run") == [12, 8, 4]


def test_a_save_that_fails_is_an_event_and_the_next_interval_tries_again(corpus, every_step, tmp_path, monkeypatch):
    failing(monkeypatch, {4, 6, 10})
    settings = {"checkpoint_every": 2, "max_save_failures": 3}
    run.train(config(corpus, tmp_path / "run", run=settings), resume=False)
    failed = events(tmp_path / "run", "save_failed")
    assert [x["step"] for x in failed] == [4, 6, 10]  # two in a row, and one
    assert "failure 2 of the 3 in a row that end the run (the newest is of step 2)" in failed[1]["text"]
    assert failed[1]["text"].endswith("the disk is full: free space")
    assert checkpoint.list_steps(tmp_path / "run") == [12, 8, 2]
    assert tensors_of(tmp_path / "run", 12) == tensors_of(every_step, 12)


def test_too_many_failures_in_a_row_end_the_run_with_74(corpus, tmp_path, monkeypatch):
    failing(monkeypatch, {4, 6, 8, 10})
    settings = {"checkpoint_every": 2, "max_save_failures": 3}
    with pytest.raises(StorageFailure) as failed:
        run.train(config(corpus, tmp_path / "run", total_steps=100, run=settings), resume=False)
    assert failed.value.exit_code == 74
    at = json.loads((tmp_path / "run/status.json").read_text())["step"]
    text = f"3 saves in a row failed; steps 3 to {at} are lost: --resume goes on from step 2"
    assert text in str(failed.value) and at <= 10
    assert checkpoint.list_steps(tmp_path / "run") == [2]


def test_the_last_save_is_tried_twice_and_its_failure_is_74(corpus, tmp_path, monkeypatch):
    failing(monkeypatch, {12})
    with pytest.raises(StorageFailure, match="^all 12 steps are done, but .*; steps 9 to 12 are lost: --resume"):
        run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=False)
    assert [x["step"] for x in events(tmp_path / "run", "save_failed")] == [12, 12]
    monkeypatch.undo()
    run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=True)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


def test_a_save_that_a_signal_asked_for_and_that_fails_says_what_is_lost(corpus, tmp_path, monkeypatch):
    failing(monkeypatch, {7})
    at_update(monkeypatch, lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 7 else None)
    with pytest.raises(StorageFailure) as failed:
        run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 5}), resume=False)
    assert failed.value.exit_code == 74
    text = str(failed.value)
    assert text.startswith("stopped by SIGTERM at step 7 of 12, but it cannot be saved: ")
    assert text.endswith("steps 6 to 7 are lost: --resume goes on from step 5")


def test_a_run_that_is_stopped_or_fails_waits_for_the_save_under_way(corpus, tmp_path, monkeypatch):
    write = checkpoint.pieces.tensors.write

    def slow(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    def stop(number: int) -> None:
        if number == 5:
            raise StopRequested("as an error would")

    monkeypatch.setattr(checkpoint.pieces.tensors, "write", slow)
    at_update(monkeypatch, stop)
    with pytest.raises(StopRequested):
        run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 4}), resume=False)
    assert checkpoint.list_steps(tmp_path / "run") == [4]
    assert [x["step"] for x in events(tmp_path / "run", "checkpoint")] == [4]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_note_and_no_failure(corpus, tmp_path, monkeypatch):
    remove = atomic.remove_tree

    def stuck(path):
        if path.name == "step-00000002" and path.exists():
            raise atomic.write_error(OSError(errno.EPERM, "no"), path, "removed")
        remove(path)

    monkeypatch.setattr(atomic, "remove_tree", stuck)
    run.train(config(corpus, tmp_path / "run", run={"checkpoint_every": 2, "keep_checkpoints": 2}), resume=False)
    assert events(tmp_path / "run", "save_failed") == []
    assert any("step-00000002: cannot be removed" in x["text"] for x in events(tmp_path / "run", "note"))
    assert 2 in checkpoint.list_steps(tmp_path / "run")


@contextmanager
def failing_call(n: int, code: int):
    """The n-th call that changes the disk fails, and on a disk that has become read-only every later one. Yields a
    list that holds how many calls there were."""
    calls, lock = [0], threading.Lock()
    names = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "listdir", "scandir", "open")

    def fails() -> bool:
        with lock:
            calls[0] += 1
            return calls[0] == n or (code == errno.EROFS and calls[0] > n)

    def counted(call):
        def made(*arguments, **options):
            if fails():
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return made

    def write(self, data):
        if fails():
            raise atomic.write_error(OSError(code, os.strerror(code)), self.final)
        return io.FileIO.write(self, data)

    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(os, name, counted(getattr(os, name)))
        patched.setattr(atomic._Raw, "write", write)
        yield calls


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_whatever_call_of_a_save_fails_the_old_ones_stay_and_the_next_save_goes_through(code, tmp_path):
    save_random(tmp_path, 1, 1)
    before = tensors_of(tmp_path, 1)
    for n in range(1, 200):
        with failing_call(n, code) as calls:
            try:
                save_random(tmp_path, 2, 2)
            except LlmtrainError as error:
                assert error.exit_code in (73, 74)
        if calls[0] < n:
            break
        assert tensors_of(tmp_path, 1) == before
        if checkpoint.list_steps(tmp_path) == [2, 1]:  # what failed came after the rename: it is whole
            list(checkpoint.verify(checkpoint.folder_of(tmp_path, 2)))
        save_random(tmp_path, 3, 3)
        left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
        assert left - {"step-00000002"} == {"step-00000001", "step-00000003"}, (n, left)
        for step in (2, 3):
            atomic.remove_tree(checkpoint.folder_of(tmp_path, step))
    else:
        raise AssertionError("a save makes fewer calls than that")
    assert n > 10

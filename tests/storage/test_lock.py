import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from llmtrain.storage.errors import CannotCreate, ConfigMismatch
from llmtrain.storage.lock import RunLock, dead_holder
from tests.storage.processes import in_child, python, small_disk

HOLDER = """
import sys, time
from llmtrain.storage.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_told_who_is_at_work(tmp_path: Path):
    path = tmp_path / "lock"
    with python(HOLDER, path) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigMismatch) as caught:
            with RunLock(path):
                raise AssertionError("two processes in one run directory")
        holder.kill()
    line = str(caught.value)
    assert f"{path}: in use by process {holder.pid} on {socket.gethostname()} since 2" in line and "\n" not in line
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_process_is_no_obstacle(tmp_path: Path, number: signal.Signals):
    path = tmp_path / "lock"
    with python(HOLDER, path) as holder:
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(number)
    assert json.loads(path.read_text())["pid"] == holder.pid  # it had no time to tidy up
    assert dead_holder(path) == holder.pid
    with RunLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert dead_holder(path) is None
    assert dead_holder(path) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"pid": "x", "host": "HOST"}', '{"pid": 1e400, "host": "HOST"}',
             '{"pid": 4194304, "host": "another machine"}', '{"pid": 1' + "0" * 30 + ', "host": "HOST"}'],
)  # fmt: skip
def test_a_lock_file_that_names_nobody_of_this_machine_names_no_dead_one(text, tmp_path):
    (tmp_path / "lock").write_text(text.replace("HOST", socket.gethostname()))
    assert dead_holder(tmp_path / "lock") is None
    assert dead_holder(tmp_path / "missing") is None


FORKING_HOLDER = """
import os, sys, time
from llmtrain.storage.lock import RunLock
with RunLock(sys.argv[1]):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


def test_the_children_of_a_dead_process_do_not_keep_its_lock(tmp_path: Path):
    path = tmp_path / "lock"
    with python(FORKING_HOLDER, path) as holder:
        child = int(holder.stdout.readline())
        holder.kill()
        holder.wait()
        try:
            os.kill(child, 0)  # it lives
            time.sleep(0.1)
            with RunLock(path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_does_not_take_the_lock_with_it(tmp_path: Path):
    lock = RunLock(tmp_path / "lock")
    with lock:
        assert in_child(lambda: lock.__exit__(None, None, None)) == 0
        with pytest.raises(ConfigMismatch, match=f"process {os.getpid()}"):
            RunLock(tmp_path / "lock").__enter__()


def test_the_lock_ends_with_its_block_however_that_ends(tmp_path: Path):
    path = tmp_path / "lock"
    for _ in range(3):
        with pytest.raises(RuntimeError):
            with RunLock(path):
                holder = json.loads(path.read_text())
                assert set(holder) == {"pid", "host", "time"}
                raise RuntimeError
    assert path.read_text() == ""


def test_a_holder_that_has_not_yet_said_who_it_is_still_holds(tmp_path: Path):
    path = tmp_path / "lock"
    with RunLock(path):
        for text in ("", '{"pid": 3', "[]"):
            path.write_text(text)
            with pytest.raises(ConfigMismatch, match="in use by another process"):
                RunLock(path).__enter__()


def test_a_place_for_no_lock_is_named(tmp_path: Path):
    with pytest.raises(CannotCreate, match="missing/lock: cannot be created: its folder does not exist"):
        RunLock(tmp_path / "missing" / "lock").__enter__()


def test_a_full_disk_with_a_lock_from_before_can_still_be_locked_or_says_why(tmp_path: Path):
    with small_disk(tmp_path / "disk") as disk:
        with RunLock(disk / "lock"):
            pass
        with pytest.raises(OSError):
            (disk / "filler").write_bytes(bytes(2 << 20))
        try:
            with RunLock(disk / "lock"):
                pass
        except Exception as error:
            assert getattr(error, "exit_code", None) == 74


def test_a_file_that_was_removed_between_opening_and_locking_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    path, opened = tmp_path / "lock", []

    def slow_open(*arguments):
        opened.append(os_open(*arguments))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    os_open = os.open
    monkeypatch.setattr(os, "open", slow_open)
    with RunLock(path):
        assert len(opened) == 2 and path.exists()
        with pytest.raises(ConfigMismatch, match=str(os.getpid())), RunLock(path):
            pass

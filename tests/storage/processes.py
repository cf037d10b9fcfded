"""Real processes to kill, and small disks to fill."""

import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import llmtrain.storage

STORAGE = os.path.dirname(os.path.abspath(llmtrain.storage.__file__))
ROOT = Path(STORAGE).parent.parent
HANGS = 300
"""Seconds after which a forked process tells its stack and ends."""


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process and gives its exit status: 0, 1 after an exception, -9 when killed, -14 after
    a hang."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Not dump_traceback_later: pytest's own is armed, and its thread, which that waits for, was not forked.
            faulthandler.register(signal.SIGALRM, file=2, chain=True)
            signal.alarm(HANGS)
            # What earlier tests left is not taken down here: a destructor may wait for a thread that was not forked.
            gc.freeze()
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_each_line(work: Callable[[], object], every: int = 1) -> Iterator[int]:
    """Runs `work` in one process after another, each killed (SIGKILL) before a line of storage code, `every` lines
    further on; yields the line's number after each death, and ends after the process that came through."""
    for n in range(1, 1000, every):
        status = in_child(lambda n=n: _run_until_line(n, work))
        if status == 0:
            assert n > 1, "no line of storage was run"
            return
        assert status == -signal.SIGKILL
        yield n
    raise AssertionError("the work grows with what the killed ones leave")


def _run_until_line(n: int, work: Callable[[], object]) -> None:
    left = n

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.startswith(STORAGE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """A process that runs `code`; its stdout is a pipe of text. It is killed at the end of the block, however that is
    left: who waits for one that writes for ever waits for ever."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Path]:
    """A file system in memory that is full after `size`; skips the test where this process may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def killed_while_it_writes(writer: str, path: Path, look: Callable[[], int], dice: random.Random) -> None:
    """Runs a program that writes version after version to `path`. `look` gives the version that is there; a moment
    after it has met three of them the program is killed."""
    seen: set[int] = set()
    with python(writer, path) as process:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if path.exists():
                version = look()
                if len(seen) == 2 and version not in seen:
                    end = time.monotonic() + dice.random() * 0.2
                seen.add(version)
        process.kill()
    assert len(seen) > 2, "the program did not get to write"

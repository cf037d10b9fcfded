"""Trials: SIGKILL at random moments of a run, and at every call of a save."""

import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from llmtrain.training import checkpoint
from tests.faults.forks import Process
from tests.faults.runs import AT_CALL, SAVE, Runs, Tally


def phase(run_dir: Path) -> str:
    """What a run was doing when it died, as its folder tells."""
    if not (run_dir / "metrics.jsonl").exists():
        return "starting"
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    if any(name.endswith(".partial") for name in names):
        return "writing a checkpoint"
    if any(name.endswith(".trash") for name in names):
        return "removing an old one"
    return "before the first checkpoint" if not names else "between saves"


def at_moments(runs: Runs, kills: int, seed: int) -> Tally:
    """Kills at random moments, each in a run of its own, which is resumed to its end."""
    chance, tally = random.Random(seed), Tally()
    while tally.tried < kills:
        run_dir = runs.folder / "moment"
        shutil.rmtree(run_dir, ignore_errors=True)
        process = runs.start("moment")
        time.sleep(chance.uniform(0, runs.seconds))
        process.kill()
        if process.end() != -signal.SIGKILL:
            continue  # it was through
        met = phase(run_dir)
        tally.add(runs.goes_on("moment"), met)
    return tally


def at_calls(runs: Runs, numbers: Iterable[int]) -> Tally:
    """Kills before the calls of these numbers of the save of step SAVE, as Python makes them; ends with the save's
    last."""
    tally = Tally()
    for n in numbers:
        run_dir = runs.copy("call")
        process = runs.start("call", before=AT_CALL, AT_CALL=n)
        if (code := process.end()) == 0:
            break
        assert code == -signal.SIGKILL, process.err
        found = checkpoint.list_steps(run_dir)
        met = "after the new one had its name" if SAVE in found else "before it"
        tally.add(runs.goes_on("call"), met)
    return tally


# In `enter` a thread says its number and waits for a tracer; `leave` says that its part is done, and waits until the
# tracer has let go. The calls that are meant stand between two of getppid.
TRACED = f"""
import os, threading, time
from llmtrain.storage import tensors
from llmtrain.training import saving

def say(text):
    os.write(1, f"{{text}} {{threading.get_native_id()}}\\n".encode())

def traced():
    try:
        with open(f"/proc/self/task/{{threading.get_native_id()}}/status") as file:
            return "TracerPid:\\t0\\n" not in file.read()
    except OSError:
        return None  # the error that is tried fell on this

def enter():
    say("HERE")
    while traced() is not True:
        time.sleep(0.001)
    os.getppid()

def leave():
    os.getppid()
    for _ in range(2):
        try:
            say("DONE")
            break
        except OSError:
            pass
    while traced() is not False:
        time.sleep(0.001)

saves, write, write_tensors = [0], saving.Saver._write, tensors.write

def watched(self, step, state):
    saves[0] = step
    if step != {SAVE} or os.environ["THREAD"] != "save":
        return write(self, step, state)
    enter()
    try:
        return write(self, step, state)
    finally:
        leave()

def watched_tensors(target, *arguments):
    if saves[0] != {SAVE} or os.environ["THREAD"] != getattr(target, "name", ""):
        return write_tensors(target, *arguments)
    enter()
    try:
        return write_tensors(target, *arguments)
    finally:
        leave()

saving.Saver._write, tensors.write = watched, watched_tensors
"""
THREADS = ("save", checkpoint.MODEL, checkpoint.OPTIMIZER)
"""Those that make a checkpoint; the others only hash."""
CHANGES = (
    "write", "pwrite64", "fsync", "fdatasync", "openat", "mkdir", "rename", "unlink", "unlinkat", "rmdir", "ftruncate",
    "fadvise64",
)  # fmt: skip
"""System calls that change a disk, or open what does."""


def why_no_strace() -> str:
    """Why system calls cannot be traced here; empty where they can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    probe = subprocess.run(["strace", "-o", "/dev/null", "-e", "inject=getppid:error=EIO", "true"], capture_output=True)
    return "strace may not trace here" if probe.returncode else ""


def traced(runs: Runs, thread: str, inject: str) -> tuple[int, str, Process]:
    """Goes on with a copy of the template while strace is at a thread of its save, with `inject` (empty: nothing): the
    exit code, what strace saw, and the process."""
    runs.copy("traced")
    process = runs.start("traced", before=TRACED, THREAD=thread)
    process.says("HERE ")
    tid = re.search(r"HERE (\d+)", process.out)[1]
    log = runs.folder / "strace"
    command = ["strace", "-qq", "-o", log, "-p", tid, *(["-e", f"inject={inject}"] if inject else [])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tracer:
        while process.alive() and "DONE" not in process.out:
            time.sleep(0.002)
        tracer.terminate()
        tracer.communicate()
    return process.end(), log.read_text(), process


def system_calls(runs: Runs, thread: str) -> list[tuple[str, int]]:
    """Those that a thread makes in the save of step SAVE: kind and number among its kind, as strace counts."""
    code, log, process = traced(runs, thread, "")
    assert code == 0, process.err
    seen: Counter[str] = Counter()
    calls, inside = [], False
    for line in log.splitlines():
        kind = line.partition("(")[0]
        seen[kind] += 1
        if kind == "getppid":
            inside = not inside
        elif inside and kind.isidentifier():
            calls.append((kind, seen[kind]))
    return calls


def at_system_calls(runs: Runs, step: int = 1) -> Tally:
    """Kills at every system call of the threads that write a checkpoint (every `step`-th), by strace."""
    tally = Tally()
    for thread in THREADS:
        for kind, n in system_calls(runs, thread)[step - 1 :: step]:
            code, log, process = traced(runs, thread, f"{kind}:signal=SIGKILL:when={n}")
            # How often threads wait for each other differs, so the call may come earlier or not at all.
            if code == -signal.SIGKILL and log.count("getppid()") == 1:
                tally.add(runs.goes_on("traced"), f"thread {thread}")
            else:
                assert code in (0, -signal.SIGKILL), process.err
    return tally


def failing_system_calls(runs: Runs, error: str, step: int = 1) -> Tally:
    """Lets every system call of a save that changes the disk (every `step`-th) fail once. The run must go on: its next
    saves hold, and it ends with the bits of one that nobody disturbed."""
    tally = Tally()
    for thread in THREADS:
        calls = [(kind, n) for kind, n in system_calls(runs, thread) if kind in CHANGES]
        for kind, n in calls[step - 1 :: step]:
            code, log, process = traced(runs, thread, f"{kind}:error={error}:when={n}")
            if log.partition("(INJECTED)")[0].count("getppid()") == 1:
                failed = "not saved" in process.out
                tally.add(runs.wrong(runs.folder / "traced", code, process), "save failed" if failed else "save held")
    return tally

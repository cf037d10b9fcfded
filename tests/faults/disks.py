"""Trials: disks that are full or read-only at a call of a save, and power that goes at one."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.storage.errors import LlmtrainError
from llmtrain.training import checkpoint
from tests.faults.runs import AT_CALL, EVERY, SAVE, Runs, Tally
from tests.storage.processes import small_disk

# Before the call the disk is filled to the last byte; when that save has ended it has room again.
FILL = """
def act(call):
    with open(os.environ["FILLER"], "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(b"x")
        except OSError:
            pass

wait = saving.Saver.wait
def waited(self):
    wait(self)
    if calls[0] >= at and os.path.exists(os.environ["FILLER"]):
        os.unlink(os.environ["FILLER"])

saving.Saver.wait = waited
"""

# Before the call the disk becomes read-only, where the kernel allows it: not while a file there is open for writing.
READ_ONLY = """
import subprocess

def remount(how):
    return subprocess.run(["mount", "-o", f"remount,{how}", os.environ["DISK"]], capture_output=True).returncode == 0

is_read_only = [False]

def act(call):
    is_read_only[0] = remount("ro")
    os.write(1, b"READ-ONLY\\n" if is_read_only[0] else b"REFUSED\\n")

wait = saving.Saver.wait
def waited(self):
    wait(self)
    if is_read_only[0]:
        is_read_only[0] = not remount("rw")

saving.Saver.wait = waited
"""


def full_at_calls(runs: Runs, numbers: Iterable[int]) -> Tally:
    """Fills the disk before the calls of these numbers of a save. The run goes on, and its next save holds."""
    tally = Tally()
    template = runs.template()
    with small_disk(runs.folder / "full", "4m") as disk:
        for n in numbers:
            run_dir = disk / "run"
            shutil.rmtree(run_dir, ignore_errors=True)
            shutil.copytree(template, run_dir)
            process = runs.start("full", run_dir=run_dir, before=AT_CALL + FILL, AT_CALL=n, FILLER=disk / "filler")
            code = process.end()
            if (disk / "filler").exists():
                (disk / "filler").unlink()
            elif code == 0 and "not saved" not in process.out and n > last_call(runs):
                break
            tally.add(runs.wrong(run_dir, code, process), "save failed" if "not saved" in process.out else "save held")
    return tally


def read_only_at_calls(runs: Runs, numbers: Iterable[int]) -> Tally:
    """Remounts the disk read-only before the calls of these numbers of a save. The run goes on, and its next save
    holds. Where the kernel refuses, because a file is open for writing, there is no trial."""
    tally = Tally()
    run_dir = runs.folder / "read-only"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    template = runs.template()
    # A mount of its own: metrics.jsonl, which is open for writing, would keep the disk from being remounted.
    with small_disk(run_dir / "checkpoints", "4m") as disk:
        for n in numbers:
            if n > last_call(runs):
                break
            for path in [*disk.iterdir(), *(path for path in run_dir.iterdir() if path != disk)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            shutil.copytree(template, run_dir, dirs_exist_ok=True)
            process = runs.start("read-only", before=AT_CALL + READ_ONLY, AT_CALL=n, DISK=disk)
            code = process.end()
            if "READ-ONLY" in process.out:
                failed = "not saved" in process.out
                tally.add(runs.wrong(run_dir, code, process), "save failed" if failed else "save held")
    return tally


def last_call(runs: Runs) -> int:
    """How many calls the save of step SAVE makes."""
    if not hasattr(runs, "last_call"):
        runs.copy("counted")
        code = "import atexit\n" + AT_CALL + "wait = saving.Saver.wait\ndef waited(self):\n    wait(self)\n"
        code += "    os.write(1, f'CALLS {calls[0]}\\n'.encode())\nsaving.Saver.wait = waited\n"
        process = runs.start("counted", before=code, AT_CALL=10**9)
        assert process.end() == 0, process.err
        runs.last_call = max(int(line.split()[1]) for line in process.out.splitlines() if line.startswith("CALLS "))
    return runs.last_call


# At the call the disk's image is copied, and the process dies: the copy holds what a disk has after a power cut.
CUT = """
import shutil

def act(call):
    shutil.copyfile(os.environ["IMAGE"], os.environ["IMAGE"] + ".after")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def why_no_images() -> str:
    """Why no disk image can be mounted here; empty where one can."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return "needs root and mkfs.ext4"
    return ""


def why_no_mounts() -> str:
    """Why no file system can be mounted here; empty where one can."""
    return "" if os.geteuid() == 0 else "mounting a small file system needs root"


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """Raises CalledProcessError where this machine mounts no image."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def power_lost_at_calls(runs: Runs, numbers: Iterable[int], before: str = "") -> Tally:
    """Cuts the power at the calls of these numbers of the third save of a run from its start. What was saved before
    must be there, every checkpoint under its final name must be whole, and the run goes on to the same bits. `before`
    is Python that makes a run careless: the method must see that."""
    tally = Tally()
    image, after = runs.folder / "disk.img", runs.folder / "disk.img.after"
    for n in numbers:
        if n > last_call(runs):
            break
        after.unlink(missing_ok=True)
        with open(image, "wb") as file:
            file.truncate(24 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        with mounted(image, runs.folder / "disk") as disk:
            process = runs.start("power", run_dir=disk / "run", before=AT_CALL + CUT + before, AT_CALL=n, IMAGE=image)
            code = process.end()
            published = SAVE in checkpoint.list_steps(disk / "run")
        if code == 0:
            break
        assert code == -signal.SIGKILL, process.err
        with mounted(after, runs.folder / "after") as disk:
            met = "after the new one had its name" if published else "before it"
            tally.add(after_power_loss(runs, disk / "run"), met)
        image.unlink()
    return tally


def after_power_loss(runs: Runs, run_dir: Path) -> str | None:
    """What is wrong with a run after a power cut in its third save."""
    steps = checkpoint.list_steps(run_dir)
    if SAVE - EVERY not in steps:
        return f"the checkpoint of step {SAVE - EVERY} is gone: {steps}"
    for step in steps:
        try:
            for _ in checkpoint.verify(checkpoint.folder_of(run_dir, step)):
                pass
        except LlmtrainError as error:
            return str(error)
    return runs.goes_on("after", run_dir)

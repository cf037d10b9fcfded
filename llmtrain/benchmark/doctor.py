"""Whether this machine can train: what is right, what is worth a word, what would stop a run, and what to do about it.

Things are tried, not only read: a file is synced, a C program compiled, a step of a small model trained. What touches
torch, a driver or a kernel does so in a process of its own (`benchmark/doctor_trials.py`), so that a crash or a hang in
there is a finding too.
"""

import ctypes
import getpass
import glob
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from llmtrain import __version__
from llmtrain.storage import errors
from llmtrain.storage.atomic import atomic_file, fsync_folder
from llmtrain.storage.disk import existing_folder, free_bytes
from llmtrain.storage.lock import RunLock
from llmtrain.storage.processes import python_module
from llmtrain.storage.units import in_bytes

OK, NOTE, WRONG = "ok", "note", "wrong"
TRIALS_TAKE = 300.0
"""Seconds after which the trials of torch, driver and kernels count as hung: compiling for a card may take a minute."""
SLOW_SYNC = 0.1
"""Seconds of a small fsync beyond which a disk is worth a word."""
CHECKPOINT_102M, CHECKPOINT_31M = 12 * 102e6, 12 * 31e6
"""Bytes of a checkpoint of configs/102m.toml and configs/31m.toml: weights and two moments in FP32."""
PROBE_BYTES = 64 << 20
"""What is written to measure the disk."""
OPEN_FILES = 1024
"""ulimit -n from which on a corpus in many files is no trouble."""
PASSING = {"tmpfs": "a reboot empties it", "ramfs": "a reboot empties it", "overlay": "it goes with the container"}
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "virtiofs"}
TIME_ERROR = 5
"""What adjtimex(2) returns where nothing keeps the clock right."""


@dataclass(frozen=True)
class DoctorConfig:
    run_dir: Path = Path("runs/default")
    """Where a run would be, for the checks of the disk."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it would train; cpu: what is amiss with a card is no matter."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: str
    """OK, NOTE (a run works, something is worth doing) or WRONG (a run would stop, or be another than was meant)."""
    text: str
    """What is so."""
    advice: str = ""
    """What to do."""
    exit_code: int = 0
    """With WRONG: which one a run would end with."""


def ok(name: str, text: str) -> Finding:
    return Finding(name, OK, text)


def note(name: str, text: str, advice: str) -> Finding:
    return Finding(name, NOTE, text, advice)


def wrong(name: str, text: str, advice: str, exit_code: int = errors.UsageError.exit_code) -> Finding:
    return Finding(name, WRONG, text, advice, exit_code)


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    yield python()
    on_card = False
    for finding in trials(config.device):
        on_card |= finding.name == "card" and finding.verdict == OK and config.device != "cpu"
        yield finding
    yield from guarded("compiler", lambda: compiler(on_card))
    yield from guarded("extras", extras)
    yield from guarded("disk", lambda: disk(config.run_dir))
    yield from guarded("limits", lambda: limits(on_card))
    yield from guarded("systemd", systemd)
    yield from guarded("clock", clock)


def guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that cannot be done is a finding."""
    try:
        yield from check()
    except Exception as error:
        yield note(name, f"could not be looked at ({type(error).__name__}: {error})", "report it, it is a bug")


def python() -> Finding:
    return ok("python", f"{platform.python_version()}, llmtrain {__version__}, {sys.executable}")


def trials(device: str) -> Iterator[Finding]:
    """What the trials in a process of their own find."""
    command, environment = python_module("llmtrain.benchmark.doctor_trials", device)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            out, err = process.communicate(timeout=TRIALS_TAKE)
            ended = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            ended = f"did not come to an end within {TRIALS_TAKE:.0f} s"
    tried = "torch"
    for line in out.splitlines():
        with suppress(ValueError, TypeError):
            said = json.loads(line)
            if "tries" in said:
                tried = said["tries"]
            else:
                yield Finding(**said)
    if process.returncode != 0:
        last = err.strip().splitlines()[-1:] or ["without a word"]
        yield wrong(tried, f"the process that tried it {ended}: {last[0][:200]}", "see `dmesg` and nvidia-smi", 70)


def compiler(on_card: bool) -> Iterator[Finding]:
    """Triton compiles the launcher of each kernel with the machine's C compiler, against Python's headers."""
    found = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    fault = wrong if on_card else note
    needed = "" if on_card else " (of use with a card only)"
    if found is None:
        yield fault("compiler", f"no gcc, clang or cc is there{needed}", "install gcc (Debian: apt-get install gcc)")
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#include <Python.h>\nint main(void) { return Py_IsInitialized(); }\n")
        command = [*found.split(), "-c", str(source), "-o", str(Path(folder, "try.o"))]
        command += [f"-I{sysconfig.get_paths()['include']}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            said = (done.stderr.strip().splitlines() or [""])[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            yield fault("compiler", f"{found}: does not run ({error}){needed}", "install gcc, or unset CC")
            return
    if done.returncode == 0:
        yield ok("compiler", f"{found} compiles against Python's headers")
    elif "Python.h" in done.stderr:
        advice = "install them (Debian: apt-get install python3-dev)"
        yield fault("compiler", f"{found} works, but Python's headers are missing{needed}", advice)
    else:
        yield fault("compiler", f"{found} compiles nothing: {said}{needed}", "install a whole gcc")


def extras() -> Iterator[Finding]:
    """Which optional packages are there."""
    wanted: dict[str, list[str]] = {}
    for line in metadata.requires("llmtrain") or []:
        if match := re.match(r"""([A-Za-z0-9_.-]+).*extra == ["']([a-z]+)["']""", line):
            wanted.setdefault(match[2], []).append(match[1])
    wanted.pop("dev", None)
    absent = {extra: [name for name in names if not _installed(name)] for extra, names in wanted.items()}
    there = [extra for extra, names in absent.items() if not names]
    missing = [f"{extra} ({', '.join(names)})" for extra, names in absent.items() if names]
    text = f"installed: {', '.join(there) or 'none'}" + (f"; not: {', '.join(missing)}" if missing else "")
    yield Finding("extras", OK, text, "pip install 'llmtrain[NAME]' adds one" if missing else "")


def _installed(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def disk(run_dir: Path) -> Iterator[Finding]:
    """The place of the run directory: writable, with locks, room, and a sync that takes its time and no more."""
    folder = existing_folder(run_dir)
    kind = file_system(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".llmtrain-doctor-", dir=folder) as name:
            with RunLock(Path(name, "lock")):
                pass
            free = free_bytes(folder)
            yield _room(folder, free)
            yield _speed(folder, kind, Path(name), min(PROBE_BYTES, (free or PROBE_BYTES) // 8))
    except (OSError, errors.LlmtrainError) as error:
        failure = errors.write_error(error, folder) if isinstance(error, OSError) else error
        reason, _, advice = str(failure).rpartition(": ")
        yield wrong("disk", reason, advice, failure.exit_code)
        return
    if kind in PASSING:
        yield note("disk", f"{folder} is {kind}: {PASSING[kind]}", "put runs on a disk that stays")
    elif kind in REMOTE or kind.startswith("fuse."):
        advice = "where the server may go away, keep the run directory on a disk of this machine"
        yield note("disk", f"{folder} is {kind}: locks and syncs are as good as its server's", advice)


def _room(folder: Path, free: int | None) -> Finding:
    if free is None:
        return ok("disk", f"{folder}: its file system does not say what is free")
    held = f"{in_bytes(free)} are free in {folder}: {free / CHECKPOINT_102M:,.0f} checkpoints of a 102M model"
    if free < CHECKPOINT_31M:
        code = errors.StorageFailure.exit_code
        return wrong("disk", held, "free space, or name another --run-dir", code)
    if free < 4 * CHECKPOINT_102M:
        return note("disk", held, "three are kept and a fourth is written: free space, or see --keep-checkpoints")
    return ok("disk", held)


def _speed(folder: Path, kind: str, probe: Path, size: int) -> Finding:
    """Seconds of a small sync, and bytes a second."""
    small = []
    for i in range(8):
        since = time.perf_counter()
        with atomic_file(probe / f"small{i}") as file:
            file.write(bytes(4096))
        small.append(time.perf_counter() - since)
    block = os.urandom(1 << 20)  # a file system may compress
    since = time.perf_counter()
    with open(probe / "large", "wb", buffering=0) as raw:
        for _ in range(max(1, size >> 20)):
            raw.write(block)
        os.fsync(raw.fileno())
    fsync_folder(probe)
    rate = max(1 << 20, size) / (time.perf_counter() - since)
    sync = statistics.median(small)
    text = f"{kind}: a file is there for good after {1e3 * sync:.1f} ms, {in_bytes(rate)} a second are written"
    if sync > SLOW_SYNC:
        return note("disk", text, "saves run beside the training, but a stop waits for one: a faster disk ends sooner")
    return ok("disk", text)


def file_system(folder: Path) -> str:
    """Its type, such as ext4; "unknown" where the system does not say."""
    with suppress(OSError, IndexError):
        whole, best = os.path.realpath(folder), ("", "unknown")
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            place = before.split()[4].encode().decode("unicode_escape")
            inside = whole == place or whole.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best[0]):
                best = (place, after.split()[0])
        return best[1]
    return "unknown"


def limits(on_card: bool) -> Iterator[Finding]:
    """Limits of the process: ulimits, processors."""
    advice = "raise it in the shell or unit that starts the run"

    def soft(kind: int) -> int | None:
        value = resource.getrlimit(kind)[0]
        return None if value == resource.RLIM_INFINITY else value

    found = []
    if (size := soft(resource.RLIMIT_FSIZE)) is not None and size < 2 * CHECKPOINT_102M:
        code = errors.StorageFailure.exit_code
        found.append(wrong("limits", f"files may grow to {in_bytes(size)} only (ulimit -f)", advice, code))
    if (space := soft(resource.RLIMIT_AS)) is not None:
        text = f"the address space is limited to {in_bytes(space)} (ulimit -v)"
        more = ", of which CUDA takes far more than memory" if on_card else ""
        found.append((wrong if on_card else note)("limits", text + more, advice))
    if (seconds := soft(resource.RLIMIT_CPU)) is not None:
        text = f"a process is killed after {seconds} s of processor time (ulimit -t)"
        found.append(wrong("limits", text, advice))
    if (files := soft(resource.RLIMIT_NOFILE)) is not None and files < OPEN_FILES:
        text = f"{files} files may be open at a time (ulimit -n): a corpus in many parts wants more"
        found.append(note("limits", text, f"ulimit -n {OPEN_FILES}"))
    quota = processor_quota()
    if quota is not None and quota < 1:
        found.append(note("limits", f"the control group gives {quota:.2f} of a processor", "raise its cpu.max"))
    yield from found
    if not found:
        from llmtrain.benchmark.machine import cpu_count

        share = f", {quota:g} of them by the control group" if quota is not None else ""
        yield ok("limits", f"{cpu_count()} processors{share}; no ulimit is in the way")


def processor_quota() -> float | None:
    """Processors that the control group allows; None where it sets no limit."""
    with suppress(OSError, ValueError, StopIteration):
        own = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
        quota, period = Path("/sys/fs/cgroup", own[3:].lstrip("/"), "cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def systemd() -> Iterator[Finding]:
    """What `llmtrain service` needs."""
    elsewhere = "docs/service.md has Slurm, and what any supervisor has to do"
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        yield ok("systemd", f"does not run here, so no `llmtrain service`: {elsewhere}")
        return
    said = _answer("systemctl", "--user", "is-system-running")
    if said not in ("running", "degraded", "starting", "initializing"):
        advice = "log in by a session of your own (ssh), or use `llmtrain service --system`"
        yield note("systemd", f"your user's manager does not answer ({said or 'no word'})", advice)
        return
    user = getpass.getuser()
    if not Path("/var/lib/systemd/linger", user).exists():
        text = f"your user's manager is {said}, but {user}'s services end with the last session"
        yield note("systemd", text, "loginctl enable-linger")
        return
    yield ok("systemd", f"your user's manager is {said}, {user}'s services run on without a session")


def _answer(*command: str) -> str:
    """The first line that a program says, on whichever stream."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
        return (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]
    return ""


def clock() -> Iterator[Finding]:
    """Times of lines and of checkpoints come from it."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    newest = max(os.stat(path).st_mtime for path in glob.glob(f"{Path(__file__).parents[1]}/*/*.py"))
    if time.time() < newest - 86400:
        yield note("clock", f"{now} is before this program was installed", "set the clock: timedatectl set-ntp true")
        return
    state = None
    with suppress(OSError, AttributeError):
        # struct timex, with modes = 0: nothing is set.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == TIME_ERROR:
        advice = "timedatectl set-ntp true; in a container it is for the host to do"
        yield note("clock", f"{now}, but nothing keeps it right: times in metrics.jsonl may jump", advice)
    else:
        yield ok("clock", now + (", synchronised" if state is not None and state >= 0 else ""))


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"findings": [asdict(finding) for finding in findings], "sound": all(f.verdict != WRONG for f in findings)}

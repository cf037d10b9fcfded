"""Tries every fault that a run promises to survive, hundreds of times, and writes docs/reliability.md.

    sudo .venv/bin/python scripts/faults/all.py [--only PART ...] [--render] [--output docs/reliability.md]

Each part has an entry in docs/data/reliability.json, written when it ends, with the machine it ran on; parts that are
not run keep theirs. What cannot be tried here (no root, no strace) is left out and named. `--render` only writes the
page. scripts/faults/card.py, systemd.py and tokenize_kills.py write JSON of their own, which the page takes in. All
parts take some twenty minutes on two cores, without a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: what is forked must have no threads

from llmtrain.benchmark.machine import describe, headline  # noqa: E402
from llmtrain.benchmark.tables import data_path, table  # noqa: E402
from llmtrain.storage.atomic import write_bytes, write_json  # noqa: E402
from tests.faults import disks, kills, week  # noqa: E402
from tests.faults.damage import damaged  # noqa: E402
from tests.faults.forks import Forks  # noqa: E402
from tests.faults.runs import EVERY, STEPS, Runs, Tally  # noqa: E402


def pytest(folder: Path, *files: str) -> Tally:
    """Each test of some files as a trial."""
    report, tally = folder / "report.xml", Tally()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            failures = [str(found.get("message")) for kind in ("failure", "error") for found in case.findall(kind)]
            tally.add(f"{case.get('name')}: {failures[0].splitlines()[0]}" if failures else None)
    return tally


def small_week(folder: Path) -> Tally:
    with Forks() as forks:
        many = Runs(folder, forks, 2000, "--checkpoint-every", 25, "--val-every", 200)
        return week.week(many, 150, seed=0)


def on_runs(trials: Callable[[Runs], Tally]) -> Callable[[Path], Tally]:
    def part(folder: Path) -> Tally:
        with Forks() as forks:
            return trials(Runs(folder, forks))

    return part


@dataclass
class Part:
    fault: str
    trials: Callable[[Path], Tally]
    why_not: Callable[[], str] = str
    """Why this machine cannot try it; empty where it can."""


CALLS = range(1, 10_000)
PARTS = {
    "moments": Part(
        "kill -9 at a random moment of a run that saves every 3 steps", on_runs(lambda r: kills.at_moments(r, 200, 0))
    ),
    "system-calls": Part(
        "kill -9 at every system call of a save (strace)", on_runs(kills.at_system_calls), kills.why_no_strace
    ),
    "calls": Part("kill -9 at every call of a save, as Python makes them", on_runs(lambda r: kills.at_calls(r, CALLS))),
    "damage": Part(
        "a flipped bit or a cut in the newest checkpoint, manifest included", lambda folder: damaged(folder, 500, 0)
    ),
    "power": Part(
        "power cut at every call of a save (copy of a mounted ext4 image)",
        on_runs(lambda r: disks.power_lost_at_calls(r, CALLS)), disks.why_no_images,
    ),
    "full": Part(
        "the disk is full from a call of a save on, at each", on_runs(lambda r: disks.full_at_calls(r, CALLS)),
        disks.why_no_mounts,
    ),
    "read-only": Part(
        "the disk is remounted read-only at a call of a save, at each where the kernel allows it",
        on_runs(lambda r: disks.read_only_at_calls(r, CALLS)), disks.why_no_mounts,
    ),
    "enospc": Part(
        "ENOSPC from each system call of a save that changes the disk (strace)",
        on_runs(lambda r: kills.failing_system_calls(r, "ENOSPC")), kills.why_no_strace,
    ),
    "eio": Part(
        "EIO from each of these", on_runs(lambda r: kills.failing_system_calls(r, "EIO")), kills.why_no_strace
    ),
    "signals": Part(
        "a stop signal in each phase, full disks, frozen loops, a second process: the tests of these, each as one",
        lambda folder: pytest(folder, *(f"tests/faults/test_{name}.py" for name in TESTS)),
    ),
    "intervals": Part(
        "other intervals of logging, evaluating and saving", lambda folder: week.other_intervals(folder, 100, 0)
    ),
    "week": Part("a week in small: 2,000 steps under a supervisor that has the run killed again and again", small_week),
}  # fmt: skip
TESTS = ("signals", "hangs", "disks", "systemd", "history", "run_faults")
CARD = "102M model with --deterministic on one GPU: kill -9 between saves and in one"


def run_part(name: str) -> dict:
    part = PARTS[name]
    began = time.monotonic()
    machine = describe(on_card=False)
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        tally = part.trials(Path(folder))
    seconds = round(time.monotonic() - began, 1)
    counts = {"tried": tally.tried, "lost": tally.lost, "met": dict(tally.met)}
    return {"fault": part.fault, **counts, "seconds": seconds, "machine": machine}


def row(entry: dict) -> list[str]:
    met = ", ".join(f"{times} {where}" for where, times in sorted(entry["met"].items(), key=lambda item: -item[1]))
    lost = len(entry["lost"])
    return [entry["fault"], met, str(entry["tried"]), str(entry["tried"] - lost), str(lost)]


def markdown(entries: dict[str, dict], card: dict | None, systemd: dict | None, tokenize: dict | None) -> str:
    """docs/reliability.md."""
    rows = [row(entries[name]) for name in PARTS if name in entries]
    rows.append(row(card) if card else [CARD, "not yet run", "", "", ""])
    if tokenize:
        what, done = "`tokenize-corpus` killed with -9 at random moments", tokenize["kills"]
        lost = tokenize["different_outputs"]
        met = f"{tokenize['kills_with_a_journal']} at work"
        rows.append([what, met, str(done), str(done - lost), str(lost)])
    tried, _, lost = (sum(int(cells[i] or 0) for cells in rows) for i in (2, 3, 4))
    missing = [f"- {PARTS[name].fault}: not yet run." for name in PARTS if name not in entries]
    machines = {headline(entry["machine"]).partition(". Taken")[0]: None for entry in entries.values()}
    wrong = [f"- {entry['fault']}: {text}" for entry in entries.values() for text in entry["lost"]]
    lines = [
        "# What a run survives", "",
        "On the same machine, versions and device count, `llmtrain train --resume` gives bit-identical parameters, "
        "optimizer state, losses and data order to a run that nobody disturbed (on CUDA with `--deterministic`). No "
        "single crash, full disk, power cut or damaged file costs more than one checkpoint interval, and every stop "
        "says what happened and what to do; a disk that stays full ends the run at the third save in a row that fails "
        "(`--max-save-failures`), and costs what came after the last that did not. This page is the evidence.", "",
        f"**{tried:,} faults tried, {tried - lost:,} survived, {lost} lost.**", "",
        *table(["fault", "where they fell", "tried", "survived", "lost"], rows, numbers_from=2), "",
        "Survived means, of a run: it, resumed, or going on by itself where the fault does not end it, ended with the "
        "same sha256 of weights and of optimizer state, and with each step's loss, gradient norm and learning rate "
        "once in metrics.jsonl, equal to the last bit; nothing was left over in its folder; and no checkpoint that "
        "was said to be saved was gone.", "",
        "A checkpoint is written while training goes on, and counts from the moment it has its name: a crash costs "
        "what came after the newest that has it.", "",
        *missing, *([""] if missing else []), *wrong, *([""] if wrong else []),
    ]  # fmt: skip
    if systemd:
        faults = [[fault["fault"], fault["outcome"]] for fault in systemd["faults"]]
        lines += [
            f"Under a real `systemd --user` ({systemd['machine']['systemd']}), with the unit that `llmtrain service` "
            "writes; whatever was done to them, the runs ended in the bits of an undisturbed one:", "",
            *table(["fault", "outcome"], faults, numbers_from=2), "",
        ]  # fmt: skip
    lines += [
        "## How", "",
        f"- A run: a very small model on a CPU, {STEPS} steps, saved every {EVERY}. It takes the same code as a large "
        "one from the command line to the disk.",
        "- Calls of a save are those of the threads that write it, from the first look at the room on the disk to the "
        "removal of the checkpoint that is rotated out. With strace they are system calls; as Python makes them they "
        "are those of its `os` module and of its files, which needs no strace.",
        "- A full disk is a small file system in memory, filled to the last byte at the call and freed when that save "
        "has ended. Where a file is open for writing the kernel refuses to remount its disk read-only; those calls are "
        "no trials.",
        "- A power cut: the run is on an ext4 image that is mounted; at the call the image is copied, as it is then, "
        "and the copy is mounted. `tests/faults/test_trials.py` shows that the method sees a loss: with `fsync` made a "
        "no-op it finds one.",
        "- Damage: both the check of the checksums and the resume must refuse the checkpoint; the one before must come "
        "back to the bit.",
        "- The week: kills within the next 150 steps or while the run starts, at times with SIGTERM; at times a file "
        "of the newest checkpoint is damaged before the next start.",
        "",
        "Not tried: a disk that lies about fsync, memory that flips bits (`--verify-every` looks for that), network "
        "file systems, several GPUs.", "",
        *(f"{machine}." for machine in machines), "",
        "Made by `scripts/faults/all.py` from [data/reliability.json](data/reliability.json); short forms of all of it "
        "are in `tests/faults/` and part of `make test`.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def page(output: Path) -> str:
    """docs/reliability.md, of the JSON that is there."""
    source = data_path(output)
    others = [read(source.with_name(f"{name}.json")) for name in ("reliability-card", "systemd", "tokenize-kills")]
    return markdown(read(source) or {}, *others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/reliability.md", help="Markdown")
    args = parser.parse_args()
    source = data_path(args.output)
    source.parent.mkdir(parents=True, exist_ok=True)
    lost = 0
    for name in [] if args.render else args.only or PARTS:
        if reason := PARTS[name].why_not():
            print(f"{name}: left out: {reason}", flush=True)
            continue
        entry = run_part(name)
        lost += len(entry["lost"])
        write_json(source, {**(read(source) or {}), name: entry})
        print(f"{name}: {entry['tried']} tried, {len(entry['lost'])} lost, {entry['seconds']} s", flush=True)
    write_bytes(args.output, page(args.output).encode())
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()

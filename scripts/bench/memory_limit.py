"""Whether runs fit where they should: --batch-size auto, a batch that is too large, other processes on the card.

    python scripts/bench/memory_limit.py [--case 102m --case 1b] [--output docs/memory.md]
    python scripts/bench/memory_limit.py --smoke      # a tiny model on the CPU, under a limit of its address space

Each line is a run of `llmtrain train` in a process of its own, of --steps steps on random tokens with an evaluation:
the preset's own micro-batch; the one that auto chooses; one as large as the step, which must be refused within seconds
with exit code 2 and leave nothing; what that refusal suggests, which must run and be the same step; and, with most of
the card held by another process, auto again and the large one, whose refusal must be 74. The peak of each is held to
its prediction. Cases that were measured before stay in the JSON. Exits 1 where something of those measured now does not
hold.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmtrain.benchmark.data import write_random_tokens  # noqa: E402
from llmtrain.benchmark.machine import describe, headline  # noqa: E402
from llmtrain.benchmark.tables import figure, read_data, table, write_page  # noqa: E402
from llmtrain.storage.journal import JsonLines  # noqa: E402

GIB = 2**30
WITHIN = 0.08
"""By how much a measured peak may differ from its prediction."""
SECONDS = 60.0
"""What a refusal may take, of which most is importing torch, compiling kernels and waking the card."""
HELD_BY_OTHERS = 0.7
"""Share of the card that the other process takes."""

# The address space of the smoke test is limited after the imports, which take much of it without touching it.
LIMITED = """
import os, resource, sys
from llmtrain.cli.main import run
from llmtrain.training import run as _
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20,) * 2)
sys.exit(run(sys.argv[1:]))
"""
OTHER = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(0, int(float(sys.argv[1]) * total) - (total - free)), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Case:
    """A preset, with so many sequences a step that they never fit at once."""

    name: str
    sequences: int
    arguments: tuple[str, ...]
    vocab_size: int
    seq_len: int
    own: int
    """The preset's own micro-batch."""


@dataclass
class Outcome:
    """What became of one run."""

    what: str
    options: list[str]
    exit_code: int
    seconds: float
    batch_size: int | None = None
    tokens_per_step: int | None = None
    trial: dict[str, Any] = field(default_factory=dict)
    """The event of the trial; nothing on a CPU where the size was given."""
    error: str = ""
    left: bool = False
    """Whether the run directory is there."""


def preset(name: str, sequences: int) -> Case:
    path = Path(__file__).resolve().parents[2] / "configs" / f"{name}.toml"
    tables = tomllib.loads(path.read_text())
    given = ("--config", name, "--accumulate", "1")  # by its name: the JSON keeps this, on whatever machine it is
    return Case(
        name, sequences, given, tables["model"]["vocab_size"], tables["data"]["seq_len"], tables["run"]["batch_size"]
    )


TINY = Case(
    "tiny", 900,
    ("--d-model", "32", "--n-layers", "8", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
     "--seq-len", "64", "--precision", "fp32", "--device", "cpu", "--vocab-size", "512"),
    512, 64, 8,
)  # fmt: skip


class Runs:
    """Runs of one case, each in a fresh run directory that is removed behind it."""

    def __init__(self, case: Case, folder: Path, steps: int, smoke: bool) -> None:
        self.case, self.folder, self.steps = case, folder, steps
        self.command = ["-c", LIMITED] if smoke else ["-m", "llmtrain"]
        self.tokens = folder / "random.u16"
        windows = 64
        write_random_tokens(self.tokens, case.vocab_size, windows * case.seq_len + 1)

    def __call__(self, what: str, *options: str) -> Outcome:
        run_dir = self.folder / "run"
        # One thread and one arena: others would reserve a good part of the smoke test's address space.
        narrow = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"} if self.command[0] == "-c" else {}
        since = time.perf_counter()
        done = subprocess.run(
            [
                sys.executable, *self.command, "train", *self.case.arguments, "--tokens", str(self.tokens),
                "--val-tokens", f"held={self.tokens}", "--val-windows", "16", "--run-dir", str(run_dir),
                "--total-steps", str(self.steps), "--warmup-steps", "1", "--checkpoint-every", "1000000",
                "--log-every", "1", *options,
            ],
            capture_output=True, text=True, env={**os.environ, **narrow},
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        outcome = Outcome(what, list(options), done.returncode, time.perf_counter() - since)
        outcome.left, outcome.error = run_dir.exists(), done.stderr.strip()
        if done.returncode == 0:
            settings = tomllib.loads((run_dir / "config.toml").read_text())["run"]
            lines = list(JsonLines.read(run_dir / "metrics.jsonl"))
            trials = [line for line in lines if line.get("event") == "trial"]
            outcome.trial = trials[-1] if trials else {}
            outcome.batch_size = settings["batch_size"]
            outcome.tokens_per_step = next(line["tokens"] for line in lines if line["kind"] == "train")
        shutil.rmtree(run_dir, ignore_errors=True)
        print(f"{self.case.name}: {what}: exit {done.returncode} after {outcome.seconds:.1f} s", file=sys.stderr)
        if outcome.error:
            print(outcome.error, file=sys.stderr)
        return outcome


def suggested(outcome: Outcome) -> list[str]:
    """The options that a refusal says to give."""
    found = re.search(r"give (--batch-size .*?) or --batch-size auto", outcome.error)
    return found[1].split() if found else ["--batch-size", "none-was-suggested"]


def measure(case: Case, folder: Path, steps: int, smoke: bool) -> dict[str, Any]:
    run = Runs(case, folder, steps, smoke)
    whole = ("--global-batch-size", str(case.sequences))
    own = run("the preset's own", "--batch-size", str(case.own))
    auto = run("auto", "--batch-size", "auto", *whole)
    large = run("too large", "--batch-size", str(case.sequences), "--accumulate", "1")
    follow = run("as suggested", *suggested(large))
    outcomes, tokens = [own, auto, large, follow], case.sequences * case.seq_len
    checks = {
        "the preset's own micro-batch runs": own.exit_code == 0,
        "what auto chose runs": auto.exit_code == 0 and auto.tokens_per_step == tokens,
        "a batch that is too large is refused with 2": large.exit_code == 2 and large.error.count("\n") == 0,
        f"within {SECONDS:.0f} s": large.seconds < SECONDS,
        "and leaves nothing": not large.left,
        "what is suggested runs and is the same step": follow.exit_code == 0 and follow.tokens_per_step == tokens,
    }
    if not smoke:
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(HELD_BY_OTHERS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            beside = run("auto beside another process", "--batch-size", "auto", *whole)
            # What auto took of the empty card.
            taken = run("its first choice beside another", "--batch-size", str(auto.batch_size or 1), *whole)
        finally:
            other.communicate("")
        outcomes += [beside, taken]
        smaller = (beside.batch_size or 0) < (auto.batch_size or 0)
        checks["auto takes less beside another process"] = beside.exit_code == 0 and smaller
        checks["what fits an empty card is refused there with 74"] = taken.exit_code == 74
        errors = [miss(outcome) for outcome in outcomes if outcome.exit_code == 0]
        checks[f"every peak is within {WITHIN:.0%} of its prediction"] = all(abs(error) <= WITHIN for error in errors)
    return {**asdict(case), "steps": steps, "outcomes": [asdict(outcome) for outcome in outcomes], "checks": checks}


def miss(outcome: Outcome) -> float:
    """Measured over predicted peak, less 1."""
    return outcome.trial["peak_bytes"] / outcome.trial["planned_bytes"] - 1


def markdown(data: dict[str, Any], source: str) -> str:
    """docs/memory.md."""
    lines = ["# What fits", "", f"Made by `scripts/bench/memory_limit.py` from [{source}]({source}).", ""]
    for case in data["cases"]:
        lines += [
            f"## {case['name']}: {case['sequences']} sequences of {case['seq_len']} a step", "",
            headline(case["machine"]), "",
        ]  # fmt: skip
        rows = []
        for outcome in case["outcomes"]:
            trial = outcome["trial"]
            peak, planned = trial.get("peak_bytes"), trial.get("planned_bytes")
            rows.append([
                outcome["what"], str(outcome["exit_code"]), str(outcome["batch_size"] or ""),
                ", ".join(map(str, trial.get("tried", []))), figure(planned, ".2f", 1 / GIB),
                figure(peak, ".2f", 1 / GIB), figure(peak / planned - 1 if peak else None, "+.1%"),
                figure(trial.get("held_bytes"), ".2f", 1 / GIB), figure(trial.get("seconds"), ".1f"),
                f"{outcome['seconds']:.1f}",
            ])  # fmt: skip
        lines += table(
            ["run", "exit", "micro-batch", "tried", "predicted GiB", "peak GiB", "off", "held GiB", "trial s", "all s"],
            rows,
        )
        said = [f"- {outcome['what']}: `{outcome['error']}`" for outcome in case["outcomes"] if outcome["error"]]
        checks = [f"- {'holds' if holds else '**does not hold**'}: {what}" for what, holds in case["checks"].items()]
        lines += ["", *said, "", *checks, ""]
    lines += [
        "Peak is what tensors took at most (torch.cuda.max_memory_allocated), held what the allocator came to hold, "
        "captured graphs and an evaluation included; auto chooses by the latter, with a margin. All s is the whole "
        "process, the checkpoint at its end included.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = {"102m": 1024, "1b": 128}
    parser.add_argument("--case", action="append", choices=cases, help="default: all")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    todo = [TINY] if args.smoke else [preset(name, cases[name]) for name in args.case or cases]
    data, wrong = read_data(args.output) or {"kind": "memory", "cases": []}, []
    for case in todo:
        machine = describe(not args.smoke)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            result = measure(case, Path(folder), args.steps, args.smoke) | {"machine": machine}
        wrong += [f"{case.name}: {what}" for what, holds in result["checks"].items() if not holds]
        data["cases"] = [other for other in data["cases"] if other["name"] != case.name] + [result]
        if args.output:
            write_page(args.output, data, markdown)
    print(markdown(data, "its JSON"))
    print(f"does not hold: {'; '.join(wrong)}" if wrong else "all hold")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

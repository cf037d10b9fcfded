"""A change against the source tree without it: the same steps of both, resident on one card, taking turns.

    python scripts/bench/trees.py OLD [--case 102m-4x1024 ...] [--rounds 8] [--output docs/data/trees.json]
    python scripts/bench/trees.py OLD --smoke        # a tiny model on the CPU

OLD is a folder with llmtrain/ and scripts/ as they were, such as a `git worktree`. Of a case of peers.py each shape is
taken that llmtrain runs. This tree runs twice: what the two differ by is the floor.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from peer_process import ROOT, ArmProcess, Settings  # noqa: E402
from peers import CASES, NO_CARD, OURS, SMOKE  # noqa: E402

from llmtrain.benchmark.config import Shape  # noqa: E402
from llmtrain.benchmark.machine import describe  # noqa: E402
from llmtrain.benchmark.statistics import rotation  # noqa: E402
from llmtrain.storage.atomic import make_parent, write_json  # noqa: E402

STEPS = 8
NEW, AGAIN, OLD = "new", "new, again", "old"


def measure(shape: Shape, old: Path, settings: Settings) -> dict[str, Any]:
    """Tokens a second of each tree, a burst a round in turns, and the losses of the first steps."""
    trees = {NEW: ROOT, AGAIN: ROOT, OLD: old}
    arms: dict[str, ArmProcess] = {}
    rates: dict[str, list[float]] = {name: [] for name in trees}
    try:
        arms = {name: ArmProcess(OURS, shape, STEPS, settings, root) for name, root in trees.items()}
        losses = {name: arm.answer()["losses"] for name, arm in arms.items()}
        for turn in range(settings.rounds):
            for i in rotation(len(arms), turn):
                name = list(arms)[i]
                arms[name].tell("burst")
                taken = arms[name].answer()
                rates[name].append(taken["steps"] * shape.tokens_per_step / taken["wall_s"])
    finally:
        for arm in arms.values():
            arm.stop()
    new, again, before = (statistics.median(rates[name]) for name in trees)
    return {
        "shape": asdict(shape), "tok_per_s": rates, "losses": losses,
        "gain": (new + again) / 2 / before - 1, "floor": abs(new / again - 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of the other source tree")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], default=["102m-4x1024"])
    parser.add_argument("--seconds", type=float, default=0.7, help="length of a burst")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, in FP32")
    args = parser.parse_args()
    old = args.old.resolve()
    if not (old / "scripts/bench/peer_arm.py").is_file():
        parser.error(f"{args.old}: no source tree of llmtrain: it lacks scripts/bench/peer_arm.py")
    if not (args.smoke or torch.cuda.is_available()):
        parser.error(NO_CARD)
    if args.rounds < 2:
        parser.error(f"--rounds must be 2 or more to show a floor, not {args.rounds}")
    of_cases = [entry for case in CASES if case.name in args.case for entry in case.entries if entry.arm == OURS]
    shapes = dict.fromkeys(entry.shape for entry in (SMOKE[0].entries[:1] if args.smoke else of_cases))
    machine, rows = describe(not args.smoke), []
    with tempfile.TemporaryDirectory(prefix="trees-caches-") as caches:
        device, precision = ("cpu", "fp32") if args.smoke else ("cuda", "bf16")
        settings = Settings(args.seconds, args.rounds, device, precision, Path(caches))
        for shape in shapes:
            rows.append(measure(shape, old, settings))
            text = f"{shape.batch_size} x {shape.seq_len} x {shape.accumulate} of {shape.model.d_model}"
            new, again, before = rows[-1]["losses"].values()
            apart, scatter = (max(abs(a - b) for a, b in zip(new, other, strict=True)) for other in (before, again))
            told = f"{rows[-1]['gain']:+.2%}, floor {rows[-1]['floor']:.2%}"
            print(f"{text}: {told}; losses differ by {apart:.1g}, of the two new ones by {scatter:.1g}", flush=True)
            if args.output:
                make_parent(args.output)
                write_json(args.output, {"machine": machine, "old": os.path.basename(old), "rows": rows})


if __name__ == "__main__":
    main()

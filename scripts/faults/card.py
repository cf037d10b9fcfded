"""A run on a card, killed with -9 twice and resumed, against an undisturbed one: the same checkpoints to the bit.

    python scripts/faults/card.py [--tokens data/corpus.u16] [--output docs/data/reliability-card.json]

The 102M model with --deterministic, 200 steps of 16 x 1024, saved every 50. The first kill comes between two saves, the
second while a checkpoint is written. Without --tokens the corpus is random. Takes about two minutes, most of it the
start of four processes, and 10 GB of disk.
`--smoke` does the same with a small model, on the CPU too. Exits 1 where a bit differs. scripts/faults/all.py --render
then takes the figures into docs/reliability.md.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from llmtrain.benchmark.data import write_random_tokens
from llmtrain.benchmark.machine import describe
from llmtrain.storage.atomic import write_json
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 200, 50
VOCAB_SIZE = 32000
SMALL = [
    "--vocab-size", str(VOCAB_SIZE), "--d-model", "32", "--n-layers", "1", "--n-heads", "2", "--n-kv-heads", "1",
    "--head-dim", "16", "--d-ff", "64", "--seq-len", "32", "--batch-size", "2",
]  # fmt: skip


class Run:
    """One run directory."""

    def __init__(self, args: argparse.Namespace, run_dir: Path) -> None:
        shape = SMALL if args.smoke else ["--config", str(ROOT / "configs/102m.toml"), "--batch-size", "16"]
        self.run_dir, self.seconds = run_dir, 0.0
        self.command = [
            sys.executable, "-m", "llmtrain", "train", "--resume", "--tokens", str(args.tokens), *shape,
            "--run-dir", str(run_dir), "--total-steps", str(STEPS), "--warmup-steps", "10", "--log-every", "1",
            "--checkpoint-every", str(EVERY), "--keep-checkpoints", str(STEPS // EVERY), "--deterministic",
        ]  # fmt: skip

    def start(self) -> subprocess.Popen:
        return subprocess.Popen(self.command, stdout=subprocess.DEVNULL)

    def finish(self) -> None:
        process = self.start()
        if code := process.wait():
            raise SystemExit(f"{self.run_dir.name}: ended with {code}")

    def kill(self, at_step: int, in_save: bool) -> dict:
        """Kills it when `at_step` is logged and, from then on, a checkpoint is or is not being written."""
        process = self.start()
        while process.poll() is None and self.logged() < at_step:
            time.sleep(0.002)
        while process.poll() is None and self.writes() != in_save:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise SystemExit(f"{self.run_dir.name}: ended with {process.returncode} before it could be killed")
        newest = max(checkpoint.list_steps(self.run_dir), default=0)
        return {"at_step": self.logged(), "newest_checkpoint": newest, "while_saving": self.writes()}

    def logged(self) -> int:
        """The newest step of this attempt."""
        path = self.run_dir / "metrics.jsonl"
        lines = list(JsonLines.read(path)) if path.exists() else []
        attempt = max((line["attempt"] for line in lines), default=0)
        return max((line["step"] for line in lines if line["attempt"] == attempt), default=0)

    def writes(self) -> bool:
        return any((self.run_dir / "checkpoints").glob("*.partial"))

    def result(self) -> dict[str, object]:
        """What must be the same: hashes of each checkpoint's tensors, and each step's figures."""
        found: dict[str, object] = {}
        for step in checkpoint.list_steps(self.run_dir):
            files = checkpoint.read_manifest(checkpoint.folder_of(self.run_dir, step))["files"]
            found[f"checkpoint {step}"] = [files[name]["sha256"] for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)]
        list(checkpoint.verify(checkpoint.folder_of(self.run_dir, STEPS)))
        lines = [line for line in JsonLines.read(self.run_dir / "metrics.jsonl") if line["kind"] == "train"]
        found["losses"] = [(line["step"], line["lm_loss"], line["grad_norm"]) for line in lines]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, help="token file; default: random tokens")
    parser.add_argument("--folder", type=Path, help="where the runs are; default: the temporary folder")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    machine = describe(torch.cuda.is_available())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.tokens is None:
            args.tokens = folder / "random.u16"
            write_random_tokens(args.tokens, VOCAB_SIZE, STEPS * 16 * 1024 // 4)
        whole, killed = Run(args, folder / "whole"), Run(args, folder / "killed")
        whole.finish()
        kills = [killed.kill(85, in_save=False), killed.kill(140, in_save=True)]
        killed.finish()
        expected, found = whole.result(), killed.result()
    different = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    met = {"while a checkpoint was written": 0, "between saves": 0}
    for kill in kills:
        met["while a checkpoint was written" if kill["while_saving"] else "between saves"] += 1
    model = "small model" if args.smoke else "102M model"
    result = {
        "fault": f"{model} with --deterministic on one {'GPU' if machine['card'] else 'CPU'}: kill -9, twice in a run",
        "tried": len(kills), "lost": [f"differ: {', '.join(different)}"] if different else [],
        "met": {where: times for where, times in met.items() if times}, "kills": kills, "compared": sorted(expected),
        "steps": STEPS, "seconds": round(time.monotonic() - began, 1), "machine": machine,
    }  # fmt: skip
    if args.output:
        write_json(args.output, result)
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()

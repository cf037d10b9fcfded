"""`llmtrain train` on a real corpus against `llmtrain bench step` on the same shape: does a run reach that rate?

    python scripts/bench/train_rate.py --config configs/102m.toml --batch-size 64 --tokens data/corpus.u16 \\
        --output docs/train-rate.md

Each takes turns in a process of its own, twice; the training figure is the median of a run's log lines, its first left
out. Bursts of `bench step` last for seconds, as the run does: under load a card's clock falls within the first of them.
The corpus may have been tokenized with any vocabulary that the model's covers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.tables import table, write_page
from llmtrain.storage.journal import JsonLines


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "llmtrain", *arguments], check=True, stdout=subprocess.DEVNULL)


def train_rate(args: argparse.Namespace, folder: Path) -> tuple[float, list[dict]]:
    """(median tokens a second, train lines) of a run."""
    run(
        "train", "--config", args.config, "--tokens", args.tokens, "--seq-len", str(args.seq_len),
        "--batch-size", str(args.batch_size), "--accumulate", "1", "--total-steps", str(args.steps),
        "--log-every", "20", "--checkpoint-every", "1000000", "--run-dir", str(folder / "run"),
    )  # fmt: skip
    lines = [line for line in JsonLines.read(folder / "run/metrics.jsonl") if line["kind"] == "train"][1:]
    return statistics.median(line["tok_per_s"] for line in lines), lines


def step_rate(args: argparse.Namespace, folder: Path) -> float:
    output = folder / "step.md"
    run(
        "bench", "step", "--config", args.config, "--batch-size", str(args.batch_size), "--seq-len", str(args.seq_len),
        "--accumulate", "1", "--output", str(output), "--seconds", str(args.seconds), "--bursts", "2",
    )  # fmt: skip
    return json.loads((folder / "data/step.json").read_text())["tok_per_s"]


def markdown(result: dict, source: str) -> str:
    """docs/train-rate.md."""
    rows = [
        [name, *(f"{rate:,.0f}" for rate in rates), f"{statistics.median(rates):,.0f}"]
        for name, rates in result["tok_per_s"].items()
    ]
    turns = [f"turn {i + 1}" for i in range(len(rows[0]) - 2)]
    lines = [
        "# A run against its step", "",
        f"`{result['config']}` at {result['batch_size']} x {result['seq_len']}, tokens a second. `train` reads a real "
        f"corpus for {result['steps']} steps; its figure is the median of its log lines. {headline(result['machine'])}",
        "", *table(["", *turns, "median"], rows), "",
        f"`train` reaches {result['ratio']:.1%} of `bench step`; it waited {result['median_data_ms_a_line']:.2f} ms "
        "for data between two log lines, 20 steps.", "",
        f"Made by `scripts/bench/train_rate.py` from [{source}]({source}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/102m.toml")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=6, help="length of a burst of `bench step`")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"train": [], "bench step": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            rate, lines = train_rate(args, Path(name))
            rates["train"].append(rate)
            rates["bench step"].append(step_rate(args, Path(name)))
    ratio = statistics.median(rates["train"]) / statistics.median(rates["bench step"])
    print(f"train {rates['train']}, bench step {rates['bench step']} tok/s: ratio {ratio:.4f}")
    if args.output:
        shape = {"config": args.config, "batch_size": args.batch_size, "seq_len": args.seq_len, "steps": args.steps}
        waits = statistics.median(line["data_ms"] for line in lines)
        result = {**shape, "tok_per_s": rates, "ratio": ratio, "median_data_ms_a_line": waits}
        result = {**result, "machine": describe(True)}
        write_page(args.output, result, markdown)


if __name__ == "__main__":
    main()

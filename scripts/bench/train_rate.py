"""`llmtrain train` on a real corpus against `llmtrain bench step` on the same shape: does a run reach that rate?

    python scripts/bench/train_rate.py --config configs/102m.toml --batch-size 64 --tokens data/corpus.u16 \\
        --output docs/train-rate.md

Each takes turns in a process of its own, twice, in an order that rotates: the run, the step on random tokens, and the
step on the tokens that the run reads. At its power limit a card's time depends on the numbers themselves, so only the
last does the run's work, but for a learning rate of its own; what it has over the run is the loop's. Under load a
card's clock falls within the first seconds: the figure of a run is the median of its log lines behind WARM_STEPS, that
of `bench step` the median of its bursts, each of seconds, behind the first. The corpus may have been tokenized with any
vocabulary that the model's covers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.statistics import rotation
from llmtrain.benchmark.tables import table, write_page
from llmtrain.storage.journal import JsonLines

WARM_STEPS = 20
"""Steps of a run that its figure leaves out."""
BURSTS = 3
"""Of `bench step`, the first of which its figure leaves out."""
KEPT = ("step", "tok_per_s", "step_ms", "data_ms", "card_w", "card_c")
"""Of a run's train lines."""


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "llmtrain", *arguments], check=True, stdout=subprocess.DEVNULL)


def train_lines(args: argparse.Namespace, folder: Path) -> list[dict]:
    """What is kept of the train lines of a run, but for those of its beginning."""
    run(
        "train", "--config", args.config, "--tokens", args.tokens, "--seq-len", str(args.seq_len),
        "--batch-size", str(args.batch_size), "--accumulate", "1", "--total-steps", str(args.steps),
        "--log-every", str(WARM_STEPS), "--checkpoint-every", "1000000", "--run-dir", str(folder / "run"),
    )  # fmt: skip
    lines = [line for line in JsonLines.read(folder / "run/metrics.jsonl") if line["kind"] == "train"]
    return [{name: line[name] for name in KEPT if name in line} for line in lines if line["step"] > WARM_STEPS]


def bench_step(args: argparse.Namespace, folder: Path, *more: str) -> dict:
    """The JSON of `bench step`."""
    output = folder / "step.md"
    run(
        "bench", "step", "--config", args.config, "--batch-size", str(args.batch_size), "--seq-len", str(args.seq_len),
        "--accumulate", "1", "--output", str(output), "--seconds", str(args.seconds),
        "--bursts", str(BURSTS), *more,
    )  # fmt: skip
    return json.loads((folder / "data/step.json").read_text())


def of_card(lines: list[dict]) -> str:
    """The card's mean power and temperature at the log lines, as far as they are known."""
    units = {"card_w": "{:.0f} W", "card_c": "{:.0f} °C"}
    known = {name: [line[name] for line in lines if name in line] for name in units}
    means = [units[name].format(statistics.mean(values)) for name, values in known.items() if values]
    return f" Meanwhile the card was at {' and '.join(means)} in the mean." if means else ""


def shares(medians: dict[str, float]) -> str:
    """What the run reaches of each of the others."""
    return " and ".join(f"{medians['train'] / of:.1%} of `{name}`" for name, of in medians.items() if name != "train")


def markdown(result: dict, source: str) -> str:
    """docs/train-rate.md."""
    medians = {name: statistics.median(rates) for name, rates in result["tok_per_s"].items()}
    rows = [
        [name, *(f"{rate:,.0f}" for rate in rates), f"{medians[name]:,.0f}"]
        for name, rates in result["tok_per_s"].items()
    ]
    turns = [f"turn {i + 1}" for i in range(len(rows[0]) - 2)]
    lines = [
        "# A run against its step", "",
        f"`{result['config']}` at {result['batch_size']} x {result['seq_len']}, tokens a second. `train` reads a real "
        f"corpus for {result['steps']} steps; its figure is the median of its log lines. {headline(result['machine'])}",
        "", *table(["", *turns, "median"], rows), "",
        f"`train` reaches {shares(medians)}; it waited {result['median_data_ms_a_line']:.2f} ms "
        f"for data between two log lines, 20 steps.{of_card(sum(result.get('train_lines', []), []))}", "",
        f"Made by `scripts/bench/train_rate.py` from [{source}]({source}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/102m.toml")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=5, help="length of a burst of `bench step`")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    machine, runs = describe(True), list[list[dict]]()
    steps: dict[str, list[str]] = {"bench step": [], "bench step --tokens": ["--tokens", args.tokens]}
    bursts: dict[str, list[list[float]]] = {name: [] for name in steps}
    rates: dict[str, list[float]] = {name: [] for name in ("train", *steps)}
    for turn in range(args.rounds):
        for i in rotation(len(rates), turn):
            name = list(rates)[i]
            with tempfile.TemporaryDirectory() as folder:
                if name == "train":
                    runs.append(train_lines(args, Path(folder)))
                    rates[name].append(statistics.median(line["tok_per_s"] for line in runs[-1]))
                else:
                    step = bench_step(args, Path(folder), *steps[name])
                    bursts[name].append(step["burst_step_ms"])
                    rates[name].append(1e3 * step["tokens_per_step"] / statistics.median(bursts[name][-1][1:]))
            print(f"{name}: {rates[name][-1]:,.0f} tok/s", flush=True)
    result = {
        "config": args.config, "batch_size": args.batch_size, "seq_len": args.seq_len, "steps": args.steps,
        "tok_per_s": rates, "median_data_ms_a_line": statistics.median(line["data_ms"] for line in sum(runs, [])),
        "train_lines": runs, "burst_step_ms": bursts, "machine": machine,
    }  # fmt: skip
    print(f"train reaches {shares({name: statistics.median(of_arm) for name, of_arm in rates.items()})}")
    if args.output:
        write_page(args.output, result, markdown)


if __name__ == "__main__":
    main()

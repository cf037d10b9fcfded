"""Is a pilot run fit to be made long? Its loss is smooth and still falls, its rate is what was promised, its samples
are no loop.

    python scripts/corpus/verdict.py RUN [--tok-per-s 640000] [--prompt TEXT ...]

Prints one line a question and exits 0 where all hold, 1 otherwise. Without --tok-per-s the rate is not judged: take it
from `llmtrain sweep` or `llmtrain bench step` on the same card, shape and batch.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmtrain.storage.journal import JsonLines  # noqa: E402

JUMP = 0.3
"""Nats that a log line may lie above the median of its neighbours."""
NEIGHBOURS = 5
"""Lines on either side."""
FALLS = 0.005
"""Nats at least that the last fifth of the run lies below the fifth before it."""
RATE = 0.95
"""Share of the promised rate."""
DISTINCT = 0.5
"""Share of a sample's 4-grams of words that are different, at least: a loop repeats a few."""
PROMPTS = ("def main(", "The theorem states that", "import ")


def jumps(losses: list[float]) -> list[int]:
    """The places that lie above their neighbours by more than JUMP."""
    found = []
    for i, loss in enumerate(losses):
        around = losses[max(0, i - NEIGHBOURS) : i] + losses[i + 1 : i + 1 + NEIGHBOURS]
        if around and loss - statistics.median(around) > JUMP and i >= NEIGHBOURS:
            found.append(i)
    return found


def fall(losses: list[float]) -> float:
    """How far the last fifth's mean lies below that of the fifth before it."""
    n = max(1, len(losses) // 5)
    return statistics.mean(losses[-2 * n : -n]) - statistics.mean(losses[-n:])


def distinct(text: str) -> float:
    """Share of different 4-grams of words; 1 for a text too short to have any."""
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def sample(run: Path, prompt: str) -> str:
    command = [
        sys.executable, "-m", "llmtrain", "generate", "--run-dir", str(run), "--prompt", prompt, "--max-new-tokens",
        "200", "--seed", "1",
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tok-per-s", type=float)
    parser.add_argument("--prompt", action="append")
    args = parser.parse_args()
    lines = [line for line in JsonLines.read(args.run / "metrics.jsonl") if line["kind"] == "train"]
    if len(lines) < 5 * NEIGHBOURS:
        parser.error(f"{args.run} has {len(lines)} train lines: {5 * NEIGHBOURS} or more tell something")
    losses = [line["lm_loss"] for line in lines]
    answers = []

    def answer(holds: bool, text: str) -> None:
        answers.append(holds)
        print("ok  " if holds else "FAIL", text, flush=True)

    where = [lines[i]["step"] for i in jumps(losses)]
    answer(not where, "the loss is smooth" if not where else f"the loss jumps at the lines of steps {where[:10]}")
    answer(fall(losses) >= FALLS, f"the loss still falls: by {fall(losses):.4f} nats from fifth to fifth at the end")
    if args.tok_per_s:
        rate = statistics.median(line["tok_per_s"] for line in lines[1:])
        share = rate / args.tok_per_s
        answer(share >= RATE, f"{rate:,.0f} tokens a second, {share:.1%} of what was promised")
    for prompt in args.prompt or PROMPTS:
        share = distinct(sample(args.run, prompt))
        answer(share >= DISTINCT, f"{share:.0%} of the 4-grams after {prompt!r} are different")
    sys.exit(0 if all(answers) else 1)


if __name__ == "__main__":
    main()

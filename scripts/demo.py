"""The product from end to end on this machine, in minutes: text, tokenizer, token file, a training run that is
interrupted and goes on, its loss on text held out, and code that the model wrote. `make demo` runs it.

The text is the source of Python's standard library, which every machine with Python has. What the demo makes lies in
data/demo and runs/demo, which it empties when it begins; runs/demo/demo.json records what it measured, and on what.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path

from llmtrain.benchmark.machine import card_state, describe

ROOT = Path(__file__).parents[1]
TEXT, RUN, CONFIG = Path("data/demo/text"), Path("runs/demo"), Path("configs/demo.toml")
TOKENIZER, TOKENS, HELD_OUT = Path("data/demo/tokenizer.json"), Path("data/demo/corpus.u16"), "data/demo/corpus.val.u16"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LEAST_TEXT = 10_000_000
LIMIT = 0.6


def main() -> None:
    os.chdir(ROOT)
    machine = describe(on_card=card_state() is not None)
    begin = time.monotonic()
    for made in (TEXT.parent, RUN):
        shutil.rmtree(made, ignore_errors=True)
    gather()
    llmtrain("train-tokenizer", "--input", TEXT, "--output", TOKENIZER, "--vocab-size", 2048)
    llmtrain("tokenize-corpus", "--input", TEXT, "--tokenizer", TOKENIZER, "--output", TOKENS, "--holdout", 0.05)
    train = ("train", "--config", CONFIG, "--run-dir", RUN)
    llmtrain(*train, stop_at=tomllib.loads(CONFIG.read_text())["schedule"]["total_steps"] // 2)
    llmtrain(*train, "--resume")
    llmtrain("evaluate", "--run-dir", RUN, "--tokens", HELD_OUT)
    llmtrain("generate", "--run-dir", RUN, "--prompt", "def read_file(path", "--max-new-tokens", 160, "--seed", 1)
    seconds = time.monotonic() - begin
    record = {"machine": machine, "seconds": seconds, "validation": lines("eval")}
    (RUN / "demo.json").write_text(json.dumps(record, indent=1) + "\n")
    check_losses()
    print(f"The demo took {seconds:.0f} s.")


def gather() -> None:
    """Copies the sources of the standard library to TEXT, without its tests, which some distributions leave out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = size = 0
    for source in sorted(library.rglob("*.py")):
        place = source.relative_to(library)
        if LEFT_OUT & set(place.parts):
            continue
        data = source.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        (TEXT / place).parent.mkdir(parents=True, exist_ok=True)
        (TEXT / place).write_bytes(data)
        files, size = files + 1, size + len(data)
    print(f"{files} files, {size / 1e6:.1f} MB of Python from {library} lie in {TEXT}", flush=True)
    if size < LEAST_TEXT:
        sys.exit(f"demo: {library} holds less than {LEAST_TEXT / 1e6:.0f} MB of source: is it complete?")


def llmtrain(*args: object, stop_at: int | None = None) -> None:
    """Runs a command and ends the demo unless it finishes (exit 0); with `stop_at` sends it SIGTERM once it has logged
    that step, and then it must have saved its state (exit 75)."""
    words = [str(arg) for arg in args]
    print("\n$ llmtrain", shlex.join(words), flush=True)
    process = subprocess.Popen([sys.executable, "-m", "llmtrain", *words])
    if stop_at is not None:
        while process.poll() is None and last_step() < stop_at:
            time.sleep(0.2)
        print(f"$ kill -TERM {process.pid}", flush=True)
        process.send_signal(signal.SIGTERM)
    code, expected = process.wait(), 0 if stop_at is None else 75
    if code != expected:
        sys.exit(f"demo: `llmtrain {words[0]}` ended with exit code {code}, not {expected}")


def lines(kind: str) -> list[dict]:
    try:
        whole = (RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in whole if line.endswith("\n")]
    return [line for line in found if line["kind"] == kind]


def last_step() -> int:
    return max((line["step"] for line in lines("train")), default=0)


def check_losses() -> None:
    losses = [line["val_loss"] for line in lines("eval")]
    if len(losses) < 2:
        sys.exit(f"demo: {RUN}/metrics.jsonl holds {len(losses)} validations; a first and a last one are needed")
    share = losses[-1] / losses[0]
    print(f"\nThe validation loss went from {losses[0]:.3f} to {losses[-1]:.3f}, which is {share:.0%} of the first.")
    if not share < LIMIT:
        sys.exit(f"demo: the last validation loss should be under {LIMIT:.0%} of the first")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")

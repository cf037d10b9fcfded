"""What a checkpoint costs the training: the delay of each save, tokens a second with and without saves, and its bits.

    python scripts/bench/save_delay.py [--tokens data/corpus.u16] --output docs/save-delay.md

`llmtrain train` runs with saves and without in turns, each in a process of its own; the rate is that of the whole span
between two log lines, so everything that a save costs is in it, what its thread takes of the processor too. Without
--tokens the corpus is random. Then, in this process: a snapshot whose next update comes at once must hold the bits of a
copy that was made before in the update's own stream, and without the wait it must not; and runs with --deterministic
that save often and never must end in the same files. Exits 1 where a bound does not hold. `--smoke` does it all with a
small model, on the CPU too, where the delay is not judged.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from models import MODEL_102M, MODEL_SMOKE

from llmtrain.benchmark.config import Shape, TimingConfig
from llmtrain.benchmark.data import write_random_tokens
from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.step import LEARNING_RATE, TimedSteps
from llmtrain.benchmark.tables import figure, table, write_page
from llmtrain.model.config import ModelConfig
from llmtrain.storage.journal import JsonLines
from llmtrain.training import checkpoint
from llmtrain.training.devices import pick_device
from llmtrain.training.snapshot import Snapshot

BOUND_MS = 20.0
"""What a save may delay training by."""
def model_options(model: ModelConfig) -> list[str]:
    names = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_seq_len")
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(model, name)))]


def train(args: argparse.Namespace, run_dir: Path, steps: int, every: int, *more: str) -> list[dict]:
    """The lines of metrics.jsonl."""
    command = [
        sys.executable, "-m", "llmtrain", "train", "--tokens", args.tokens, "--run-dir", str(run_dir),
        *model_options(args.model), "--seq-len", str(args.seq_len), "--batch-size", str(args.batch_size),
        "--total-steps", str(steps), "--warmup-steps", "10", "--log-every", str(args.log_every),
        "--checkpoint-every", str(every), "--keep-checkpoints", "2", *more,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return list(JsonLines.read(run_dir / "metrics.jsonl"))


def rate(lines: list[dict], args: argparse.Namespace) -> float:
    """Tokens a second between the first log line and the last but one: all saves but the last are in the span, and with
    the default intervals the writing of each."""
    at = {line["step"]: (line["time"], line["tokens"]) for line in lines if line["kind"] == "train"}
    (begin, before), (end, after) = at[args.log_every], at[args.steps - args.log_every]
    return (after - before) / (end - begin)


def same_bits(shape: Shape, folder: Path, hold: bool) -> bool:
    """Whether a snapshot, and its checkpoint, hold what there was before the update that follows at once. hold: the
    update waits for the copy, as it has to."""
    device = pick_device("auto")
    steps = TimedSteps(shape, TimingConfig(), device)
    step = steps.step
    snapshot = Snapshot(step.flat, step.optimizer)
    sources = {name: stretch.buffer for name, stretch in step.optimizer.large.items()}
    same = True
    for _ in range(3):
        steps()
        steps()
        # In the stream of the training, between the updates, and without a wait of the host.
        expected = {name: source.clone() for name, source in sources.items()}
        event = snapshot.take()
        step.reader = event if hold else None
        step.optimizer_step(10 * LEARNING_RATE)  # no micro-step between: the copy has only just begun
        checkpoint.save(folder, 1, snapshot, {"config": {}})
        for name, stretch in snapshot.large.items():
            same &= torch.equal(stretch.buffer, expected[name].cpu())
        assert not torch.equal(step.flat.master.cpu(), expected["weight"].cpu()), "the update changed nothing"
        checkpoint.load(checkpoint.folder_of(folder, 1), step.flat, step.optimizer)
        spans = step.flat.spans
        same &= all(
            torch.equal(step.flat.view(sources[kind], name), step.flat.view(expected[kind], name))
            for kind in sources for name in spans
        )  # fmt: skip
    snapshot.close()
    return same


def hashes(run_dir: Path, step: int) -> dict[str, str]:
    files = json.loads((checkpoint.folder_of(run_dir, step) / checkpoint.MANIFEST).read_text())["files"]
    return {name: files[name]["sha256"] for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)}


def markdown(result: dict, source: str) -> str:
    """docs/save-delay.md."""
    rows = [
        [
            str(i), figure(save["host_ms"], ".2f"), figure(save["device_ms"], ".2f"), f"{save['delay_ms']:.2f}",
            f"{save['seconds']:.2f}",
        ]
        for i, save in enumerate(result["saves"], 1)
    ]  # fmt: skip
    rates = [
        [name, *(f"{value:,.0f}" for value in values), f"{statistics.median(values):,.0f}"]
        for name, values in result["tok_per_s"].items()
    ]
    turns = [f"turn {i + 1}" for i in range(len(rates[0]) - 2)]
    checks = [[name, "yes" if holds else "**no**"] for name, holds in result["checks"].items()]
    lines = [
        "# What a save costs", "",
        f"{result['model']} at {result['batch_size']} x {result['seq_len']}, a checkpoint of "
        f"{result['bytes'] / 1e9:.2f} GB every {result['save_every']} steps. {headline(result['machine'])}", "",
        "Delay of the training by each save: the host's time in it, and what the next update waited on the device, by "
        "events. The checkpoint is written beside the training.", "",
        *table(["save", "host ms", "device ms", "delay ms", "written in s"], rows), "",
        f"Tokens a second over the same {result['span']} steps, in which {result['saves_in_span']} saves are begun and "
        "written:", "", *table(["", *turns, "median"], rates), "",
        f"With saves a run reaches {result['ratio']:.2%} of one without.", "",
        *table(["check", "holds"], checks), "",
        f"Made by `scripts/bench/save_delay.py` from [{source}]({source}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="token file; default: random tokens")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=80)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written; default: the temporary folder")
    parser.add_argument("--output", type=Path, help="Markdown; its JSON goes to data/ beside it")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.model = MODEL_SMOKE if args.smoke else MODEL_102M
    if args.smoke:
        args.batch_size, args.seq_len, args.steps, args.save_every, args.log_every = 2, 64, 40, 10, 5
    on_card = torch.cuda.is_available()
    machine = describe(on_card)
    rates: dict[str, list[float]] = {"without saves": [], "with saves": []}
    saves: list[dict] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.tokens is None:
            args.tokens = str(folder / "random.u16")
            write_random_tokens(Path(args.tokens), args.model.vocab_size, args.batch_size * args.seq_len * 50)
        for turn in range(args.rounds):
            for arm, every in (("without saves", 10**6), ("with saves", args.save_every)):
                lines = train(args, folder / f"{turn}-{every}", args.steps, every)
                rates[arm].append(rate(lines, args))
                events = [line for line in lines if line.get("event") == "checkpoint" and line["step"] < args.steps]
                saves += [{k: e[k] for k in ("step", "seconds", "delay_ms", "host_ms", "device_ms")} for e in events]
                print(f"{arm}: {rates[arm][-1]:,.0f} tok/s", *(f"{e['delay_ms']:.2f} ms" for e in events), flush=True)

        # Losing to a race takes a copy that is slower than the launch of an update: on a card, not on a CPU.
        shape = Shape(args.model, 2 if args.smoke else 8, args.seq_len)
        bits = folder / "bits"
        bits.mkdir()
        checks = {"a snapshot holds the bits from before the next update": same_bits(shape, bits, hold=True)}
        if on_card:
            raced = not same_bits(shape, bits, hold=False)
            checks["without the wait it does not, so the check can fail"] = raced
            worst = max(save["delay_ms"] for save in saves)
            checks[f"every save delays training by under {BOUND_MS:g} ms (worst {worst:.2f})"] = worst < BOUND_MS
        ends = []
        for every in (3, 10**6):
            train(args, folder / f"bits-{every}", 21, every, "--deterministic")
            ends.append(hashes(folder / f"bits-{every}", 21))
        checks["runs that save every 3 steps and never end in the same bits (--deterministic)"] = ends[0] == ends[1]
        size = sum(p.stat().st_size for p in checkpoint.folder_of(folder / "bits-3", 21).iterdir())

    for check, holds in checks.items():
        print("ok  " if holds else "FAIL", check)
    ratio = statistics.median(rates["with saves"]) / statistics.median(rates["without saves"])
    print(f"with saves {ratio:.2%} of the rate without")
    if args.output:
        result = {
            "model": "small model" if args.smoke else "102M model", "batch_size": args.batch_size,
            "seq_len": args.seq_len, "steps": args.steps, "save_every": args.save_every, "bytes": size,
            "span": args.steps - 2 * args.log_every, "saves_in_span": len(saves) // args.rounds, "saves": saves,
            "tok_per_s": rates, "ratio": ratio, "checks": checks, "machine": machine,
        }  # fmt: skip
        write_page(args.output, result, markdown)
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()

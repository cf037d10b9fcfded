"""How much longer a checkpoint takes than its bytes: a save against plain write and fsync, a load against plain read.

    python scripts/bench/checkpoint.py [--rounds 7] [--folder .] [--output docs/data/checkpoint.json]

The model is dense, of 55 million parameters, on the CPU; weights and both moments are saved. Reads are cold: the files'
pages are dropped first (a virtual disk may still hold them in its host's memory).
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from plain_io import drop_cache, plain_read, plain_write, timed

from llmtrain.benchmark.machine import describe
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import parameter_counts
from llmtrain.model.transformer import Transformer
from llmtrain.storage import atomic
from llmtrain.training import checkpoint
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.flat import FlatParameters
from llmtrain.training.optimizer import AdamW
from llmtrain.training.snapshot import Snapshot

CONFIG = ModelConfig(vocab_size=32000, d_model=640, n_layers=8, n_heads=10, n_kv_heads=2, d_ff=1760, max_seq_len=1024)


def measure(folder: Path, rounds: int) -> dict:
    model = Transformer(CONFIG, device="meta")
    flat = FlatParameters(model, "cpu", torch.float32)
    optimizer = AdamW(flat, OptimizerConfig())
    buffers = [flat.master, optimizer.exp_avg, optimizer.exp_avg_sq]
    for buffer in buffers:
        buffer.normal_()
    snapshot = Snapshot(flat, optimizer)
    views = [buffer.view(torch.uint8).numpy().data for buffer in buffers]
    plain, run = folder / "plain.bin", folder / "run"
    saved = checkpoint.folder_of(run, 1)
    seconds: dict[str, list[float]] = {"plain write": [], "save": [], "plain read": [], "load": []}
    for turn in range(rounds + 1):  # the first warms up
        plain.unlink(missing_ok=True)
        atomic.remove_tree(run)
        run.mkdir()
        os.sync()
        times = {"plain write": timed(lambda: plain_write(plain, views))}
        os.sync()
        times["save"] = timed(lambda: (snapshot.take(), checkpoint.save(run, 1, snapshot, {})))
        if turn:
            for name, value in times.items():
                seconds[name].append(value)
    os.sync()  # reads come after all writes: a disk that is still busy with those would be measured
    for turn in range(rounds + 1):
        for path in (plain, *saved.iterdir()):
            drop_cache(path)
        times = {"plain read": timed(lambda: plain_read(plain, views))}
        times["load"] = timed(lambda: checkpoint.load(saved, flat, optimizer))
        if turn:
            for name, value in times.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "parameters": parameter_counts(CONFIG).total,
        "model_file_bytes": (saved / checkpoint.MODEL).stat().st_size,
        "bytes": sum(view.nbytes for view in views),
        "seconds": medians,
        "save_ratio": medians["save"] / medians["plain write"],
        "load_ratio": medians["load"] / medians["plain read"],
        "machine": describe(False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), args.rounds)
    print(f"{result['parameters']:,} parameters, {result['bytes'] / 1e6:.0f} MB")
    print(f"save {result['seconds']['save']:.2f} s, {result['save_ratio']:.2f} times the plain write")
    print(f"load {result['seconds']['load']:.2f} s, {result['load_ratio']:.2f} times the plain read")
    if args.output:
        atomic.write_json(args.output, result)


if __name__ == "__main__":
    main()

"""How much longer a tensor file takes than its bytes: write against plain write and fsync, read against plain read.

    python scripts/bench/storage.py [--megabytes 220] [--rounds 7] [--folder .] [--output FILE.json]

The arms take turns, and their medians are compared; each has a twin, whose ratio to it is the noise of the method.
Reads are cold: the file's pages are dropped first (a virtual disk may still hold them in its host's memory).
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

from plain_io import drop_cache, plain_read, plain_write, timed

from llmtrain.storage import tensors

N_TENSORS = 60  # about as many as a small model has


def careful_write(path: Path, views: list[memoryview]) -> None:
    """The bytes under a temporary name, fsync, rename: what any careful program does."""
    partial = path.with_suffix(".partial")
    plain_write(partial, views)
    os.replace(partial, path)


def measure(folder: Path, megabytes: int, rounds: int) -> dict:
    """Medians in seconds, and the ratios."""
    size = megabytes * 1_000_000 // N_TENSORS // 4 * 4
    views = [memoryview(bytearray(os.urandom(size))) for _ in range(N_TENSORS)]
    entries = {f"layer.{i}": tensors.TensorEntry("F32", (size // 4,), view) for i, view in enumerate(views)}
    buffers = {name: memoryview(bytearray(size)) for name in entries}
    plain, ours = folder / "plain.bin", folder / "ours.safetensors"
    writes = {
        "plain": lambda: careful_write(plain, views),
        "tensors.write": lambda: tensors.write(ours, entries),
        "plain twin": lambda: careful_write(plain, views),
    }
    reads = {
        "plain": (plain, lambda: plain_read(plain, list(buffers.values()))),
        "tensors.read_into": (ours, lambda: tensors.read_into(ours, buffers)),
        "plain twin": (plain, lambda: plain_read(plain, list(buffers.values()))),
    }
    seconds: dict[str, dict[str, list[float]]] = {"write": {n: [] for n in writes}, "read": {n: [] for n in reads}}
    for turn in range(rounds + 1):  # the first warms up
        for name, write in writes.items():
            for old in (plain, ours):
                old.unlink(missing_ok=True)
            os.sync()
            took = timed(write)
            if turn:
                seconds["write"][name].append(took)
    careful_write(plain, views)
    tensors.write(ours, entries)
    for turn in range(rounds + 1):
        for name, (path, read) in reads.items():
            drop_cache(path)
            took = timed(read)
            if turn:
                seconds["read"][name].append(took)
    medians = {kind: {n: statistics.median(s) for n, s in arms.items()} for kind, arms in seconds.items()}
    return {
        "megabytes": megabytes,
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "seconds": medians,
        "write_ratio": medians["write"]["tensors.write"] / medians["write"]["plain"],
        "write_noise": medians["write"]["plain twin"] / medians["write"]["plain"],
        "read_ratio": medians["read"]["tensors.read_into"] / medians["read"]["plain"],
        "read_noise": medians["read"]["plain twin"] / medians["read"]["plain"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=220, help="bytes of tensors, in 10^6")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="where to put the JSON as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as folder:
        result = measure(Path(folder), options.megabytes, options.rounds)
    for kind, arms in result["seconds"].items():
        for name, took in arms.items():
            print(f"{kind:5} {name:18} {took:7.3f} s  {options.megabytes / took / 1000:6.2f} GB/s")
    print(f"write: {result['write_ratio']:.2f}x of plainly writing and fsyncing (twin {result['write_noise']:.2f}x)")
    print(f"read:  {result['read_ratio']:.2f}x of plainly reading, cold (twin {result['read_noise']:.2f}x)")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Packs real text for experiments into one compressed file that travels: a keyed sample of documents, without doubles.

    python scripts/experiments/corpus.py --input FOLDER [--input FOLDER ...] [--suffix .py ...] [--bytes 250MB]

A file of text is a document. They are taken in the order of the hash of their text, so the same inputs give the same
file, whatever their names.
"""

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from llmtrain.storage.manifest import sha256_file
from llmtrain.storage.units import in_bytes

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def documents(paths: list[Path], suffixes: tuple[str, ...]) -> Iterator[bytes]:
    """Files as documents, in no particular order; what is no UTF-8 or nearly empty is left out."""
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*"):
            if not file.is_file() or file.is_symlink() or (suffixes and file.suffix not in suffixes):
                continue
            data = file.read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            if len(text.strip()) >= 64 and "\0" not in text:
                yield data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, action="append", required=True, help="file or folder; repeat it")
    parser.add_argument("--suffix", action="append", default=[], help="of files to take, such as .py; default: all")
    parser.add_argument("--bytes", default="250MB", help="of text to take at most")
    parser.add_argument("--longest", type=int, default=1 << 20, help="bytes of a document beyond which it is left out")
    parser.add_argument("--output", type=Path, default=Path("data/experiments/text.jsonl.gz"))
    args = parser.parse_args()
    budget = int(float(args.bytes[:-2]) * UNITS[args.bytes[-2:]])
    order: dict[bytes, tuple[int, bytes]] = {}
    for data in documents(args.input, tuple(args.suffix)):
        if len(data) <= args.longest:
            order.setdefault(hashlib.sha256(data).digest(), (len(data), data))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    taken = count = 0
    with open(args.output, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as out:
        for digest in sorted(order):
            size, data = order[digest]
            if taken + size > budget:
                continue
            taken, count = taken + size, count + 1
            out.write(json.dumps({"text": data.decode()}, ensure_ascii=False).encode() + b"\n")
    print(
        f"{args.output}: {count:,} documents, {in_bytes(taken)} of text in {in_bytes(args.output.stat().st_size)}, "
        f"sha256 {sha256_file(args.output)}"
    )


if __name__ == "__main__":
    main()

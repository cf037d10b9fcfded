"""Documents stored in the forms that text comes in."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import zstandard
from pyarrow import parquet

# How bytes are stored: a name's ending, and pieces of the bytes into members or frames.
STORED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, 1, mtime=0),
    ".zst": zstandard.ZstdCompressor(1, write_checksum=True).compress,
}


def store(path: Path, data: bytes, suffix: str, cuts: Sequence[int] = ()) -> Path:
    """Writes `data`, cut at the places `cuts`, each part a member of its own."""
    path = path.with_name(path.name + suffix)
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    path.write_bytes(b"".join(STORED[suffix](data[a:b]) for a, b in zip([0, *ends], ends, strict=False)))
    return path


def json_lines(documents: Sequence[str], field: str = "text") -> bytes:
    lines = []
    for number, text in enumerate(documents):
        record: Any = text
        for name in reversed(field.split(".")):
            record = {"id": number, name: record}
        lines.append(json.dumps(record, ensure_ascii=number % 2 == 0))
    return "".join(line + "\n" for line in lines).encode()


def write_parquet(path: Path, documents: Sequence[str | None], field: str = "text", rows: int = 3) -> Path:
    columns: Any = pa.array(documents, pa.string())
    outer, *inner = field.split(".")
    for name in reversed(inner):
        columns = pa.StructArray.from_arrays([columns], [name])
    parquet.write_table(pa.table({"id": range(len(documents)), outer: columns}), path, row_group_size=rows)
    return path

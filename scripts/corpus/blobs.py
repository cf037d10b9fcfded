"""The text of the blobs that a Parquet file names, as JSON Lines on stdout, in the file's order.

    python scripts/corpus/blobs.py hf://datasets/bigcode/the-stack-v2-dedup/data/Python/train-00000-of-00064.parquet

The Stack v2 and python-edu name files of the Software Heritage archive, one gzip object each. They are fetched some
dozens at a time and never stored. A blob that is not there is counted and left out; the archive being out of reach ends
the program with 74, and what was printed is then no whole shard.
"""

import argparse
import gzip
import json
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow.parquet

ATTEMPTS = 6
ROWS = 1024


def fetch(url: str) -> bytes | None:
    """The object's bytes; None where it is not there. Raises OSError when it cannot be had after some attempts."""
    if "://" not in url:
        return Path(url).read_bytes() if Path(url).exists() else None
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code in (403, 404):
                return None
        except OSError:
            pass
        time.sleep(2**attempt)
    raise OSError(f"{url}: not to be had in {ATTEMPTS} attempts")


def text_of(archive: str, blob_id: str, encoding: str | None) -> str | None:
    """A blob as text; None where it is not there or not what its row says."""
    stored = fetch(f"{archive}/{blob_id}")
    try:
        return None if stored is None else gzip.decompress(stored).decode(encoding or "utf-8")
    except (UnicodeDecodeError, LookupError, gzip.BadGzipFile, EOFError):
        return None


def rows(url: str) -> Iterator[tuple[str, str | None]]:
    """(blob_id, src_encoding) of each row."""
    with fsspec.open(url).open() as file:
        table = pyarrow.parquet.ParquetFile(file)
        names = [name for name in ("blob_id", "src_encoding") if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=ROWS, columns=names):
            columns = batch.to_pydict()
            yield from zip(columns["blob_id"], columns.get("src_encoding", [None] * len(batch)), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet")
    parser.add_argument("--archive", required=True, help="where the blobs are: a URL or a folder")
    parser.add_argument("--connections", type=int, default=64)
    args = parser.parse_args()
    missing = 0
    waiting: deque[Future[str | None]] = deque()

    def say(text: str | None) -> int:
        if text is not None:
            print(json.dumps({"text": text}))
        return text is None

    try:
        with ThreadPoolExecutor(args.connections) as pool:
            for blob_id, encoding in rows(args.parquet):
                waiting.append(pool.submit(text_of, args.archive, blob_id, encoding))
                if len(waiting) >= 4 * args.connections:
                    missing += say(waiting.popleft().result())
            while waiting:
                missing += say(waiting.popleft().result())
    except BrokenPipeError:
        sys.exit(74)  # the reader has said why it left
    except OSError as error:
        print(f"blobs.py: {error}", file=sys.stderr)
        sys.exit(74)
    if missing:
        print(f"blobs.py: {args.parquet}: {missing} blobs are not there", file=sys.stderr)


if __name__ == "__main__":
    main()

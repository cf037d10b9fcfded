"""A mixture of public data sets, shard by shard into token files: text never lies on the disk.

    python scripts/corpus/stream.py scripts/corpus/code-70-20-10.toml [--tokens 50B] [--disk 120GB] [--hub FOLDER]

Sources are taken in turns, always the one that is furthest behind its share, until the tokens are there or the disk's
budget would be passed. Killed at any moment, the same command goes on: a shard is in its token file once, whole. Ends
with the `llmtrain train` command for what was made. `--hub FOLDER` reads a folder that is laid out as the hub is, in
place of hf://datasets/, and FOLDER/content in place of the archive of blobs.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from llmtrain.corpus.inputs import find_inputs  # noqa: E402
from llmtrain.storage.errors import LlmtrainError, StorageFailure, UsageError  # noqa: E402

HUB = "hf://datasets/"
ARCHIVE = "https://softwareheritage.s3.amazonaws.com/content"
UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def number(text: str) -> int:
    """"2.5B" or "120GB" as a number."""
    digits = text.upper().removesuffix("B") if text[-2:-1].isalpha() else text.upper()
    factor = UNITS.get(digits[-1:], 1)
    try:
        value = float(digits.rstrip("KMGBT")) * factor
    except ValueError:
        raise UsageError(f"{text!r} is no number: write it like 2.5B or 120GB") from None
    if not value > 0:
        raise UsageError(f"{text} must be above 0")
    return round(value)


@dataclass(frozen=True)
class Source:
    """One [[source]] of a recipe."""

    name: str
    """Of its token file."""
    share: float
    """Of the mixture's tokens."""
    inputs: tuple[str, ...]
    """Files of the data set, globs too."""
    text_field: str = "text"
    """Field that holds the text."""
    blobs: bool = False
    """The rows name blobs of the Software Heritage archive (blob_id, src_encoding) instead of holding text."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {self.share}")


class Output:
    """A source's token file, and which of its shards are in it."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.source = source
        self.path = folder / f"{source.name}.u16"
        self.work = folder / f".{source.name}.u16.partial"
        self.ledger = folder / f"{source.name}.shards.jsonl"

    def tokens(self) -> int:
        """Held-out ones aside."""
        manifest = self.path.with_name(self.path.name + ".json")
        return json.loads(manifest.read_text())["tokens"] if manifest.exists() else 0

    def note(self, **line: Any) -> None:
        with self.ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> tuple[set[str], dict[str, Any]]:
        """(shards that are in the token file, what was begun and has no end in the ledger, or nothing). The file may
        have all of the begun one, where it has grown since and nothing is in work: shards are added whole."""
        done: set[str] = set()
        begun: dict[str, Any] = {}
        for text in self.ledger.read_text().splitlines() if self.ledger.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # torn by a power cut: the line that told what began before it is whole
            done |= {line["done"]} if "done" in line else set()
            begun = {} if "done" in line else line
        if begun and not self.work.exists():
            done |= {begun["begin"]} if self.tokens() != begun["tokens"] else set()
            begun = {}
        return done, begun

    def add(self, shard: str, tokenizer: str, archive: str, arguments: list[str], begun: dict[str, Any]) -> None:
        """Tokenizes one shard into the file; `begun` is what `read` gave for one that was killed, which the command
        that it was goes on with. Raises StorageFailure, or SystemExit with what the command ended with."""
        append = begun.get("append", self.path.exists())
        if not begun:
            self.note(begin=shard, tokens=self.tokens(), append=append)
        command = [
            sys.executable, "-m", "llmtrain", "tokenize-corpus", "--tokenizer", tokenizer, "--output", str(self.path),
            "--on-bad", "skip", "--text-field", self.source.text_field, *arguments, *["--append"] * append,
        ]  # fmt: skip
        if not self.source.blobs:
            code = subprocess.run([*command, "--input", shard]).returncode
        else:
            fetch = [sys.executable, str(HERE / "blobs.py"), shard, "--archive", archive]
            with subprocess.Popen(fetch, stdout=subprocess.PIPE) as fetcher:
                code = subprocess.run([*command, "--input", "-", "--format", "jsonl"], stdin=fetcher.stdout).returncode
                fetcher.stdout.close()  # type: ignore[union-attr]
                if fetcher.wait() and not code:
                    raise StorageFailure(f"{shard}: its blobs could not all be had: run the command again")
        if code:
            raise SystemExit(code)  # the command has said why
        self.note(done=shard)


def read_recipe(path: Path) -> tuple[dict[str, Any], list[Source]]:
    """Raises UsageError."""
    try:
        recipe = tomllib.loads(path.read_text())
        sources = [Source(**{**table, "inputs": tuple(table["inputs"])}) for table in recipe.pop("source")]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: is no recipe ({error!r})") from None
    total = sum(source.share for source in sources)
    if abs(total - 1) > 1e-6:
        raise UsageError(f"{path}: the shares add up to {total:g}, not 1: put them right")
    return recipe, sources


def used(folder: Path) -> int:
    """Bytes in the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stream(recipe_path: Path, tokens: int | None, disk: int | None, hub: Path | None) -> None:
    recipe, sources = read_recipe(recipe_path)
    wanted = tokens or number(str(recipe["tokens"]))
    budget = disk or number(str(recipe["disk"]))
    folder = Path(recipe["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    root, archive = (f"{hub}/", str(hub / "content")) if hub else (HUB, ARCHIVE)
    outputs = [Output(folder, source) for source in sources]
    arguments = recipe["tokenizer"], archive, list(recipe.get("arguments", []))
    left: dict[str, list[str]] = {}
    for output in outputs:
        names = [name.replace(HUB, root, 1) for name in output.source.inputs]
        done, begun = output.read()
        if begun:
            output.add(begun["begin"], *arguments, begun)
            done.add(begun["begin"])
        left[output.source.name] = [one.name for one in find_inputs(names) if one.name not in done]
    largest = 0  # bytes that a shard added, at most so far
    while True:
        open_ = [o for o in outputs if left[o.source.name] and o.tokens() < wanted * o.source.share]
        if not open_:
            break
        if used(folder) + largest > budget:
            print(f"{folder} holds {used(folder):,} bytes: another shard might pass the budget of {budget:,}")
            break
        output = min(open_, key=lambda o: o.tokens() / o.source.share)
        shard = left[output.source.name].pop(0)
        share = round(wanted * output.source.share)
        print(f"{output.source.name}: {output.tokens():,} of {share:,} tokens; {shard}", flush=True)
        before = used(folder)
        output.add(shard, *arguments, {})
        largest = max(largest, used(folder) - before)
    parts = []
    for output in outputs:
        have, share = output.tokens(), round(wanted * output.source.share)
        if have:
            epochs = f", {share / have:.1f} epochs" if have < share else ""
            print(f"{output.source.name}: {have:,} tokens of the {share:,} asked{epochs}")
            parts.append(f"--tokens {output.source.name}={output.path}:{share}")
    print("llmtrain train " + " ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--tokens", help="in all, such as 50B; default: the recipe's")
    parser.add_argument("--disk", help="bytes that the token files may take, such as 120GB; default: the recipe's")
    parser.add_argument("--hub", type=Path, help="a folder laid out as the hub is")
    args = parser.parse_args()
    try:
        stream(args.recipe, args.tokens and number(args.tokens), args.disk and number(args.disk), args.hub)
    except LlmtrainError as error:
        print(f"stream.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""The shares into which N machines split a corpus, with nothing shared but a folder, and the names of their parts."""

import hashlib
import heapq
import json
import re
from collections.abc import Sequence
from pathlib import Path

from llmtrain.corpus.config import MOST_SHARDS
from llmtrain.corpus.inputs import Input
from llmtrain.storage.errors import UsageError


def part_path(path: Path, number: int, of: int) -> Path:
    """X.u16 -> X.I-of-N.u16."""
    return path.with_suffix(f".{number}-of-{of}{path.suffix}")


def find_parts(path: Path) -> list[Path]:
    """The parts of `path` by number, those missing included; none where there is no part. Raises UsageError where
    there are parts of more than one split."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.([0-9]+)-of-([0-9]+){re.escape(path.suffix)}")
    try:
        found = [match for one in path.parent.iterdir() if (match := pattern.fullmatch(one.name))]
    except OSError:
        return []
    # A name with more is somebody else's: its parts could not be listed.
    splits = {int(match[2]) for match in found if len(match[2]) <= 6 and int(match[2]) <= MOST_SHARDS}
    if len(splits) > 1:
        raise UsageError(f"{path}: has parts of {' and '.join(map(str, sorted(splits)))}: remove those of one split")
    return [part_path(path, number, of) for of in splits for number in range(1, of + 1)]


def share(inputs: Sequence[Input], number: int, of: int) -> list[Input]:
    """Share `number` (from 1): in their order, chosen so that all shares are about equally large, the same on every
    machine that sees the same names and sizes. Raises UsageError for an input without a size."""
    for one in inputs:
        if one.size is None:
            raise UsageError(f"{one.name}: does not say its size, so it cannot be split with --shard: give it to one")
    loads = [(0, shard) for shard in range(1, of + 1)]
    mine = []
    for index in sorted(range(len(inputs)), key=lambda index: -(inputs[index].size or 0)):
        load, shard = heapq.heappop(loads)
        # An empty input weighs something too, or one share would get all of them.
        heapq.heappush(loads, (load + (inputs[index].size or 0) + 1, shard))
        if shard == number:
            mine.append(index)
    return [inputs[index] for index in sorted(mine)]


def split_hash(inputs: Sequence[Input]) -> str:
    """Of all inputs' names and sizes: parts whose split differs do not belong together."""
    return hashlib.sha256(json.dumps([(one.name, one.size) for one in inputs]).encode()).hexdigest()

"""What `llmtrain inspect` says of a token file."""

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.corpus.shards import find_parts
from llmtrain.storage.units import in_bytes, plural

if TYPE_CHECKING:
    from llmtrain.corpus.census import Census
    from llmtrain.corpus.token_file import TokenFile
    from llmtrain.corpus.tokenizer import Tokenizer

SHOWN_DOCUMENTS = 3
EXCERPT_TOKENS, EXCERPT = 200, 160
"""Ids of a document that are decoded, and characters of its text that are shown."""
SHOWN_IDS = 10

Line = tuple[str, str]


def open_token_file(path: Path, eos_id: int | None = None) -> "TokenFile":
    """The token file, with any vocabulary where it has no manifest."""
    from llmtrain.corpus.config import U16_VOCAB_SIZE
    from llmtrain.corpus.token_file import TokenFile
    from llmtrain.corpus.token_manifest import manifest_path

    return TokenFile.open(path, None if manifest_path(path).exists() else U16_VOCAB_SIZE, eos_id)


def token_file_lines(
    path: Path, limit: int, against: Path | None, tokenizer_file: Path | None, eos_id: int | None
) -> Iterator[Line]:
    file = open_token_file(path, eos_id)
    form = file.form
    if file.manifest:
        form += " and a document index" if file.doc_ends is not None else ", no document index"
    else:
        form += ", no manifest"
    yield "token file", f"{path}: {form}"
    yield "size", in_bytes(file.ids.nbytes)
    yield "tokens", f"{file.tokens:,}"
    if file.documents:
        yield "documents", f"{file.documents:,}, {file.tokens / file.documents:,.1f} tokens each on average"
    yield from manifest_lines(file)
    tokenizer = find_tokenizer(file, tokenizer_file)
    other = held_out(path) if against is None else against
    other_file = open_token_file(other, eos_id) if other is not None else None

    from llmtrain.corpus.census import take_census

    yield from census_lines(file, take_census(file, limit, other_file), tokenizer, other_file)
    yield from first_documents(file, tokenizer)


def manifest_lines(file: "TokenFile") -> Iterator[Line]:
    manifest = file.manifest
    if manifest is None:
        return
    yield "vocabulary", f"{manifest['vocab_size']:,}; largest id {manifest['max_id']}, EOS {manifest['eos_id']}"
    yield "tokenizer", f"{manifest['tokenizer']['file']} (sha256 {manifest['tokenizer']['sha256'][:16]})"
    yield "engine", " ".join(str(manifest["engine"].get(name, "")) for name in ("name", "version"))
    inputs = manifest["inputs"]
    yield "inputs", f"{plural(len(inputs), 'file')}, {in_bytes(sum(one['bytes'] for one in inputs))}"
    skipped: dict[str, int] = {}
    for one in inputs:
        for reason, count in one["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    if skipped:
        yield "skipped", ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    if file.has_mask:
        counts = manifest["mask"]["loss_tokens"]
        share = counts / max(file.tokens, 1)
        yield "loss", f"{counts:,} tokens count ({share:.2%}), the rest are of prompts; [...] marks them below"
    yield "made by", str(manifest.get("created_by", "unknown"))


def held_out(path: Path) -> Path | None:
    """The held-out file beside a token file, X.val.u16 of X.u16."""
    from llmtrain.corpus.token_manifest import held_out_path

    beside = held_out_path(path)
    return beside if beside != path and (beside.is_file() or find_parts(beside)) else None


def find_tokenizer(file: "TokenFile", named: Path | None) -> "Tokenizer | None":
    """The tokenizer that was named, or the one that the manifest names where it is still there."""
    from llmtrain.corpus import tokenizer
    from llmtrain.storage.manifest import sha256_file

    if named is not None:
        return tokenizer.load(named)
    if file.manifest is None:
        return None
    said = file.manifest["tokenizer"]
    for path in (Path(said["file"]), file.path.parent / Path(said["file"]).name):
        if path.is_file() and sha256_file(path) == said["sha256"]:
            return tokenizer.load(path)
    return None


def census_lines(
    file: "TokenFile", census: "Census", tokenizer: "Tokenizer | None", other: "TokenFile | None"
) -> Iterator[Line]:
    import numpy as np

    if census.tokens < file.tokens:
        yield "looked at", f"the first {census.tokens:,} tokens; --limit 0 takes all"
    present = np.flatnonzero(census.ids)
    yield "ids", f"{present.size:,} different ones, from {present[0]} to {present[-1]}"
    for i in np.argsort(-census.ids, kind="stable")[:SHOWN_IDS].tolist():
        if census.ids[i]:
            text = "" if tokenizer is None else f"  {json.dumps(tokenizer.decode([i]), ensure_ascii=False)}"
            yield "", f"{i:>6} {census.ids[i] / census.tokens:7.2%}{text}"
    if tokenizer is not None:
        from llmtrain.corpus.tokenizer import token_bytes

        sizes = np.zeros(len(census.ids), np.int64)
        known = token_bytes(tokenizer)[: len(sizes)]
        sizes[: len(known)] = known
        mean = int((sizes * census.ids).sum()) / census.tokens
        single = int(census.ids[sizes == 1].sum()) / census.tokens
        yield "text", f"{mean:.3f} bytes a token; {single:.2%} of the tokens are one byte"
    if not census.documents:
        return
    longest = int(census.lengths.max())
    yield "lengths", f"of {plural(census.documents, 'document')} in tokens, the longest has {census.longest:,}"
    for i in range(int(np.flatnonzero(census.lengths)[0]), int(np.flatnonzero(census.lengths)[-1]) + 1):
        count = int(census.lengths[i])
        bar = "#" * round(30 * count / longest)
        yield "", f"{f'{1 << i:,} to {(2 << i) - 1:,}':>24} {count / census.documents:7.2%} {bar}".rstrip()
    share = census.repeated / census.documents
    yield "duplicates", f"{plural(census.repeated, 'document')} ({share:.2%}) the same as one before"
    if other is not None and census.shared is not None:
        yield "held out", f"{census.shared:,} of {plural(census.of_shared, 'document')} of {other.path} are among these"


def first_documents(file: "TokenFile", tokenizer: "Tokenizer | None") -> Iterator[Line]:
    """How the first documents begin, as text where the tokenizer is known."""
    begin = 0
    ends = [file.tokens]
    if file.has_borders:
        ends = [int(end) for end in islice(chain.from_iterable(file.ends_of_documents()), SHOWN_DOCUMENTS)]
    for number, end in enumerate(ends, 1):
        label = f"document {number}" if file.has_borders else "begins with"
        for masked, first, last in _runs(file, begin, end):
            ids = file.ids[first : min(last, first + EXCERPT_TOKENS)]
            content = ids[:16].tolist() if tokenizer is None else tokenizer.decode(ids)[:EXCERPT]
            text = json.dumps(content, ensure_ascii=False)
            yield label, f"[{text}]" if masked else text
            label = ""
        begin = end


def _runs(file: "TokenFile", begin: int, end: int) -> Iterator[tuple[bool, int, int]]:
    """The parts of a document as (whether the loss leaves it out, its first token, the one behind its last)."""
    import numpy as np

    if not file.has_mask:
        yield False, begin, end
        return
    counts = file.read_mask(np.array([begin]), np.array([end - begin]))
    borders = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), counts.size]
    for first, last in zip(borders, borders[1:], strict=False):
        yield not counts[first], begin + first, begin + last

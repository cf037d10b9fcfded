"""A few texts, and what `tokenize-corpus` makes of them in the current folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmtrain.corpus.config import TokenizeConfig
from llmtrain.corpus.engine import TOKENIZERS
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.tokenizer import load

# Fixed text, so that the documents chosen by their content are the same everywhere.
TEXTS = (Path(__file__).parents[2] / "LICENSE").read_text().split("\n\n", 4)

CONFIG = TokenizeConfig(inputs=("text",), output=Path("corpus.u16"), holdout=0, workers=1, engine=TOKENIZERS)


def put(texts: Sequence[str | bytes], folder: str = "text") -> None:
    for number, text in enumerate(texts):
        data = text if isinstance(text, bytes) else text.encode()
        (Path(folder) / f"{number:03d}.txt").write_bytes(data)


def read(path: Path = CONFIG.output, tokenizer: Path = CONFIG.tokenizer) -> list[str]:
    """The documents of a token file, cut by its index, which must agree with its EOS ids and its manifest."""
    file = TokenFile.open(path)
    assert sum(file.verify()) == path.stat().st_size
    ids, manifest = np.array(file.ids), json.loads(Path(f"{path}.json").read_text())
    assert file.doc_ends is not None
    ends = np.array(file.doc_ends).astype(np.int64)
    assert (np.flatnonzero(ids == manifest["eos_id"]) + 1).tolist() == ends.tolist()
    assert manifest["tokens"] == len(ids) == sum(one["tokens"] for one in manifest["inputs"])
    assert manifest["documents"] == len(ends) == sum(one["documents"] for one in manifest["inputs"])
    assert manifest["max_id"] == ids.max() < manifest["vocab_size"]
    tokenizer_ = load(tokenizer)
    assert manifest["tokenizer"] == {"file": str(tokenizer), "sha256": tokenizer_.sha256}
    return [tokenizer_.decode(part[:-1]) for part in np.split(ids, ends[:-1])]


def output_bytes() -> list[bytes]:
    paths = sorted(path for path in Path().iterdir() if path.name.startswith(("corpus", ".")))
    return [str(path).encode() + path.read_bytes() for path in paths]


def left() -> list[str]:
    """What lies in the current folder beside the inputs."""
    return sorted({path.name for path in Path().iterdir()} - {"text", "tokenizer.json"})

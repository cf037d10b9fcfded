"""A text that small models learn, as the product makes a token file of it."""

import sysconfig
from pathlib import Path

import numpy as np

from llmtrain.corpus import tokenizer as tokenizers
from tests.corpus.files import write_flat

TEXT = (Path(sysconfig.get_paths()["stdlib"]) / "bisect.py").read_text()


def write_corpus(folder: Path) -> Path:
    """corpus.u16 of TEXT, and the tokenizer.json that was learnt from it."""
    file = folder / "tokenizer.json"
    file.write_bytes(tokenizers.train([TEXT], 300))
    tokenizer = tokenizers.load(file)
    ids = np.array([*tokenizer.encode_batch([TEXT])[0], tokenizer.eos_id])
    made_by = {"file": str(file), "sha256": tokenizer.sha256}
    return write_flat(folder / "corpus.u16", ids, tokenizer.vocab_size, tokenizer=made_by)

"""A folder in which texts are tokenized."""

from pathlib import Path

import pytest

from llmtrain.corpus.tokenizer import train
from tests.corpus.texts import TEXTS


@pytest.fixture(scope="session")
def trained() -> bytes:
    return train(TEXTS, 500)


@pytest.fixture
def here(tmp_path: Path, trained: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tokenizer.json and an empty text/, made the current one."""
    (tmp_path / "tokenizer.json").write_bytes(trained)
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path

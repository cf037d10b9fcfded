"""A small corpus with learnable structure, and small runs on it."""

from pathlib import Path

import numpy as np
import pytest

from llmtrain.corpus.token_manifest import BlockHashes, write_manifest
from llmtrain.model.config import ModelConfig
from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig

VOCAB = 96


def write_corpus(path: Path, tokens: int, seed: int = 0) -> Path:
    """Documents of 10 to 60 ids in which each id follows its predecessor by a rule, most of the time; EOS is 0."""
    rng = np.random.default_rng(seed)
    ids = np.empty(tokens, np.uint16)
    jumps = rng.integers(1, VOCAB, tokens)
    surprise = rng.random(tokens) < 0.2
    current = 1
    for i in range(tokens):
        current = int(jumps[i]) if surprise[i] else current * 5 % (VOCAB - 1) + 1
        ids[i] = current
    ends = np.cumsum(rng.integers(10, 60, tokens // 10))
    ends = np.append(ends[ends < tokens], tokens).astype(np.uint64)
    ids[ends.astype(np.int64) - 1] = 0
    ids.tofile(path)
    ends.tofile(f"{path}.docs")
    hashes = BlockHashes()
    hashes.update(ids)
    write_manifest(
        path,
        tokens=tokens,
        documents=len(ends),
        max_id=int(ids.max()),
        vocab_size=VOCAB,
        eos_id=0,
        tokenizer={"file": "tokenizer.json", "sha256": "0" * 64},
        engine={"name": "test", "version": "0"},
        sha256=hashes.hexdigests(),
        inputs=[],
    )
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.u16", 16 * 37 + 5)


SMALL = ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)


def config(
    corpus: Path, run_dir: Path, *, run: dict | None = None, optimizer: dict | None = None, **schedule
) -> TrainConfig:
    """37 windows of 16 tokens; 6 sequences a step."""
    settings = {"batch_size": 4, "global_batch_size": 6, "precision": "fp32", "device": "cpu", "log_every": 1}
    return TrainConfig(
        model=SMALL,
        data=DataConfig(tokens=(str(corpus),), seq_len=16),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, **(optimizer or {})}),
        schedule=ScheduleConfig(**{"total_steps": 12, "warmup_steps": 5, **schedule}),
        run=RunConfig(run_dir=run_dir, **{**settings, **(run or {})}),
    )

"""Evaluation within a run."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from llmtrain.corpus.batches import held_out_batches
from llmtrain.corpus.order import Source
from llmtrain.model.evaluation import EvaluationSums, evaluate
from llmtrain.model.transformer import Transformer
from llmtrain.training.config import TrainConfig
from llmtrain.training.parallel import World


@functools.lru_cache(maxsize=1)
def _token_bytes(path: Path, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """Bytes of text of each id, (vocab_size,) int64; None where the run has no tokenizer."""
    if not path.exists():
        return None
    from llmtrain.corpus import tokenizer as tokenizers  # here, because most runs of a test never need the library

    known = torch.from_numpy(tokenizers.token_bytes(tokenizers.load(path))).long()
    table = torch.zeros(vocab_size, dtype=torch.int64)
    table[: len(known)] = known[:vocab_size]
    return table.to(device)


def validate(
    model: Transformer, source: Source, config: TrainConfig, device: torch.device, goes_on: Callable[[], bool],
    world: World,
) -> dict[str, float] | None:
    """val_loss (nats a target), ppl and, where the tokenizer is known, bits_per_byte of one held-out file; None where
    `goes_on`, asked before each batch and at the end, said no on any rank. All ranks share the batches."""
    batches = held_out_batches(
        source.file, config.data.seq_len, config.run.micro_batch_size, config.run.val_windows, device,
        config.data.document_mask, world.data_rank, world.data_ranks,
    )  # fmt: skip

    def all_go_on() -> bool:
        """Ranks that have parts of a model run a batch together or not at all."""
        mine = goes_on()
        return mine if world.grid.parts == 1 else not world.any(device, not mine)

    table = _token_bytes(config.run.run_dir / "tokenizer.json", config.model.vocab_size, device)
    sums = evaluate(model, itertools.takewhile(lambda _: all_go_on(), batches), table)
    whole = goes_on()
    nats, targets, of_bytes, broken, no_table = world.totals(
        device, sums.nats, sums.targets, sums.bytes, not whole, table is None
    )
    if broken:
        return None
    sums = EvaluationSums(nats, int(targets), 0 if no_table else int(of_bytes))
    figures = {"val_loss": sums.loss, "ppl": sums.ppl}
    if sums.bits_per_byte is not None:
        figures["bits_per_byte"] = sums.bits_per_byte
    return figures

"""Evaluation within a run: of held-out token files, of multiple-choice questions and of held-out text by kind."""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from llmtrain.corpus.batches import held_out_batches, no_targets
from llmtrain.corpus.choices import Choices, accuracies, right_answers
from llmtrain.corpus.kinds import HeldOutText, sums_by_kind
from llmtrain.corpus.order import Source
from llmtrain.model.evaluation import EvaluationSums, total
from llmtrain.model.likelihood import Row, likelihoods
from llmtrain.model.transformer import Transformer
from llmtrain.storage.units import plural
from llmtrain.training.config import TrainConfig
from llmtrain.training.parallel import World
from llmtrain.training.step import TrainStep

HeldOut = Source | Choices | HeldOutText
Figures = dict[str, float]


def what_is_read(held_out: HeldOut, config: TrainConfig) -> str:
    """What an evaluation on it reads, for a person."""
    if isinstance(held_out, Choices):
        text = plural(len(held_out.questions), "question")
        cut = held_out.shortened
        return text + f", {cut} of them shortened to {config.data.seq_len} tokens" * bool(cut)
    if isinstance(held_out, HeldOutText):
        kinds = f" of {plural(len(held_out.kinds), 'kind')}" * bool(held_out.kinds)
        return f"{plural(len(held_out.spread(config.run.val_windows)), 'window')} of documents{kinds}"
    available = held_out.file.windows(config.data.seq_len)
    return f"{plural(min(config.run.val_windows or available, available), 'window')} of {config.data.seq_len} tokens"


def validate(
    step: TrainStep, held_out: HeldOut, config: TrainConfig, device: torch.device, goes_on: Callable[[], bool],
    world: World,
) -> dict[str, Figures] | None:
    """Name -> figures, as an eval line has them, that of `held_out` as a whole last; None where `goes_on`, asked before
    each batch and at the end, said no on any rank. All ranks share the work."""

    def all_go_on() -> bool:
        """Ranks that have parts of a model run a batch together or not at all."""
        mine = goes_on()
        return mine if world.grid.parts == 1 else not world.any(device, not mine)

    if isinstance(held_out, Choices):
        return _answers(step.model, held_out, config, device, all_go_on, world)
    if isinstance(held_out, HeldOutText):
        return _text(step.model, held_out, config, device, all_go_on, world)
    figures = _token_file(step, held_out, config, device, goes_on, all_go_on, world)
    return None if figures is None else {held_out.name: figures}


def _turns(world: World, batches: int) -> int:
    """How often this rank, which has so many batches, runs the model: ranks that run it together do equally often."""
    return batches if world.grid.parts == 1 else -world.least(-batches)


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


def _figures(sums: EvaluationSums) -> Figures:
    figures = {"val_loss": sums.loss, "ppl": sums.ppl}
    return figures | ({} if sums.bits_per_byte is None else {"bits_per_byte": sums.bits_per_byte})


def _token_file(
    step: TrainStep, source: Source, config: TrainConfig, device: torch.device, goes_on: Callable[[], bool],
    all_go_on: Callable[[], bool], world: World,
) -> Figures | None:
    batches = held_out_batches(
        source.file, config.data.seq_len, config.run.micro_batch_size, config.run.val_windows, device,
        config.data.document_mask, world.data_rank, world.data_ranks,
    )  # fmt: skip

    table = _token_bytes(config.run.run_dir / "tokenizer.json", config.model.vocab_size, device)
    sums = step.evaluate(itertools.takewhile(lambda _: all_go_on(), batches), table)
    whole = goes_on()
    nats, targets, of_bytes, broken, no_table = world.totals(
        device, sums.nats, sums.targets, sums.bytes, not whole, table is None
    )
    if broken:
        return None
    if not targets:
        available = source.file.windows(config.data.seq_len)
        raise no_targets(source.file, min(config.run.val_windows or available, available), "--val-windows")
    return _figures(EvaluationSums(nats, int(targets), 0 if no_table else int(of_bytes)))


def _answers(
    model: Transformer, choices: Choices, config: TrainConfig, device: torch.device, goes_on: Callable[[], bool],
    world: World,
) -> dict[str, Figures] | None:
    mine = choices.questions[world.rank :: world.size]
    rows = [Row(*row) for question in mine for row in question.rows]
    found = likelihoods(model, rows, config.run.micro_batch_size * config.data.seq_len, goes_on, partial(_turns, world))
    right, right_by_length = (0, 0) if found is None else right_answers(mine, found.nats)
    broken, right, right_by_length = map(int, world.totals(device, found is None, right, right_by_length))
    if broken:
        return None
    return {choices.name: accuracies(len(choices.questions), right, right_by_length)}


def _text(
    model: Transformer, text: HeldOutText, config: TrainConfig, device: torch.device, goes_on: Callable[[], bool],
    world: World,
) -> dict[str, Figures] | None:
    mine = text.spread(config.run.val_windows)[world.rank :: world.size]
    rows = [Row(window.ids, len(window.ids) - 1) for window in mine]
    found = likelihoods(model, rows, config.run.micro_batch_size * config.data.seq_len, goes_on, partial(_turns, world))
    sums = sums_by_kind(len(text.kinds), [] if found is None else mine, [] if found is None else found.nats)
    broken, *flat = world.totals(device, found is None, *itertools.chain.from_iterable(sums))
    if broken:
        return None
    by_kind = [EvaluationSums(flat[i], int(flat[i + 1]), int(flat[i + 2])) for i in range(0, len(flat), 3)]
    figures = {
        f"{text.name}/{kind}": _figures(of_kind)
        for kind, of_kind in zip(text.kinds, by_kind, strict=False)
        if of_kind.targets  # of a rare one no window may be among those read
    }
    return figures | {text.name: _figures(total(by_kind))}

"""What a run begins with that does not begin from its seed: the weights of another, or a step of another."""

import dataclasses
from pathlib import Path
from typing import Any

from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import ConfigMismatch, InputMissing, UsageError
from llmtrain.training import checkpoint
from llmtrain.training.config import TrainConfig, sequences_per_step
from llmtrain.training.flat import FlatParameters
from llmtrain.training.optimizer import AdamW
from llmtrain.training.tables import to_tables

MAY_DIFFER = {
    "max_seq_len", "rope_theta", "norm_eps", "z_loss", "init_std", "window", "global_every", "balance_loss",
    "router_z_loss",
}  # fmt: skip
"""Fields of a model that change none of its tensors' shapes."""


def begin(
    config: TrainConfig, flat: FlatParameters, optimizer: AdamW, corpus: list[dict[str, Any]], total_steps: int
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """Fills the weights, and of a branch the optimizer, as --init-from or --branch-from says. Returns the step that the
    run begins at, a branch's counts of the optimizer and what a person should know. corpus: the run's, as state.json
    has it; total_steps: the run's.

    Raises InputMissing where there is no such checkpoint, BadData where it is damaged, ConfigMismatch where its model
    or its optimizer are others, UsageError for a branch that would end where it begins."""
    run = config.run
    if run.init_from is not None:
        folder = checkpoint_at(run.init_from)
        state = checkpoint.load(folder, flat, check=lambda state: _check(folder, state, config, corpus))
        return 0, None, [f"weights of {folder}, step {state['step']}; all else begins anew"]
    assert run.branch_from is not None
    name, _, step = run.branch_from.rpartition(":")
    folder = checkpoint.folder_of(Path(name), int(step))
    if not folder.is_dir():
        steps = ", ".join(map(str, sorted(checkpoint.list_steps(Path(name))))) or "none"
        raise InputMissing(f"{folder}: no such checkpoint; those of the run are {steps}: name one of them")

    def check(state: dict[str, Any]) -> None:
        _check(folder, state, config, corpus)
        if state["step"] >= total_steps and not _other_data(state, config, corpus):
            raise UsageError(
                f"--branch-from {run.branch_from}: the run has {total_steps} steps in all and would begin at "
                f"{state['step']}: raise --total-steps, --epochs or the tokens asked, or branch off an earlier step"
            )
        before = state["config"]["optimizer"].get("optimizer", "adamw")
        if before != config.optimizer.optimizer:
            raise ConfigMismatch(
                f"{folder}: has the moments of {before}, this run's optimizer is {config.optimizer.optimizer}: take "
                "the weights alone with --init-from, or keep the optimizer"
            )

    state = checkpoint.load(folder, flat, optimizer, check)
    other = _other_data(state, config, corpus)
    at_step, said = state["step"], f"and goes on with its data at step {state['step']}"
    if other:
        at_step, said = 0, f"with its optimizer; {other}, so the data begin anew at step 0"
    return at_step, state["optimizer"], [f"branches off {folder}, {said}"]


def checkpoint_at(path: Path) -> Path:
    """What --init-from means: the checkpoint at `path`, or the newest whole one of the run there. Raises
    InputMissing."""
    if (path / checkpoint.MANIFEST).exists():
        return path
    folder = checkpoint.newest_whole(path)
    if folder is None:
        raise InputMissing(f"--init-from {path}: is neither a checkpoint nor a run that has one: check the path")
    return folder


def _check(folder: Path, state: dict[str, Any], config: TrainConfig, corpus: list[dict[str, Any]]) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    theirs, mine = defaults | state["config"]["model"], defaults | to_tables(config)["model"]
    for name in sorted((theirs.keys() | mine.keys()) - MAY_DIFFER):
        if theirs.get(name) != mine.get(name):
            raise ConfigMismatch(
                f"{folder}: its model has {name} {theirs.get(name)}, this run's has {mine.get(name)}: give "
                f"--{name.replace('_', '-')} {theirs.get(name)}"
            )
    made_with, of_corpus = ({source.get("tokenizer") for source in one} - {None} for one in (state["corpus"], corpus))
    if made_with and of_corpus and made_with != of_corpus:
        raise ConfigMismatch(
            f"{folder}: was trained on ids of another tokenizer than {', '.join(config.data.tokens)}: tokenize the "
            "corpus with that of the run"
        )


def _other_data(state: dict[str, Any], config: TrainConfig, corpus: list[dict[str, Any]]) -> str:
    """What of the data, or of a step's share in them, is not as it was there; "" where all is."""
    theirs, mine = state["config"], to_tables(config)
    for section, name in (("data", "seq_len"), ("data", "packing"), ("data", "document_mask"), ("run", "seed")):
        before, now = theirs[section].get(name), mine[section].get(name)
        if before != now:
            return f"{name} is {now}, was {before}"
    if sequences_per_step(theirs["run"]) != config.run.sequences_per_step:
        return f"a step has {config.run.sequences_per_step} sequences, had {sequences_per_step(theirs['run'])}"
    return "" if state["corpus"] == corpus else "the corpus is another"

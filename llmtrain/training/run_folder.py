"""The directory of a run: whether it may be used, what is made in it before the first step."""

import os
from contextlib import suppress
from pathlib import Path

from llmtrain.corpus.order import SampleOrder
from llmtrain.storage import atomic
from llmtrain.storage.errors import ConfigMismatch, LlmtrainError, write_error
from llmtrain.training import checkpoint
from llmtrain.training.config import TrainConfig
from llmtrain.training.run_corpus import tokenizer_of
from llmtrain.training.tables import to_toml


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """Raises ConfigMismatch where a fresh run would mix with an older one, CannotCreate where none can be."""
    try:
        os.stat(run_dir)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(error, run_dir) from None
    steps = checkpoint.list_steps(run_dir)
    if steps == [0] and _is_imported(checkpoint.folder_of(run_dir, 0)):
        raise ConfigMismatch(
            f"{run_dir}: holds an imported model: begin a run with it in another --run-dir, by --init-from {run_dir}"
        )
    if not resume and steps:
        raise ConfigMismatch(
            f"{run_dir}: holds checkpoints already: add --resume to go on with that run, or name another --run-dir"
        )


def _is_imported(folder: Path) -> bool:
    """Whether the checkpoint is a model that `import` put there: a run that was stopped before its first step has one
    of step 0 too."""
    try:
        return "imported" in checkpoint.read_state(folder)
    except LlmtrainError:
        return False  # damaged: resuming says so


def prepare_run_dir(config: TrainConfig, order: SampleOrder) -> list[str]:
    """Writes config.toml and tokenizer.json into the run directory; returns what a person should know.

    Raises ConfigMismatch where another tokenizer lies there and the corpus' own is not found."""
    run_dir = config.run.run_dir
    atomic.write_bytes(run_dir / "config.toml", to_toml(config).encode())
    manifest = order.sources[0].file.manifest
    if manifest is None:
        return []
    there, named = run_dir / "tokenizer.json", Path(manifest["tokenizer"]["file"])
    if path := tokenizer_of(run_dir, order):
        if path != there:
            atomic.write_bytes(there, path.read_bytes())
        return []
    if os.path.lexists(there):
        raise ConfigMismatch(
            f"{there}: is not the tokenizer of {order.sources[0].file.path}, which {named} was: remove it or put that "
            "one there"
        )
    return [f"tokenizer {named} is not where the corpus was made: copy it to {run_dir / 'tokenizer.json'} to generate"]


def make_folder(run_dir: Path) -> list[Path]:
    """Makes RUN/checkpoints; returns the folders that were not there, outermost first."""
    made: list[Path] = []
    try:
        for folder in reversed([path := run_dir / "checkpoints", *path.parents]):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)  # another process may be at it too
                made.append(folder)
        if not os.access(run_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise write_error(error, run_dir) from None
    return made


def unmake_folder(run_dir: Path, made: list[Path]) -> None:
    """Removes the folders of `make_folder` again, where nothing but the lock came into them. For its holder."""
    with suppress(OSError):  # what has come in there, or what cannot be removed, stays
        if run_dir in made and sorted(os.listdir(run_dir)) == ["checkpoints", "lock"]:
            (run_dir / "checkpoints").rmdir()
            (run_dir / "lock").unlink()
            for folder in reversed(made[:-1]):
                folder.rmdir()

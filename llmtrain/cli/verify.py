"""`llmtrain verify`."""

import os
from pathlib import Path

import click

from llmtrain.cli.inspect import kind_of
from llmtrain.cli.inspect_tokens import open_token_file
from llmtrain.cli.options import ConfigCommand
from llmtrain.storage.errors import BadData, InputMissing, LlmtrainError
from llmtrain.storage.units import in_bytes

EPILOG = """Example:

    llmtrain verify runs/default
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.argument("path", type=click.Path(path_type=Path))
def command(path: Path) -> None:
    """Check every checksum of a token file, a checkpoint or a run directory.

    Reads it all. Of a run directory it checks each checkpoint. Exit code 65 and a line that names the first thing
    that is damaged, or 0.
    """
    {"token file": verify_token_file, "checkpoint": verify_checkpoint, "run": verify_run}[kind_of(path)](path)


def verify_token_file(path: Path) -> None:
    import glob

    from tqdm import tqdm

    from llmtrain.corpus.packing import open_packed

    file = open_token_file(path)
    size = file.ids.nbytes + file.tokens * file.has_mask
    # disable=None: a bar on a terminal only.
    with tqdm(total=size, unit="B", unit_scale=True, desc=path.name, leave=False, disable=None) as bar:
        for done in file.verify():
            bar.update(done)
    names = ["ids", *["loss mask"] * file.has_mask, "manifest", *["document index"] * (file.doc_ends is not None)]
    parts = f"{', '.join(names[:-1])} and {names[-1]}"
    click.echo(f"{path}: {parts} are sound: {file.tokens:,} tokens, {file.documents:,} documents, {in_bytes(size)}")
    for name in sorted(path.parent.glob(f"{glob.escape(path.name)}.pack-*")):
        seq_len = name.name.rpartition("-")[2]
        if seq_len.isdecimal():
            size = open_packed(file, int(seq_len)).verify()
            click.echo(f"{name}: the packed windows are sound: {in_bytes(size)}")


def verify_checkpoint(folder: Path) -> None:
    from llmtrain.training.checkpoint import verify

    size = sum(n for _, n in verify(folder))
    click.echo(f"{folder}: is sound: {in_bytes(size)}")


def verify_run(run_dir: Path) -> None:
    """Says which checkpoints are sound before it fails for one that is not: the sound ones can be used."""
    from llmtrain.training.checkpoint import folder_of, list_steps

    damaged: list[LlmtrainError] = []
    steps = list_steps(run_dir)
    if not steps:
        raise InputMissing(f"{run_dir}: holds no checkpoint, so there is nothing to verify")
    for step in steps:
        folder = folder_of(run_dir, step)
        try:
            verify_checkpoint(folder)
        except (BadData, InputMissing) as error:
            if os.path.lexists(folder):
                damaged.append(error)
            else:
                click.echo(f"{folder}: was removed meanwhile, as a run does with old ones")
    if damaged:
        more = f" (and {len(damaged) - 1} more of {len(steps)} checkpoints)" if len(damaged) > 1 else ""
        raise type(damaged[0])(f"{damaged[0]}{more}")

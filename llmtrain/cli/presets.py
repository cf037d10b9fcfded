"""The TOML files in configs/, which a command takes by name, from any folder."""

from pathlib import Path
from typing import Any

import click

from llmtrain.storage.errors import InputMissing

FOLDERS = (Path("configs"), Path(__file__).parents[2] / "configs")
"""Where presets are looked for: a folder of one's own goes before that of the repository."""

SWEEP = "sweep"
"""What the names of files with rows for `llmtrain sweep` begin with; all others hold a run."""


def preset_names(of_sweep: bool = False) -> list[str]:
    """Those that are there, of runs or of sweeps."""
    found = {path.stem for folder in FOLDERS for path in folder.glob("*.toml")}
    return sorted(name for name in found if name.startswith(SWEEP) == of_sweep)


def preset_path(name: str, of_sweep: bool = False) -> Path:
    """The file itself, or the preset of that name. InputMissing, with the names that there are, where it is neither."""
    for path in (Path(name), *(folder / f"{name}.toml" for folder in FOLDERS)):
        if path.exists():
            return path
    names = ", ".join(preset_names(of_sweep)) or "none is here, they are in configs/ of the repository"
    raise InputMissing(f"{name}: no such file: check the path, or name a preset: {names}")


def complete_preset(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """For the shell: the names of presets that fit, otherwise its own completion of file names."""
    from click.shell_completion import CompletionItem

    names = [name for name in preset_names() if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]

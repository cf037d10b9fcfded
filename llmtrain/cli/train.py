"""`llmtrain train`."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.cli.presets import complete_preset, preset_path
from llmtrain.storage.errors import BadData, Diverged, StopRequested, UsageError
from llmtrain.storage.interrupts import interrupts
from llmtrain.storage.manifest import read_toml
from llmtrain.training.config import (
    SECTIONS,
    RunConfig,
    Tables,
    TrainConfig,
    for_ranks,
    keep_the_step,
    under_torchrun,
    world_size,
)
from llmtrain.training.notify import Supervisor
from llmtrain.training.tables import tables_for_resume, to_toml

EPILOG = """Example:

    llmtrain train --config 31m --tokens data/corpus.u16 --val-tokens data/corpus.val.u16 --resume
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.option(
    "--config", "preset", metavar="FILE|NAME", shell_complete=complete_preset,
    help="TOML file with any of the settings, or the name of one in configs/.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint; start where there is none.")
@config_options(*SECTIONS.values())
def command(given: dict[str, Any], preset: str | None, resume: bool) -> None:
    """Train a language model on token files, or go on with a run.

    What stands on the command line goes before --config, and that before the defaults. With --resume, settings not
    given come from the run itself.
    """
    # torchrun --max-restarts starts the same command again, to go on.
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    first = int(os.environ.get("RANK", "0")) == 0
    with Supervisor.of(os.environ) if first else Supervisor() as supervisor:
        config = configuration(given, preset_path(preset) if preset else None, resume)
        if world_size() > 1:
            # Where a rank is lost torch would warn in stacks of C++, which bury the line that names it.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from llmtrain.training.run import train  # imports torch, which a mistake in the configuration need not wait for

        interrupts.check()
        try:
            train(config, resume, supervisor)
        except (Diverged, StopRequested) as error:
            # All ranks end here. Rank 0 says how; torchrun would start them again after any other code than 0, so there
            # only RUN/status.json has it.
            if first and not under_torchrun():
                raise
            if first:
                click.echo(f"llmtrain: {error}", err=True)


def configuration(given: dict[str, Any], config_file: Path | None, resume: bool) -> TrainConfig:
    """The configuration of a run from the command line, a TOML file, and, on resume, the run directory."""
    tables = read_tables(config_file) if config_file else {section: {} for section in SECTIONS}
    where = str(config_file) if config_file else ""
    given = keep_the_step(given, tables["run"])
    if "tokens" in given and "val_tokens" not in given and tables["data"].get("val_tokens"):
        from llmtrain.corpus.order import held_out_beside

        # What the file names was held out of other tokens.
        tables["data"] = tables["data"] | {"val_tokens": held_out_beside(given["tokens"])}
    if resume:
        # Of all else the checks would be made against defaults, where the run has values of its own.
        on_line, of_file = ({k: v for k, v in of.items() if k == "run_dir"} for of in (given, tables["run"]))
        run_dir = build(RunConfig, on_line, of_file, where).run_dir
        of_run, saved = saved_tables(run_dir)
        if saved is not None:
            where = of_run
            for section, kind in SECTIONS.items():
                build(kind, {}, saved[section], f"{where} [{section}]")  # for its checks
            asked = {section: dict(values) for section, values in tables.items()}
            for section, kind in SECTIONS.items():
                names = {field.name for field in dataclasses.fields(kind)}
                asked[section] |= {name: plain(value) for name, value in given.items() if name in names}
            tables = tables_for_resume(saved, asked, world_size())
            # A run directory may have been moved or copied, and then holds the name of its first place.
            tables["run"]["run_dir"] = str(run_dir)
            return of_tables(tables, {}, where)
    init_from = build(RunConfig, given, tables["run"], where).init_from
    if init_from is not None:
        tables["model"] = model_table(init_from) | tables["model"]
    return of_tables(tables, given, where)


def of_tables(tables: Tables, given: dict[str, Any], where: str) -> TrainConfig:
    """The configuration of what was `given` over the tables, which come from `where`."""
    parts: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        parts[section] = build(kind, given, tables[section], f"{where} [{section}]")
    config = for_ranks(TrainConfig(**parts), world_size())
    try:
        to_toml(config).encode()
    except UnicodeEncodeError as error:
        name = ascii(error.object[error.start - 40 : error.end + 40])
        raise UsageError(f"a path is not UTF-8, which config.toml cannot hold ({name}): rename it") from None
    return config


def saved_tables(run_dir: Path) -> tuple[str, Tables | None]:
    """Where the configuration of a run is, and its tables: RUN/config.toml, without one what the newest whole
    checkpoint was made with; None where there is neither."""
    path = run_dir / "config.toml"
    if os.path.lexists(path):
        try:
            return str(path), read_tables(path)
        except (BadData, UsageError) as error:
            if not list((run_dir / "checkpoints").glob("step-*")):
                raise
            raise type(error)(f"{error}, or remove {path}: the checkpoints hold its settings too") from None
    if not os.path.isdir(run_dir):
        return "", None
    from llmtrain.training import checkpoint

    folder = checkpoint.newest_whole(run_dir)
    if folder is None:
        return "", None
    known = {section: {field.name for field in dataclasses.fields(config)} for section, config in SECTIONS.items()}
    state = checkpoint.read_state(folder)
    if "imported" in state:  # no run, which `train` will say
        return "", None
    saved = state["config"]
    return str(folder), {s: {k: v for k, v in saved.get(s, {}).items() if k in known[s]} for s in SECTIONS}


def model_table(init_from: Path) -> dict[str, Any]:
    """The model that --init-from names, for what is not said of it. Raises as `origin.checkpoint_at`, BadData."""
    from llmtrain.training import checkpoint, origin

    known = {field.name for field in dataclasses.fields(SECTIONS["model"])}
    model = checkpoint.read_state(origin.checkpoint_at(init_from))["config"]["model"]
    return {name: value for name, value in model.items() if name in known}


def plain(value: Any) -> Any:
    """An option's value as a TOML file would have it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def read_tables(path: Path) -> Tables:
    """The tables of a configuration file, one for each section, empty where it has none."""
    tables = read_toml(path)
    for name, table in tables.items():
        if name not in SECTIONS or not isinstance(table, dict):
            raise UsageError(f"{path}: unknown table [{name}]; known are {', '.join(SECTIONS)}")
    return {section: tables.get(section, {}) for section in SECTIONS}

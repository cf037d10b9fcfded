"""`llmtrain train`."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.storage.errors import BadData, UsageError, read_error
from llmtrain.training.config import SECTIONS, RunConfig, TrainConfig, tables_for_resume

EPILOG = """Example:

    llmtrain train --config configs/31m.toml --tokens data/corpus.u16 --val-tokens data/corpus.val.u16 --resume
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.option(
    "--config", "preset", metavar="FILE|NAME",
    help="TOML file with any of the settings, or the name of one in configs/.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint; start where there is none.")
@config_options(*SECTIONS.values())
def command(given: dict[str, Any], preset: str | None, resume: bool) -> None:
    """Train a language model on token files, or go on with a run.

    What stands on the command line goes before --config, and that before the defaults. With --resume, settings not
    given come from the run itself.
    """
    config = configuration(given, preset_path(preset) if preset else None, resume)
    from llmtrain.training.run import train  # imports torch, which a mistake in the configuration need not wait for

    train(config, resume)


def preset_path(name: str) -> Path:
    """The file itself, or configs/NAME.toml."""
    path, preset = Path(name), Path("configs", f"{name}.toml")
    return preset if not path.exists() and preset.exists() else path


def configuration(given: dict[str, Any], config_file: Path | None, resume: bool) -> TrainConfig:
    """The configuration of a run from the command line, a TOML file, and, on resume, the run directory."""
    tables = read_tables(config_file) if config_file else {section: {} for section in SECTIONS}
    where = str(config_file) if config_file else ""
    if resume:
        run_dir = build(RunConfig, given, tables["run"], where).run_dir
        if (run_dir / "config.toml").exists():
            where = str(run_dir / "config.toml")
            asked = {section: dict(values) for section, values in tables.items()}
            for section, config in SECTIONS.items():
                names = {field.name for field in dataclasses.fields(config)}
                asked[section] |= {name: plain(value) for name, value in given.items() if name in names}
            tables, given = tables_for_resume(read_tables(run_dir / "config.toml"), asked), {}
    parts: dict[str, Any] = {}
    for section, config in SECTIONS.items():
        parts[section] = build(config, given, tables[section], f"{where} [{section}]")
    return TrainConfig(**parts)


def plain(value: Any) -> Any:
    """An option's value as a TOML file would have it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a configuration file, one for each section, empty where it has none."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise read_error(error, path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadData(f"{path}: is not TOML: {error}: correct it") from None
    for name, table in tables.items():
        if name not in SECTIONS or not isinstance(table, dict):
            raise UsageError(f"{path}: unknown table [{name}]; known are {', '.join(SECTIONS)}")
    return {section: tables.get(section, {}) for section in SECTIONS}

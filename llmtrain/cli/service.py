"""`llmtrain service`."""

import os
import pwd
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options, options_of
from llmtrain.cli.presets import complete_preset, preset_path
from llmtrain.cli.train import configuration
from llmtrain.storage import atomic
from llmtrain.storage.errors import ConfigMismatch, UsageError, write_error
from llmtrain.training.config import SECTIONS, TrainConfig
from llmtrain.training.unit import SYSTEM_FOLDER, ServiceConfig, run_of, unit_name, unit_text

EPILOG = """Example:

    llmtrain service --run-dir runs/default --config 31m
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@click.option("--user/--system", "of_user", default=True, help="For systemd --user, or for the whole machine.")
@click.option("--config", "preset", metavar="FILE|NAME", shell_complete=complete_preset, help="As of `llmtrain train`.")
@config_options(ServiceConfig, *SECTIONS.values())
def command(given: dict[str, Any], of_user: bool, preset: str | None) -> None:
    """Write a systemd unit that keeps a run going: through crashes, hangs and reboots, until it is finished.

    It takes the options of `llmtrain train` and passes them on, with --resume. A run that was started already needs
    no more than its --run-dir.
    """
    service = build(ServiceConfig, given)
    config_file = preset_path(preset).absolute() if preset else None
    config = configuration(given, config_file, resume=True)
    run_dir = absolute(config.run.run_dir)
    arguments = ["--run-dir", str(run_dir), *([f"--config={config_file}"] if config_file else []), *said(given)]
    # -P: what lies in the folder where the run was started must not be imported.
    program = [absolute(Path(sys.executable)), "-P", "-m", "llmtrain", "train", "--resume", *arguments]
    user = None if of_user else account(run_dir)
    text = unit_text(service, list(map(str, program)), run_dir, Path.cwd(), user, mounts(config, run_dir))
    path = absolute(service.output or folder_of_units(of_user) / unit_name(run_dir))
    write(path, text, run_dir)
    for line in what_next(path, of_user):
        click.echo(line)
    if absent := missing(config):
        click.echo(f"note: the run cannot start before there is {' and '.join(map(str, absent))}", err=True)


def missing(config: TrainConfig) -> list[Path]:
    """The token files of the run that are not there, in parts neither."""
    from llmtrain.corpus.order import parse_sources
    from llmtrain.corpus.shards import find_parts

    named = parse_sources(config.data.tokens)
    if config.data.val_tokens:
        named += parse_sources(config.data.val_tokens, "--val-tokens")
    paths = [Path(spec.path) for spec in named]
    return [path for path in dict.fromkeys(paths) if not path.exists() and not find_parts(path)]


def absolute(path: Path) -> Path:
    """Without following links: a virtual environment's Python is one, and is found by its place."""
    return Path(os.path.abspath(path))


def said(given: dict[str, Any]) -> Iterator[str]:
    """The options of `train` that were given, as words, with paths that mean the same in any folder."""
    from llmtrain.corpus.order import absolute_spec

    for config in SECTIONS.values():
        for option in options_of(config):
            if option.field not in given or option.field == "run_dir":
                continue
            value = given[option.field]
            if option.is_flag:
                yield option.option if value else f"--no-{option.option[2:]}"
                continue
            for one in value if option.repeatable else (value,):
                if option.field in ("tokens", "val_tokens", "val_choices", "val_text"):
                    one = absolute_spec(one, option.option)
                # In one word, so that no value is taken for an option.
                yield f"{option.option}={absolute(one) if isinstance(one, Path) else one}"


def account(run_dir: Path) -> str:
    """Whose a run is that the system starts: the run directory's owner, and before there is one, whoever asks, sudo
    aside."""
    try:
        return pwd.getpwuid(run_dir.stat().st_uid).pw_name
    except FileNotFoundError:
        return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise UsageError(f"{run_dir}: its owner has no name: give it to a user of this machine") from None


def mounts(config: TrainConfig, run_dir: Path) -> list[Path]:
    from llmtrain.corpus.order import parse_sources

    return [run_dir, *(absolute(Path(parse_sources([spec])[0][1])) for spec in config.data.tokens)]


def folder_of_units(of_user: bool) -> Path:
    """Where systemd looks for units."""
    if not of_user:
        return SYSTEM_FOLDER
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"


def write(path: Path, text: str, run_dir: Path) -> None:
    """Raises ConfigMismatch where another's unit is there."""
    try:
        before = path.read_text(errors="replace")
    except FileNotFoundError:
        before = None
    except OSError as error:
        raise write_error(error, path) from None
    if before is not None and run_of(before) != str(run_dir):
        raise ConfigMismatch(f"{path}: is there already and not the unit of {run_dir}: name another with --output")
    atomic.make_parent(path)
    atomic.write_bytes(path, text.encode())


def what_next(path: Path, of_user: bool) -> Iterator[str]:
    """What was written, and the commands that come next."""
    systemctl, journalctl = (f"{name} --user" if of_user else name for name in ("systemctl", "journalctl"))
    yield f"wrote {path}"
    yield "next:"
    if path.parent != absolute(folder_of_units(of_user)):
        yield f"    {systemctl} link {shlex.quote(str(path))}"
    yield f"    {systemctl} daemon-reload"
    yield f"    {systemctl} enable --now {path.name}    # returns when the first step is done"
    yield f"    {systemctl} status {path.name}"
    yield f"    {journalctl} -u {path.name} -f"
    yield f"    {systemctl} stop {path.name}            # saves first; start goes on"
    if of_user:
        yield "    loginctl enable-linger                  # once: it runs on without you, and from boot"

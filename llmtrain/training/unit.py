"""A systemd unit that keeps a run going: its text, and where systemd looks for it. Imports no torch."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain import __version__
from llmtrain.storage.errors import UsageError

STAYS_DOWN = (2, 65, 66, 71, 78, 79)
"""Exit codes after which a restart would meet the same: wrong usage, bad data, no input, a machine that computes wrong,
a mismatch, divergence."""

SYSTEM_FOLDER = Path("/etc/systemd/system")


@dataclass(frozen=True)
class ServiceConfig:
    output: Path | None = field(default=None, metadata={"metavar": "FILE.service"})
    """The unit file to write; default: where systemd looks for it, named after the run directory."""
    watchdog: float = 300.0
    """Seconds of silence from the training loop after which it counts as hung and is restarted; 0: no watchdog."""
    setenv: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME=VALUE"})
    """Variable for the run's environment, such as CUDA_VISIBLE_DEVICES=1; repeat it for more."""

    def __post_init__(self) -> None:
        if not 0 <= self.watchdog < 1e9:
            raise ValueError(f"watchdog must be 0 or more seconds, not {self.watchdog}")
        for one in self.setenv:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", one, re.DOTALL):
                raise ValueError(f"setenv must be NAME=VALUE, not {one!r}")
        if self.output is not None and not re.fullmatch(r"[A-Za-z0-9:_.\\-]+\.service", self.output.name):
            raise ValueError(
                f"output must have a name of letters, digits and :_.- that ends in .service, not {self.output.name!r}"
            )


def unit_name(run_dir: Path) -> str:
    """The unit's file name for a run directory (absolute)."""
    return f"llmtrain-{re.sub('[^A-Za-z0-9_.:-]', '-', run_dir.name)[:200]}.service"


def run_of(text: str) -> str | None:
    """The run directory of a unit that was written here, None of any other."""
    match = re.search(r"^# run: (.*)$", text, re.MULTILINE)
    try:
        return str(json.loads(match[1])) if match else None
    except ValueError:
        return None


def quoted(word: str) -> str:
    """`word` as ExecStart= and Environment= have to spell it, so that systemd reads it back. Where a line begins with
    `:`, a $ is only a $."""
    escapes = {'"': '\\"', "\\": "\\\\", "%": "%%"}
    text = "".join(escapes.get(c) or (c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}") for c in word)
    return text if re.fullmatch(r"[A-Za-z0-9_@+=:,./%-]+", text) else f'"{text}"'


def unit_text(
    config: ServiceConfig,
    command: Sequence[str],
    run_dir: Path,
    folder: Path,
    user: str | None,
    mounts: Sequence[Path] = (),
) -> str:
    """The unit that runs `command` in `folder`. user: the name of the account of a system unit; None for a user's own
    unit. mounts: what a system unit waits for. Raises UsageError for a folder or a program that systemd cannot name."""
    if re.search(r"[\x00-\x1f\x7f]|\\$", str(folder)):
        raise UsageError(f"{ascii(str(folder))}: systemd can start nothing in a folder of this name: rename it")
    if re.search(r"""[\x00-\x1f\x7f"'\\]""", command[0]):
        raise UsageError(f"{ascii(command[0])}: systemd can start no program of this name: install llmtrain elsewhere")
    shown = re.sub(r"[\x00-\x1f\x7f\\]", "?", str(run_dir)).replace("%", "%%")
    waits = [str(path) for path in mounts if not re.search(r"""[\x00-\x1f\x7f"'\\]""", str(path))]
    lines = [
        f"# Written by `llmtrain service` {__version__}; `systemctl edit` lays changes over it.",
        f"# run: {json.dumps(str(run_dir))}",
        "[Unit]",
        f"Description=llmtrain {shown}",
        "# However often it fails, it is started again.",
        "StartLimitIntervalSec=0",
        *(["RequiresMountsFor=" + " ".join(map(quoted, waits))] if user is not None and waits else []),
        "",
        "[Service]",
        "Type=notify",
        *([f"User={user}"] if user is not None else []),
        f"WorkingDirectory={str(folder).replace('%', '%%')}",
        *[f"Environment={quoted(one)}" for one in config.setenv],
        "ExecStart=" + " ".join(quoted(word) for word in (":" + command[0], *command[1:])),
        "Restart=on-failure",
        "RestartSec=30",
        "# What a restart would meet again: usage, data, a missing input, another run's files, divergence.",
        f"RestartPreventExitStatus={' '.join(map(str, STAYS_DOWN))}",
        "# Stopped on request, and saved.",
        "SuccessExitStatus=75",
        "# The run itself asks for more time while it starts, compiles, evaluates and saves.",
        "TimeoutStartSec=600",
        "TimeoutStopSec=300",
        "TimeoutAbortSec=60",
        *([f"WatchdogSec={config.watchdog:g}"] if config.watchdog else []),
        "KillMode=mixed",
        "# A hung run leaves its stack in the journal; a core would be as large as its memory.",
        "LimitCORE=0",
        "",
        "[Install]",
        f"WantedBy={'default' if user is None else 'multi-user'}.target",
    ]
    return "\n".join(lines) + "\n"

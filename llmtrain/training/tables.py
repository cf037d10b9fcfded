"""A configuration as TOML tables, and whether two of them are the same run."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.storage.errors import ConfigMismatch
from llmtrain.training.config import SECTIONS, Tables, TrainConfig, of_pipeline, sequences_per_step


def to_tables(config: TrainConfig) -> Tables:
    """The configuration as plain TOML values; fields that are None are left out."""
    tables: Tables = {}
    for section in SECTIONS:
        values = {}
        for name, value in dataclasses.asdict(getattr(config, section)).items():
            if value is not None:
                values[name] = str(value) if isinstance(value, Path) else value
        tables[section] = values
    return tables


def to_toml(config: TrainConfig) -> str:
    """config.toml of a run directory; tomllib reads it back."""
    lines = []
    for section, values in to_tables(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(c if c >= " " and c not in '\\"\x7f' else f"\\u{ord(c):04x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)


def changes(saved: Tables, asked: Tables) -> Iterator[tuple[str, Any, Any]]:
    """(name, saved value, asked value) of what in `asked` would make it another run; both as `to_tables` has them. A
    field that `saved` lacks has its default. What may be written in several ways, the sequences of a step, is not
    looked at."""
    for section, values in asked.items():
        fields = {f.name: f for f in dataclasses.fields(SECTIONS[section])}
        for name, value in values.items():
            if name not in fields or not (section == "model" or fields[name].metadata.get("defines_run", False)):
                continue
            before = saved.get(section, {}).get(name, fields[name].default)
            if before != value and not _left_open(section, name, value):
                yield name, before, value


def _left_open(section: str, name: str, value: Any) -> bool:
    """Whether the value says that the corpus decides, as it has done."""
    return section == "model" and name in ("vocab_size", "max_seq_len") and value == 0


def tables_for_resume(saved: Tables, asked: Tables, ranks: int = 1) -> Tables:
    """The saved tables with what was asked laid over them; both as `to_tables` has them. Of several ranks, a step keeps
    its sequences by global_batch_size.

    Raises ConfigMismatch where that would make it another run.
    """
    for name, before, value in changes(saved, asked):
        raise ConfigMismatch(
            f"{name} is {before} in this run and was asked to be {value}: that would be another run: leave "
            f"--{name.replace('_', '-')} out, or start in another --run-dir"
        )
    merged = {section: dict(saved.get(section, {})) for section in SECTIONS}
    for section, values in asked.items():
        merged[section] |= {name: value for name, value in values.items() if not _left_open(section, name, value)}
    run, of_step = merged["run"], asked.get("run", {}).keys() & {"batch_size", "accumulate", "global_batch_size"}
    before = sequences_per_step(saved["run"])
    # There are two ways to say it; what was asked goes before what was saved in the other way.
    if "accumulate" in of_step and "global_batch_size" not in of_step:
        run.pop("global_batch_size", None)
        if ranks > 1:
            run["global_batch_size"] = sequences_per_step(run) * (ranks // of_pipeline(run, ranks))
            del run["accumulate"]
    elif of_step or ranks > 1:
        run.pop("accumulate", None)
        run.setdefault("global_batch_size", before)
    if sequences_per_step(run) != before:
        raise ConfigMismatch(
            f"a step of this run has {before} sequences, asked were {sequences_per_step(run)}: keep --batch-size times "
            f"--accumulate at {before}, or give --global-batch-size {before}"
        )
    return merged


def refuse_another_run(saved: Tables, config: TrainConfig) -> None:
    """Raises ConfigMismatch where `config` is not that of the run whose checkpoint says `saved`."""
    now = to_tables(config)
    found = [f"{name} is {before} in the checkpoints and {value} in" for name, before, value in changes(saved, now)]
    # A field that is None now is not in the tables.
    missing = {section: {f.name: None for f in dataclasses.fields(SECTIONS[section])} for section in SECTIONS}
    for section, values in missing.items():
        missing[section] = {name: None for name in values if name not in now[section]}
    found += [f"{name} is {before} in the checkpoints and not in" for name, before, _ in changes(saved, missing)]
    if (before := sequences_per_step(saved["run"])) != config.run.sequences_per_step:
        found.append(f"a step has {before} sequences in the checkpoints and {config.run.sequences_per_step} in")
    if found:
        raise ConfigMismatch(
            f"{found[0]} {config.run.run_dir / 'config.toml'}: that would be another run: put it back, or start in "
            "another --run-dir"
        )

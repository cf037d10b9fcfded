"""What the scripts that check kernels on a card share: what holds and what does not, and the floor of a copy."""

import json
from pathlib import Path
from typing import Any

from llmtrain.storage.atomic import make_parent, write_json

COPY_BYTES_PER_S = 4.3e12
"""A device copy on one H200, reads and writes counted: the floor of what only moves memory."""


def add_groups(output: Path, groups: dict[str, dict[str, Any]]) -> None:
    """Writes groups into a file, each with the machine it was taken on; the file's other groups stay."""
    data = json.loads(output.read_text()) if output.exists() else {"groups": {}}
    make_parent(output)
    write_json(output, {"groups": data["groups"] | groups})


class Report:
    """Lines on stdout, the same as records for a file, in groups, and what did not hold. A group is in `output` when
    the next one begins."""

    def __init__(self, machine: dict[str, Any], output: Path | None) -> None:
        self.machine, self.output = machine, output
        self.groups: dict[str, dict[str, Any]] = {}
        self.wrong: list[str] = []

    def begin(self, group: str) -> None:
        """What is added from here on belongs to `group`."""
        self.save()
        self.records: list[dict[str, Any]] = []
        self.groups[group] = {"machine": self.machine, "records": self.records}

    def add(self, op: str, **fields: Any) -> None:
        self.records.append({"op": op} | fields)
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
        print(f"{op}: {shown}", flush=True)

    def check(self, op: str, held: bool, **fields: Any) -> None:
        """The only way that something fails: with a line that names it."""
        if not held:
            self.wrong.append(op)
        self.add(op, **fields, verdict="ok" if held else "WRONG")

    def save(self) -> None:
        if self.output and self.groups:
            add_groups(self.output, self.groups)

    def end(self) -> int:
        """The exit code, and a last line that says why."""
        self.save()
        print(f"WRONG: {', '.join(dict.fromkeys(self.wrong))}" if self.wrong else "all within tolerance")
        return int(bool(self.wrong))

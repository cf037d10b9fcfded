"""What the scripts that check kernels on a card share: what holds and what does not, and the floor of a copy."""

from pathlib import Path

from llmtrain.storage.atomic import write_json

COPY_BYTES_PER_S = 4.3e12
"""A device copy on one H200, reads and writes counted: the floor of what only moves memory."""


class Report:
    """Lines on stdout, the same as records for a file, and whether everything held."""

    def __init__(self) -> None:
        self.records: list[dict] = []
        self.failed = False

    def add(self, op: str, **fields) -> None:
        self.records.append({"op": op} | fields)
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
        print(f"{op}: {shown}", flush=True)

    def check(self, op: str, held: bool, **fields) -> None:
        self.failed |= not held
        self.add(op, **fields, verdict="ok" if held else "WRONG")

    def end(self, output: Path | None) -> int:
        """Writes the records where that is asked for; the exit code."""
        if output:
            write_json(output, self.records)
        print("WRONG: see above" if self.failed else "all within tolerance")
        return int(self.failed)

"""Training throughput and memory over many shapes, one process a row, as JSON; tables.py makes Markdown of it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmtrain.benchmark.config import SweepConfig, SweepRow, TimingConfig
from llmtrain.benchmark.machine import card_before_a_run, contention, cpu_busy_share, describe
from llmtrain.benchmark.step import model_figures

LAST_LINES = 3
"""Lines of a failed row's stderr that are kept."""


def run_row(row: SweepRow, timing: TimingConfig, timeout: float) -> dict[str, Any]:
    """The result of one row, from a process of its own: `status` "ok", "oom" or "failed"."""
    timing = replace(timing, checkpoint_activations=row.checkpoint_activations or timing.checkpoint_activations)
    request = json.dumps({"shape": asdict(row.shape), "timing": asdict(timing)})
    with tempfile.TemporaryDirectory(prefix="llmtrain-row-") as folder:
        answer = Path(folder) / "row.json"
        command = [sys.executable, "-m", "llmtrain.benchmark.row", str(answer)]
        try:
            done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"gave up after {timeout:g} s"}
        if done.returncode == 0:
            return json.loads(answer.read_text())
    if done.returncode == -9:
        # The kernel's way of saying that the host's memory is used up; the process could not say it itself.
        return {"status": "oom", "reason": "killed by signal 9, as the kernel does when the host's memory is used up"}
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-LAST_LINES:]
    return {"status": "failed", "reason": f"exit code {done.returncode}: {' | '.join(last)}"}


def run_sweep(
    rows: Sequence[SweepRow],
    sweep: SweepConfig,
    timing: TimingConfig,
    on_card: bool,
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure `rows` one after the other and return what the table is made from.

    `tell` gets that after each row, so that a sweep that is stopped leaves what it has.
    """
    data: dict[str, Any] = {
        "kind": "sweep",
        "machine": describe(on_card),
        "sweep": asdict(sweep),
        "timing": asdict(timing),
        "planned": len(rows),
        "rows": [],
        "replicate": None,
    }

    def taken(row: SweepRow) -> dict[str, Any]:
        card = card_before_a_run() if on_card else None
        before = contention(card, None if on_card else cpu_busy_share())
        result = run_row(row, timing, sweep.row_timeout)
        held_mib = card["memory_used_mib"] if card else None
        if result["status"] == "ok" and result["device_used_gib"] is not None and held_mib is not None:
            # mem_get_info sees the whole card: what was held before the row is not the row's.
            result["device_peak_gib"] = result["device_used_gib"] - held_mib / 1024
        mode = row.checkpoint_activations or timing.checkpoint_activations
        figures = model_figures(row.shape, mode)
        return row.as_dict() | {"checkpoint_activations": mode, "contended": before} | figures | result

    for row in rows:
        data["rows"].append(taken(row))
        tell(data)
    first = next((i for i, result in enumerate(data["rows"]) if result["status"] == "ok"), None)
    if sweep.replicate and first is not None:
        data["replicate"] = taken(rows[first])
        tell(data)
    return data

"""What a figure was taken on: card, driver, clocks, versions, and whether somebody else was using it."""

import csv
import io
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from llmtrain import __version__

IDLE_MEMORY_MIB = 1024
"""More than this held on the card by others before a run counts as contended: an idle driver holds a few hundred."""

BUSY_SHARE = 0.10
"""A card or a CPU busier than this before a run counts as contended."""

SETTLE_SECONDS = 1.5
"""After which the share of a card's last second knows nothing of what ended before."""

CARD_FIELDS = (
    "name", "uuid", "driver_version", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu",
    "power.limit", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
)  # fmt: skip


def nvidia_smi(*arguments: str) -> list[list[str]] | None:
    """The rows of an nvidia-smi query, or None where there is no such program or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, *arguments, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(answer.stdout)) if row]


def number(cell: str) -> float | None:
    """A figure of nvidia-smi, which writes [N/A] where it knows none."""
    try:
        return float(cell)
    except ValueError:
        return None


def card_state(ours: Iterable[int] = ()) -> dict | None:
    """The first visible card as nvidia-smi sees it now, or None without one.

    `processes` lists compute processes other than `ours` (pids): pid, program, memory in MiB (None where not known).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    rows = nvidia_smi(f"--id={visible}", f"--query-gpu={','.join(CARD_FIELDS)}")
    if not rows:
        return None
    cells = dict(zip(CARD_FIELDS, rows[0], strict=True))
    apps = nvidia_smi(f"--id={visible}", "--query-compute-apps=pid,process_name,used_memory") or []
    mine = {str(pid) for pid in ours}
    others = [{"pid": int(a[0]), "name": Path(a[1]).name, "memory_mib": number(a[2])} for a in apps if a[0] not in mine]
    return {
        "name": cells["name"],
        "driver": cells["driver_version"],
        "memory_total_mib": number(cells["memory.total"]),
        "memory_used_mib": number(cells["memory.used"]),
        "utilization": number(cells["utilization.gpu"]),
        "temperature_c": number(cells["temperature.gpu"]),
        "power_limit_w": number(cells["power.limit"]),
        "clocks_mhz": {
            "sm": number(cells["clocks.sm"]),
            "memory": number(cells["clocks.mem"]),
            "max_sm": number(cells["clocks.max.sm"]),
            "max_memory": number(cells["clocks.max.mem"]),
        },
        "processes": others,
    }


def card_before_a_run() -> dict | None:
    """`card_state`, asked again a little later where the card alone says that it is busy: its share is that of the last
    second, in which the run before ours may have ended."""
    card = card_state()
    if card is not None and not card["processes"] and (card["utilization"] or 0) > 100 * BUSY_SHARE:
        time.sleep(SETTLE_SECONDS)
        card = card_state()
    return card


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_busy_share(seconds: float = 0.3) -> float | None:
    """The share of all cores' time that was busy during the next `seconds`; None where /proc does not say."""

    def read() -> tuple[int, int]:
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]

    try:
        total, idle = read()
        time.sleep(seconds)
        later_total, later_idle = read()
    except (OSError, ValueError, IndexError):
        return None
    elapsed = later_total - total
    return None if elapsed <= 0 else 1 - (later_idle - idle) / elapsed


def contention(card: dict | None, cpu_busy: float | None = None) -> list[str]:
    """Why figures taken now would be contended, each reason a phrase; empty on an idle machine.

    `card` as `card_state` returns it, taken before our own work starts; `cpu_busy` matters for a run on the CPU.
    """
    reasons = []
    if card is not None:
        if card["processes"]:
            held = sum(p["memory_mib"] or 0 for p in card["processes"])
            reasons.append(f"{len(card['processes'])} other processes on the card holding {held:.0f} MiB")
        elif (card["memory_used_mib"] or 0) > IDLE_MEMORY_MIB:
            # Inside a container the processes of others are not listed; the memory they hold is.
            reasons.append(f"{card['memory_used_mib']:.0f} MiB of the card held by others")
        if (card["utilization"] or 0) > 100 * BUSY_SHARE:
            reasons.append(f"card {card['utilization']:.0f}% busy")
    if cpu_busy is not None and cpu_busy > BUSY_SHARE:
        reasons.append(f"CPU {100 * cpu_busy:.0f}% busy")
    return reasons


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for what is not there."""
    import torch

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "llmtrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
    }


def describe(on_card: bool) -> dict:
    """The machine and its state, before a benchmark starts: what every table's JSON carries under "machine"."""
    from llmtrain.training.devices import cpu_name

    card = card_before_a_run() if on_card else None
    busy = cpu_busy_share()
    return {
        "card": card,
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "cpu_busy": busy,
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions(),
        "contended": contention(card, None if on_card else busy),
        "taken": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def headline(machine: dict) -> str:
    """The machine in one Markdown paragraph, from what `describe` returned."""
    card = machine["card"]
    parts = []
    if card is not None:
        clocks = {name: "unknown" if mhz is None else f"{mhz:.0f} MHz" for name, mhz in card["clocks_mhz"].items()}
        held = "unknown" if card["memory_used_mib"] is None else f"{card['memory_used_mib']:.0f} MiB"
        parts.append(
            f"{card['name']}, driver {card['driver']}, SM clock {clocks['sm']} before the run (at most "
            f"{clocks['max_sm']}), memory clock {clocks['memory']}, {held} of its memory held before the run"
        )
    parts.append(f"{machine['cpu']}, {machine['cores']} cores")
    known = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    parts.append(f"{known}, {machine['system']}")
    busy = "; ".join(machine["contended"])
    state = f"**Contended**: {busy}." if busy else "Idle before the run."
    return "; ".join(parts) + f". Taken {machine['taken']}. {state}"

"""How fast a run is expected to go, before its first step: from a share of the peak that was given or measured."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain.model.cards import Card, card_of
from llmtrain.storage.errors import BadData, read_error
from llmtrain.storage.journal import JsonLines, is_number
from llmtrain.storage.units import duration

MEASURED_ON = "H200"
MEASURED = {
    (30.9e6, 16 * 512): (0.324, "docs/baseline.md"),
    (30.9e6, 32 * 512): (0.371, "docs/baseline.md"),
    (88.1e6, 16 * 512): (0.404, "docs/baseline.md"),
    (101.7e6, 1 * 512): (0.106, "docs/peers.md"),
    (101.7e6, 1 * 1024): (0.182, "docs/peers.md"),
    (101.7e6, 4 * 512): (0.275, "docs/peers.md"),
    (101.7e6, 4 * 1024): (0.359, "docs/peers.md"),
    (101.7e6, 16 * 1024): (0.438, "docs/peers.md"),
    (101.7e6, 64 * 1024): (0.454, "docs/peers.md"),
    (361.8e6, 32 * 1024): (0.480, "docs/peers.md"),
    (1038.7e6, 16 * 2048): (0.567, "docs/peers.md"),
}
"""(parameters, tokens of a micro-batch) -> MFU of whole steps in bf16, and the page that has it; tests compare it with
the pages' JSON. Small matmuls fill a card badly, so both numbers count."""

NO_PACE = "known from the first log line on (no rate on record for this device and precision)"

LAST_LINES = 200
"""Train lines of a run, from its end, whose median is its pace."""


@dataclass(frozen=True)
class Pace:
    """What one device is expected to do."""

    flops: float
    """FLOP/s, as MFU counts them."""
    mfu: float | None
    """Its share of the bf16 peak; None where that is not known."""
    why: str
    """Where the figure comes from, for a person."""


def given(mfu: float, peak: float) -> Pace:
    return Pace(mfu * peak, mfu, "as given")


def usual(parameters: int, micro_tokens: int, precision: str, card: Card) -> Pace | None:
    """What the nearest measured model did; None for a precision that is another kind of arithmetic."""
    if precision in ("fp32", "mxfp8"):
        return None

    def far(shape: tuple[float, float]) -> float:
        return math.hypot(math.log(parameters / shape[0]), math.log(micro_tokens / shape[1]))

    nearest = min(MEASURED, key=far)
    mfu, page = MEASURED[nearest]
    why = f"that of {in_millions(nearest[0])} in micro-batches of {nearest[1]:,.0f} tokens"
    why += f" on an {MEASURED_ON}, {page}" if card.name == MEASURED_ON else f" on an {MEASURED_ON}: NOT MEASURED HERE"
    return Pace(mfu * card.bf16, mfu, why + ", in bf16" * (precision != "bf16"))


def in_millions(parameters: float) -> str:
    """101.7M, 1.04B."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.4g}M"


def measured(path: Path, card: Card | None) -> Pace:
    """From a run directory, or the JSON of `bench step`. Where it was measured on another card than `card`, the share
    of the peak is taken over. Raises InputMissing, StorageFailure, and BadData where there is no rate in it."""
    flops, mfu, device = _of_run(path) if path.is_dir() else _of_bench(path)
    there = card_of(device)
    if mfu is not None and card is not None and card != there:
        return Pace(mfu * card.bf16, mfu, f"measured on {device}, {path}")
    if card != there:
        raise BadData(f"{path}: was measured on {device or 'an unknown device'}: that says nothing of another device")
    return Pace(flops, mfu, f"measured, {path}")


def _of_run(run_dir: Path) -> tuple[float, float | None, str]:
    """(FLOP/s of one device, MFU, device)."""
    path = run_dir / "metrics.jsonl"
    device = ""
    rates: list[tuple[float, Any]] = []
    for line in JsonLines.read(path):
        if line.get("kind") == "event" and isinstance(line.get("environment"), dict):
            device = str(line["environment"].get("device"))
        elif line.get("kind") == "train" and _positive(line.get("tflops")):
            rates.append((1e12 * line["tflops"], line.get("mfu")))
            del rates[:-LAST_LINES]
    # The first line of an attempt includes compiling and capturing.
    if len(rates) < 2:
        raise BadData(f"{path}: has fewer than 2 train lines with a rate: name a run that has trained for longer")
    flops = median(rate for rate, _ in rates)
    shares: list[float] = [mfu for _, mfu in rates if _positive(mfu)]
    if not shares:
        return flops, None, device
    # Several ranks share the run's FLOP/s, and have the MFU of each.
    mfu, card = median(shares), card_of(device)
    return (mfu * card.bf16 if card else flops), mfu, device


def _of_bench(path: Path) -> tuple[float, float | None, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise read_error(error, path) from None
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}: is not JSON ({error}): name a run, or what `bench step --output` wrote") from None
    if not isinstance(data, dict) or not _positive(data.get("tflops")):
        raise BadData(f"{path}: holds no rate: name a run, or the JSON that `bench step --output` wrote in data/")
    machine: dict[str, Any] = data["machine"] if isinstance(data.get("machine"), dict) else {}
    card = machine.get("card")
    device = card.get("name") if isinstance(card, dict) else machine.get("cpu")
    return 1e12 * data["tflops"], data["mfu"] if _positive(data.get("mfu")) else None, str(device)


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def time_lines(pace: Pace | None, flops: float, ranks: int, card: Card | None, tokens: float) -> Iterator[str]:
    """How long `flops` FLOPs, of `tokens` tokens, take on `ranks` devices, and a card's energy."""
    if pace is None:
        yield f"time        {NO_PACE}"
        return
    seconds = flops / (pace.flops * ranks)
    share = f"{pace.mfu:.1%} of the peak" if pace.mfu is not None else f"{pace.flops / 1e12:,.3g} TFLOP/s"
    yield f"time        {in_hours(seconds)} at {tokens / seconds:,.0f} tokens/s: {share} ({pace.why})"
    if card is not None:
        of = f"{ranks} cards" if ranks > 1 else "the card"
        yield f"energy      {in_kwh(energy(seconds, ranks, card))} if {of} drew {card.watts} W throughout, host aside"


def energy(seconds: float, ranks: int, card: Card) -> float:
    """Joules at the power limit."""
    return seconds * ranks * card.watts


def in_hours(seconds: float) -> str:
    if seconds < 3600:
        return duration(seconds) if seconds >= 1 else "less than a second"
    return f"{seconds / 3600:,.2f} hours" + (f" ({seconds / 86400:,.1f} days)" if seconds > 2 * 86400 else "")


def in_kwh(joules: float) -> str:
    if joules < 3.6e4:
        return f"{joules / 3600:.2g} Wh"
    return f"{joules / 3.6e6:,.3g} kWh" if joules < 3.6e9 else f"{joules / 3.6e6:,.0f} kWh"

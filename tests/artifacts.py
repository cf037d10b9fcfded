"""What docs/data/ holds of the memory of training steps on a card."""

import json
from dataclasses import dataclass
from pathlib import Path

from llmtrain.kernels.attention import CUDNN
from llmtrain.model.config import ModelConfig

DATA = Path(__file__).parents[1] / "docs/data"


@dataclass(frozen=True)
class Measured:
    """Peaks of a step on an H200, bf16, everything kept for the backward; GiB."""

    name: str
    model: ModelConfig
    batch_size: int
    seq_len: int
    attention: str
    allocated: float
    reserved: float


def measured_steps() -> list[Measured]:
    peers = json.loads((DATA / "peers.json").read_text())["cases"]
    rows = [{**row, "name": case["name"]} for case in peers for row in case["rows"] if row["arm"] == "llmtrain"]
    rows += json.loads((DATA / "baseline.json").read_text())["rows"]
    return [
        Measured(
            row["name"], ModelConfig(**row["shape"]["model"]), row["shape"]["batch_size"], row["shape"]["seq_len"],
            row.get("attention", CUDNN), row["allocated_gib"], row["reserved_gib"],
        )
        for row in rows
        if row["status"] == "ok" and row.get("checkpoint_activations", "none") == "none"
    ]  # fmt: skip

"""Run directories as `train` leaves them, with every figure that it logs, made up."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 65_536
"""Of a step."""


def train_lines(steps: int, *, every: int = 10, attempt: int = 1, seed: int = 0, offset: float = 0.0, first: int = 1):
    """Lines of steps `first` to `steps`, with one spike where there are enough."""
    rng = np.random.default_rng(seed)
    for step in range(first, steps + 1):
        if step % every and step != first and step != steps:
            continue
        loss = 2.6 + 7.5 * (step + 5) ** -0.35 + rng.normal(0, 0.03) + offset
        loss += 1.5 * (abs(step - 3 * steps // 4) < every)
        lr = 1e-3 * min(step / 100, 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
        yield {
            "kind": "train", "step": step, "tokens": step * TOKENS, "time": 1.7e9 + step, "attempt": attempt,
            "lm_loss": loss, "aux_loss": 0.0, "skipped": 0,
            "grad_norm": 0.4 + 5 / (step + 3) + abs(rng.normal(0, 0.05)),
            "step_ms": 98 + rng.normal(0, 1), "data_ms": abs(rng.normal(0, 0.2)), "ppl": math.exp(loss), "lr": lr,
            "epoch": step / steps, "tok_per_s": 667_000 + rng.normal(0, 4000), "mfu": 0.462 + rng.normal(0, 0.003),
            "hfu": 0.46, "tflops": 457.0, "peak_gib": 23.3, "host_rss_mib": 1500.0 + step / 100,
            "expert_share": 0.5 + rng.normal(0, 0.01), "n_targets": 65_536.3,
        }  # fmt: skip


def eval_lines(steps: int, sources: tuple[str, ...], *, every: int = 250, attempt: int = 1, offset: float = 0.0):
    for step in range(0, steps + 1, every):
        for i, source in enumerate(sources):
            loss = 2.7 + 0.2 * i + 7.5 * (step + 5) ** -0.35 + offset
            yield {
                "kind": "eval", "step": step, "tokens": step * TOKENS, "time": 1.7e9 + step, "attempt": attempt,
                "source": source, "val_loss": loss, "ppl": math.exp(loss), "bits_per_byte": loss / 3,
            }  # fmt: skip


def event(step: int, name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"kind": "event", "step": step, "tokens": step * TOKENS, "time": 1.7e9 + step, "attempt": 1, "event": name,
            "text": text, **more}  # fmt: skip


ENVIRONMENT = {"llmtrain": "0.1.0", "torch": "2.11.0", "cuda": "13.0", "device": "NVIDIA H200", "attention": "cudnn",
               "deterministic": False, "nvml": None}  # fmt: skip


def write_log(folder: Path, lines) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder


def write_run(
    folder: Path, steps: int = 2000, *, seed: int = 0, offset: float = 0.0, sources: tuple[str, ...] = ("web", "code"),
    state: str = "finished", optimizer: str = "adamw",
) -> Path:  # fmt: skip
    """A run of two attempts with saves, a spike, a failed save, configuration, status and samples."""
    half = steps // 2
    begin = [event(0, "start", f"starts at step 0 of {steps}", environment=ENVIRONMENT, total_steps=steps)]
    saves = [event(s, "checkpoint", f"saved step-{s:08d} in 0.81 s") for s in range(steps // 8, steps + 1, steps // 8)]
    again = [event(half, "start", f"starts at step {half} of {steps}",
                   environment=ENVIRONMENT | {"torch": "2.12.0"}, total_steps=steps)]  # fmt: skip
    failed = [event(steps // 3, "save_failed", "not saved, failure 1 of the 3 in a row: the disk is full")]
    skipped = [event(3 * steps // 4, "skipped", "1 update was skipped as a spike")]
    lines = [
        *begin, *train_lines(half, seed=seed, offset=offset), *again,
        *train_lines(steps, seed=seed + 1, offset=offset, attempt=2, first=half + 1),
        *eval_lines(steps, sources, offset=offset), *saves, *failed, *skipped,
    ]  # fmt: skip
    write_log(folder, lines)
    (folder / "config.toml").write_text(
        f'[model]\nd_model = 768\nn_layers = 16\n[optimizer]\noptimizer = "{optimizer}"\nlearning_rate = 6e-4\n'
        f'[data]\ntokens = ["data/<web>.u16"]\n[run]\nrun_dir = "{folder}"\nseed = {seed}\n'
    )
    status = {"state": state, "reason": "all steps are done", "step": steps, "exit_code": 0}
    (folder / "status.json").write_text(json.dumps(status))
    sample = {"step": steps, "prompt": "def read(", "text": "path):\n    return open(path).read()", "how": "seed 0"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return folder

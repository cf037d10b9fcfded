"""What a run computes on: the device, and what of the options it can do."""

import platform
from pathlib import Path

import torch

from llmtrain.kernels.attention import Backend, training_backend
from llmtrain.kernels.fp8_fine import BLOCK, multiple_for, refusal
from llmtrain.kernels.mxfp8 import BLOCK as MX_BLOCK
from llmtrain.model.cards import Card
from llmtrain.model.config import ModelConfig
from llmtrain.storage.errors import UsageError
from llmtrain.training.config import Fp8Scaling
from llmtrain.training.step import COMPUTE_DTYPES


def pick_device(asked: str) -> torch.device:
    """What "auto" is: CUDA where there is a card. Raises UsageError for CUDA where there is none."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is visible: see nvidia-smi and torch's build, or --device cpu")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(asked)


def check_precision(
    precision: str, fp8_scaling: Fp8Scaling, seq_len: int, device: torch.device, card: Card | None = None,
    routed: bool = False,
) -> None:  # fmt: skip
    """Raises UsageError where --precision fp8 or mxfp8 cannot be had: on this device, or on a `card` that is not here,
    with these scales, for samples of this length, over whose tokens the gradients of weights are summed, or, where the
    model is `routed`, for experts."""
    if precision == "mxfp8" and seq_len % MX_BLOCK:
        raise UsageError(
            f"--seq-len {seq_len} is no multiple of {MX_BLOCK}, as --precision mxfp8 needs: change one of the two"
        )
    if precision != "fp8":
        return
    on_cpu = device.type != "cuda"
    capability = card.capability if card else (0, 0) if on_cpu else torch.cuda.get_device_capability(device)
    name = card.name if card else device_name(device)
    if capability < (8, 9):
        raise UsageError(
            f"--precision fp8: {name} has no 8-bit matmuls: NVIDIA's from "
            "compute capability 8.9 on have (RTX 40 and 50, L4, L40, H100, H200, B200): give --precision bf16"
        )
    if seq_len % (multiple := multiple_for(fp8_scaling)):
        raise UsageError(
            f"--seq-len {seq_len} is no multiple of {multiple}, as --precision fp8 needs with --fp8-scaling "
            f"{fp8_scaling}: change one of them"
        )
    if routed and capability[0] not in (9, 10):
        # torch asks for just these two in its _scaled_grouped_mm, but only when it is called, in the first step.
        raise UsageError(
            f"--precision fp8 with --moe: {name} has no 8-bit matmuls of experts: "
            "compute capability 9 and 10 do (H100, H200, B200): give --precision bf16"
        )
    if fp8_scaling == "tensorwise":
        return
    if card is None:
        why = refusal(fp8_scaling, device)
    else:
        why = "those of compute capability 9 do" if fp8_scaling == BLOCK and card.capability[0] != 9 else None
    if why is not None:
        raise UsageError(
            f"--fp8-scaling {fp8_scaling}: {name} does not multiply so with "
            f"torch {torch.__version__} ({why}): give --fp8-scaling tensorwise"
        )


def pick_attention(
    asked: str, precision: str, model: ModelConfig, seq_len: int, device: torch.device, masked: bool = False,
    card: Card | None = None,
) -> Backend:  # fmt: skip
    """The backend of --attention, on a `card` that is not here where one is given. Raises UsageError where the one
    asked for cannot do the shape on the device."""
    shape = asked, COMPUTE_DTYPES[precision], model.head_dim, seq_len, device, masked
    capability = card.capability if card else None
    hiding = [window is not None and window < seq_len for window in model.windows]
    try:
        without = None if all(hiding) else training_backend(*shape, capability=capability)
        within = training_backend(*shape, windowed=True, capability=capability) if any(hiding) else None
    except ValueError as error:
        raise UsageError(f"--attention {asked}: it {error}: name another, or leave it at auto") from None
    if within is None:
        assert without is not None
        return without
    if without is None:
        return Backend(within.name, within.why, within.name)
    return Backend(without.name, f"{without.why}; within windows {within.name}: {within.why}", within.name)


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

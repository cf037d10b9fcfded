"""How the card is: temperature, power and load, asked of its driver by a thread: no step waits for an answer."""

import threading
from contextlib import suppress
from typing import Any

import torch

EVERY = 2.0
"""Seconds between two questions."""
MILLI = 1e-3


class Card:
    """What NVML says of the run's card, as it was at most some seconds ago. Nothing at all without a card, without
    the package nvidia-ml-py, or with a driver that knows nothing of it."""

    def __init__(self, device: torch.device) -> None:
        self._newest: dict[str, float] = {}
        self._over = threading.Event()
        if device.type == "cuda":
            # The one of that UUID: NVML counts all cards, CUDA those that are visible, in an order of its own.
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
            threading.Thread(target=self._ask, args=(f"GPU-{uuid}",), name="card", daemon=True).start()

    def now(self) -> dict[str, float]:
        """`card_c` (degrees Celsius), `card_w` (watts), `card_busy` (share of the time in which a kernel ran) and
        `card_used_gib` (by all processes); what is not known is left out."""
        return self._newest

    def _ask(self, uuid: str) -> None:
        """The part of the thread."""
        try:
            import pynvml
        except ImportError:
            return
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            while True:
                self._newest = figures(pynvml, handle)
                if self._over.wait(EVERY):
                    return

    def close(self) -> None:
        # The thread is not joined: a driver that does not answer must not hold up the end.
        self._over.set()


def figures(nvml: Any, handle: Any) -> dict[str, float]:
    """What `nvml` (the module) says of the card; a figure that this card does not have is left out."""
    found = {}
    with suppress(nvml.NVMLError):
        found["card_c"] = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    with suppress(nvml.NVMLError):
        found["card_w"] = nvml.nvmlDeviceGetPowerUsage(handle) * MILLI
    with suppress(nvml.NVMLError):
        found["card_busy"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with suppress(nvml.NVMLError):
        found["card_used_gib"] = nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
    return found

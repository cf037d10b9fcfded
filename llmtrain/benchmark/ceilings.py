"""What the device can do, measured in the same run as what is held against it."""

from dataclasses import asdict, dataclass

import torch

from llmtrain.benchmark.timing import Method, Work, measure

METHOD = Method(sessions=1, rounds=2, samples=10, warmup=3, cold_l2=False)


@dataclass(frozen=True)
class Ceilings:
    """Rates of the two simplest things that use a device fully."""

    bytes_per_s: float
    """A pass that reads a large tensor and writes another, both counted."""
    flops: float
    """A square bf16 (on a CPU FP32) matrix product of random data."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def dtype_of_products(device: torch.device) -> torch.dtype:
    """What products of matrices, and what consists of them, are measured in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure_ceilings(device: torch.device) -> Ceilings:
    """Both rates; a second on a card."""
    on_card = device.type == "cuda"
    side = 8192 if on_card else 512
    elements = (1 << 29) if on_card else (1 << 23)  # 1 GiB and 16 MiB of 16-bit values: far beyond any cache
    dtype = dtype_of_products(device)

    def moved() -> Work:
        source = torch.randint(1, 1000, (elements,), dtype=torch.int16, device=device)
        target = torch.empty_like(source)
        # Arithmetic, so that a kernel moves the bytes: in a captured graph a plain copy becomes a node that the copy
        # engine may run, on an H200 at 2.7 TB/s where kernels reach 4.3.
        return Work(lambda: torch.neg(source, out=target), (source,))

    def product() -> Work:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return Work(lambda: torch.mm(a, b, out=out), (a, b))

    measured, _ = measure({"moved": moved, "product": product}, device=device, replicate=["moved"], method=METHOD)
    return Ceilings(
        bytes_per_s=2 * 2 * elements / (measured["moved"].times.pooled / 1e3),
        flops=2 * side**3 / (measured["product"].times.pooled / 1e3),
    )

"""What eight-bit formats are, by their definitions alone."""

import numpy as np
import torch

from llmtrain.kernels.fp8 import E4M3, E5M2

EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
MANTISSA = {E4M3: 3, E5M2: 2}
LOWEST = {E4M3: -6, E5M2: -14}
"""Exponent of the smallest normal number."""


def bits_by_hand(x: torch.Tensor, factor: float | np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """uint8 of each number: the format's definition in integers and FP64, no cast of torch or Triton in it.
    factor: the scale, or an array of them that broadcasts with x."""
    wide = x.double().numpy() * factor
    m, lowest = MANTISSA[dtype], LOWEST[dtype]
    with np.errstate(invalid="ignore", divide="ignore"):
        exponent = np.floor(np.log2(np.abs(wide)))
        exponent = np.where(np.abs(wide) > 0, np.maximum(exponent, lowest), lowest)
        units = np.rint(np.abs(wide) / 2.0 ** (exponent - m))  # rint: ties to even
    # A subnormal has units below 2^m, and the field 0; a carry into the next binade comes out right by itself.
    field = (exponent - lowest) * 2**m + units
    top = {E4M3: 0x7E, E5M2: 0x7B}[dtype]
    finite = np.isfinite(x.float().numpy())
    bits = np.where(finite, np.minimum(np.nan_to_num(field, posinf=1e6), top), 0x7F).astype(np.uint8)
    return bits | (np.signbit(wide).astype(np.uint8) << 7)

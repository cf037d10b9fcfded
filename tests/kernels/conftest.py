"""Kernels run under Triton's interpreter here, and whatever torch hands out unwritten is NaN."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import numpy as np
import pytest
import torch

try:
    import triton.language as tl
    from triton.runtime import interpreter
except ImportError:  # the tests of the kernels themselves then fail, each by its name
    interpreter = None


def round_as_the_card_does(convert):
    """Triton's interpreter cuts FP32 off to bf16, slowly; a card rounds to nearest even."""

    def converted(data, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(data).view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            return np.where(np.isnan(bits.view(np.float32)), 0x7FC0, rounded).astype(np.uint16)
        if (input_dtype, output_dtype) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << np.uint32(16)
        return convert(data, input_dtype, output_dtype, rounding_mode)

    return converted


if interpreter is not None and os.environ["TRITON_INTERPRET"] == "1":
    interpreter._convert_float = round_as_the_card_does(interpreter._convert_float)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves part of its output unwritten must not pass by luck."""

    def poison(allocate):
        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocated

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))

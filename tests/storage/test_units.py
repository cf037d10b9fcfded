import pytest

from llmtrain.storage.units import in_bytes, in_flops


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (12_007_000, "12.01 MB"),
        (373_400_000, "373.40 MB"), (12.5e9, "12.50 GB"), (2.5e12, "2.50 TB"), (4e15, "4,000.00 TB"),
    ],
)  # fmt: skip
def test_bytes(n, text):
    assert in_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(8.339e12, "8.34 TFLOPs"), (1.252e14, "125.20 TFLOPs"), (2.1e20, "210.00 EFLOPs")]
)
def test_flops(n, text):
    assert in_flops(n) == text

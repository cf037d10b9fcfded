"""The head against FP64 autograd: losses, gradients, ignored targets, z-loss, chunks."""

import pytest
import torch
import torch.nn.functional as F

from llmtrain.kernels import choice
from llmtrain.kernels.cross_entropy import (
    IGNORED,
    LOGITS_BYTES,
    chunk_rows,
    configuration,
    cross_entropy_in_place,
    cross_entropy_triton,
    head_loss,
)

Z_LOSS = 1e-2


def case(n: int, v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose storage beyond V is NaN, and targets of which some are ignored; first and last column occur."""
    torch.manual_seed(n * v)
    storage = torch.full((n, v + 5), float("nan"), dtype=dtype)
    storage[:, :v] = torch.randn(n, v) * 4
    targets = torch.randint(0, v, (n,))
    targets[0], targets[-1] = 0, v - 1
    targets[1::3] = IGNORED
    return storage[:, :v], targets


def expected(logits: torch.Tensor, targets: torch.Tensor, z_loss: float):
    """(losses, zs, gradient) in FP64, by autograd."""
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none")
    zs = torch.where(targets != IGNORED, z_loss * wide.logsumexp(-1).square(), 0.0)
    (losses.sum() + zs.sum()).backward()
    return losses.detach(), zs.detach(), wide.grad


def tolerance(dtype: torch.dtype) -> float:
    # bf16: half a unit in the last place, and FP32's own error on top.
    return {torch.bfloat16: 2**-8 * 1.01, torch.float32: 2e-6, torch.float64: 1e-12}[dtype]


def check(logits, targets, losses, zs, before, z_loss, dtype) -> None:
    loss64, z64, gradient64 = expected(before, targets, z_loss)
    fine = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(losses.double(), loss64, rtol=fine, atol=fine)
    torch.testing.assert_close(zs.double(), z64, rtol=fine, atol=fine)
    bound = tolerance(dtype)
    torch.testing.assert_close(logits.double(), gradient64, rtol=bound, atol=min(bound, 1e-6))
    assert (logits[targets == IGNORED] == 0).all()


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", torch.float64),
        ("reference", torch.bfloat16),
        ("triton", torch.float32),
        ("triton", torch.bfloat16),
    ],
)
# Smaller than any block, one with a tail, whole ones, and several with a tail.
@pytest.mark.parametrize(("n", "v"), [(7, 3), (9, 257), (5, 16384), (6, 17001)])
@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
def test_losses_and_gradients_are_those_of_fp64(implementation, dtype, n, v, z_loss):
    logits, targets = case(n, v, dtype)
    before = logits.clone()
    losses = torch.full((n,), float("nan"), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    zs = losses.clone()
    with choice.forced(implementation):
        cross_entropy_in_place(logits, targets, losses, zs, z_loss, True)
    assert choice.ran["cross_entropy"] == implementation
    check(logits, targets, losses, zs, before, z_loss, dtype)
    beyond = logits.as_strided((n, 5), (v + 5, 1), v)
    assert beyond.isnan().all(), "wrote beyond the row"


@pytest.mark.parametrize(("v", "stride"), [(700, 704), (700, 720), (257, 272), (704, 704), (13, 16)])
def test_rows_with_room_behind_them_are_taken_in_whole_sixteens(v, stride):
    logits, targets = case(5, v, torch.float32)
    before = logits.clone()
    storage = torch.full((5, stride), float("nan"))
    storage[:, :v] = logits
    losses, zs = torch.full((2, 5), float("nan"))
    cross_entropy_triton(storage[:, :v], targets, losses, zs, Z_LOSS, True, (256, 4))
    check(storage[:, :v], targets, losses, zs, before, Z_LOSS, torch.float32)
    assert storage[:, -(-v // 16) * 16 :].isnan().all(), "wrote beyond the next multiple of 16"


def test_large_logits_do_not_overflow():
    for v in (500, 17000):
        logits, targets = case(3, v, torch.float32)
        logits.mul_(1e4)
        before = logits.clone()
        losses, zs = torch.empty(2, 3)
        cross_entropy_triton(logits, targets, losses, zs, 0.0, True)
        loss64, _, gradient64 = expected(before, targets, 0.0)
        torch.testing.assert_close(losses.double(), loss64, rtol=1e-6, atol=1e-2)
        assert logits.isfinite().all() and (logits - gradient64).abs().max() < 1e-2


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_without_a_gradient_the_logits_stay(implementation):
    for v in (300, 17000):
        logits, targets = case(4, v, torch.float32)
        before = logits.clone()
        losses, zs = torch.full((2, 4), float("nan"))
        with choice.forced(implementation):
            cross_entropy_in_place(logits, targets, losses, zs, Z_LOSS, False)
        assert torch.equal(logits, before)
        torch.testing.assert_close(losses.double(), expected(before, targets, Z_LOSS)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, about the NaN
def test_an_ignored_row_of_nan_gives_nothing():
    for v in (300, 17000):
        logits, _ = case(2, v, torch.float32)
        logits[1] = float("nan")
        losses, zs = torch.full((2, 2), float("nan"))
        cross_entropy_triton(logits, torch.tensor([3, IGNORED]), losses, zs, Z_LOSS, True)
        assert logits.isfinite().all() and losses[1] == 0 and zs[1] == 0


def head(n: int, d: int, v: int):
    torch.manual_seed(0)
    x = torch.randn(n, d)
    weight = torch.randn(v, d) * 0.3
    targets = torch.randint(0, v, (n,))
    targets[::4] = IGNORED
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    losses, zs, _ = expected((x64 @ w64.T).detach(), targets, Z_LOSS)
    logits = x64 @ w64.T
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    (total + (Z_LOSS * logits.logsumexp(-1).square())[targets != IGNORED].sum()).backward()
    return x, weight, targets, losses.sum(), zs.sum(), x64.grad, w64.grad


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("preallocated", [False, True])
def test_the_chunked_head_is_the_whole_one(implementation, chunk, preallocated):
    x, weight, targets, loss64, z64, dx64, dw64 = head(23, 16, 71)
    x.requires_grad_()
    weight.requires_grad_()
    if preallocated:
        weight.grad = torch.full_like(weight, float("nan"))
        weight.grad_stale = True
    with choice.forced(implementation, "cross_entropy"):
        loss, z = head_loss(x, weight, targets, Z_LOSS, chunk)
    assert choice.ran["cross_entropy"] == implementation
    (loss + z).backward()
    torch.testing.assert_close(loss.double(), loss64, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z.double(), z64, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), dx64, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), dw64, rtol=1e-5, atol=1e-5)


def test_evaluation_forms_no_gradients():
    x, weight, targets, loss64, _, _, _ = head(23, 16, 71)
    weight.requires_grad_()
    weight.grad = torch.full_like(weight, 5.0)
    with torch.no_grad():
        loss, _ = head_loss(x, weight, targets, Z_LOSS, 8)
    torch.testing.assert_close(loss.double(), loss64, rtol=1e-5, atol=1e-5)
    assert (weight.grad == 5.0).all()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("v", [5, 16384, 32000, 49152, 50257, 65536, 1 << 20])
@pytest.mark.parametrize("n", [1, 100, 4096, 16385, 17000, 32768, 65536])
def test_chunks_hold_to_their_memory_and_none_of_many_is_small(device, n, v):
    rows = chunk_rows(n, v, torch.bfloat16, torch.device(device))
    assert 1 <= rows <= n
    assert rows <= 128 or rows * v * 2 <= LOGITS_BYTES[device]
    chunks = -(-n // rows)
    if chunks > 1:
        assert rows % 128 == 0
        assert n - (chunks - 1) * rows >= rows // 2 - 128 * chunks


def test_chunks_are_those_that_were_measured_best():
    cuda = torch.device("cuda")
    for n, v, rows in (
        (65536, 32000, 16384), (32768, 32000, 16384), (4096, 32000, 4096), (32768, 49152, 5632), (65536, 50257, 5632),
        (17000, 32000, 8576), (6000, 49152, 3072),
    ):  # fmt: skip
        assert chunk_rows(n, v, torch.bfloat16, cuda) == rows


def test_no_rows_are_no_loss():
    weight = torch.randn(7, 4).requires_grad_()
    loss, z = head_loss(torch.randn(0, 4), weight, torch.empty(0, dtype=torch.int64), Z_LOSS)
    assert loss == z == 0


def test_configurations_give_each_lane_32_columns_at_most():
    for v in (1, 255, 4096, 16384, 16385, 32000, 50257):
        block, warps = configuration(v)
        assert block & (block - 1) == 0 and warps & (warps - 1) == 0 and block <= warps * 32 * 32 <= 16384


@pytest.fixture
def fresh_memory_is_nan():
    """In torch's deterministic mode what is not yet written can be filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("n_columns", [37, 61, 64])
def test_what_lies_between_rows_of_logits_is_in_no_gradient(n_columns: int, fresh_memory_is_nan):
    torch.manual_seed(0)
    x = torch.randn(48, 48).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(n_columns, 48))
    lm, z = head_loss(x, weight, torch.randint(0, n_columns, (48,)), 1e-4)
    (lm + z).backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(weight.grad).all()

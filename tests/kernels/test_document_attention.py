"""Attention within documents and windows: the kernel against FP64 on whole score matrices."""

import pytest
import torch

from llmtrain.kernels import choice
from llmtrain.kernels.document_attention import document_attention, end_seen, first_seen


def heads(b: int, t: int, h: int, h_kv: int, d: int, dtype: torch.dtype):
    """q, k, v and dy; v is a view of a packed qkv whose other parts are NaN."""
    torch.manual_seed(t)
    packed = torch.full((b, t, h + 2 * h_kv, d), float("nan"), dtype=dtype)
    packed[:, :, h + h_kv :] = torch.randn(b, t, h_kv, d)
    q, k, dy = (torch.randn(b, t, n, d).to(dtype) for n in (h, h_kv, h))
    return q, k, packed[:, :, h + h_kv :], dy


def exact(q, k, v, dy, start):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(group, 2) for x in leaves[1:])
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], wide_k) / q.shape[3] ** 0.5
    column = torch.arange(q.shape[1])
    seen = ((column <= column[:, None]) & (column >= start[:, :, None]))[:, None]
    out = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), wide_v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy.double())]


def documents(t: int, *begins: int) -> torch.Tensor:
    """(2, T) int32: the columns' documents in the first row begin at `begins`, the second row is one document."""
    first = torch.zeros(t, dtype=torch.int32)
    for begin in begins:
        first[begin:] = begin
    return torch.stack([first, torch.zeros_like(first)])


CASES = [
    (1, (), None),
    (70, (3, 40, 64, 69), None),
    (200, (), 50),
    (200, (90, 128), 33),
    (256, (), None),
    (256, (64, 130, 131), None),
]


@pytest.mark.parametrize(("t", "begins", "window"), CASES)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_output_and_gradients_are_those_of_fp64(t, begins, window, implementation):
    q, k, v, dy = heads(2, t, 3, 1, 16, torch.float32)
    start = first_seen(t, 2, documents(t, *begins) if begins or window is None else None, window, q.device)
    wanted = exact(q, k, v, dy, start)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with choice.forced(implementation):
        out = document_attention(q, k, v, start)
    assert choice.ran["document_attention"] == implementation
    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), dy)]
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.float32, 2e-6)])
def test_every_head_size_in_half_precision_and_in_fp32(d, dtype, tolerance):
    # float16, because the interpreter multiplies the bits of bfloat16 matrices as integers.
    q, k, v, dy = heads(1, 150, 4, 2, d, dtype)
    start = documents(150, 20, 77)[:1]
    wanted = exact(q, k, v, dy, start)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with choice.forced("triton"):
        out = document_attention(q, k, v, start)
    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), dy)]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


def test_ranges_of_queries_and_keys_mirror_each_other():
    t = 60
    for doc_start, window in ((documents(t, 7, 30), None), (None, 9), (documents(t, 7, 30), 9)):
        start = first_seen(t, 2, doc_start, window, torch.device("cpu"))
        end = end_seen(start)
        column = torch.arange(t)
        seen = (column <= column[:, None]) & (column >= start[:, :, None])  # (B, query, key)
        by_key = (column[:, None] >= column) & (column[:, None] < end[:, None, :])
        assert torch.equal(seen, by_key)


def test_offsets_of_64_bits_say_the_same(monkeypatch):
    q, k, v, dy = heads(2, 70, 4, 2, 16, torch.float32)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # head by head: a head's stride reaches further than a token's
    start = documents(70, 3, 40)
    outs = []
    for reach in (1 << 31, 1):
        monkeypatch.setattr("llmtrain.kernels.document_attention.NARROW_REACH", reach)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with choice.forced("triton"):
            out = document_attention(*leaves, start)
        outs.append([out.detach(), *torch.autograd.grad(out, leaves, dy)])
    for narrow, wide in zip(*outs, strict=True):
        assert torch.equal(narrow, wide)


def test_more_sequences_than_a_launch_takes_are_refused():
    q = torch.zeros(65536, 1, 1, 16)
    with choice.forced("triton"), pytest.raises(ValueError, match="q: 65536 sequences, .* 65535 at most"):
        document_attention(q, q, q, torch.zeros(65536, 1, dtype=torch.int32))

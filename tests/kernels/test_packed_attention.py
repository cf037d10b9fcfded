"""Attention on documents laid end to end: against FP64, document by document, by the reference and by the kernel."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmtrain.kernels import attention_blocks, choice
from llmtrain.kernels.attention_blocks import LONG, SHORT, Blocks
from llmtrain.kernels.document_ranges import clear_behind, document_ranges, document_ranges_reference
from llmtrain.kernels.packed import packed_attention, why_not


def borders(lengths: list[int], slots: int) -> Tensor:
    """cu_seqlens of these documents, with unused slots behind them."""
    ends = torch.tensor(lengths).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends, ends[-1:].expand(slots - len(lengths))]).int()


def heads(total: int, h: int, h_kv: int, d: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dy; v is a view of a packed qkv whose other parts are NaN."""
    generator = torch.Generator().manual_seed(total)
    packed = torch.full((total, h + 2 * h_kv, d), float("nan"), dtype=dtype)
    packed[:, h + h_kv :] = torch.randn(total, h_kv, d, generator=generator)
    q, k, dy = (torch.randn(total, n, d, generator=generator).to(dtype) for n in (h, h_kv, h))
    return q, k, packed[:, h + h_kv :], dy


def exact(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, lengths: list[int], window: int | None) -> list[Tensor]:
    """out, dq, dk, dv in FP64 from the whole score matrix."""
    total, h, d = q.shape
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(h // k.shape[1], 1) for x in leaves[1:])
    of = torch.cat([torch.full((n,), i) for i, n in enumerate([*lengths, total - sum(lengths)])])
    token = torch.arange(total)
    seen = (of == of[:, None]) & (token <= token[:, None]) & (token < sum(lengths))
    if window is not None:
        seen &= token > token[:, None] - window
    scores = torch.einsum("ihd,jhd->hij", leaves[0], wide_k) / d**0.5
    weights = scores.masked_fill(~seen, -1e300).softmax(-1) * seen
    out = torch.einsum("hij,jhd->ihd", weights, wide_v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy.double())]


def both(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, cu: Tensor, window: int | None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = packed_attention(*leaves, cu, window)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    behind=st.integers(0, 40),
    group=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([None, 1, 7, 33]),
    split=st.booleans(),
)
@example(lengths=[1, 1, 1], behind=0, group=3, window=None, split=True)
@example(lengths=[64], behind=64, group=1, window=None, split=False)
@example(lengths=[100], behind=0, group=3, window=16, split=True)
def test_results_and_gradients_are_those_of_fp64(lengths, behind, group, window, split):
    total = sum(lengths) + behind
    q, k, v, dy = heads(total, group, 1, 16)
    wanted = exact(q, k, v, dy, lengths, window)
    cu = borders(lengths, len(lengths) + 2)
    blocks = Blocks(32, 16, 4, 2, split=split)
    tables = (attention_blocks.FORWARD, attention_blocks.DQ, attention_blocks.DKV)
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table[16, LONG] = table[16, SHORT] = blocks
        for implementation in ("reference", "triton"):
            with choice.forced(implementation):
                got = both(q, k, v, dy, cu, window)
            assert choice.ran["packed_attention"] == implementation
            for ours, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
                assert not ours[sum(lengths) :].any(), "behind the last document all is 0"
    finally:
        for table, rows in zip(tables, before, strict=True):
            table.clear()
            table.update(rows)


@pytest.mark.parametrize(("d", "dtype"), [(64, torch.float16), (128, torch.float16)])
def test_the_real_tiles_in_16_bits(d, dtype):
    # float16, because the interpreter multiplies the bits of bfloat16 matrices as integers.
    lengths = [70, 1, 130]
    q, k, v, dy = heads(210, 6, 2, d, dtype)
    wanted = exact(q, k, v, dy, lengths, None)
    for slots in (3, 100):  # few tokens a slot take the short form, where there is one
        with choice.forced("triton"):
            got = both(q, k, v, dy, borders(lengths, slots), None)
        for ours, theirs in zip(got, wanted, strict=True):
            assert (ours.double() - theirs).norm() < 2e-3 * theirs.norm()


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=9).filter(any),
    slots=st.integers(0, 30),
    behind=st.integers(0, 300),
    window=st.sampled_from([None, 1, 100, 1 << 31]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_ranges_of_the_kernel_are_those_of_the_reference(lengths, slots, behind, window, dtype):
    total = sum(lengths) + behind
    cu = borders(lengths, len(lengths) + slots).to(dtype)
    with choice.forced("triton"):
        ours = document_ranges(cu, total, window)
    theirs = document_ranges_reference(cu, total, window)
    real = sum(lengths)
    assert torch.equal(ours, theirs)
    assert (ours[0, real:] == total).all() and (ours[0, :real] <= torch.arange(real)).all()
    # What a token sees is what sees it.
    start, end = ours[:, :real]
    token = torch.arange(real)
    assert torch.equal(
        (token >= start[:, None]) & (token <= token[:, None]), (token[:, None] >= token) & (token[:, None] < end)
    )


def test_rows_behind_the_border_are_cleared_and_no_others():
    for border in (0, 63, 64, 65, 150):
        x = torch.ones(150, 3, 40)
        with choice.forced("triton"):
            clear_behind(x, torch.tensor(border))
        assert x[:border].all() and not x[border:].any()


def test_two_calls_give_the_same_bits():
    q, k, v, dy = heads(90, 4, 2, 16)
    with choice.forced("triton"):
        first, second = (both(q, k, v, dy, borders([40, 50], 4), 20) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_compiler_takes_it_as_one_operator_for_every_mix():
    q, k, v, dy = heads(60, 4, 2, 16)
    graphs = 0

    def backend(module, _):
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(lambda *x: packed_attention(*x, window=30) * 2, fullgraph=True, backend=backend)
    for lengths in ([60], [10, 50], [1, 2, 3]):
        cu = borders(lengths, 4)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = compiled(*leaves, cu)
        got = torch.autograd.grad(out, leaves, dy)
        for ours, theirs in zip(got, both(q, k, v, 2 * dy, cu, 30)[1:], strict=True):
            torch.testing.assert_close(ours, theirs)
    assert graphs == 1
    torch.library.opcheck(
        torch.ops.llmtrain.packed_attention.default,
        (*(x.detach().requires_grad_() for x in (q, k, v.contiguous())), borders([20, 40], 3), None, 60, "reference"),
    )


Q, CU = torch.randn(10, 4, 16), torch.tensor([0, 4, 10])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("q", {"q": torch.randn(10, 4)}),
        ("q", {"q": torch.zeros(10, 4, 16, dtype=torch.int32)}),
        ("q", {"q": torch.randn(10, 16, 4).transpose(1, 2)}),
        ("k", {"k": torch.randn(10, 3, 16), "v": torch.randn(10, 3, 16)}),
        ("k", {"k": torch.randn(9, 2, 16), "v": torch.randn(9, 2, 16)}),
        ("k", {"k": torch.randn(10, 2, 16, dtype=torch.float64)}),
        ("k", {"k": torch.empty(10, 2, 16, device="meta")}),
        ("v", {"v": torch.randn(10, 1, 16)}),
        ("cu_seqlens", {"cu_seqlens": CU.float()}),
        ("cu_seqlens", {"cu_seqlens": CU[:1]}),
        ("cu_seqlens", {"cu_seqlens": CU.to("meta")}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([1, 4, 10])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 7, 4, 10])}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 11])}),
        ("cu_seqlens", {"max_seqlen": 5}),
        ("max_seqlen", {"max_seqlen": 11}),
        ("window", {"window": 0}),
        ("window", {"window": 2.5}),
        ("max_seqlen", {"max_seqlen": 6.0}),
        ("q", {"q": Q.to(torch.float8_e5m2)}),
    ],
)
def test_what_is_wrong_is_named(name, changed):
    arguments = {"q": Q, "k": Q[:, :2], "v": Q[:, 2:], "cu_seqlens": CU} | changed
    with pytest.raises(ValueError, match=f"^{name}: "):
        packed_attention(**arguments)


@pytest.mark.parametrize("implementation", [choice.REFERENCE, choice.TRITON])
def test_borders_of_any_stride_will_do(implementation):
    apart = torch.stack([CU, CU * 0 + 7], 1)[:, 0]
    with choice.forced(implementation, "packed_attention", "document_ranges"):
        wanted, got = (packed_attention(Q, Q[:, :2], Q[:, 2:], borders) for borders in (CU, apart))
    assert torch.equal(got, wanted)


def test_a_backend_asked_for_by_name_runs_or_says_why_not():
    assert "compute capability" in why_not("cudnn", Q, 10)
    with choice.forced("cudnn", "packed_attention"), pytest.raises(RuntimeError, match="packed_attention: cudnn needs"):
        packed_attention(Q, Q, Q, CU)
    with choice.forced("triton", "packed_attention"), pytest.raises(RuntimeError, match="heads of 16 in float64"):
        packed_attention(Q.double(), Q.double(), Q.double(), CU)
    with choice.forced("flash", "packed_attention"), pytest.raises(RuntimeError, match="no backend"):
        packed_attention(Q, Q, Q, CU)

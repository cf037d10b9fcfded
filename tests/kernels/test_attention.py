"""Attention against FP64 loops over what each query may see, and the choice of backends."""

import pytest
import torch

from llmtrain.kernels import choice, cudnn_attention
from llmtrain.kernels.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    GRAPH,
    attention,
    choose_backend,
    training_backend,
    why_not,
)

H200 = (9, 0)


def by_hand(q, k, v, offset=0, doc_start=None, window=None):
    """The definition, query by query, in FP64."""
    b, t, h, d = q.shape
    group = h // k.shape[2]
    out = torch.zeros(b, t, h, d, dtype=torch.float64)
    for row in range(b):
        for i in range(t):
            first = 0 if doc_start is None else int(doc_start[row, i])
            if window is not None:
                first = max(first, offset + i - window + 1)
            seen = slice(first, offset + i + 1)
            for head in range(h):
                scores = k[row, seen, head // group].double() @ q[row, i, head].double() / d**0.5
                out[row, i, head] = scores.softmax(0) @ v[row, seen, head // group].double()
    return out


def heads(b, t, s, h, h_kv, d, dtype=torch.float64):
    torch.manual_seed(0)
    q = torch.randn(b, t, h, d, dtype=dtype)
    packed = torch.randn(b, s, (h + 2 * h_kv) * d, dtype=dtype).view(b, s, -1, d)
    return q, packed[:, :, h : h + h_kv], packed[:, :, h + h_kv :]


DOCUMENTS = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 7, 7], [0, 1, 1, 1, 1, 1, 6, 6, 6]])


@pytest.mark.parametrize(
    ("t", "offset", "doc_start", "window"),
    [
        (9, 0, None, None),
        (1, 0, None, None),
        (1, 8, None, None),
        (4, 5, None, None),
        (9, 0, DOCUMENTS, None),
        (9, 0, None, 3),
        (9, 0, DOCUMENTS, 2),
        (1, 8, None, 4),
    ],
)
@pytest.mark.parametrize(("h", "h_kv"), [(4, 4), (4, 2), (3, 1)])
def test_every_query_sees_exactly_what_it_may(t, offset, doc_start, window, h, h_kv):
    q, k, v = heads(2, t, offset + t, h, h_kv, 8)
    out = attention(q, k, v, offset=offset, doc_start=doc_start, window=window)
    assert choice.ran["attention"] == choice.REFERENCE
    torch.testing.assert_close(out, by_hand(q, k, v, offset, doc_start, window), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("doc_start", "window"), [(None, None), (DOCUMENTS, 4)])
def test_gradients_reach_q_and_the_packed_k_and_v(doc_start, window):
    q, k, v = (x.clone().requires_grad_() for x in heads(2, 9, 9, 4, 2, 8))
    q2, k2, v2 = (x.detach().clone().requires_grad_() for x in (q, k, v))
    dy = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    attention(q, k, v, doc_start=doc_start, window=window).backward(dy)
    group = 2
    scores = torch.einsum("bihd,bjhd->bhij", q2, k2.repeat_interleave(group, 2)) / 8**0.5
    i, j = torch.arange(9)[:, None], torch.arange(9)[None, :]
    seen = j <= i
    if window is not None:
        seen = seen & (j > i - window)
    if doc_start is not None:
        seen = (seen & (j >= doc_start[:, :, None]))[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    torch.einsum("bhij,bjhd->bihd", weights, v2.repeat_interleave(group, 2)).backward(dy)
    for ours, theirs in ((q, q2), (k, k2), (v, v2)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_bf16_is_close_to_fp64():
    q, k, v = heads(2, 40, 40, 4, 2, 16, torch.bfloat16)
    out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_hand(q, k, v), rtol=2e-2, atol=2e-2)


def chosen(*case) -> str:
    return choose_backend(*case).name


def test_training_shapes_take_cudnn_on_hopper():
    assert chosen(torch.bfloat16, 64, 1024, 1024, False, H200, False) == CUDNN
    assert chosen(torch.bfloat16, 128, 4096, 4096, False, H200, False) == CUDNN


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ((torch.bfloat16, 64, 1024, 1024, False, H200, True), "atomics"),
        ((torch.bfloat16, 192, 1024, 1024, False, H200, False), "192"),
        ((torch.bfloat16, 64, 1000, 1000, False, H200, False), "1000"),
        ((torch.bfloat16, 64, 1, 77, False, H200, False), "1"),
        ((torch.bfloat16, 64, 1024, 1024, False, (8, 0), False), "compute capability"),
    ],
    ids=["deterministic", "head_dim", "T", "decoding", "another card"],
)
def test_what_cudnn_cannot_do_well_takes_flash_and_says_why(case, why, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "unavailable", lambda: "is not here")  # its graph API can do it in order
    assert chosen(*case) == FLASH
    assert why in choose_backend(*case).why


def test_documents_and_windows_take_our_kernel_where_it_has_their_shape():
    assert chosen(torch.bfloat16, 64, 1000, 1000, True, H200, True) == choice.TRITON
    assert chosen(torch.bfloat16, 96, 1024, 1024, True, H200, False) == EFFICIENT, "head_dim"
    assert chosen(torch.bfloat16, 64, 4, 100, True, H200, False) == EFFICIENT, "keys from a cache"
    assert chosen(torch.float32, 64, 1024, 1024, False, H200, False) == EFFICIENT
    assert chosen(torch.bfloat16, 64, 1024, 1024, False, (7, 5), False) == EFFICIENT, "an old card"


@pytest.mark.parametrize("backend", [CUDNN, FLASH, EFFICIENT, choice.TRITON, choice.REFERENCE])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 192, 264])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_auto_takes_can_do_it_and_a_refusal_names_its_reason(backend, head_dim, dtype):
    case = dtype, head_dim, 1000, 1000, False, H200, True
    reason = why_not(backend, *case)
    if chosen(*case) == backend:
        assert reason is None
    elif backend == CUDNN:
        assert reason is not None and ("1000" in reason or str(head_dim) in reason or "float32" in reason)


@pytest.mark.parametrize(
    ("backend", "case", "why"),
    [
        (CUDNN, (torch.bfloat16, 64, 1024, 1024, True, H200, False), "documents"),
        (CUDNN, (torch.bfloat16, 64, 1024, 1024, False, H200, True), "atomics"),
        (FLASH, (torch.float32, 64, 1024, 1024, False, H200, False), "float32"),
        (FLASH, (torch.bfloat16, 64, 1024, 1024, False, (7, 5), False), "7.5"),
        (FLASH, (torch.bfloat16, 64, 1024, 1024, False, None, False), "CUDA"),
        (EFFICIENT, (torch.bfloat16, 36, 1024, 1024, False, H200, False), "36"),
        (choice.TRITON, (torch.bfloat16, 96, 1024, 1024, False, H200, False), "96"),
        (choice.TRITON, (torch.bfloat16, 64, 4, 100, False, H200, False), "cache"),
    ],
)
def test_a_backend_that_cannot_says_why(backend, case, why):
    assert why in why_not(backend, *case)


def test_cudnns_graph_api_takes_windows_and_the_fixed_order_where_it_is_there(monkeypatch):
    case = torch.bfloat16, 64, 1024, 1024
    for missing, windowed, fixed in ((None, GRAPH, GRAPH), ("is not here", choice.TRITON, FLASH)):
        monkeypatch.setattr(cudnn_attention, "unavailable", lambda missing=missing: missing)
        assert choose_backend(*case, False, H200, False, windowed=True).name == windowed
        assert choose_backend(*case, False, H200, True).name == fixed
        assert why_not(GRAPH, *case, False, H200, True) == missing
    monkeypatch.setattr(cudnn_attention, "unavailable", lambda: None)
    assert choose_backend(*case, True, H200, False, windowed=True).name == choice.TRITON, "documents in rows"
    assert choose_backend(*case, False, (8, 0), False, windowed=True).name == choice.TRITON
    assert choose_backend(*case, False, H200, False).name == CUDNN
    for asked, why in (("cudnn", "no windows"), ("flash", "no windows"), ("triton", None)):
        reason = why_not(asked, *case, False, H200, False, windowed=True)
        assert reason is None if why is None else why in reason


@pytest.mark.parametrize(("doc_start", "window"), [(DOCUMENTS, None), (None, 3), (DOCUMENTS, 2)])
def test_the_kernel_sees_the_same_documents_and_windows(doc_start, window):
    q, k, v = (x.float() for x in heads(2, 9, 9, 4, 2, 16))
    with choice.forced(choice.TRITON):
        out = attention(q, k, v, doc_start=doc_start, window=window)
    ran = choice.ran["attention" if window is None else "windowed attention"]
    assert ran == choice.ran["document_attention"] == choice.TRITON
    wanted = by_hand(q, k, v, 0, doc_start, window)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_forced_backend_is_the_one_that_runs():
    q, k, v = heads(1, 3, 3, 2, 1, 8)
    with choice.forced(choice.REFERENCE, "attention"):
        attention(q, k, v)
    assert choice.ran["attention"] == choice.REFERENCE


def test_a_backend_forced_by_name_takes_what_auto_would_not_and_refuses_what_it_cannot():
    q, k, v = (x.float() for x in heads(2, 9, 9, 4, 2, 16))
    with choice.forced(choice.TRITON, "attention", "document_attention"):
        out = attention(q, k, v)  # plain causal, which auto leaves to torch
    assert choice.ran["attention"] == choice.TRITON
    torch.testing.assert_close(out.double(), by_hand(q, k, v), rtol=1e-5, atol=1e-5)
    with choice.forced(CUDNN, "attention"), pytest.raises(RuntimeError, match="cudnn runs on a CUDA card only"):
        attention(q, k, v)
    with choice.forced(CUDNN, "attention"), choice.forced(choice.AUTO, "attention"):
        attention(q, k, v)
    assert choice.ran["attention"] == choice.REFERENCE


def test_training_on_a_cpu_takes_the_reference_and_refuses_the_rest():
    cpu = torch.device("cpu")
    assert training_backend("auto", torch.bfloat16, 64, 1024, cpu).name == choice.REFERENCE
    assert training_backend("reference", torch.bfloat16, 64, 1024, cpu).name == choice.REFERENCE
    with pytest.raises(ValueError, match="CUDA"):
        training_backend("flash", torch.bfloat16, 64, 1024, cpu)

"""What cuDNN is told of our tensors: a stand-in computes from that alone, and where the library is, it checks it."""

import contextlib
import sys

import pytest
import torch

from llmtrain.kernels import choice, cudnn_attention, packed
from llmtrain.kernels.cudnn_attention import backward_graph, forward_graph, shape_of
from tests.kernels import fake_cudnn
from tests.kernels.test_packed_attention import borders, exact, heads


@pytest.fixture
def stand_in(monkeypatch):
    caches = (cudnn_attention.unavailable, cudnn_attention._planned, cudnn_attention._handle)
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cudnn_attention, "_stream", lambda _: 0)
    monkeypatch.setattr(packed, "why_not", lambda *_: None)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("window", [None, 9, 1000])
@pytest.mark.parametrize(("h", "h_kv"), [(6, 2), (2, 2)])
def test_documents_are_read_and_written_where_they_lie(stand_in, window, h, h_kv):
    lengths = [30, 1, 25]
    q, k, v, dy = heads(70, h, h_kv, 16, torch.bfloat16)
    wanted = exact(q, k, v, dy, lengths, window)
    cu = borders(lengths, 5)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with choice.forced("cudnn", "packed_attention"):
        out = packed.packed_attention(*leaves, cu, window, max_seqlen=30)
        got = [out.detach(), *torch.autograd.grad(out, leaves, dy)]
    assert choice.ran["packed_attention"] == "cudnn"
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.double() - theirs).norm() < 5e-3 * theirs.norm()
        assert not ours[56:].any(), "behind the last document all is 0"


def test_rows_with_windows(stand_in):
    t, window = 40, 12
    parts = [heads(t + i, 6, 2, 16, torch.bfloat16) for i in (0, 0)]
    q, k, v, dy = (torch.stack([a, -b]) for a, b in zip(*parts, strict=True))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cudnn_attention.cudnn_attention(*leaves, window)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dy)]
    for row in range(2):
        wanted = exact(q[row], k[row], v[row], dy[row], [t], window)
        for ours, theirs in zip(got, wanted, strict=True):
            assert (ours[row].double() - theirs).norm() < 5e-3 * theirs.norm()


@pytest.mark.parametrize("slots", [None, 7])
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_library_itself_takes_the_graphs(slots, window, deterministic):
    if cudnn_attention.unavailable():
        pytest.skip(f"cuDNN's graph API {cudnn_attention.unavailable()}")
    rows = (2, 1024) if slots is None else (2048,)
    qkv = torch.empty(*rows, 20, 64, dtype=torch.bfloat16)
    q, k, v = qkv.split([12, 4, 4], -2)
    shape = shape_of(q.contiguous(), k.contiguous(), v, slots, 1024, window, deterministic)
    forward_graph(shape)
    backward_graph(shape)


def test_reasons_not_to_are_half_sentences():
    assert cudnn_attention.unavailable() is None or cudnn_attention.unavailable().startswith(("needs", "finds"))

"""The lookup and the sum of its gradients: with atomics, and in a fixed order."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

import llmtrain.kernels.embedding as module
from llmtrain.kernels import choice
from llmtrain.kernels.embedding import embedding
from tests.kernels.exactness import assert_summed

V = 37
WAYS = pytest.mark.parametrize("way", ["reference", "atomic", "ordered"], indirect=True)
ORDERED = pytest.mark.parametrize("way", ["ordered"], indirect=True)


@pytest.fixture
def way(request, monkeypatch):
    """Which implementation a test forces; the ordered sum is the one of torch's deterministic mode."""
    if request.param == "ordered":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        monkeypatch.setattr(module, "RUN", 8)  # so that few rows make many runs
        monkeypatch.setattr(module, "CHUNK", 2)
    return "reference" if request.param == "reference" else "triton"


def run(implementation, ids, weight, dy):
    with choice.forced(implementation):
        y = embedding(ids, weight, dy.dtype)
        y.backward(dy)
    assert choice.ran["embedding"] == implementation
    return y.detach()


def exact(ids, dy, rows=V):
    """The gradient of the matrix in FP64."""
    out = torch.zeros(rows, dy.shape[-1], dtype=torch.float64)
    for id, row in zip(ids.flatten().tolist(), dy.flatten(0, -2).double(), strict=True):
        out[id] += row
    return out


@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("b", "t", "width"), [(1, 1, 8), (3, 23, 40), (2, 16, 300)])
def test_rows_are_looked_up_and_gradients_summed(way, dtype, b, t, width):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(V, width))
    ids, dy = torch.randint(0, V, (b, t)), torch.randn(b, t, width).to(dtype)
    y = run(way, ids, weight, dy)
    assert torch.equal(y, weight.detach().to(dtype)[ids])
    assert_summed(weight.grad, exact(ids, dy))


@WAYS
def test_a_head_that_came_first_is_added_to_and_a_stale_buffer_is_not(way):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(V, 16))
    ids, dy = torch.randint(0, V, (2, 9)), torch.randn(2, 9, 16)
    head = torch.randn(V, 16)
    weight.grad = buffer = head.clone()
    run(way, ids, weight, dy)
    assert weight.grad is buffer
    assert_summed(buffer, head.double() + exact(ids, dy))
    buffer.fill_(float("nan"))
    weight.grad_stale = True
    run(way, ids, weight, dy)
    assert_summed(buffer, exact(ids, dy))


CROWDS = {
    "one id for all": [5] * 70,
    "segments that end on a border": [1] * 8 + [2] * 16 + [3] * 8,
    "segments that begin and end inside": [1] * 5 + [2] * 9 + [3] * 30 + [4] + [5] + [6] * 20,
    "no id twice": list(range(V)),
    "a last run of one row": [7] * 33,
}


@ORDERED
@pytest.mark.parametrize("crowd", CROWDS)
def test_segments_are_whole_wherever_the_borders_fall(way, crowd):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(V, 12))
    ids = torch.tensor(CROWDS[crowd])[torch.randperm(len(CROWDS[crowd]))][None]
    dy = torch.randn(1, ids.shape[1], 12)
    run(way, ids, weight, dy)
    assert_summed(weight.grad, exact(ids, dy))


@ORDERED
def test_the_ordered_sum_does_not_use_atomics(way, monkeypatch):
    monkeypatch.setattr(module, "_add_atomically", None)
    weight = torch.nn.Parameter(torch.randn(V, 12))
    run(way, torch.randint(0, V, (1, 20)), weight, torch.randn(1, 20, 12))


@WAYS
def test_ids_of_any_stride_are_looked_up(way):
    tokens = torch.arange(12).view(4, 3) % V
    ids = tokens[:, 1:2]  # (4, 1), whose view as one row still has a stride
    weight = torch.randn(V, 8, requires_grad=True)
    dy = torch.randn(4, 1, 8)
    assert torch.equal(run(way, ids, weight, dy), weight.detach()[ids])
    assert_summed(weight.grad, exact(ids, dy))

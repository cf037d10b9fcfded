"""The second stage of sums over rows, alone and many in one launch."""

import importlib
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import choice, partials
from llmtrain.kernels.partials import deliver_partials, in_one_launch
from llmtrain.kernels.rmsnorm import rmsnorm_fork
from llmtrain.kernels.rmsnorm_routes import PARTIALS, BackwardRoute


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sums of each launch."""
    launch, seen = partials._launch, []
    for columns in ("LEAST_COLS", "MOST_COLS"):
        monkeypatch.setattr(partials, columns, 128)  # the interpreter pays by the program
    monkeypatch.setattr(
        partials, "_launch", lambda kind, sums, *early: (seen.append(len(sums)), launch(kind, sums, *early))
    )
    return seen


def weight_of(width: int, grad: float | None = float("nan"), stale: bool = True) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(width))
    if grad is not None:
        weight.grad, weight.grad_stale = torch.full((width,), grad), stale
    return weight


def summed(partial: Tensor, before: float = 0.0) -> Tensor:
    return (partial.double().sum(0) + before).float()


def test_many_partial_sums_are_added_without_loss():
    torch.manual_seed(0)
    sums = torch.randn(1500, 19) * 1000
    assert torch.equal(deliver_partials(weight_of(19, None), sums), summed(sums))


@pytest.mark.parametrize("width", [31, 32, 100, 128, 250])
def test_wide_sums_take_more_columns_a_program_and_are_the_same(width: int, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"LEAST_COLS": 8, "MOST_COLS": 32, "PROGRAMS": 4}.items():
        monkeypatch.setattr(partials, name, value)
    torch.manual_seed(0)
    sums = torch.randn(132, width)
    assert torch.equal(deliver_partials(weight_of(width, None), sums), summed(sums))


@pytest.mark.parametrize(("stale", "before"), [(True, float("nan")), (False, 3.0)])
def test_sums_of_one_shape_are_made_in_one_launch_each_as_alone(launches: list[int], stale: bool, before: float):
    torch.manual_seed(0)
    given = [(weight_of(19, before, stale), torch.randn(40, 19)) for _ in range(5)]
    given += [(weight_of(8, before, stale), torch.randn(40, 8)) for _ in range(2)]
    given += [(weight_of(8, before, stale), torch.randn(7, 8))]
    with in_one_launch():
        assert [deliver_partials(weight, sums) for weight, sums in given] == [None] * 8
        assert launches == []
    assert launches == [5, 2, 1]
    for weight, sums in given:
        assert torch.equal(weight.grad, summed(sums, 0.0 if stale else before))


def test_more_sums_than_a_launch_takes_are_made_in_several(launches: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partials, "MOST_SUMS", 3)
    given = [(weight_of(8), torch.randn(5, 8)) for _ in range(7)]
    with in_one_launch():
        for weight, sums in given:
            deliver_partials(weight, sums)
    assert launches == [3, 3, 1] and all(torch.equal(weight.grad, summed(sums)) for weight, sums in given)


def test_a_weight_that_is_used_again_and_again_gets_all_its_sums():
    weight, sums = weight_of(8), [torch.randn(5, 8) for _ in range(3)]
    with in_one_launch():
        for part in sums:
            deliver_partials(weight, part)
    assert torch.allclose(weight.grad, summed(torch.cat(sums)))


def test_a_sum_that_autograd_waits_for_is_made_at_once(launches: list[int]):
    weight, sums = weight_of(8, None), torch.randn(5, 8)
    with in_one_launch():
        assert torch.equal(deliver_partials(weight, sums), summed(sums))
        assert launches == [1]
    assert launches == [1]


def test_an_error_in_the_block_leaves_nothing_to_the_next():
    left, weight, sums = weight_of(8), weight_of(8), torch.randn(5, 8)
    with pytest.raises(ZeroDivisionError), in_one_launch():
        deliver_partials(left, sums)
        raise ZeroDivisionError
    with in_one_launch():
        deliver_partials(weight, sums)
    assert left.grad.isnan().all() and torch.equal(weight.grad, summed(sums))


def test_the_norms_of_a_backward_have_their_weights_gradients_from_one_launch(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
):
    route = BackwardRoute(PARTIALS, rows=8, warps=1, per_processor=1)
    monkeypatch.setattr(importlib.import_module("llmtrain.kernels.rmsnorm"), "backward_route", lambda *_: route)
    monkeypatch.setattr("llmtrain.kernels.rmsnorm_routes.PROCESSORS", 3)
    torch.manual_seed(0)
    weights, x = [torch.randn(16) for _ in range(3)], torch.randn(75, 16)
    grads = []
    for together in (False, True):
        norms = [torch.nn.Parameter(w.clone()) for w in weights]
        for norm in norms:
            norm.grad, norm.grad_stale = torch.full((16,), float("nan")), True
        h = x.clone().requires_grad_()
        with choice.forced("triton"):
            y = h
            for norm in norms:
                y, copy = rmsnorm_fork(y, norm, 1e-6)
                y = y.tanh() + copy
            if together:
                with in_one_launch():
                    y.square().sum().backward()
            else:
                y.square().sum().backward()
        grads.append([h.grad, *(norm.grad for norm in norms)])
    assert launches == [1, 1, 1, 3]
    assert all(torch.equal(alone, one) and alone.isfinite().all() for alone, one in zip(*grads, strict=True))

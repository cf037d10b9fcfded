"""Which program runs at a shape, and that its sums hold the budget: at both ends of every window and one row beyond."""

import functools
import importlib
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from torch import Tensor

from llmtrain.benchmark.rmsnorm_candidates import backward_candidates, default_table, table_source
from llmtrain.kernels import choice, partials, rmsnorm_backward, rmsnorm_forward, rmsnorm_routes
from llmtrain.kernels.rmsnorm_routes import (
    ATOMIC,
    BACKWARD,
    COLUMNS,
    COLUMNS_ROWS,
    DEEP,
    FOLD,
    FORWARD,
    LONGEST_SUM,
    PROCESSORS,
    SHRINK,
    BackwardRoute,
    backward_route,
    ends,
    forward_route,
)

module = importlib.import_module("llmtrain.kernels.rmsnorm")  # its name in the package is the function's

MOST_ROWS = 1 << 20
BOTH_MODES = pytest.mark.parametrize("deterministic", [True, False])
FAMILIES = ("cancelling", "same sign", "a few large")


def row_counts(deterministic: bool, width: int) -> list[int]:
    """Both ends of every window of a width (one row beyond is the next one's first); the last ends at MOST_ROWS."""
    return sorted(
        {
            n_rows
            for of_width, first, last, _ in ends(BACKWARD[deterministic])
            if of_width == width
            for n_rows in (first, last or MOST_ROWS)
        }
    )


def shares(family: str, n_rows: int, columns: int) -> Tensor:
    """What each row adds to dw, (n_rows, columns) FP32."""
    values = torch.randn(n_rows, columns)
    if family == "same sign":
        return values.abs()
    if family == "a few large":
        values[torch.rand(n_rows) < 0.01] *= 100
    return values


def summed(values: Tensor, route: BackwardRoute) -> Tensor:
    """The column sums of `values` (T, C), FP32, in the order in which the route's kernel adds them up."""
    n_rows, columns = values.shape
    rows = DEEP if route.program == COLUMNS else route.rows
    programs = 1 if route.program == COLUMNS else route.programs(n_rows)
    turns = -(-n_rows // (rows * programs))
    tiles = torch.zeros(turns, programs, rows, columns)
    tiles.view(-1, columns)[:n_rows] = values * SHRINK
    fold = 0 if route.program == COLUMNS else route.fold(n_rows)
    running, folded = torch.zeros_like(tiles[0]), torch.zeros_like(tiles[0])
    for turn in range(turns):
        running += tiles[turn]
        if fold and (turn + 1) % fold == 0:
            folded += running
            running = torch.zeros_like(running)
    running += folded
    if route.program == COLUMNS:
        return (running.double().sum((0, 1)) / SHRINK).float()
    partial_sums = running.sum(1)
    if route.program == ATOMIC:  # one of the orders in which programs may finish
        total = torch.zeros(columns)
        for partial in partial_sums[torch.randperm(programs)]:
            total += partial / SHRINK
        return total
    return (partial_sums.double().sum(0) / SHRINK).float()


@functools.cache
def worst_error(n_rows: int, route: BackwardRoute) -> float:
    """Of dw, in units of the budget."""
    torch.manual_seed(0)
    worst = 0.0
    for family in FAMILIES:
        values = shares(family, n_rows, 2)
        exact = values.double().sum(0)
        error = (summed(values, route).double() - exact).abs() / (1e-4 + 1e-4 * exact.abs())
        worst = max(worst, error.max().item())
    return worst


@BOTH_MODES
@pytest.mark.parametrize("width", [width for width, _ in FORWARD])
def test_sums_hold_the_budget_at_both_ends_of_every_window_and_one_row_beyond(width, deterministic):
    for n_rows in row_counts(deterministic, width):
        route = backward_route(n_rows, width, deterministic)
        assert worst_error(n_rows, route) <= 0.5, f"{n_rows} rows, {route}"


def test_the_model_of_the_order_is_that_of_the_kernel(monkeypatch):
    """To the bit, where a program takes one row at a time (how a tile's own rows are added is up to the compiler)."""
    torch.manual_seed(0)
    monkeypatch.setattr(rmsnorm_routes, "PROCESSORS", 1)
    for route in (BackwardRoute("partials", 1, 4, 2), BackwardRoute("columns", 8, 4, cols=16)):
        monkeypatch.setattr(module, "backward_route", lambda *shape, route=route: route)
        h, dy, weight = torch.randn(131, 16), torch.randn(131, 16), torch.ones(16)
        with choice.forced(choice.TRITON):
            rstd = torch.rand(131) + 0.5
            _, dw = rmsnorm_backward(dy, h, weight, rstd)
        assert torch.equal(dw, summed(dy * (h * rstd[:, None]), route))


@BOTH_MODES
def test_the_kernels_at_the_ends_of_windows(monkeypatch, deterministic):
    torch.manual_seed(0)
    monkeypatch.setattr(partials, "LEAST_COLS", 128)
    monkeypatch.setattr(partials, "MOST_COLS", 128)
    width = 64
    for n_rows in [n for n in row_counts(deterministic, width) if n <= COLUMNS_ROWS + 1]:
        x, dy, weight = torch.randn(n_rows, width), torch.randn(n_rows, width), 1 + 0.3 * torch.randn(width)
        with choice.forced(choice.TRITON):
            _, h, rstd = rmsnorm_forward(x, weight)
            dx, dw = rmsnorm_backward(dy, h, weight, rstd, deterministic=deterministic)
        wide = x.double().requires_grad_()
        exact_weight = weight.double().requires_grad_()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * exact_weight
        y.backward(dy.double())
        assert ((dx - wide.grad).abs() <= 1e-5 + 1e-5 * wide.grad.abs()).all()
        assert ((dw - exact_weight.grad).abs() <= 1e-4 + 1e-4 * exact_weight.grad.abs()).all()


@pytest.mark.parametrize("route", [BackwardRoute("partials", 1, 4, 1), BackwardRoute("columns", 64, 4, cols=16)])
def test_rows_near_the_largest_number_do_not_overflow_on_the_way(monkeypatch, route):
    monkeypatch.setattr(rmsnorm_routes, "PROCESSORS", 1)
    monkeypatch.setattr(module, "backward_route", lambda *shape: route)

    def dw(dy: Tensor) -> Tensor:
        """Of rows whose normed values are all 1; the weight is 0, so that dx stays out of it."""
        ones = torch.ones(len(dy), 16)
        with choice.forced(choice.TRITON):
            return rmsnorm_backward(dy, ones, torch.zeros(16), torch.ones(len(dy)))[1]

    large = 2.0**123
    for n_rows in (17, 31):
        assert torch.equal(dw(torch.full((n_rows, 16), large)), torch.full((16,), n_rows * large))
    assert torch.equal(dw(torch.full((33, 16), large)), torch.full((16,), float("inf")))  # the sum itself is too large
    # A program's rows of one sign, then as many of the other: the sum is 0, and neither inf nor NaN on the way to it.
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(LONGEST_SUM // 2)
    assert torch.equal(dw(large * signs[:, None].expand(-1, 16)), torch.zeros(16))


@BOTH_MODES
def test_windows_cover_every_number_of_rows_once(deterministic):
    widths = [width for width, _ in BACKWARD[deterministic]]
    assert widths == sorted(set(widths)) and widths[-1] >= 8192
    for _, of_width in BACKWARD[deterministic]:
        bounds = [most for most, _ in of_width]
        assert bounds[-1] is None and bounds[:-1] == sorted({b for b in bounds[:-1] if b})
    for _, of_width in FORWARD:
        assert of_width[-1][0] is None


@BOTH_MODES
@pytest.mark.parametrize("width", [1, 64, 257, 768, 960, 1025, 2048, 8192, 20000])
@pytest.mark.parametrize("n_rows", [1, 1024, 1025, 4096, 65536, 1 << 20])
def test_a_running_sum_is_short_and_programs_are_few(n_rows, width, deterministic):
    route = backward_route(n_rows, width, deterministic)
    programs = route.programs(n_rows)
    assert programs * route.rows < n_rows + route.rows, "a program without rows"
    assert route.warps <= 32
    if route.program == COLUMNS:
        assert n_rows <= COLUMNS_ROWS and route.cols > 0
        return
    turns = -(-n_rows // (route.rows * programs))
    assert turns <= LONGEST_SUM
    assert route.fold(n_rows) == (FOLD if turns > FOLD else 0)
    assert programs <= max(n_rows // LONGEST_SUM + 1, 8 * PROCESSORS)
    assert (route.stages - 1) * 3 * route.rows * width * 4 <= 200 << 10, "shared memory"
    assert forward_route(n_rows, width).warps <= 32
    if deterministic:
        assert route.program != ATOMIC


def test_a_table_that_is_written_reads_back_as_it_was():
    forward, backward = default_table()
    names: dict = {}
    exec(table_source(forward, backward, "a test"), names)

    def joined(windows):
        """Neighbouring windows with the same route as one, which is how a table is written."""
        out = []
        for width, of_width in windows:
            kept = []
            for most, route in of_width:
                kept = kept[:-1] if kept and kept[-1][1] == route else kept
                kept.append((most, route))
            out.append((width, tuple(kept)))
        return tuple(out)

    def made(rows, kind):
        return tuple((width, tuple((most, kind(*route)) for most, route in windows)) for width, windows in rows)

    assert made(names["FORWARD"], rmsnorm_routes.ForwardRoute) == joined(forward)
    for mode in (True, False):
        assert made(names["BACKWARD"][mode], BackwardRoute) == joined(backward[mode])


@pytest.mark.parametrize("width", [64, 512, 768, 2048, 4096, 8192])
def test_no_candidate_is_offered_twice_and_deterministic_ones_have_no_atomics(width):
    for deterministic in (True, False):
        offered = backward_candidates(width, deterministic)
        assert len(offered) == len(set(offered))
        assert any(route.program == ATOMIC for route in offered) != deterministic

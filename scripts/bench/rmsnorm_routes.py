"""Measures RMSNorm's candidates on a card and writes llmtrain/kernels/rmsnorm_table.py: accuracy first, time second.

    python scripts/bench/rmsnorm_routes.py [--quick | --long] [--width H ...] [--inputs N] [--data FILE] [--table FILE]
    python scripts/bench/rmsnorm_routes.py --width H --add    # this width anew; the other widths stay as they are
    python scripts/bench/rmsnorm_routes.py --defaults     # the table that stands where nothing was measured
    python scripts/bench/rmsnorm_routes.py --cpu          # tiny, under the interpreter: does the script work

Between two numbers of rows of the grid lies a window. First all candidates are compiled and judged, many at once, and
then timed one by one. In a window a backward candidate qualifies where, at both of the window's ends (--long: and at
every 64th number of rows within), its dw holds the budget and is no worse than FP32 eager's on the same inputs of
three families, by the worst element and by the median one; eager takes 1 / sqrt in both of its forms and the worse of
them counts. (dw does not depend on the weight, so one dtype of it stands for both.) Of those that qualify the window
gets the fastest, by the geometric mean of its times at both ends; where none does, the fastest of the most accurate,
and the JSON says so. Widths that are not measured keep their defaults, or with --add what the table and the JSON hold.
One H200: --quick about 150 s, plain 6 min, --long hours.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import importlib

import torch
from places import place
from torch import Tensor

from llmtrain.benchmark import rmsnorm as bench
from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.rmsnorm_candidates import (
    WIDTHS,
    backward_candidates,
    default_table,
    forward_candidates,
    table_source,
)
from llmtrain.benchmark.timing import Method, Work, measure
from llmtrain.kernels.rmsnorm_routes import (
    BACKWARD,
    COLUMNS,
    COLUMNS_ROWS,
    FORWARD,
    BackwardRoute,
    ForwardRoute,
)
from llmtrain.storage.atomic import make_parent, write_bytes, write_json

op = importlib.import_module("llmtrain.kernels.rmsnorm")  # its name in the package is the function's

ROOT = Path(__file__).parents[2]
QUICK = ((256, 512, 768, 1024, 2048, 4096, 6144), (16, 64, 256, 1024, 4096, 16384, 65536))
PLAIN = (WIDTHS, (16, 64, 256, COLUMNS_ROWS, 2048, 4096, 8192, 16384, 65536, 262144))
METHOD = Method(sessions=2, rounds=2, samples=21, turn_seconds=0.004, warmup=2)
INPUTS = 120
"""Of each family, where they are small."""
ELEMENTS = INPUTS << 22
"""Of all inputs of a family together, at most: larger ones are fewer, but no fewer than is asked for."""
SHARED = 1 << 27
"""Elements of an input that are judged beside others; larger ones follow by themselves."""
MOST_ELEMENTS = 1 << 30
"""Of one tensor: the last window is entered at its first number of rows and left at as many as this allows."""


def last_rows(width: int, grid: tuple[int, ...]) -> int:
    return max(grid[-1] + 1, min(1 << 20, MOST_ELEMENTS // width, 16 * grid[-1]))


def windows(grid: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """(first number of rows, last or None)."""
    return list(zip((1, *(g + 1 for g in grid)), (*grid, None), strict=True))


def fits(route: BackwardRoute, last: int | None) -> bool:
    return route.program != COLUMNS or (last is not None and last <= COLUMNS_ROWS)


def backward(route: BackwardRoute, inputs: bench.Inputs, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dw = torch.empty_like(inputs.weight)
    return op._backward(inputs.dy, None, inputs.x.detach(), inputs.weight.detach(), rstd, dw, False, route), dw


def root_of(x: Tensor) -> Tensor:
    return 1 / torch.sqrt(x)


def rstd_of(x: Tensor, root: Callable[[Tensor], Tensor]) -> Tensor:
    return root(x.detach().float().square().mean(-1) + bench.EPS)


class Accuracy:
    """Errors of dw over its tolerance at one shape, over all inputs."""

    def __init__(self, width: int, n_rows: int, routes: set[BackwardRoute], inputs: int, device: torch.device) -> None:
        self.errors: dict[str, list[Tensor]] = {}
        shape = bench.Shape(n_rows, width)
        for family in bench.FAMILIES:
            for seed in range(inputs):
                given = bench.make_inputs(shape, device, seed, family)
                exact = bench.exact(given)["dw"]
                tolerance = 1e-4 + 1e-4 * exact.abs()

                def add(name: str, dw: Tensor, exact: Tensor = exact, tolerance: Tensor = tolerance) -> None:
                    self.errors.setdefault(name, []).append(((dw.double() - exact).abs() / tolerance).nan_to_num(1e9))

                wide, g = given.x.detach().float(), given.dy.float()
                for name, root in (("rsqrt", torch.rsqrt), ("1/sqrt", root_of)):
                    add(f"eager {name}", (g * (wide * rstd_of(given.x, root)[:, None])).sum(0))
                del wide, g
                rstd = op._forward(given.x.detach(), None, given.weight.detach(), bench.EPS)[2]
                for route in routes:
                    add(str(route), backward(route, given, rstd)[1])

    def worst(self, name: str) -> float:
        return max(error.max().item() for error in self.errors[name])

    def median(self, name: str) -> float:
        return torch.cat(self.errors[name]).median().item()

    def eager(self) -> dict[str, float]:
        names = ("eager rsqrt", "eager 1/sqrt")
        return {"worst": max(map(self.worst, names)), "median": max(map(self.median, names))}

    def record(self, route: BackwardRoute) -> dict[str, Any]:
        worst, median, eager = self.worst(str(route)), self.median(str(route)), self.eager()
        least = bench.ROUNDING
        held = worst <= 1 and worst <= max(eager["worst"], least) and median <= max(eager["median"], least / 4)
        return {"worst": worst, "median": median, "qualifies": held}


Build = Callable[[Any], Callable[[], Work]]


def milliseconds(build: Build, routes: list[Any], device: torch.device) -> dict[Any, float]:
    arms = {str(route): build(route) for route in routes}
    method = METHOD if device.type == "cuda" else Method(sessions=1, rounds=2, samples=1, warmup=1)
    measured, _ = measure(arms, device=device, replicate=[str(routes[0])], method=method)
    return {route: measured[str(route)].times.pooled for route in routes}


def times_at(width: int, n_rows: int, device: torch.device) -> tuple[dict[Any, float], dict[Any, float]]:
    """Milliseconds of every candidate that can run: (forward, backward of both modes)."""
    given = bench.make_inputs(bench.Shape(n_rows, width), device)
    x, weight = given.x.detach(), given.weight.detach()
    rstd = rstd_of(x, torch.rsqrt)

    def forward_work(route: ForwardRoute) -> Callable[[], Work]:
        def run() -> object:
            op.forward_route = lambda n, w: route
            return op._forward(x, None, weight, bench.EPS)

        return lambda: Work(run, (x,))

    def backward_work(route: BackwardRoute) -> Callable[[], Work]:
        return lambda: Work(lambda: backward(route, given, rstd), (x, given.dy))

    before = op.forward_route
    try:
        forward = milliseconds(forward_work, forward_candidates(width), device)
    finally:
        op.forward_route = before
    routes = [r for r in every_backward(width) if fits(r, n_rows)]
    return forward, milliseconds(backward_work, routes, device)


def every_backward(width: int) -> list[BackwardRoute]:
    return list(dict.fromkeys(backward_candidates(width, True) + backward_candidates(width, False)))


def compile_all(width: int, grid: tuple[int, ...], part: int) -> None:
    """Runs every candidate once at every number of rows, so that its code is in Triton's cache on disk."""
    device = torch.device("cuda")
    for first, last in windows(grid):
        for n_rows in (first, last or min(last_rows(width, grid), 65536)):
            given = bench.make_inputs(bench.Shape(n_rows, width), device)
            rstd = rstd_of(given.x, torch.rsqrt)
            if part == 0:
                for forward_tile in forward_candidates(width):
                    op.forward_route = lambda n, w, tile=forward_tile: tile
                    op._forward(given.x.detach(), None, given.weight.detach(), bench.EPS)
            for route in every_backward(width)[part::2]:
                if fits(route, n_rows):
                    backward(route, given, rstd)


def inputs_of(width: int, n_rows: int, least: int) -> int:
    """How many inputs of each family a point is judged by."""
    return max(least, min(INPUTS, ELEMENTS // (width * n_rows)))


Point = tuple[int, int]
"""(width, number of rows)."""


def points_of(grid: tuple[int, ...], window: tuple[int, int | None], width: int, inside: int | None) -> list[int]:
    """Numbers of rows that a window's candidates are judged at: both ends, and every `inside`-th between."""
    first, last = window
    end = last or last_rows(width, grid)
    return [first, end] + (list(range(first // inside * inside + inside, end, inside)) if inside else [])


def judge(width: int, n_rows: int, least: int, cpu: bool) -> dict[str, Any]:
    """What all candidates that can run at a point were found to be, by their names, and eager's errors."""
    routes = {r for r in every_backward(width) if fits(r, n_rows)}
    inputs = least if cpu else inputs_of(width, n_rows, least)
    accuracy = Accuracy(width, n_rows, routes, inputs, torch.device("cpu" if cpu else "cuda"))
    found = {"inputs": inputs, "eager": accuracy.eager(), "routes": {str(r): accuracy.record(r) for r in routes}}
    if not cpu:
        torch.cuda.empty_cache()  # for the other processes
    return found


def judge_all(
    widths: tuple[int, ...], grid: tuple[int, ...], inside: int | None, least: int, cpu: bool
) -> dict[Point, dict[str, Any]]:
    """All points of all windows; on a card by several processes, which compile the candidates first."""
    points = {(w, n): None for w in widths for window in windows(grid) for n in points_of(grid, window, w, inside)}
    shared = [point for point in points if point[0] * point[1] <= SHARED and not cpu]
    judged = {}
    if shared:
        with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
            pool.starmap(compile_all, [(width, grid, part) for width in widths for part in (0, 1)], chunksize=1)
            found = pool.starmap(judge, [(*point, least, cpu) for point in shared], chunksize=1)
            judged = dict(zip(shared, found, strict=True))
            pool.close()
            pool.join()  # or one that is still ending uses the card while it is timed
    return judged | {point: judge(*point, least, cpu) for point in points if point not in judged}


def geometric(a: float, b: float) -> float:
    return math.sqrt(a * b)


def choose(
    width: int, grid: tuple[int, ...], judged: dict[Point, dict[str, Any]], inside: int | None, device: torch.device
) -> tuple[dict[str, Any], list[Any], dict[bool, list[Any]]]:
    """(what was measured, the forward's windows, the backward's of either mode)."""
    times = {n: times_at(width, n, device) for n in grid}
    record: dict[str, Any] = {"width": width, "windows": []}
    forward: list[Any] = []
    backwards: dict[bool, list[Any]] = {True: [], False: []}
    for first, last in windows(grid):
        low, high = max((g for g in grid if g < first), default=grid[0]), last or grid[-1]
        tiles = {t: geometric(times[low][0][t], times[high][0][t]) for t in times[high][0]}
        forward.append((last, min(tiles, key=tiles.__getitem__)))
        points = {n: judged[width, n] for n in points_of(grid, (first, last), width, inside)}
        able = {r for r in times[high][1] if fits(r, last) and r in times[low][1]}
        mean = {r: geometric(times[low][1][r], times[high][1][r]) for r in able}
        at = {r: {str(n): point["routes"][str(r)] for n, point in points.items()} for r in able}
        worst = {r: max(one["worst"] for one in at[r].values()) for r in able}
        found: dict[str, Any] = {
            "first": first, "last": last, "points": len(points), "routes": {str(r): at[r] for r in able},
            "inputs": {str(n): point["inputs"] for n, point in points.items()},
            "eager": {str(n): point["eager"] for n, point in points.items()},
            "forward_ms": {str(t): ms for t, ms in tiles.items()},
            "backward_ms": {str(r): ms for r, ms in mean.items()},
        }  # fmt: skip
        for deterministic in (True, False):
            offered = [r for r in backward_candidates(width, deterministic) if r in able]
            good = [r for r in offered if all(one["qualifies"] for one in at[r].values())]
            best = min(good, key=mean.__getitem__) if good else min(offered, key=lambda r: (worst[r], mean[r]))
            backwards[deterministic].append((last, best))
            chosen = {"name": str(best), "route": asdict(best), "qualified": bool(good)}
            found["deterministic" if deterministic else "any order"] = chosen
        record["windows"].append(found)
    return record, forward, backwards


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer widths and rows, at least 2 inputs a family")
    size.add_argument("--long", action="store_true", help="120 inputs a family, at every 64th number of rows too")
    size.add_argument("--cpu", action="store_true", help="tiny shapes under the interpreter")
    parser.add_argument("--add", action="store_true", help="other widths stay as the table and the JSON have them")
    size.add_argument("--defaults", action="store_true", help="write the table that stands before anything is measured")
    parser.add_argument("--width", type=int, action="append", choices=WIDTHS, help="this width; may be repeated")
    parser.add_argument("--inputs", type=int, help="inputs of each family, at least")
    parser.add_argument("--data", type=Path, help="JSON; default: docs/data/rmsnorm-routes.json")
    parser.add_argument("--table", type=Path, help="default: llmtrain/kernels/rmsnorm_table.py")
    arguments = parser.parse_args()
    data_path = arguments.data or ROOT / place(None, "docs/data/rmsnorm-routes.json", arguments.cpu)
    table_path = arguments.table or ROOT / place(None, "llmtrain/kernels/rmsnorm_table.py", arguments.cpu)
    make_parent(data_path)
    make_parent(table_path)
    forward, backwards = (FORWARD, dict(BACKWARD)) if arguments.add else default_table()
    if arguments.defaults:
        origin = "nothing is measured yet, these are the defaults"
        write_bytes(table_path, table_source(forward, backwards, origin).encode())
        return 0
    begin = time.perf_counter()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    widths, grid = ((64,), (8, 40)) if arguments.cpu else QUICK if arguments.quick else PLAIN
    widths = tuple(arguments.width or widths)
    inputs = arguments.inputs or (INPUTS if arguments.long else 2 if arguments.quick or arguments.cpu else 10)
    machine = describe(not arguments.cpu)
    inside = 64 if arguments.long else None
    judged = judge_all(widths, grid, inside, inputs, arguments.cpu)
    print(f"compiled and judged after {time.perf_counter() - begin:.0f} s", flush=True)
    kept = json.loads(data_path.read_text())["widths"] if arguments.add and data_path.exists() else []
    records = {of_width["width"]: of_width for of_width in kept}
    left = set(widths)
    for width in widths:
        record, tiles, of_mode = choose(width, grid, judged, inside, device)
        records[width] = record | {"grid": grid, "machine": machine}
        left.remove(width)
        forward = tuple((w, tuple(tiles) if w == width else old) for w, old in forward)
        for mode, chosen in of_mode.items():
            backwards[mode] = tuple((w, tuple(chosen) if w == width else old) for w, old in backwards[mode])
        share = statistics.mean(w["deterministic"]["qualified"] for w in record["windows"])
        print(f"width {width}: {share:.0%} of windows have a qualified route, {time.perf_counter() - begin:.0f} s",
              flush=True)  # fmt: skip
        measured = ", ".join(map(str, sorted(records)))
        origin = f"measured on {machine['card']['name'] if machine['card'] else 'a CPU'}: widths {measured}"
        data = {
            "machine": machine, "inputs": inputs, "every_64th": arguments.long, "missing": sorted(left),
            "widths": [records[other] for other in sorted(records)],
        }  # fmt: skip
        write_json(data_path, data)
        write_bytes(table_path, table_source(forward, backwards, origin).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

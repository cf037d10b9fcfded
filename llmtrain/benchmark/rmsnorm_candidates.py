"""What could run at a shape of RMSNorm, for scripts/bench/rmsnorm_routes.py, and its table as source text."""

from typing import Any

from llmtrain.kernels.rmsnorm_routes import (
    ATOMIC,
    COLUMNS,
    COLUMNS_ROWS,
    PARTIALS,
    BackwardRoute,
    ForwardRoute,
    Windows,
    block_of,
)

WIDTHS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 5120, 6144, 8192)
REGISTERS = 65536
"""Of a processor."""


def forward_candidates(width: int) -> list[ForwardRoute]:
    """The first is what runs where nothing was measured, of many rows; the second, of few."""
    block = block_of(width)
    warps = max(4, block // 512)
    many, few = (max(1, 4096 // block) if block <= 1024 else 1), max(1, 1024 // block)
    tiles = [(many, warps), (few, warps), (max(1, 2048 // block), warps), (1, max(1, block // 1024)), (1, 2 * warps)]
    return [ForwardRoute(rows, warps) for rows, warps in dict.fromkeys(tiles) if warps <= 32]


def partials(width: int, warps: int, per_processor: int, program: str = PARTIALS) -> BackwardRoute:
    block = block_of(width)
    most = REGISTERS // (32 * warps * per_processor) // 8 * 8
    # What a program takes by itself, at 8, 16 and 32 elements a thread; a limit far below that would spill.
    wanted = {8: 72, 16: 120}.get(max(1024, block) // (32 * warps), 255)
    registers = most if wanted * 7 // 8 <= most < wanted else None
    return BackwardRoute(program, max(1, 1024 // block), warps, per_processor, registers=registers)


def backward_candidates(width: int, deterministic: bool) -> list[BackwardRoute]:
    """The first is what runs where nothing was measured, of more rows than COLUMNS_ROWS; the last, of fewer."""
    block = block_of(width)
    # Measured on an H200 before sums were folded: a row over 4 warps beats a row in one or in two; 8 programs a
    # processor are 1.08 times the bytes' time at width 768 (4: 1.17), 4 are 1.11 at 960 (8: 1.14) and 1.05 at 2048
    # (8: 1.14).
    if block <= 1024:
        tiles = [(4, 8), (4, 4)] if width <= 768 else [(4, 4), (4, 8)]
        tiles += [(4, 6), (8, 4), (2, 8)]
    elif block == 2048:
        tiles = [(4, 4), (4, 3), (8, 4), (8, 3), (4, 2)]
    else:
        tiles = [(block // 512, 8192 // block), (block // 1024, 8192 // block), (block // 512, 1), (block // 1024, 3)]
    routes = [partials(width, *tile) for tile in dict.fromkeys(tiles)]
    if not deterministic:
        routes += [partials(width, *tile, program=ATOMIC) for tile in list(dict.fromkeys(tiles))[:2]]
    warps = max(4, block // 1024)
    for cols in (64, 32) if width > 32 else (32,):
        routes.append(BackwardRoute(COLUMNS, max(1, 1024 // block), warps, cols=cols))
    return routes


def default_table() -> tuple[Windows[ForwardRoute], dict[bool, Windows[BackwardRoute]]]:
    """What runs until a card has said better."""
    few = COLUMNS_ROWS
    forward = []
    for width in WIDTHS:
        tiles = forward_candidates(width)
        forward.append((width, ((few, tiles[1 if block_of(width) <= 1024 else 0]), (None, tiles[0]))))
    backward: dict[bool, Any] = {}
    for deterministic in (True, False):
        rows = []
        for width in WIDTHS:
            routes = backward_candidates(width, deterministic)
            windows: list[tuple[int | None, BackwardRoute]] = [(few, routes[-1])]
            if not deterministic:
                windows.append((8 * few, next(route for route in routes if route.program == ATOMIC)))
            rows.append((width, (*windows, (None, routes[0]))))
        backward[deterministic] = tuple(rows)
    return tuple(forward), backward


def table_source(forward: Windows[ForwardRoute], backward: dict[bool, Windows[BackwardRoute]], origin: str) -> str:
    """The text of rmsnorm_table.py; windows of the same route are joined."""

    def fields(route: Any) -> str:
        values = list(vars(route).values())
        defaults = [f.default for f in type(route).__dataclass_fields__.values()]
        while values and values[-1] == defaults[len(values) - 1]:
            values.pop()
        return "(" + ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values) + ")"

    def lines(windows: Any, indent: str) -> list[str]:
        out = []
        for width, of_width in windows:
            joined: list[tuple[int | None, Any]] = []
            for most, route in of_width:
                if joined and joined[-1][1] == route:
                    joined.pop()
                joined.append((most, route))
            inner = " ".join(f"({most}, {fields(route)})," for most, route in joined)
            out.append(f"{indent}({width}, ({inner})),")
        return out

    head = (
        f'"""Windows of RMSNorm\'s routes. Written by scripts/bench/rmsnorm_routes.py; {origin}."""\n\n'
        "# fmt: off\n"
        "# ruff: noqa: E501\n"
        "# (width up to, ((rows up to or None for all others, the fields of a route), ...))\n"
    )
    return (
        head
        + "FORWARD: tuple = (\n" + "\n".join(lines(forward, "    ")) + "\n)\n\n"
        + "BACKWARD: dict[bool, tuple] = {\n"
        + "".join(f"    {d}: (\n" + "\n".join(lines(w, "        ")) + "\n    ),\n" for d, w in backward.items())
        + "}\n"
    )  # fmt: skip

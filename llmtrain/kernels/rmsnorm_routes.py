"""Which program of RMSNorm runs at a shape, and how its work is shared out.

Both follow from the shape alone: how a sum is shared out decides how it is rounded, so it must not depend on the card.
The windows are in rmsnorm_table.py, which scripts/bench/rmsnorm_routes.py writes from measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from llmtrain.kernels import rmsnorm_table as table

PROCESSORS = 132
"""Of an H200. Not asked of the card: how a sum is shared out, and so rounded, is the same on every card."""

FOLD = 16
"""Rows, at most, in one running sum of dw; such sums are added up in a second one."""

LONGEST_SUM = 8 * FOLD
"""Rows of one program's sum, at most: all programs' are added up in FP64."""

SHRINK = 2.0**-8
"""What sums of dw are kept times: LONGEST_SUM rows near the largest FP32 do not overflow before their signs meet."""

DEEP = 64
"""Rows at a time where dw is summed by columns."""

COLUMNS_ROWS = FOLD * DEEP
"""Rows, at most, of a window that sums dw by columns: it has no second sum."""

PARTIALS, COLUMNS, ATOMIC = "partials", "columns", "atomic"
"""Programs of the backward: partial sums and a kernel that adds them up; a kernel with programs of its own for dw;
partial sums added up by atomic additions, in whatever order programs finish."""


@dataclass(frozen=True)
class ForwardRoute:
    rows: int
    """Rows of a program."""
    warps: int


@dataclass(frozen=True)
class BackwardRoute:
    program: str
    rows: int
    """Rows at a time, of a program that computes dx."""
    warps: int
    per_processor: int = 0
    """Programs a processor, at least, where programs walk over rows."""
    stages: int = 3
    """Of the pipeline: rows in flight, and one in work."""
    cols: int = 0
    """Columns of a program that sums dw by columns."""
    registers: int | None = None
    """At most, where the compiler would take so many that fewer programs are resident than there are."""

    def programs(self, n_rows: int) -> int:
        """Programs that compute dx."""
        turns = -(-n_rows // self.rows)
        if self.program == COLUMNS:
            return turns
        return min(turns, max(PROCESSORS * self.per_processor, -(-turns // LONGEST_SUM)))

    def fold(self, n_rows: int) -> int:
        """FOLD where a program's running sum is longer than that, else 0."""
        return FOLD if -(-n_rows // (self.rows * self.programs(n_rows))) > FOLD else 0


Route = TypeVar("Route")
Windows = tuple[tuple[int, tuple[tuple[int | None, Route], ...]], ...]
"""(largest width, ((most rows or None, route), ...)), ...: both in ascending order."""

FORWARD: Windows[ForwardRoute] = tuple(
    (width, tuple((most, ForwardRoute(*route)) for most, route in windows)) for width, windows in table.FORWARD
)
BACKWARD: dict[bool, Windows[BackwardRoute]] = {
    deterministic: tuple(
        (width, tuple((most, BackwardRoute(*route)) for most, route in windows)) for width, windows in widths
    )
    for deterministic, widths in table.BACKWARD.items()
}


def window(windows: Windows[Route], n_rows: int, width: int) -> Route:
    """The route of a shape; one wider than the last width has that one's."""
    _, of_width = next((w for w in windows if width <= w[0]), windows[-1])
    return next(route for most, route in of_width if most is None or n_rows <= most)


def ends(windows: Windows[Route]) -> Iterator[tuple[int, int, int | None, Route]]:
    """(width, first number of rows, last or None, route) of every window."""
    for width, of_width in windows:
        first = 1
        for most, route in of_width:
            yield width, first, most, route
            first = (most or 0) + 1


def block_of(width: int) -> int:
    """The power of two that a row takes."""
    return 1 << (width - 1).bit_length() if width > 1 else 1


def forward_route(n_rows: int, width: int) -> ForwardRoute:
    route = window(FORWARD, n_rows, width)
    if width <= FORWARD[-1][0]:
        return route
    return ForwardRoute(1, min(32, block_of(width) // 512))


def backward_route(n_rows: int, width: int, deterministic: bool) -> BackwardRoute:
    if width <= BACKWARD[deterministic][-1][0]:
        return window(BACKWARD[deterministic], n_rows, width)
    # Wider than what was measured: two rows of three tensors may not fit into shared memory.
    return BackwardRoute(PARTIALS, 1, min(32, block_of(width) // 1024), 4, stages=1)

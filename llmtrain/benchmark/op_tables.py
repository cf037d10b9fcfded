"""Tables of the ops' benchmarks, out of what `op.measure_cases` returned."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmtrain.benchmark.statistics import range_line
from llmtrain.benchmark.tables import NONE, figure, percent, table

_OF_CARD = (
    " `h`: the host takes longer to issue the call than the device to run it. `e`: it waits for the device, as nothing "
    "in a graph can, and the eager call is timed."
)
_LEGEND = (
    "Milliseconds of {time}, the median of all sessions' samples. `+` ours is faster and `-` slower than the best "
    "peer by more than the floor in every session, `=` neither. `~`: session medians of an arm spread over 5%.{of_card}"
    " `(x)`: the arm's worst error is x times its "
    "tolerance, so it does not compete; `!`: no peer is inside the budget, and the fastest is compared. `*`: it does "
    "not deliver what ours does, and does not compete; what it lacks is said below. Of copy: the bytes the op must "
    "move, over its time, as a share of a device copy's rate in the same run; of matmul: the same of FLOPs. Floor: the "
    "largest difference, in any session, between ours and its own second copy."
)
LEGEND = _LEGEND.format(time="device time", of_card=_OF_CARD)
"""Of tables that were taken on a card."""
LEGEND_ON_CPU = _LEGEND.format(time="host time, of the whole call on a CPU", of_card="").replace(
    "a device copy's rate", "a copy's rate"
)


def worst_of(errors: Mapping[str, float | None]) -> float:
    """The largest; JSON has no word for an infinite one."""
    return max((math.inf if error is None else error for error in errors.values()), default=0.0)


def cell(arm: dict[str, Any]) -> str:
    """An arm's time with its marks."""
    if arm["status"] != "ok":
        return arm["status"]
    worst = worst_of(arm["errors"])
    marks = ("~" if arm["noisy"] else "") + ("h" if arm["host_bound"] else "")
    marks += ("" if arm.get("captured", True) else "e") + ("*" if arm["lacks"] else "")
    return f"{arm['ms']:.4g}{marks}" + (f" ({worst:.2g})" if worst > 1 else "")


def best_peer(row: dict[str, Any]) -> dict[str, Any] | None:
    return next((arm for arm in row["arms"] if arm["name"] == row["best"]), None)


def ratio(row: dict[str, Any]) -> str:
    """Ours against the best peer."""
    best = best_peer(row)
    if best is None:
        return NONE
    noisy = "~" if best["noisy"] or row["arms"][0]["noisy"] else ""
    mark = "" if row["best_in_budget"] else f"! ({worst_of(best['errors']):.2g})"
    return f"{best['ratio']:.2f}{best['verdict']}{noisy}{mark}"


def share_columns(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(heading, key) of the shares of a ceiling that any row has."""
    named = (("of copy", "bytes_share"), ("of matmul", "flops_share"))
    return [(name, key) for name, key in named if any(row["arms"][0].get(key) is not None for row in rows)]


def group_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One table: rows of one op and one direction, with the same columns of shape."""
    names = dict.fromkeys((not arm["ours"], arm["name"]) for row in rows for arm in row["arms"])
    arms = [name for _, name in sorted(names, key=lambda found: found[0])]
    shape = list(rows[0]["shape"])
    shares = share_columns(rows)
    cells = []
    for row in rows:
        by_name = {arm["name"]: arm for arm in row["arms"]}
        ours = row["arms"][0]
        cells.append([
            *(str(row["shape"][name]) for name in shape),
            *(cell(by_name[name]) if name in by_name else "" for name in arms),
            *(percent(ours.get(key)) for _, key in shares),
            row["best"] or NONE,
            ratio(row),
            percent(row["floor"]),
        ])  # fmt: skip
    header = [*shape, *arms, *(name for name, _ in shares), "best peer", "best / ours", "floor"]
    said = summary(rows)
    return [*table(header, cells, numbers_from=len(shape)), "", *said, *([""] if said else [])]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table says as a whole: only rows with a peer inside the budget count."""
    if not any(row["best"] for row in rows):
        return []
    ratios = [peer["ratio"] for row in rows if row["best_in_budget"] and (peer := best_peer(row)) is not None]
    if not ratios:
        return ["No row has a peer inside the budget."]
    verdicts = [peer["verdict"] for row in rows if row["best_in_budget"] and (peer := best_peer(row)) is not None]
    wins, losses = verdicts.count("+"), verdicts.count("-")
    left_out = len(rows) - len(ratios)
    out = f" {left_out} rows have no peer inside the budget and are left out." if left_out else ""
    return [f"Best peer / ours: {range_line(ratios)}; {wins} wins, {losses} losses beyond the floor.{out}"]


def error_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each arm's worst error over its tolerance, in any row of one op."""
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        for arm in row["arms"]:
            of_arm = worst.setdefault(arm["name"], {})
            for name, error in arm["errors"].items():
                of_arm[name] = max(of_arm.get(name, 0.0), worst_of({name: error}))
    outputs = list(dict.fromkeys(name for errors in worst.values() for name in errors))
    if not outputs:
        return []
    cells = [
        [arm, *(format(errors[name], ".2g") if name in errors else "" for name in outputs)]
        for arm, errors in worst.items()
        if errors
    ]
    return [f"Worst error of any row of {rows[0]['op']}, over the tolerance:", "", *table(["arm", *outputs], cells), ""]


def memory_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What each arm took at its peak in the rows of one op, where that was measured."""
    peaks: dict[str, list[float]] = {}
    for row in rows:
        for arm in row["arms"]:
            if "peak_gib" in arm:
                peaks.setdefault(arm["name"], []).append(arm["peak_gib"])
    if not peaks:
        return []
    cells = [[name, f"{min(found):.2f}", f"{max(found):.2f}"] for name, found in peaks.items()]
    header = ["arm", "least", "most"]
    return [f"GiB at the peak above the inputs, in the rows of {rows[0]['op']}:", "", *table(header, cells), ""]


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What arms lack, and why some are not there; each once."""
    found = []
    for row in rows:
        for arm in row["arms"]:
            if arm["status"] != "ok":
                found.append(f"- {arm['name']}: {arm['status']}: {arm['reason']}.")
            elif arm["lacks"]:
                found.append(f"- {arm['name']}: {row['what']}: {', '.join(arm['lacks'])}.")
    return list(dict.fromkeys(found))


def op_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown of all rows: a table for each direction, those taken without torch.compile apart, and the notes."""
    compiles = any(arm["compiled"] for row in rows for arm in row["arms"])
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        apart = compiles and not row["compiler_in_process"]
        groups.setdefault((row["op"], row["what"], apart, tuple(row["shape"])), []).append(row)
    lines = []
    for (op, what, apart, _), group in groups.items():
        lines += [f"**{op}, {what}**{', before torch.compile was used in the process' if apart else ''}", ""]
        lines += group_lines(group)
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = [row for row in rows if row["op"] == op]
        lines += [*error_lines(of_op), *memory_lines(of_op)]
    said = notes(rows)
    return [*lines, *said, ""] if said else lines


def ceilings_line(ceilings: dict[str, float]) -> str:
    return (
        f"Ceilings of the same run: one read and one write at {figure(ceilings['bytes_per_s'], '.3g', 1e-12)} TB/s, "
        f"a square matrix product {figure(ceilings['flops'], '.4g', 1e-12)} TFLOP/s."
    )


def method_line(method: dict[str, Any], on_card: bool) -> str:
    cold = "behind a cold L2" if method["cold_l2"] else "with a warm L2"
    how = f"replays of a CUDA graph {cold}" if method["graph"] else f"eager calls {cold}"
    if not on_card:
        how = "calls, one after the other"
    return (
        f"{method['sessions']} sessions, every other one in reverse order, of {method['rounds']} rounds of at most "
        f"{method['samples']} {how}; a turn of long calls ends after {method['turn_seconds']:g} s."
    )

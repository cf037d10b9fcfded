"""docs/peers.md out of the JSON that scripts/bench/peers.py wrote."""

import itertools
from typing import Any

from llmtrain.benchmark.config import Shape, shape_from
from llmtrain.benchmark.machine import headline
from llmtrain.benchmark.statistics import Times, compare, noise_floor
from llmtrain.benchmark.tables import figure, percent, table
from llmtrain.model.flops import peak_flops

HEADER = (
    "arm", "batch", "tok/s", "spread", "llmtrain's share", "MFU", "tensors GiB", "held GiB", "first step s", "loss",
    "differs by",
)  # fmt: skip

COPY = " (copy)"

LEGEND = (
    "tok/s is the median of the bursts, by the wall clock. llmtrain's share is llmtrain's tok/s over the arm's, of "
    "the same group of resident processes: `+` where llmtrain is faster and `-` where it is slower by more than the "
    "floor in every round, `=` otherwise, `?` where no copy ran, `~` where the rounds of either spread over 5%. The "
    "floor is the largest difference in a round between llmtrain and its copy. Tensors is the allocator's peak, held "
    "what the allocator took from the card. First step counts from the start of the process, with the most arms that "
    "were starting beside it, those of cases in the same run among them. Compile caches are empty at the start of a "
    "run, and its cases share them: the copy finds what llmtrain left, the arm with CUDA graphs what the one without "
    "did, and a case what arms of other cases had compiled by then. Loss is that after the stated number of steps on "
    "the same data from the same weights, those of the copy moved within half a bf16 ulp. Differs by is the largest "
    "difference from llmtrain's loss in any of those steps (of a second llmtrain, from the first's), and `!` marks "
    "one beyond three times what replicates (the copy, a second llmtrain) differ by. There is no TensorFlow/XLA arm."
)


def seconds_per_token(row: dict[str, Any]) -> Times:
    return Times(tuple((b["wall_s"] / b["steps"] / row["tokens_per_step"],) for b in row["bursts"]))


def largest_difference(row: dict[str, Any], measure: dict[str, Any]) -> float | None:
    """Of two arms' losses, step by step; None where they did not see the same tokens in a step."""
    if row["tokens_per_step"] != measure["tokens_per_step"]:
        return None
    return max(abs(a - b) for a, b in zip(row["losses"], measure["losses"], strict=True))


class CaseView:
    """A case with what its rows are held against."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.timed = [row for row in case["rows"] if row["status"] == "ok" and len(row["bursts"]) >= 2]
        self.measures: dict[int, dict[str, Any]] = {}
        """The measure of each group: the first arm of the case, where the group has it."""
        for row in self.timed:
            if (row["arm"], row["shape"]) == (case["rows"][0]["arm"], case["rows"][0]["shape"]):
                self.measures.setdefault(row["group"], row)
        copies = [row for row in self.timed if row["arm"].endswith(COPY) and row["group"] in self.measures]
        pairs = [(self.measures[c["group"]], c) for c in copies if self.measures[c["group"]]["shape"] == c["shape"]]
        self.floor = noise_floor((seconds_per_token(a), seconds_per_token(b)) for a, b in pairs) if pairs else None
        # The measure once more, of another group, is a replicate too, and from the very same weights.
        replicates = [*pairs, *itertools.combinations(self.measures.values(), 2)] if pairs else []
        self.scatter = max((largest_difference(b, a) or 0.0 for a, b in replicates), default=None)

    def share(self, row: dict[str, Any]) -> str:
        measure = self.measures.get(row["group"])
        if measure is None or measure is row:
            return ""
        ours, theirs = seconds_per_token(measure), seconds_per_token(row)
        if self.floor is None:
            return f"{theirs.pooled / ours.pooled:.2f}?"
        return str(compare(ours, theirs, self.floor))

    def difference(self, row: dict[str, Any]) -> str:
        first = next(iter(self.measures.values()), None)
        measure = self.measures.get(row["group"], first)
        if measure is row:
            measure = first
        if measure is None or measure is row or (largest := largest_difference(row, measure)) is None:
            return ""
        beyond = self.scatter is not None and largest > 3 * self.scatter
        return f"{largest:.1e}{'!' if beyond else ''}"

    def cells(self, row: dict[str, Any]) -> list[str]:
        shape: Shape = shape_from(row["shape"])
        start = [row["arm"], str(shape)]
        if row not in self.timed:
            words = {"oom": "out of memory", "absent": "absent", "failed": "failed", "ok": "no bursts"}
            return [*start, words[row["status"]], *[""] * 8]
        times = seconds_per_token(row)
        peak = peak_flops(row["device_name"] or "")
        return [
            *start,
            f"{1 / times.pooled:,.0f}",
            percent(times.spread),
            self.share(row),
            percent(row["flops_per_token"] / times.pooled / peak if peak else None),
            figure(row["allocated_gib"], ".1f"),
            figure(row["reserved_gib"], ".1f"),
            f"{row['first_step_s']:.1f} ({row['started_beside']})",
            f"{row['losses'][-1]:.4f}",
            self.difference(row),
        ]


def packages(rows: list[dict[str, Any]]) -> str:
    """Versions of what only the peers use, as a sentence."""
    found = {name: version for row in rows for name, version in row.get("versions", {}).items() if version}
    return f" Peers: {', '.join(f'{name} {version}' for name, version in found.items())}." if found else ""


def case_markdown(case: dict[str, Any]) -> list[str]:
    view = CaseView(case)
    shape = shape_from(case["rows"][0]["shape"])
    m = shape.model
    lines = [
        f"## {case['name']}",
        "",
        f"d_model {m.d_model}, {m.n_layers} layers, {m.n_heads} heads and {m.n_kv_heads} kv heads of {m.head_dim}, "
        f"d_ff {m.d_ff}, vocabulary {m.vocab_size}, {case['precision']}; bursts of {case['seconds']:g} s; losses after "
        f"{case['steps']} steps. Floor: {percent(view.floor)}.",
        "",
        headline(case["machine"]) + packages(case["rows"]),
        "",
        *table(HEADER, [view.cells(row) for row in case["rows"]], numbers_from=2),
        "",
    ]
    notes = [f"- {row['arm']}: {row['reason']}." for row in case["rows"] if row["status"] != "ok"]
    notes += [
        f"- {row['arm']}: not captured: {row['not_captured']}." for row in case["rows"] if row.get("not_captured")
    ]
    return lines + notes + ([""] if notes else [])


def peers_markdown(data: dict[str, Any], source: str) -> str:
    """The page: a table for each case. `source` names the JSON file."""
    lines = [
        "# Against its peers",
        "",
        f"Made by `python scripts/bench/peers.py` from [{source}]({source}): whole training steps on the same model, "
        "batch and data, each arm in a process of its own, arms taking turns in rotating order.",
        "",
        LEGEND,
        "",
    ]
    for case in data["cases"]:
        lines += case_markdown(case)
    return "\n".join(lines)

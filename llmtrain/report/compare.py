"""Whether a change helps: a run against replicates of the run without it.

The losses of all runs are averaged over the same blocks of tokens at their end. What the replicates differ by, though
nothing was changed between them, is what a difference has to exceed. A run is one sample of what chance does, however
many losses it logs: an offset that stays to the end looks the same in all of its blocks. So the floor comes first of
all from the runs' means, by Student's t, with one degree of freedom less than there are replicates.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmtrain.report.curves import Curve, Floats
from llmtrain.storage.errors import BadData, ConfigMismatch

BETTER, WORSE, CANNOT_TELL = "better", "worse", "cannot tell"


@dataclass(frozen=True)
class Verdict:
    """What block means say; losses in nats, differences negative where the changed run is lower."""

    verdict: str
    difference: float
    """The changed run's mean less that of the replicates."""
    floor: float
    """What a difference has to exceed."""
    gap: float
    """Between the means of the replicates: the largest less the smallest."""
    largest_gap: float
    """The same within one block, in that where it is largest."""
    rests_on: str
    """Which of three bounds the floor is."""

    @property
    def floors(self) -> float:
        return self.difference / self.floor if self.floor else math.copysign(math.inf, self.difference)


@functools.cache
def student_t(confidence: float, freedom: int) -> float:
    """x with P(|T| < x) = confidence, T of Student's t with `freedom` degrees of freedom."""
    # With x = sqrt(freedom) tan(a) the density becomes cos(a)^(freedom - 1), whose integral is summed by the midpoints
    # of a fine grid: exact enough, smooth, and without a library.
    edges = np.linspace(0.0, math.pi / 2, 20_001)
    middle = (edges[1:] + edges[:-1]) / 2
    share = np.cumsum(np.cos(middle) ** (freedom - 1))
    angle = float(np.interp(confidence, np.append(0.0, share / share[-1]), edges))
    return math.sqrt(freedom) * math.tan(angle)


def judge(replicates: Floats, changed: Floats, confidence: float = 0.95) -> Verdict:
    """replicates: (R, K) block means of R >= 2 runs of one configuration; changed: (K,) of the run with the change,
    K >= 2 blocks of the same tokens.

    The floor is the largest of three bounds, each a quantile of Student's t times a standard error:
    of the replicates' means, which no offset of a whole run deceives; of the replicates' blocks as if they were
    independent, below which means that agree by luck must not lead; of the blocks of the difference, for a changed run
    that is more erratic than they are. So chance alone is called a difference in at most 1 - confidence of all cases.
    """
    runs, blocks = replicates.shape
    assert runs >= 2 and blocks >= 2 and changed.shape == (blocks,)
    middle = replicates.mean(0)
    by_block = changed - middle
    scale = math.sqrt(1 + 1 / runs)
    residuals = replicates - middle
    of_means = math.sqrt(float((residuals.mean(1) ** 2).sum()) / (runs - 1))
    of_blocks = math.sqrt(float((residuals**2).sum()) / ((runs - 1) * blocks) / blocks)
    bounds = {
        "the means of the replicates": student_t(confidence, runs - 1) * of_means * scale,
        "the blocks of the replicates": student_t(confidence, (runs - 1) * blocks) * of_blocks * scale,
        "the blocks of the difference": student_t(confidence, blocks - 1)
        * float(by_block.std(ddof=1))
        / math.sqrt(blocks),
    }
    rests_on = max(bounds, key=bounds.__getitem__)
    difference, floor = float(by_block.mean()), bounds[rests_on]
    verdict = CANNOT_TELL if abs(difference) <= floor else BETTER if difference < 0 else WORSE
    means, spread = replicates.mean(1), replicates.max(0) - replicates.min(0)
    return Verdict(verdict, difference, floor, float(means.max() - means.min()), float(spread.max()), rests_on)


MOST_BLOCKS = 20
"""That a tail is cut into by default."""


@dataclass(frozen=True)
class Blocks:
    """The runs' tail, cut at the same tokens."""

    edges: Floats
    """(K + 1,), in tokens; a block holds what lies above its first edge, up to its last."""
    means: Floats
    """(runs, K): mean losses, in nats."""
    paired: bool
    """Whether every run has a loss at the same tokens, so that what a batch is worth cancels in differences."""
    lines: int
    """Losses in the tail of the run that has the fewest."""


def cut(curves: Sequence[Curve], tail: float, blocks: int) -> Blocks:
    """Block means over the last `tail` (a share) of the tokens that all runs have; blocks 0: up to MOST_BLOCKS. Raises
    BadData where a block of some run has no loss."""
    remedy = "lower --blocks, raise --tail" if blocks else "raise --tail"
    if not blocks:
        for fewer in range(MOST_BLOCKS, 2, -1):
            with suppress(BadData):
                return cut(curves, tail, fewer)
        blocks = 2
    end = min(int(curve.tokens[-1]) for curve in curves)
    edges = np.linspace((1 - tail) * end, end, blocks + 1)
    common = set.intersection(*(set(curve.tokens.tolist()) for curve in curves))
    inside = [curve.tokens[(curve.tokens > edges[0]) & (curve.tokens <= edges[-1])] for curve in curves]
    paired = all(set(tokens.tolist()) <= common for tokens in inside)
    means = np.empty((len(curves), blocks))
    for i, curve in enumerate(curves):
        of_block = np.searchsorted(edges, curve.tokens, side="left") - 1
        for k in range(blocks):
            losses = curve.losses[of_block == k]
            if not len(losses):
                raise BadData(
                    f"{curve.name}: has no loss between {edges[k]:,.0f} and {edges[k + 1]:,.0f} tokens: "
                    f"{remedy}, or log more often (--log-every, --val-every)"
                )
            means[i, k] = losses.mean()
    return Blocks(edges, means, paired, min(map(len, inside)))


def trailing(curve: Curve, width: float) -> Floats:
    """The mean of the losses of the last `width` tokens at each line; the first ones have fewer."""
    sums = np.append(0.0, np.cumsum(curve.losses))
    first = np.searchsorted(curve.tokens, curve.tokens - width, side="right")
    last = np.arange(1, len(curve.tokens) + 1)
    return np.asarray((sums[last] - sums[first]) / (last - first))


def reached(curve: Curve, loss: float, width: float) -> dict[str, float] | None:
    """Where the trailing mean of the curve comes down to `loss`, between two lines by a straight line: its step, tokens
    and seconds; None where it never does, or begins below.

    A noisy curve crosses a level several times, and the first of them is early. So its values are put in falling order
    first: as many lines then lie before the place as are above the level.
    """
    means = np.sort(trailing(curve, width))[::-1]
    there = np.flatnonzero(means <= loss)
    if not len(there) or there[0] == 0:
        return None
    i = int(there[0])
    share = (means[i - 1] - loss) / (means[i - 1] - means[i])
    axes = {"step": curve.steps, "tokens": curve.tokens, "seconds": curve.seconds}
    return {name: float(axis[i - 1] + share * (axis[i] - axis[i - 1])) for name, axis in axes.items()}


def speed(replicates: Sequence[Curve], changed: Curve, blocks: Blocks) -> dict[str, Any]:
    """How much sooner the changed run has the loss that the replicates end with: their tokens and seconds over its own;
    where it never gets there, how much later it has its own end than they have that loss, so below 1."""
    width = float(blocks.edges[-1] - blocks.edges[-2])
    end = float(blocks.edges[-1])

    def at_end(curve: Curve) -> dict[str, float]:
        return {
            "loss": float(np.interp(end, curve.tokens, trailing(curve, width))),
            "step": float(np.interp(end, curve.tokens, curve.steps)),
            "tokens": end,
            "seconds": float(np.interp(end, curve.tokens, curve.seconds)),
        }

    ends = [at_end(curve) for curve in replicates]
    theirs = {name: sum(one[name] for one in ends) / len(ends) for name in ends[0]}
    mine = reached(changed, theirs["loss"], width)
    target = theirs["loss"]
    if mine is None or mine["tokens"] > end:
        mine = at_end(changed)
        target = mine["loss"]
        found = [at for curve in replicates if (at := reached(curve, target, width))]
        if not found:  # the run begins above what the other ends with, and never meets it
            return {"loss": target, "replicates": None, "changed": mine, "tokens_ratio": None, "seconds_ratio": None}
        theirs = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    ratios = {f"{name}_ratio": theirs[name] / mine[name] for name in ("tokens", "seconds")}
    return {"loss": target, "replicates": theirs, "changed": mine, **ratios}


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ between two runs, as `read_settings` gives them: name -> (before, after). Where a run lives
    and how and how often it speaks or saves changes no loss."""
    silent = {
        "run.run_dir", "run.log_every", "run.checkpoint_every", "run.keep_checkpoints", "run.keep_every",
        "run.val_every", "run.max_save_failures", "run.verify_every", "run.console", "run.tensorboard", "run.wandb",
        "run.rank_timeout",
    }  # fmt: skip
    names = sorted((before.keys() | after.keys()) - silent)
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


def refuse_no_replicate(first: str, other: str, found: dict[str, tuple[Any, Any]]) -> None:
    """Raises ConfigMismatch where what should be replicates differ in more than their seed."""
    found = {name: values for name, values in found.items() if name != "run.seed"}
    if found:
        name, (before, after) = next(iter(found.items()))
        raise ConfigMismatch(
            f"{other}: is no replicate of {first}: its {name} is {after}, not {before}: the first two runs must be of "
            "one configuration, the third has the change"
        )


def compare(
    replicates: Sequence[Curve], changed: Curve, tail: float = 0.25, blocks: int = 0, confidence: float = 0.95
) -> dict[str, Any]:
    """All that `llmtrain compare` says of the losses, as JSON takes it. Raises BadData as `cut` does."""
    curves = [*replicates, changed]
    cuts = cut(curves, tail, blocks)
    verdict = judge(cuts.means[:-1], cuts.means[-1], confidence)
    means = cuts.means.mean(1)
    return {
        "verdict": verdict.verdict,
        "difference": verdict.difference,
        "floor": verdict.floor,
        "floors": verdict.floors if math.isfinite(verdict.floors) else None,
        "gap": verdict.gap,
        "largest_gap": verdict.largest_gap,
        "rests_on": verdict.rests_on,
        "confidence": confidence,
        "tail": {"from": float(cuts.edges[0]), "to": float(cuts.edges[-1]), "blocks": cuts.means.shape[1],
                 "paired": cuts.paired, "lines": cuts.lines},
        "runs": [{"name": c.name, "loss": float(m), "steps": int(c.steps[-1]), "tokens": int(c.tokens[-1]),
                  "seconds": float(c.seconds[-1])} for c, m in zip(curves, means, strict=True)],
        "block_means": cuts.means.tolist(),
        "same_loss": speed(replicates, changed, cuts),
    }  # fmt: skip


def along(replicates: Sequence[Curve], changed: Curve, blocks: Blocks, rows: int = 10) -> list[dict[str, float]]:
    """Losses at equal shares of the run: trailing means, of the replicates' mean and of the changed run."""
    width = float(blocks.edges[-1] - blocks.edges[-2])
    table = []
    for tokens in np.linspace(0, float(blocks.edges[-1]), rows + 1)[1:]:
        theirs = [float(np.interp(tokens, c.tokens, trailing(c, width))) for c in replicates]
        mine = float(np.interp(tokens, changed.tokens, trailing(changed, width)))
        table.append(
            {
                "tokens": float(tokens),
                "step": float(np.interp(tokens, changed.tokens, changed.steps)),
                "seconds": float(np.interp(tokens, changed.tokens, changed.seconds)),
                "replicates": sum(theirs) / len(theirs),
                "changed": mine,
            }
        )
    return table

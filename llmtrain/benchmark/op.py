"""Rows of an op's benchmark: arms that compute the same thing, judged by their error and timed side by side.

Peers compete with ours only where their outputs are those of ours (all of them, of the same dtype) and inside the error
budget; where none does, the fastest that has the outputs is shown with its error over its tolerance. Every arm is shown
all the same: the slow, the wrong and the absent.
"""

import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmtrain.benchmark.ceilings import Ceilings
from llmtrain.benchmark.statistics import compare
from llmtrain.benchmark.timing import REPLICATE, Method, Work, captured, measure


@dataclass(frozen=True)
class Budget:
    """What one output may be off by."""

    atol: float = 0.0
    """Of each element."""
    rtol: float = 0.0
    """Of each element, times its exact size."""
    relative_l2: float | None = None
    """Of the whole tensor, |error| / |exact|; instead of the two above."""
    ulps: float | None = None
    """Units in the last place of the output's dtype, half of one being a right rounding; instead of all above."""
    dtype: torch.dtype | None = None
    """What a competing arm must deliver; None: any."""

    def excess(self, got: Tensor, exact: Tensor) -> float:
        """The error over the tolerance: at most 1 inside the budget, infinite where `got` is not finite.

        Raises ValueError for another shape.
        """
        if got.shape != exact.shape:
            raise ValueError(f"got: {tuple(got.shape)} where {tuple(exact.shape)} is exact")
        if not bool(torch.isfinite(got).all()):
            return float("inf")
        if self.ulps is not None:
            return ulp_error(got, exact) / self.ulps
        error = got.to(exact.dtype) - exact
        if self.relative_l2 is not None:
            return (error.norm() / exact.norm()).item() / self.relative_l2
        return (error.abs_() / exact.abs().mul_(self.rtol).add_(self.atol)).max().item()


def ulp_error(got: Tensor, exact: Tensor) -> float:
    """The largest error in units of the last place that `got`'s dtype has at the exact value.

    Values below 2^-12 of the largest count as that: where terms cancel, only FP32's rounding of them is left.
    """
    size = exact.abs().clamp_min_((exact.abs().max() * 2.0**-12).item() or 1.0)
    unit = torch.exp2(torch.floor(torch.log2(size))) * torch.finfo(got.dtype).eps
    return ((got.to(exact.dtype) - exact).abs() / unit).max().item()


ABOUT_AN_OUTPUT = re.compile(r"no (\w+)|(\w+) in \w+")
"""What `judge` says of an output that is missing or has another dtype."""


@dataclass(frozen=True)
class Judgement:
    """What was found out about an arm's outputs, the worst over all inputs that were tried."""

    errors: Mapping[str, float] = field(default_factory=dict)
    """Output -> error over tolerance."""
    lacks: tuple[str, ...] = ()
    """What it does not deliver as ours does, each a phrase: it then does not compete."""

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def competes(self) -> bool:
        return not self.lacks and self.worst <= 1

    def of(self, *outputs: str) -> "Judgement":
        """Of these outputs alone: an arm whose backward is wrong still competes in its forward."""
        about = {lack: ABOUT_AN_OUTPUT.fullmatch(lack) for lack in self.lacks}
        lacks = tuple(lack for lack, named in about.items() if named is None or (named[1] or named[2]) in outputs)
        return Judgement({name: error for name, error in self.errors.items() if name in outputs}, lacks)

    def __or__(self, other: "Judgement") -> "Judgement":
        """The worse of both."""
        names = self.errors.keys() | other.errors.keys()
        errors = {name: max(self.errors.get(name, 0.0), other.errors.get(name, 0.0)) for name in sorted(names)}
        return Judgement(errors, tuple(dict.fromkeys(self.lacks + other.lacks)))


def judge(outputs: Mapping[str, Tensor], exact: Mapping[str, Tensor], budget: Mapping[str, Budget]) -> Judgement:
    """An arm's outputs against the exact ones (FP64), which name what has to be there."""
    errors, lacks = {}, []
    for name, truth in exact.items():
        if name not in outputs:
            lacks.append(f"no {name}")
            continue
        got = outputs[name]
        errors[name] = budget[name].excess(got, truth)
        wanted = budget[name].dtype
        if wanted is not None and got.dtype != wanted:
            lacks.append(f"{name} in {str(got.dtype).removeprefix('torch.')}")
    return Judgement(errors, tuple(lacks))


@dataclass(frozen=True)
class Arm:
    """One implementation at one shape."""

    build: Callable[[], Work]
    judgement: Judgement = Judgement()
    ours: bool = False
    """A variant of our own: shown and compared, but no peer."""
    compiled: bool = False
    """It uses torch.compile."""
    absent: str = ""
    """Why it cannot run here, where it cannot: it is shown so."""
    peak_gib: float | None = None
    """What a call takes of the card's memory above its inputs, at its peak; None: not measured."""


@dataclass(frozen=True)
class Timed:
    """What becomes one row: the arms of one direction at one shape. The first arm is ours, and the measure."""

    what: str
    """Such as "forward"."""
    arms: Mapping[str, Arm]
    nbytes: int
    """That the op must read and write; 0 where memory is not what bounds it."""
    flops: int = 0
    """That its matmuls must do."""


@dataclass(frozen=True)
class Case:
    """One shape of one op."""

    op: str
    shape: Mapping[str, Any]
    """Such as {"T": 4096, "H": 768}: the first columns of the table."""
    rows: Callable[[bool], Sequence[Timed]]
    """Makes inputs and arms; told whether arms that compile are wanted."""
    small: bool = False
    """So little work that what else lives in the process shows: also timed without torch.compile in it."""


def compiler_in_process() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    return "torch._inductor.compile_fx" in sys.modules


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[:200]


def waits(run: Callable[[], object]) -> bool:
    """Whether a call waits for the device. Found out before it is captured: a capture that fails leaves torch's random
    numbers unusable in the process."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def trial(arm: Arm, device: torch.device, graph: bool) -> tuple[str, bool]:
    """Why the arm cannot be timed, or nothing, and whether it can be captured where graphs are wanted. Of ours the
    latter is taken for granted."""
    try:
        work = arm.build()
        work.bound()()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            if graph and not arm.ours and waits(work.bound()):
                return "", False
            if graph:
                captured(work, device)()
            torch.cuda.synchronize(device)
    except Exception as error:  # a peer may fail in any way, and the other arms are timed all the same
        return reason(error), True
    return "", True


def measure_row(
    timed: Timed, *, device: torch.device, method: Method, ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """One row as JSON: its floor, each arm, and the best peer. Raises RuntimeError where our own arm fails."""
    measure_name = next(iter(timed.arms))
    trials = {name: trial(arm, device, method.graph) for name, arm in timed.arms.items() if not arm.absent}
    failed = {name: why for name, (why, _) in trials.items()}
    if reason_of_ours := failed.get(measure_name, "absent"):
        raise RuntimeError(f"{timed.what}: {measure_name} failed: {reason_of_ours}")

    def build(name: str) -> Work:
        return replace(timed.arms[name].build(), capturable=trials[name][1])

    builds = {name: partial(build, name) for name, why in failed.items() if not why}
    measured, floor = measure(builds, device=device, replicate=[measure_name], method=method)
    ours = measured[measure_name]
    arms = []
    for name, arm in timed.arms.items():
        judged = {"errors": dict(arm.judgement.errors), "lacks": list(arm.judgement.lacks), "ours": arm.ours}
        record: dict[str, Any] = {"name": name, "compiled": arm.compiled} | judged
        if arm.peak_gib is not None:
            record["peak_gib"] = arm.peak_gib
        if name not in builds:
            arms.append(record | {"status": "absent" if arm.absent else "failed", "reason": arm.absent or failed[name]})
            continue
        taken = measured[name]
        comparison = compare(ours.times, taken.times, floor)
        record |= {
            "status": "ok",
            "ms": taken.times.pooled,
            "blocks": list(taken.times.medians),
            "samples": len(taken.times.samples),
            "noisy": taken.times.noisy,
            "host_ms": taken.host.pooled,
            "host_bound": taken.host_bound,
            "captured": trials[name][1],
            "ratio": comparison.ratio,
            "verdict": comparison.verdict,
        }
        if ceilings is not None:
            seconds = taken.times.pooled / 1e3
            record["bytes_share"] = timed.nbytes / seconds / ceilings.bytes_per_s if timed.nbytes else None
            record["flops_share"] = timed.flops / seconds / ceilings.flops if timed.flops else None
        arms.append(record)
    peers = [arm for arm in arms if not arm["ours"] and arm["name"] != measure_name and arm["status"] == "ok"]
    inside = [peer for peer in peers if timed.arms[peer["name"]].judgement.competes]
    matched = [peer for peer in peers if not peer["lacks"]]
    best = min(inside or matched, key=lambda peer: peer["ms"], default=None)
    return {
        "what": timed.what,
        "bytes": timed.nbytes,
        "flops": timed.flops,
        "floor": floor,
        "copy_ms": measured[measure_name + REPLICATE].times.pooled,
        "compiler_in_process": compiler_in_process(),
        "best": best and best["name"],
        "best_in_budget": bool(inside),
        "arms": arms,
    }


def measure_cases(
    cases: Sequence[Case],
    *,
    device: torch.device,
    method: Method | None = None,
    ceilings: Ceilings | None = None,
    compiled: bool = True,
    tell: Callable[[str], None] | None = None,
    keep: Callable[[list[dict[str, Any]], int], None] | None = None,
) -> list[dict[str, Any]]:
    """Every row of every case; small ones first without the arms that compile, before any of them has run, then all.

    `compiled` False leaves those arms out altogether. `keep` gets the rows so far after each case, and how many cases
    are still to come.
    """
    method = method or Method()
    turns = [(case, False) for case in cases if case.small and compiled and not compiler_in_process()]
    turns += [(case, compiled) for case in cases]
    records = []
    for taken, (case, with_compiler) in enumerate(turns, 1):
        for timed in case.rows(with_compiler):
            row = measure_row(timed, device=device, method=method, ceilings=ceilings)
            records.append({"op": case.op, "shape": dict(case.shape)} | row)
            if tell is not None:
                tell(line(records[-1]))
        timed = None  # type: ignore[assignment]  # its arms hold their inputs
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if keep is not None:
            keep(records, len(turns) - taken)
    return records


def line(row: dict[str, Any]) -> str:
    """One row in one line, for who waits."""
    shape = " ".join(f"{name} {value}" for name, value in row["shape"].items())
    times = (f"{arm['name']} {arm['ms']:.4f}" if arm["status"] == "ok" else f"{arm['name']} {arm['status']}"
             for arm in row["arms"])  # fmt: skip
    return f"{row['op']} {row['what']}, {shape}: {', '.join(times)} ms"

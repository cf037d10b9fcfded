"""The tables of docs/ops.md: RMSNorm, SwiGLU, rotary and products of matrices against their peers.

    python scripts/bench/ops.py [--only PART ...] [--quick] [--out DIR] [--device cpu]

Peers that compile are first compiled by several processes, whose results on disk the measuring one finds; what they
tuned while others ran is forgotten. Writes DIR/ops-PART.json (docs/data by default) after each case; `python
scripts/docs_ops.py` then makes the page.
Expected on one H200: rmsnorm 120 s, crossover 50 s, swiglu 50 s, gemm 13 s; --quick takes about a quarter (2 sessions,
fewer shapes, the compiler without its own tuning). Peers that are not installed are listed as absent: put Liger's
package on PYTHONPATH.
"""

import argparse
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from places import place
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache

from llmtrain.benchmark import gemm, rmsnorm, swiglu
from llmtrain.benchmark.config import OpTimingConfig
from llmtrain.benchmark.op import Case, reason
from llmtrain.benchmark.ops import measure_op
from llmtrain.benchmark.peers import COMPILED
from llmtrain.storage.atomic import make_parent, write_json
from llmtrain.training.devices import pick_device

ROOT = Path(__file__).parents[2]

ARMS = ("eager", "torch rms_norm", "Liger", "QuACK", "Transformer Engine", *COMPILED)
UNTUNED = tuple(arm for arm in ARMS if arm != COMPILED[1])
"""Without the compiler's own tuning, which takes seconds a shape."""

Parts = dict[str, Callable[[torch.device, bool], list[Case]]]


def norm_cases(device: torch.device, quick: bool) -> list[Case]:
    plain = [(t, width) for width in (768, 2048, 4096, 6144) for t in (16384, 65536)]
    few = [(t, width) for width in (768, 4096) for t in (1, 64, 512)]
    if quick:
        plain, few = [(16384, 768), (65536, 2048)], [(256, 768)]
    halves = rmsnorm.DIRECTIONS[:2]
    shapes = [(rmsnorm.Shape(*shape), halves) for shape in (*plain, *few)]
    shapes += [(rmsnorm.Shape(16384, width, residual=True), rmsnorm.DIRECTIONS[2:3]) for width in (768, 6144)]
    shapes += [(rmsnorm.Shape(16384, 768), rmsnorm.DIRECTIONS[3:])]
    if not quick:
        shapes += [(rmsnorm.Shape(4096, 256, heads, heads == 24), halves) for heads in (24, 4)]
    tuned = {(16384, 768), (16384, 2048), (16384, 6144), (64, 768)}
    return [
        rmsnorm.make_case(
            shape, device, directions,
            ARMS if not quick and (shape.rows, shape.width) in tuned and directions == halves else UNTUNED,
            seeds=2 if quick or shape.nbytes > 1 << 28 else rmsnorm.SEEDS,
        )
        for shape, directions in shapes
    ]  # fmt: skip


def crossover_cases(device: torch.device, quick: bool) -> list[Case]:
    counts = [round(2048 * 2 ** (i / 2)) // 16 * 16 for i in range(13)][:: 3 if quick else 1]
    arms = ("eager", "torch rms_norm", "Liger", COMPILED[0])
    return [rmsnorm.make_case(rmsnorm.Shape(t, 1280), device, rmsnorm.DIRECTIONS[2:3], arms, seeds=1) for t in counts]


def swiglu_cases(device: torch.device, quick: bool) -> list[Case]:
    counts = (16384,) if quick else (2048, 16384, 131072)
    return [swiglu.swiglu_case(t, 3456, device) for t in counts] + [
        swiglu.rotary_case(max(1, t // 2048), 2048, 20, 4, 64, device) for t in counts
    ]


def gemm_cases(device: torch.device, quick: bool) -> list[Case]:
    layers = (
        (512, 2816),
        (768, 1280),
        (768, 2816),
        (1408, 768),
        (960, 5120),
        (2048, 3072),
        (2048, 16384),
        (8192, 2048),
    )
    return [gemm.make_case(16384, k, n, device) for k, n in (layers[2:3] if quick else layers)]


PARTS: Parts = {"rmsnorm": norm_cases, "crossover": crossover_cases, "swiglu": swiglu_cases, "gemm": gemm_cases}


PROCESSES = 12
"""That compile ahead: the largest cases take 30 GB of a card while they are judged, the others little."""


def compile_case(part: str, i: int, quick: bool, device: str) -> None:
    """Makes one case's arms, which runs each once."""
    try:
        with inductor_config.patch(compile_threads=1):
            PARTS[part](torch.device(device), quick)[i].rows(True)
    except Exception as error:  # the process that measures meets it again, and says it in its place
        print(f"{part}, case {i}: not compiled ahead, {reason(error)}", flush=True)


def compile_ahead(parts: Sequence[str], quick: bool, device: str, cache: Path) -> None:
    jobs = [(part, i, quick, device) for part in parts for i in range(len(PARTS[part](torch.device(device), quick)))]
    workers = min(PROCESSES, len(jobs), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(compile_case, jobs, chunksize=1)
        pool.close()
        pool.join()  # or one that is still ending holds the card when it is looked at
    for choice in cache.rglob("*.best_config"):
        choice.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="2 sessions and few shapes")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile's arms")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default: docs/data")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    out = arguments.out or ROOT / place(None, "docs/data", device.type == "cpu")
    begin = time.perf_counter()
    ahead = [part for part in arguments.only or PARTS if part != "gemm"]
    if device.type == "cuda" and ahead and not arguments.no_compile:
        # In a child: the table's small rows are first timed in a process that has not loaded the compiler.
        compile_ahead(ahead, arguments.quick, "cuda", Path(inductor_cache()))
        print(f"compiled ahead: {time.perf_counter() - begin:.0f} s", flush=True)
    for part in arguments.only or PARTS:
        timing = OpTimingConfig(
            sessions=2 if arguments.quick else 4, samples=25, turn_seconds=0.006, device=arguments.device,
            compile=part != "gemm" and not arguments.no_compile,  # its autotuning of products takes minutes
        )  # fmt: skip
        make_parent(out / f"ops-{part}.json")
        cases = PARTS[part](device, arguments.quick)
        keep = functools.partial(write_json, out / f"ops-{part}.json")
        data = measure_op(part, cases, timing, tell=functools.partial(print, flush=True), keep=keep)
        print(f"{part}: {data['seconds']:.0f} s, {time.perf_counter() - begin:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which tiles our attention kernels should take: each candidate by itself, by head size and by length of documents.

    python scripts/bench/attention_blocks.py [--output docs/data/attention-blocks.json] [--only 64-short ...] [--quick]

About 130 s on one H200 for all four cases, of which compiling, in parallel, is half. Prints for each kernel the
candidates by their time, the chosen one marked, and those that are faster than it beyond the floor: they belong into
llmtrain/kernels/attention_blocks.py. What the file holds of other cases stays. Exits 1 where a candidate's results
differ from the chosen one's.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checks import add_groups
from torch import Tensor

from llmtrain.benchmark.machine import describe
from llmtrain.benchmark.statistics import compare
from llmtrain.benchmark.timing import Method, Work, measure
from llmtrain.kernels import attention_blocks, document_attention
from llmtrain.kernels.attention_blocks import LONG, SHORT, Blocks, blocks_for
from llmtrain.kernels.document_ranges import document_ranges

TABLES = {"forward": attention_blocks.FORWARD, "dq": attention_blocks.DQ, "dkv": attention_blocks.DKV}

TOKENS = 65536
HEADS = {64: (12, 4), 128: (6, 2)}
LENGTH = {LONG: 1024, SHORT: 256}

CANDIDATES = {
    (64, "forward"): (
        Blocks(128, 64, 8, 3, True, 128), Blocks(128, 64, 4, 3, True), Blocks(128, 128, 8, 2, True),
        Blocks(128, 64, 8, 2, False, 128), Blocks(128, 64, 4, 2, False), Blocks(64, 64, 4, 2, False, 128),
        Blocks(64, 64, 4, 3, False, 128), Blocks(64, 64, 4, 3, True, 128), Blocks(64, 32, 4, 3, False, 128),
        Blocks(64, 128, 4, 2, False),
    ),
    (64, "dq"): (
        Blocks(128, 64, 8, 2, True), Blocks(128, 64, 8, 2, True, 128), Blocks(64, 64, 4, 2, True, 168),
        Blocks(64, 64, 4, 2, False, 128), Blocks(64, 64, 4, 3, False, 168), Blocks(64, 32, 4, 3, False, 128),
        Blocks(128, 64, 8, 2, False), Blocks(128, 32, 8, 3, True, 128),
    ),
    (64, "dkv"): (
        Blocks(64, 128, 8, 2, True), Blocks(64, 128, 8, 2, False), Blocks(64, 64, 4, 2, False, 168),
        Blocks(64, 64, 4, 2, True), Blocks(32, 64, 4, 3, False, 128), Blocks(32, 128, 8, 3, True, 128),
        Blocks(64, 64, 4, 3, False, 168), Blocks(128, 64, 8, 2, False),
    ),
    (128, "forward"): (
        Blocks(128, 64, 8, 3, True), Blocks(128, 32, 8, 3, True, 168), Blocks(128, 128, 8, 2, True),
        Blocks(64, 64, 4, 2, False), Blocks(64, 64, 4, 3, True), Blocks(64, 32, 4, 3, False, 168),
    ),
    (128, "dq"): (
        Blocks(64, 64, 4, 2, True), Blocks(64, 64, 4, 2, False), Blocks(128, 64, 8, 2, True),
        Blocks(64, 32, 4, 2, False), Blocks(64, 32, 4, 3, True, 168),
    ),
    (128, "dkv"): (
        Blocks(32, 128, 8, 2, True), Blocks(64, 128, 8, 2, True), Blocks(64, 64, 4, 2, False),
        Blocks(32, 64, 4, 2, False), Blocks(32, 64, 4, 3, True), Blocks(64, 64, 4, 2, True),
    ),
}  # fmt: skip


@contextmanager
def chosen(kernel: str, d: int, length: str, blocks: Blocks) -> Iterator[None]:
    """Inside, `kernel` takes `blocks`."""
    table = TABLES[kernel]
    before = dict(table)
    table[d, length] = blocks
    try:
        yield
    finally:
        table.clear()
        table.update(before)


class Case:
    """Operands of the three kernels on documents of one length."""

    def __init__(self, d: int, length: str, tokens: int) -> None:
        h, h_kv = HEADS[d]
        torch.manual_seed(0)
        self.keys_seen = LENGTH[length]
        qkv = torch.randn(1, tokens, h + 2 * h_kv, d, device="cuda").bfloat16()
        q, k, self.v = qkv.split([h, h_kv, h_kv], 2)
        self.q, self.k = q.contiguous(), k.contiguous()
        self.dy = torch.randn(1, tokens, h, d, device="cuda").bfloat16()
        borders = torch.arange(0, tokens + 1, self.keys_seen, device="cuda", dtype=torch.int32)
        self.start, self.end = document_ranges(borders, tokens, None)[:, None]
        self.out, self.lse = document_attention.forward_triton(self.q, self.k, self.v, self.start, self.keys_seen)
        *_, self.delta = document_attention.dq_triton(
            self.q, self.k, self.v, self.start, self.out, self.lse, self.dy, self.keys_seen
        )

    def run(self, kernel: str) -> tuple[Tensor, ...]:
        module, operands = document_attention, (self.q, self.k, self.v)
        if kernel == "forward":
            return module.forward_triton(*operands, self.start, self.keys_seen)
        if kernel == "dq":
            return module.dq_triton(*operands, self.start, self.out, self.lse, self.dy, self.keys_seen)
        return module.dkv_triton(*operands, self.end, self.lse, self.dy, self.delta, self.keys_seen)


def compile_ahead(job: tuple[int, str, str, Blocks]) -> str | None:
    """Runs one candidate on a few tokens, so that Triton's cache has it; returns what failed."""
    d, length, kernel, blocks = job
    try:
        case = Case(d, length, 1024)
        with chosen(kernel, d, length, blocks):
            case.run(kernel)
        torch.cuda.synchronize()
    except Exception as problem:  # out of shared memory or registers, say: a result too
        return str(problem).splitlines()[0][:100]
    return None


def work(case: Case, kernel: str, d: int, length: str, blocks: Blocks) -> Work:
    def run() -> object:
        with chosen(kernel, d, length, blocks):
            return case.run(kernel)

    return Work(run, (case.q, case.k, case.dy))


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(
        bool(((a.float() - b.float()).norm() <= 5e-3 * b.float().norm()).item())
        for a, b in zip(ours, theirs, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/data/attention-blocks.json"), help="JSON")
    cases = [f"{d}-{length}" for d in HEADS for length in LENGTH]
    parser.add_argument("--only", action="append", choices=cases, help="this case; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one session of two short rounds")
    arguments = parser.parse_args()
    method = Method(sessions=1, rounds=2, samples=5) if arguments.quick else Method(sessions=2, rounds=2, samples=11)
    machine = describe(on_card=True)

    wanted = arguments.only or cases
    jobs = []
    for name in wanted:
        d, length = int(name.split("-")[0]), name.split("-")[1]
        for kernel, table in TABLES.items():
            now = blocks_for(table, d, LENGTH[length])
            jobs += [(d, length, kernel, blocks) for blocks in dict.fromkeys((now, *CANDIDATES[d, kernel]))]
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(compile_ahead, jobs), strict=True))

    wrong: list[str] = []
    for name in wanted:
        rows: list[dict[str, Any]] = []
        d, length = int(name.split("-")[0]), name.split("-")[1]
        case = Case(d, length, TOKENS)
        for kernel, table in TABLES.items():
            now = blocks_for(table, d, LENGTH[length])
            reference = case.run(kernel)
            arms: dict[str, Callable[[], Work]] = {}
            for job, failure in failures.items():
                if job[:3] != (d, length, kernel):
                    continue
                blocks = job[3]
                if failure is None:
                    with chosen(kernel, d, length, blocks):
                        if not same(case.run(kernel), reference):
                            failure = "WRONG RESULTS"
                            wrong.append(f"{name} {kernel} {tuple(blocks)}")
                if failure is None:
                    arms[str(tuple(blocks))] = partial(work, case, kernel, d, length, blocks)
                else:
                    print(f"{name} {kernel} {tuple(blocks)}: {failure}")
                    rows.append({"kernel": kernel, "blocks": str(tuple(blocks)), "failed": failure})
            measured, floor = measure(arms, device=torch.device("cuda"), replicate=[str(tuple(now))], method=method)
            ours = measured[str(tuple(now))].times
            for arm in sorted(arms, key=lambda arm: measured[arm].times.pooled):
                times = measured[arm].times
                against = compare(times, ours, floor)
                mark = " <- chosen" if arm == str(tuple(now)) else " FASTER" if against.verdict == "+" else ""
                print(f"{name} {kernel} {arm}: {times.pooled:.4f} ms, {against}{mark}", flush=True)
                rows.append(
                    {"kernel": kernel, "blocks": arm, "ms": times.pooled, "medians": times.medians,
                     "chosen": arm == str(tuple(now)), "faster": against.verdict == "+",
                     "against_chosen": str(against), "floor": floor}
                )  # fmt: skip
        del case
        torch.cuda.empty_cache()
        add_groups(arguments.output, {name: {"machine": machine, "rows": rows}})
    print(f"WRONG: {'; '.join(wrong)}" if wrong else "all candidates agree")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

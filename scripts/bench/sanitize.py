"""What compute-sanitizer finds in the kernels on a card: small steps of every kind of model, and the ops by themselves.

    python scripts/bench/sanitize.py [--tool memcheck ...] [--output docs/data/sanitize.json]
    python scripts/bench/sanitize.py --cases dense ops --device cpu   # only the work, under Triton's interpreter

Sizes are odd, so that masks matter, and torch's allocator keeps nothing, so that a step beyond a tensor is a step
beyond an allocation. Each tool is first given a kernel with a planted fault of its kind: one that does not find it
proves nothing. Reports are told apart by the kernel they name: in ours, or in those of the libraries. Exits 1 where a
tool names one of ours or misses its planted fault. Needs compute-sanitizer, which comes with CUDA's toolkit.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import torch

from llmtrain.benchmark.machine import describe
from llmtrain.kernels import choice, linear_cross_entropy, packed_attention, rmsnorm, swiglu
from llmtrain.model.config import ModelConfig
from llmtrain.storage.atomic import make_parent, write_json
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.step import TrainStep

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 380
"""Of a tool in all; card.py ends the script at 400, and nothing would be written."""

# A kernel a tool, each with the fault that the tool is for; x has n numbers, of which none was written.
PLANTED = {
    "memcheck": "x[n + (1 << 22) + threadIdx.x] = 1;",
    "initcheck": "x[threadIdx.x] = x[n - 1 - threadIdx.x] + 1;",
    "racecheck": "__shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x]; x[threadIdx.x] = s[63 - threadIdx.x];",
    "synccheck": "if (threadIdx.x < 16) __syncthreads(); x[threadIdx.x] = 1;",
}
TOOLS = tuple(PLANTED)

SMALL = ModelConfig(
    vocab_size=500, d_model=112, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=32, d_ff=176, max_seq_len=128
)
EIGHT_BIT = {"d_model": 128, "d_ff": 256, "n_heads": 4, "n_kv_heads": 2}
"""Sides that products in eight bits can take."""
EXPERTS = {"moe": True, "n_experts": 5, "experts_per_token": 2, "moe_d_ff": 64, "moe_layers": 1}


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(SMALL), **changes})


def steps(
    config: ModelConfig, device: str, *, seq_len: int = 72, optimizer: Literal["adamw", "muon"] = "adamw",
    documents: bool = False, **more: Any,
) -> None:  # fmt: skip
    """Two micro-batches and an update, twice, uncaptured; a third of the targets does not count."""
    batch_size = 2
    step = TrainStep.build(
        config, OptimizerConfig(optimizer=optimizer), batch_size=batch_size, seq_len=seq_len, device=device,
        capture=False, document_mask=documents, **{"precision": "bf16", **more},
    )  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (batch_size, seq_len), device=device)
    targets = ids.roll(-1, 1)
    targets.view(-1)[::3] = -100
    starts = torch.tensor([0, 7, 8, 50], device=device)
    position = torch.arange(seq_len, device=device)
    doc_start = starts[torch.searchsorted(starts, position, right=True) - 1].int().expand(batch_size, -1)
    for _ in range(2):
        for first in (True, False):
            step.micro_step(ids, targets, first, doc_start if documents else None)
        step.optimizer_step(1e-3)
    assert torch.isfinite(torch.tensor(step.metrics()["lm_loss"]))


def ops(device: str) -> None:
    """Forward and backward of what is used by itself, at the borders of its routes."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16().requires_grad_()

    for n_rows in (1, 37, 1100):
        for deterministic in (True, False):
            y, h = rmsnorm(randn(n_rows, 200), randn(200), 1e-6, randn(n_rows, 200), deterministic)
            (y + h).sum().backward()
    swiglu(randn(37, 2 * 88)).sum().backward()
    ends = torch.tensor([0, 3, 40, 41, 150], dtype=torch.int32, device=device)
    for window in (None, 16):
        with choice.forced(choice.TRITON, "packed_attention"):
            packed_attention(randn(150, 4, 64), randn(150, 2, 64), randn(150, 2, 64), ends, window).sum().backward()
    targets = torch.randint(0, 1003, (97,), device=device)
    targets[::5] = -100
    linear_cross_entropy(randn(97, 64), randn(1003, 64), targets, z_loss=1e-4, chunk=40).backward()


CASES: dict[str, Callable[[str], None]] = {
    "ops": ops,
    "dense": lambda device: steps(model(qk_norm=True, z_loss=1e-4), device),
    "documents": lambda device: steps(model(window=16, global_every=2), device, documents=True),
    "muon": lambda device: steps(model(tie_embeddings=False), device, optimizer="muon"),
    "activations": lambda device: steps(model(), device, checkpoint_activations="full"),
    "experts": lambda device: steps(model(**EXPERTS), device),
    **{
        f"fp8-{scaling}": lambda device, scaling=scaling, seq_len=seq_len: steps(
            model(**EIGHT_BIT), device, seq_len=seq_len, precision="fp8", fp8_scaling=scaling
        )
        for scaling, seq_len in (("tensorwise", 80), ("rowwise", 80), ("block", 128))
    },
    "fp8-experts": lambda device: steps(model(**EIGHT_BIT, **EXPERTS), device, seq_len=80, precision="fp8"),
    "mxfp8": lambda device: steps(model(**EIGHT_BIT), device, seq_len=96, precision="mxfp8"),
}


def work(cases: list[str], device: str) -> None:
    """What a tool watches; a line a case says which implementation of each op ran."""
    torch.manual_seed(0)
    with choice.forced(choice.TRITON if device == "cpu" else choice.AUTO):
        for case in cases:
            choice.ran.clear()
            CASES[case](device)
            if device == "cuda":
                torch.cuda.synchronize()
            print("CASE", case, " ".join(f"{op}={ran}" for op, ran in sorted(choice.ran.items())), flush=True)


def run_planted(tool: str) -> None:
    source = f'extern "C" __global__ void planted_{tool}_kernel(float* x, int n) {{ {PLANTED[tool]} }}'
    kernel = torch.cuda._compile_kernel(source, f"planted_{tool}_kernel")  # type: ignore[attr-defined]
    x = torch.empty(64, device="cuda")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, x.numel()])
    torch.cuda.synchronize()


def our_kernels() -> set[str]:
    sources = (path.read_text() for path in (ROOT / "llmtrain/kernels").glob("*.py"))
    return {name for source in sources for name in re.findall(r"@triton\.jit\s+def (\w+_kernel)\(", source)}


def reported(output: str) -> Counter[str]:
    """Kernel -> how often a report of a tool names it as the place: `at NAME+0x...`, or `at 0x... in NAME`."""
    place = re.compile(r"^=+ .*?\bat (?:0x[0-9a-f]+ in )?(?:void )?([A-Za-z_][\w:]*)", re.M)
    return Counter(place.findall(output))


def watched(tool: str, words: list[str], timeout: float) -> tuple[int, str]:
    """The exit status, 124 where it took too long, and all output of this script under a tool."""
    program = shutil.which("compute-sanitizer")
    assert program is not None
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [program, "--tool", tool, *quiet, "--target-processes", "application-only", "--print-limit", "200"]
    here = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    here["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    # Into a file: a pipe would be waited for as long as what the tool had started holds it.
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        try:
            status = subprocess.run(
                [*command, sys.executable, __file__, *words], env=here, stdout=out, stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = 124
        out.seek(0)
        return status, out.read()


def judge(tool: str, cases: list[str]) -> dict[str, Any]:
    begin = time.monotonic()
    _, planted = watched(tool, ["--planted", tool], TIMEOUT_S)
    found = f"planted_{tool}_kernel" in reported(planted)
    left = max(0.0, TIMEOUT_S - (time.monotonic() - begin))
    status, output = watched(tool, ["--cases", *cases, "--device", "cuda"], left)
    by_kernel, ours = reported(output), our_kernels()
    ran = [line.split()[1:] for line in output.splitlines() if line.startswith("CASE ")]
    in_ours = {name: n for name, n in by_kernel.items() if name in ours}
    whole = [case for case, *_ in ran] == cases
    return {
        "tool": tool, "held": found and whole and not in_ours, "planted_found": found, "in_ours": in_ours,
        "elsewhere": {name: n for name, n in by_kernel.items() if name not in ours},
        "cases": {case: dict(op.split("=") for op in ops_of) for case, *ops_of in ran}, "status": status,
        "seconds": time.monotonic() - begin,
        "end": [line for line in output.splitlines() if "SUMMARY" in line or "Error" in line][-5:],
        **({} if found else {"planted_end": planted.splitlines()[-5:]}),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS), help="all at once by default")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help="only the work, watched by nobody")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--planted", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    if args.planted:
        run_planted(args.planted)
        return 0
    if args.cases:
        work(args.cases, args.device)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit")
    machine = describe(True)
    with ThreadPoolExecutor(len(args.tool)) as pool:
        results = list(pool.map(lambda tool: judge(tool, list(CASES)), args.tool))
    for result in results:
        told = "nothing in our kernels" if result["held"] else f"NOT HELD: {result['in_ours'] or result['end']}"
        print(f"{result['tool']}, {result['seconds']:.0f} s: {told}; planted fault found: {result['planted_found']}")
    if args.output:
        make_parent(args.output)
        write_json(args.output, {"machine": machine, "records": results})
    return int(not all(result["held"] for result in results))


if __name__ == "__main__":
    sys.exit(main())

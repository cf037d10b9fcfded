"""What compute-sanitizer finds in the kernels on a card: small steps of every kind of model, and the ops by themselves.

    python scripts/bench/sanitize.py [--tool memcheck ...] [--output docs/data/sanitize.json]
    python scripts/bench/sanitize.py --cases dense ops --device cpu   # only the work, under Triton's interpreter

Sizes are odd, so that masks matter, and torch's allocator keeps nothing, so that a step beyond a tensor is a step
beyond an allocation. Each tool is first given a kernel with a planted fault of its kind: one that does not find it
proves nothing. Reports are told apart by the kernel they name: in ours, or in those of the libraries. Exits 1 where a
tool names one of ours or misses its planted fault. Needs compute-sanitizer, which comes with CUDA's toolkit.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.benchmark.machine import describe
from llmtrain.kernels import choice, linear_cross_entropy, packed_attention, rmsnorm, swiglu
from llmtrain.model.config import ModelConfig
from llmtrain.storage.atomic import make_parent, write_json
from llmtrain.training.config import OptimizerConfig
from llmtrain.training.step import TrainStep

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 340.0
"""Of a tool in all, unless told otherwise; card.py ends the script at 360, and nothing would be written."""

AT_ONCE = {"initcheck": 1}
OF_OTHERS = 3
"""Cases in one process; the processes run side by side. Each case ran by itself before, so none compiles a kernel.
initcheck, which looks after every byte, is many times as slow as the others."""

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


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
OUT_VARIANTS = {"default": "out", "": "out", "dtype": "dtype_out"}


class SeenProducts(TorchDispatchMode):
    """Products of matrices whose results initcheck takes for written. Those of the libraries store through the copy
    engine of a processor, which it does not see: here they go where torch has written zeros before."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in PRODUCTS:
            return func(*args, **kwargs)
        self.made += 1
        if "out" in kwargs:
            if not any(kwargs["out"] is x for x in args):  # or it is added to
                kwargs["out"].zero_()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        target = torch.zeros_like(result)
        into = getattr(func.overloadpacket, OUT_VARIANTS[func._overloadname], None)
        return target.copy_(result) if into is None else into(*args, **kwargs, out=target)


def work(cases: list[str], device: str, products_seen: bool = False) -> None:
    """What a tool watches; a line a case says which implementation of each op ran. Attention is by our kernel: what a
    library's writes is not seen either, and is not what is watched."""
    torch.manual_seed(0)
    with (
        choice.forced(choice.TRITON if device == "cpu" else choice.AUTO),
        choice.forced(choice.TRITON, "attention"),
        SeenProducts() if products_seen else nullcontext(),
    ):
        for case in cases:
            choice.ran.clear()
            CASES[case](device)
            if device == "cuda":
                torch.cuda.synchronize()
            print("CASE", case, json.dumps(choice.ran, sort_keys=True), flush=True)


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
    place = re.compile(r"^=+ (?!.*backtrace).*?\bat (?:0x[0-9a-f]+ in )?(?:void )?([A-Za-z_][\w:]*)", re.M)
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


def judge(tool: str, cases: list[str], timeout: float) -> dict[str, Any]:
    begin = time.monotonic()
    seen = ["--products-seen"] if tool == "initcheck" else []
    at_once = AT_ONCE.get(tool, OF_OTHERS)
    groups = [cases[i : i + at_once] for i in range(0, len(cases), at_once)]
    all_words = [["--planted", tool], *(["--cases", *few, "--device", "cuda", *seen] for few in groups)]
    with ThreadPoolExecutor(len(all_words)) as pool:
        (_, planted), *said = pool.map(lambda words: watched(tool, words, timeout), all_words)
    found = f"planted_{tool}_kernel" in reported(planted)
    status, output = next((status for status, _ in said if status), 0), "\n".join(output for _, output in said)
    by_kernel, ours = reported(output), our_kernels()
    ran = {case: json.loads(ops) for case, ops in re.findall(r"^CASE (\S+) (\{.*\})$", output, re.M)}
    in_ours = {name: n for name, n in by_kernel.items() if name in ours}
    held = found and list(ran) == cases and not in_ours and status != 124
    return {
        "tool": tool, "held": held, "planted_found": found, "in_ours": in_ours,
        "elsewhere": {name: n for name, n in by_kernel.items() if name not in ours},
        "cases": ran, "status": status,
        "seconds": time.monotonic() - begin,
        "end": [line for line in output.splitlines() if "SUMMARY" in line or not line.startswith("=")][-8:],
        **({} if found else {"planted_end": planted.splitlines()[-5:]}),
    }  # fmt: skip


def compile_all(cases: list[str], timeout: float) -> None:
    """Runs every case once, unwatched and side by side, so that its kernels are in Triton's cache on disk; what fails
    there fails again under the tools, and is told of then."""

    def alone(case: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            words = [sys.executable, __file__, "--cases", case, "--device", "cuda"]
            here = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
            subprocess.run(words, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=timeout)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(alone, cases))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS), help="all at once by default")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help="only the work, watched by nobody")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--products-seen", action="store_true", help="results of products go where torch wrote before")
    parser.add_argument("--planted", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds of a tool in all")
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    if args.planted:
        run_planted(args.planted)
        return 0
    if args.cases:
        work(args.cases, args.device, args.products_seen)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit")
    machine, begin = describe(True), time.monotonic()
    compile_all(list(CASES), args.timeout)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    left = max(1.0, args.timeout - (time.monotonic() - begin))
    done: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(len(args.tool)) as pool:
        running = [pool.submit(judge, tool, list(CASES), left) for tool in args.tool]
        for finished in as_completed(running):  # written at once: who ends the script early keeps what was done
            result = finished.result()
            done[result["tool"]] = result
            told = "nothing in our kernels" if result["held"] else f"NOT HELD: {result['in_ours']} {result['end']}"
            print(f"{result['tool']}, {result['seconds']:.0f} s: {told}; "
                  f"planted fault found: {result['planted_found']}", flush=True)  # fmt: skip
            if args.output:
                make_parent(args.output)
                records = [done[tool] for tool in args.tool if tool in done]
                missing = [tool for tool in args.tool if tool not in done or done[tool]["status"] == 124]
                write_json(args.output, {"machine": machine, "records": records, "missing": missing})
    return int(not all(result["held"] for result in done.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Kernels compile for cards here, where there is none; the scripts that say so say it too where one does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"

FAULTY = """
import json, sys
import torch, triton
import triton.language as tl
from card_stand_in import META, card_stands_in

@triton.jit
def fine(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, i < n) * 2, i < n)

@triton.jit
def product(x, y, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    at = i[:, None] * SIDE + i[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(0, 8):
        total = tl.dot(tl.load(x + k * SIDE + at), tl.load(x - k * SIDE + at), total)
    tl.store(y + at, total)

@triton.jit
def unlike(x, y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, 2 * BLOCK)))

x, y = (torch.empty(1 << 20, dtype=dtype, device=META) for dtype in (torch.bfloat16, torch.float32))
with card_stands_in() as card:
    card.where = "here"
    fine[(1,)](x, x, 100, 128)
    fine[(9,)](x[16:], x, 104, 128)  # the same code
    fine[(1,)](x[1:], x, 100, 128)  # other alignment
    fine[(1,)](x, x, 100, 8192, num_warps=4, maxnreg=24)
    product[(1,)](x, y, 64, num_warps=4, num_stages=3)
    product[(1,)](x, y, 256, num_warps=8, num_stages=3)
    product[(1,)](x, y, 256, num_warps=8, num_stages=3)
    unlike[(1,)](x, y, 64)
assert triton.runtime.driver._active is None and not x.is_cuda
print(json.dumps([vars(one) for one in card.compiled]))
"""

TOO_LARGE = """
import sys
import compile_kernels
from llmtrain.kernels.attention_blocks import FORWARD, SHORT, Blocks
FORWARD[64, SHORT] = Blocks(64, 256, 4, 6, False)
few = lambda card: compile_kernels.packed_attention(card, 4096, (12, 4, 64), 32, None)
compile_kernels.representative = few
sys.argv = ["compile_kernels.py", "--quick"]
sys.exit(compile_kernels.main())
"""

FAMILIES = (
    "adamw", "cross_entropy", "attention_clear_behind", "attention_ranges", "document_attention_dkv",
    "document_attention_dq", "document_attention_forward", "embedding_atomic", "embedding_join", "embedding_lookup",
    "embedding_segments", "expert_combine", "expert_gather", "expert_swiglu_backward", "expert_swiglu_forward",
    "fp8_quantise", "fp8_quantise_fine", "fp8_quantise_largest", "fp8_quantise_rows", "grouped", "grouped_gradient",
    "mxfp8_round", "partial_sums", "rmsnorm_backward", "rmsnorm_backward_columns", "rmsnorm_forward", "rotary_backward",
    "rotary_forward", "route", "route_backward", "swiglu_backward", "swiglu_forward", "places", "update_scalars",
)  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Without the interpreter, and with nothing compiled yet."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parents[1])])
    environment.pop("TRITON_INTERPRET", None)
    return environment


def run(environment, *command):
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("card", ["h200", "rtx4090"])  # the most shared memory for a program, and the least
def test_kernels_of_every_kind_compile(environment, card):
    done = run(environment, SCRIPTS / "compile_kernels.py", "--quick", "--card", card)
    assert done.returncode == 0, done.stdout + done.stderr
    lacking = [name for name in FAMILIES if f" _{name}_kernel " not in done.stdout]
    assert not lacking, done.stdout


def test_a_tile_that_is_too_large_is_said_and_is_a_failure(environment):
    done = run(environment, "-c", TOO_LARGE)
    assert done.returncode == 1, done.stdout + done.stderr
    (wrong,) = [line for line in done.stdout.splitlines() if line.startswith("WRONG _")]
    assert "_document_attention_forward_kernel" in wrong and "shared memory" in wrong


def test_each_code_is_recorded_once_and_what_is_wrong_with_it(environment, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    done = run(environment, script)
    assert done.returncode == 0, done.stderr
    fine, other, spills, small, large, unlike = json.loads(done.stdout)
    assert [one["error"] for one in (fine, other, spills, small)] == [None] * 4
    assert fine["constants"] == {"BLOCK": 128} and fine["where"] == "here" and fine["spilled"] == 0
    assert 0 < fine["registers"] <= 255 and fine["warps"] == 4
    assert spills["spilled"] > 100 and spills["most_registers"] == 24 and spills["registers"] <= 24
    assert small["shared"] >= 2 * 2 * 64 * 64 * 2  # two operands of two stages, at least
    assert large["name"] == "product" and "out of resource: shared memory" in large["error"]
    assert large["shared"] > 232448
    assert unlike["name"] == "unlike" and unlike["constants"] == {"BLOCK": 64} and "Error" in unlike["error"]

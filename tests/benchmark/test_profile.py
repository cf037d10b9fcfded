import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import llmtrain.kernels as kernels_room
from llmtrain.benchmark.config import Shape
from llmtrain.benchmark.profile import by_name, by_part, covered, needed, part_of
from llmtrain.model.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=100, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32, max_seq_len=64
)


@pytest.mark.parametrize(
    "name, part",
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128>(...)", "matmul"),
        ("aten::addmm", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_1", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("void cutlass::fmha_forward", "attention"),
        ("_adamw_kernel", "optimizer"),
        ("_cross_entropy_kernel", "head softmax"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>", "attention"),
        ("void at::native::reduce_kernel<512, 1, at::native::NormTwoOps<float>>", "optimizer"),
        ("aten::silu_backward", "swiglu backward"),
        ("aten::silu", "swiglu forward"),
        ("_SwiGLUBackward", "swiglu backward"),
        ("_RMSNormBackward", "rmsnorm backward"),
        ("_RMSNorm", "rmsnorm forward"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_a_kernel_belongs_to_the_part_its_name_says(name, part):
    assert part_of(name) == part


def test_each_triton_kernel_has_a_name_of_its_own_that_says_its_part():
    parts = {
        "adamw": {"optimizer"},
        "cross_entropy": {"head softmax"},
        "document_attention": {"attention"},
        "document_ranges": {"attention"},
        "embedding": {"embedding"},
        "experts": {"routing", "swiglu forward", "swiglu backward"},
        "feed_forward": {"swiglu forward", "swiglu backward"},
        "fp8": {"eight-bit casts"},
        "fp8_fine": {"eight-bit casts"},
        "fp8_grouped": {"eight-bit casts"},
        "grouped": {"matmul"},
        "mxfp8": {"eight-bit casts"},
        "partials": {"rmsnorm backward"},
        "rmsnorm": {"rmsnorm forward", "rmsnorm backward"},
        "rotary": {"rotary forward", "rotary backward"},
        "routing": {"routing"},
        "swiglu": {"swiglu forward", "swiglu backward"},
        "update_scalars": {"optimizer"},
    }
    seen: list[str] = []
    for path in sorted(Path(kernels_room.__path__[0]).glob("*.py")):
        # What a kernel calls is compiled into it; what is launched ends in _kernel.
        names = re.findall(r"@triton\.jit\s+def (\w+_kernel)\(", path.read_text())
        assert {part_of(name) for name in names} == parts.pop(path.stem, set())
        seen += names
    assert not parts and len(set(seen)) == len(seen) > 10


def test_overlapping_kernels_count_their_time_once():
    assert covered([(0, 10), (5, 12), (20, 21), (6, 7)]) == 13
    assert covered([]) == 0


def test_kernels_are_summed_by_name_and_divided_by_steps():
    rows = by_name([("nvjet", 2.0), ("Memset", 1.0), ("nvjet", 3.0), ("nvjet", 3.0), ("nvjet", 1.0)], steps=2)
    assert [(r["name"], r["instances"], r["ms"], r["share"]) for r in rows] == [
        ("nvjet", 2.0, 4.5, 0.9), ("Memset", 0.5, 0.5, 0.1),
    ]  # fmt: skip


def test_a_part_is_held_against_the_floor_of_its_work():
    work = needed(Shape(MODEL, batch_size=2, seq_len=8, accumulate=3), "bf16")
    parameters_in_matmuls = 2 * (16 * 32 + 16 * 16 + 3 * 16 * 32) + 100 * 16
    assert work["matmul"].flops == 6 * parameters_in_matmuls * 48
    assert work["attention"].flops == 12 * 2 * 8 * (8 * 9 / 2) * 2 * 6  # pairs of 6 sequences in 2 layers
    assert work["swiglu forward"].bytes + work["swiglu backward"].bytes == 2 * 8 * 32 * 48 * 2
    assert work["rotary forward"].bytes == 2 * 2 * 3 * 8 * 48 * 2
    assert work["rotary backward"].bytes == 2 * 2 * 4 * 8 * 48 * 2
    assert work["head softmax"].bytes == 2 * 100 * 48 * 2
    assert needed(Shape(MODEL, 2, 8), "fp32")["rmsnorm forward"].bytes == (4 * 3 + 2) * 16 * 16 * 4
    assert needed(Shape(MODEL, 2, 8), "fp32")["rmsnorm backward"].bytes == (4 * 4 + 3) * 16 * 16 * 4
    normed = needed(Shape(replace(MODEL, qk_norm=True), 2, 8, 3), "bf16")["rotary backward"].bytes
    assert normed - work["rotary backward"].bytes == 2 * 3 * 8 * 48 * 2
    kernels = by_name([("nvjet", 3.0), ("_swiglu_backward", 1.0), ("_swiglu_backward", 1.0), ("x", 5.0)], steps=1)
    ceilings = {"flops": work["matmul"].flops / 1e-3, "bytes_per_s": work["swiglu backward"].bytes / 1e-3}
    rows = {row["part"]: row for row in by_part(kernels, work, ceilings)}
    assert list(rows) == ["other", "matmul", "swiglu backward"]
    assert rows["matmul"]["floor_ms"] == pytest.approx(1.0)
    assert rows["swiglu backward"]["ms"] == 2.0 and rows["swiglu backward"]["floor_ms"] == pytest.approx(1.0)
    assert rows["other"]["floor_ms"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_step_on_the_card_is_accounted_for():
    from llmtrain.benchmark.config import TimingConfig
    from llmtrain.benchmark.profile import profile_step

    model = ModelConfig(
        vocab_size=1024, d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512, max_seq_len=256
    )
    data = profile_step(Shape(model, 16, 256), TimingConfig(seconds=0.1, bursts=2))
    parts = {row["part"]: row["ms"] for row in data["parts"]}
    assert parts["matmul"] > 0 and parts["attention"] > 0 and parts["optimizer"] > 0
    assert 0 < data["busy_ms"] <= sum(parts.values()) * 1.001
    assert data["copies"]["htod"] == data["copies"]["dtoh"] == 0

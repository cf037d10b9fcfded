"""Whether every Triton kernel compiles for a card, at the shapes it is launched with, on a machine without one.

    python scripts/bench/compile_kernels.py [--card h200] [--only PART ...] [--quick]

Prints each code once: shared memory a program, registers and spilled bytes a thread. Exits 1 where one does not
compile or needs more than the card has; nothing runs, so it says nothing of results. Newton-Schulz has no kernel of its
own. Triton keeps what it compiled: the first time takes half an hour, --quick half a minute. Another version of Triton
comes first on PYTHONPATH.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import triton  # noqa: E402
from attention_blocks import CANDIDATES, HEADS, LENGTH, chosen  # noqa: E402
from card_stand_in import KINDS, META, Card, Compiled, card_stands_in  # noqa: E402
from check_fp8 import SCALINGS, weight_of  # noqa: E402
from check_fp8 import SHAPES as EIGHT_BIT_SHAPES  # noqa: E402
from half_accumulate import DEPTH, SIDE, by_triton  # noqa: E402
from half_accumulate import TILES as HALF_TILES  # noqa: E402
from kernel_bench import EPS, TILES, deterministic, rmsnorm, swiglu  # noqa: E402
from kernel_bench import SHAPES as MODEL_SHAPES  # noqa: E402

from llmtrain.benchmark.config import Shape as StepShape  # noqa: E402
from llmtrain.benchmark.rmsnorm_candidates import WIDTHS, backward_candidates, forward_candidates  # noqa: E402
from llmtrain.cli.bench import what_to_run  # noqa: E402
from llmtrain.kernels import (  # noqa: E402
    attention,
    choice,
    cross_entropy,
    document_attention,
    embedding,
    packed,
    partials,
    rotary,
)
from llmtrain.kernels.document_ranges import clear_behind  # noqa: E402
from llmtrain.kernels.fp8 import Scaling  # noqa: E402
from llmtrain.kernels.fp8_fine import BLOCK  # noqa: E402
from llmtrain.kernels.head import linear_cross_entropy  # noqa: E402
from llmtrain.kernels.mxfp8 import rounded  # noqa: E402
from llmtrain.kernels.rmsnorm_routes import COLUMNS, COLUMNS_ROWS  # noqa: E402
from llmtrain.training.config import OptimizerConfig  # noqa: E402
from llmtrain.training.flat import FlatParameters  # noqa: E402
from llmtrain.training.step import TrainStep  # noqa: E402

DENSE = ("31m", "102m", "200m", "361m", "500m", "1b", "1.5b")
ROUTED = ("moe-55m", "moe-1b", "moe-2b", "moe-3b", "moe-5b", "moe-8b")
LADDER = ("moe-1b", (32, 48, 64, 96), (1, 16))
"""kernel_ladder.py's layer is this one's: experts, sequences."""
ROWS = (1, 37, 64, COLUMNS_ROWS, 2048, 16384, 65536, 1 << 18)
"""Of norms: in each window of the table, one row alone, and as no power of two divides."""
MORE_WIDTHS = (33, 960, 1280, 1792, 12288, 16384)
VOCABULARIES = (256, 16384, 32000, 49152, 50257, 65536, 128256, 262144)
HALVES = (torch.bfloat16, torch.float16)

Part = Callable[[Card], None]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """With a gradient buffer, as the optimizer's side leaves it."""
    of_shape = torch.nn.Parameter(empty(*shape, dtype=dtype))
    of_shape.grad = torch.empty_like(of_shape)
    of_shape.grad_stale = True  # type: ignore[attr-defined]
    return of_shape


def steps(
    card: Card, shape: StepShape, name: str, precision: str = "bf16", layers: int = 2, once: bool = False,
    **options: object,
) -> None:  # fmt: skip
    """A training step of each kind, or `once` a first one alone. Attention is torch's where nothing is hidden but what
    comes later."""
    model = replace(shape.model, n_layers=layers, moe_layers=min(layers, shape.model.moe_layers))
    card.where = f"{name} {shape} {precision} {options}"
    step = TrainStep.build(
        model, OptimizerConfig(), batch_size=shape.batch_size, seq_len=shape.seq_len, precision=precision, device=META,
        capture=False, **options,
    )  # fmt: skip
    hides = bool(options.get("document_mask")) or bool(model.window)
    with choice.forced(choice.TRITON if hides else choice.REFERENCE, "attention"):
        if not once:
            step._warm_up()
            return
        step._micro(first=True)
        step._update()


def scalings(card: Card) -> tuple[str, ...]:
    """Those of --precision fp8 that the card is not refused."""
    if card.capability < (8, 9):
        return ()
    return tuple(scaling for scaling in SCALINGS if scaling != BLOCK or card.capability[0] == 9)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Tensors hold no numbers: initial ones are not made, and scales are as after a step."""
    with (
        mock.patch.object(FlatParameters, "init_weights", lambda *_: None),
        mock.patch.object(Scaling, "follow_history", lambda _: None),
    ):
        yield


def rung(name: str, batch_size: int | None = None, seq_len: int | None = None, **model: int) -> StepShape:
    shape = what_to_run({}, name, batch_size, seq_len, 1)[0]
    return replace(shape, model=replace(shape.model, **model))


def whole_steps(card: Card, names: tuple[str, ...]) -> None:
    with without_values():
        for name in names:
            shape = rung(name)
            steps(card, shape, name, layers=shape.model.n_layers)  # all, as their norms' sums share a launch
            for scaling in scalings(card):
                steps(card, shape, name, "fp8", fp8_scaling=scaling)
            steps(card, shape, name, "mxfp8")
            for size in (2 * shape.batch_size, max(1, shape.batch_size // 2), 1):
                steps(card, rung(name, size), name)
            steps(card, shape, name, document_mask=True)
            steps(card, shape, name, checkpoint_activations="full")
            with deterministic():
                steps(card, shape, name)


def other_steps(card: Card) -> None:
    """Windows, FP32, shapes of a decoding, and the layer of kernel_ladder.py."""
    with without_values():
        for name in ("102m", "1.5b", "moe-55m"):
            steps(card, rung(name, window=256), name)
            steps(card, rung(name, window=1024, seq_len=4096, batch_size=4), name, document_mask=True)
            steps(card, rung(name, 1), name, "fp32")
            for length in (1, 37):
                steps(card, rung(name, 1, length), name)
        name, experts, sequences = LADDER
        for n_experts in experts:
            for batch_size in sequences:
                for grouped in (choice.AUTO, choice.TRITON):
                    with choice.forced(grouped, "grouped"):
                        steps(card, rung(name, batch_size, n_experts=n_experts), name)
                if scalings(card):
                    steps(card, rung(name, batch_size, n_experts=n_experts), name, "fp8")


def heads(b: int, t: int, h: int, h_kv: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, the last a view of a packed qkv."""
    v = empty(b, t, h + 2 * h_kv, d, dtype=dtype).narrow(2, h + h_kv, h_kv)
    return empty(b, t, h, d, dtype=dtype), empty(b, t, h_kv, d, dtype=dtype), v


def document_attentions(card: Card) -> None:
    """By rows of documents and windows, and packed."""
    small = (16, 4, 2), (32, 4, 2), (64, 12, 4), (128, 6, 2)
    shapes = [(b, 1024, h, h_kv, d) for d, h, h_kv in small for b in (2, 64)]
    shapes += [
        (1, 1 << 20, 32, 8, 64),
        (16, 2048, 32, 8, 64),
        (16, 4096, 20, 1, 64),
        (16, 4096, 20, 20, 64),
        (4, 16384, 16, 16, 128),
    ]
    for shape in shapes:
        for dtype in (*HALVES, torch.float32):
            for window in (None, 256, 512):
                card.where = f"attention {shape} {dtype} window {window}"
                q, k, v = (x.requires_grad_() for x in heads(*shape, dtype))
                with choice.forced(choice.TRITON, "attention"):
                    out = attention.attention(q, k, v, doc_start=empty(*shape[:2], dtype=torch.int32), window=window)
                torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    for of, slots in (((12, 4, 64), 200), ((6, 2, 128), 32), ((20, 4, 64), 1400), ((16, 16, 128), 4)):
        for total in (65536, 65037):
            for window in (None, 512):
                packed_attention(card, total, of, slots, window)


def packed_attention(card: Card, total: int, of: tuple[int, int, int], slots: int, window: int | None) -> None:
    """As the bodies of its operators have it: of an operator itself nothing but shapes is asked here."""
    card.where = f"packed attention {total} x {of}, {slots} slots, window {window}"
    q, k, v = (x.squeeze(0) for x in heads(1, total, *of, torch.bfloat16))
    for dtype in (torch.int32, torch.int64):
        borders, how = empty(slots + 1, dtype=dtype), (window, total, choice.TRITON)
        out, *kept = packed._forward._init_fn(q, k, v, borders, *how)
        packed._backward._init_fn(torch.empty_like(out), q, k, v, borders, out, *kept, *how)
        clear_behind(out, borders[-1])


def attention_candidates(card: Card) -> None:
    """Those of attention_blocks.py."""
    for (d, kernel), candidates in CANDIDATES.items():
        for length, seen in LENGTH.items():
            q, k, v = heads(1, 65536, *HEADS[d], d, torch.bfloat16)
            ranges = empty(1, 65536, dtype=torch.int32)
            for blocks in candidates:
                card.where = f"candidate {d} {length} {kernel} {tuple(blocks)}"
                with chosen(kernel, d, length, blocks):
                    if kernel == "forward":
                        document_attention.forward_triton(q, k, v, ranges, seen)
                        continue
                    lse = empty(1, k.shape[2], 65536 * q.shape[2] // k.shape[2], dtype=torch.float32)
                    if kernel == "dq":
                        document_attention.dq_triton(q, k, v, ranges, q, lse, q, seen)
                    else:
                        document_attention.dkv_triton(q, k, v, ranges, lse, q, lse, seen)


def norms(card: Card) -> None:
    """The table's routes, at widths between and beyond its own too."""
    for width in (*WIDTHS, *MORE_WIDTHS):
        for n_rows in (n for n in ROWS if n * width < 1 << 31):
            for dtype in (torch.bfloat16, torch.float32):
                norms_of(card, n_rows, width, dtype)
    for normed in (24, 4):
        card.where = f"rmsnorm of {normed} heads"
        strided = empty(4096, 24 + 2 * 4, 256).narrow(1, 0, normed).requires_grad_()
        y = rmsnorm.rmsnorm(strided, weight(256), EPS)
        y.backward(torch.empty_like(y))


def norms_of(card: Card, n_rows: int, width: int, dtype: torch.dtype) -> None:
    card.where = f"rmsnorm {n_rows} x {width} {dtype}"
    rows = [empty(n_rows, width, dtype=dtype).requires_grad_() for _ in range(2)]
    for of in (weight(width), empty(width, dtype=dtype).requires_grad_()):
        for in_any_order in (False, True):
            y = rmsnorm.rmsnorm(rows[0], of, EPS, deterministic=not in_any_order)
            y.backward(torch.empty_like(y))
        y, h = rmsnorm.rmsnorm(rows[0], of, EPS, rows[1])
        torch.autograd.backward([y, h], [torch.empty_like(y)] * 2)
        y, h = rmsnorm.rmsnorm_fork(rows[0], of, EPS)
        torch.autograd.backward([y, h], [torch.empty_like(y)] * 2)


def norm_candidates(card: Card) -> None:
    """Those of rmsnorm_routes.py."""
    for width in WIDTHS:
        for n_rows in (64, COLUMNS_ROWS, 8192, 1 << 18):
            x, of, rstd = empty(n_rows, width), empty(width), empty(n_rows, dtype=torch.float32)
            for tile in forward_candidates(width):
                card.where = f"candidate {width} {tile}"
                with mock.patch.object(rmsnorm, "forward_route", lambda n, w, tile=tile: tile):
                    rmsnorm._forward(x, None, of, EPS)
            for route in {*backward_candidates(width, True), *backward_candidates(width, False)}:
                if route.program != COLUMNS or n_rows <= COLUMNS_ROWS:
                    card.where = f"candidate {width} {route}"
                    rmsnorm._backward(x, None, x, of, rstd, empty(width, dtype=torch.float32), False, route)


def other_ops(card: Card) -> None:
    """Heads of other vocabularies, ops by themselves, sums of partial sums, and products in half precision."""
    for vocabulary in VOCABULARIES:
        for dtype in (*HALVES, torch.float32):
            card.where = f"head {vocabulary} {dtype}"
            x, of = empty(4096, 768, dtype=dtype).requires_grad_(), empty(vocabulary, 768, dtype=dtype)
            targets = empty(4096, dtype=torch.int64)
            linear = cross_entropy.head_loss, lambda *of_head: linear_cross_entropy(*of_head, z_loss=1e-4)
            for loss in linear:
                loss(x, of.requires_grad_(), targets)
                with torch.no_grad():
                    loss(x, of, targets)
    for s in MODEL_SHAPES:
        for tiles in ((), *TILES.values()):
            for module, patch in tiles or ((None, {}),):
                if module is rmsnorm:
                    continue
                card.where = f"ops {s} {patch}"
                with mock.patch.multiple(module, **patch) if module else contextlib.nullcontext():
                    small_ops(s)
    for count in range(1, partials.MOST_SUMS + 1, 9):
        for add in (False, True):
            card.where = f"{count} sums"
            sums = [(empty(1056, 768, dtype=torch.float32), empty(768, dtype=torch.float32))] * count
            partials._launch(partials._Kind(1056, 768, add, 2.0**-8), sums)
    for tile in HALF_TILES:
        card.where = f"half_accumulate.py {tile}"
        a, b = empty(SIDE, DEPTH, dtype=torch.float16), empty(DEPTH, SIDE, dtype=torch.float16)
        for half, parts in ((False, 1), (True, 1), (True, 4), (True, 8)):
            by_triton(a, b, half, parts, tile)()


def small_ops(s: object) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = empty(s.n, 2 * s.d_ff, dtype=dtype)
        swiglu._backward(swiglu._forward(gate_up), gate_up)
        qkv = empty(s.b, s.t, (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, dtype=dtype).requires_grad_()
        tables = [empty(s.t, s.head_dim // 2, dtype=torch.float32) for _ in range(2)]
        for norms_of in ((None, None), (weight(s.head_dim), weight(s.head_dim))):
            parts = rotary.rotary_qkv(qkv, *tables, s.n_heads, s.n_kv_heads, *norms_of, EPS)
            torch.autograd.backward(parts, [torch.empty_like(x) for x in parts])
        ids, dy = empty(s.n, dtype=torch.int64), empty(s.n, s.d_model, dtype=dtype)
        embedding._lookup(ids, empty(s.vocab_size, s.d_model, dtype=dtype))
        for add in (embedding._add_atomically, embedding._add_in_order):
            add(dy, ids, empty(s.vocab_size, s.d_model, dtype=torch.float32))


def eight_bits(card: Card) -> None:
    """The linears of check_fp8.py."""
    for name, shape in EIGHT_BIT_SHAPES.items():
        for scaling in scalings(card):
            eight_bit_linear(card, name, shape, scaling)


def eight_bit_linear(card: Card, name: str, shape: tuple[int, int, int], scaling: str) -> None:
    card.where = f"{scaling} {name}"
    n, n_in, n_out = shape
    x, dy, w = empty(n, n_in), empty(n, n_out), empty(n_out, n_in)
    eight = weight_of(scaling, w, x, dy)
    for row_major, transposed in ((True, True), (True, False), (False, True)):
        eight.quantise_input(x, row_major=row_major, transposed=transposed)
    for transposed in (True, False):
        eight.quantise_gradient(dy, transposed=transposed)


def representative(card: Card) -> None:
    """A few of every kind."""
    name = "moe-55m"
    with without_values():
        precision = "fp8" if scalings(card) else "bf16"
        steps(card, rung(name, qk_norm=True), name, precision, once=True, document_mask=True)
        with choice.forced(choice.TRITON, "grouped"), deterministic():
            steps(card, rung(name, 1), name, once=True)
        steps(card, rung(name, 1), name, "fp32", once=True)
    norms_of(card, 16384, 8192, torch.float32)
    for scaling in scalings(card)[1:]:
        eight_bit_linear(card, "384 x 256", (256, 384, 256), scaling)
    packed_attention(card, 4096, (12, 4, 64), 32, None)
    for along in (0, 1):
        card.where = f"MXFP8 along {along}"
        rounded(empty(4096, 768), along)


PARTS: dict[str, Part] = {
    "dense": lambda card: whole_steps(card, DENSE),
    "routed": lambda card: whole_steps(card, ROUTED),
    "steps": other_steps,
    "fp8": eight_bits,
    "attention": document_attentions,
    "attention-candidates": attention_candidates,
    "norms": norms,
    "norm-candidates": norm_candidates,
    "ops": other_ops,
}


def line(one: Compiled) -> str:
    if one.error is not None:
        return f"WRONG {one}  [{one.where}]: {one.error}"
    return f"{one.shared:7d} {one.registers:4d} {one.spilled:6d}  {one}  [{one.where}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=KINDS, default="h200", help="Default: %(default)s.")
    parser.add_argument("--only", action="append", choices=PARTS, help="A part; repeat it. Default: all.")
    parser.add_argument("--quick", action="store_true", help="A few kernels of every kind.")
    args = parser.parse_args()
    parts = {"quick": representative} if args.quick else {name: PARTS[name] for name in args.only or PARTS}
    print(f"{args.card}, triton {triton.__version__}, torch {torch.__version__}")
    print(" shared regs spills  kernel")
    begin = time.perf_counter()
    with card_stands_in(args.card) as card:
        card.shown = lambda one: print(line(one), flush=True)
        for name, part in parts.items():
            part(card)
            print(f"{name}: {len(card.compiled)} codes after {time.perf_counter() - begin:.0f} s", flush=True)
    wrong = card.wrong
    print(f"WRONG: {len(wrong)} of {len(card.compiled)}" if wrong else f"all {len(card.compiled)} compile")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

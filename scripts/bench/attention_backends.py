"""All backends of attention side by side: docs/attention.md and its JSON.

    python scripts/bench/attention_backends.py [--only GROUP ...] [--quick] [--no-compile] [--output docs/attention.md]

Groups, with the time each should take on one H200: bars 80 s, kv 80 s, padding 60 s, windows 200 s. FlexAttention is in
kv and windows; its compilations are half of that, and --no-compile leaves them out. A group that is measured replaces
what the JSON holds of it, so that the page can be made in several turns; --page makes it from the JSON alone. Exits 1
where an arm of ours fails or is outside the error budget, or a bar is missed, of the groups that were measured.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from places import place

from llmtrain.benchmark.attention import Shape, make_case, uniform_lengths
from llmtrain.benchmark.config import OpTimingConfig
from llmtrain.benchmark.op_tables import LEGEND
from llmtrain.benchmark.ops import measure_op, section_lines
from llmtrain.benchmark.tables import table
from llmtrain.storage.atomic import make_parent, write_bytes, write_json

TEXT = """# Attention within documents

`from llmtrain.kernels import packed_attention`:

    out = packed_attention(q, k, v, cu_seqlens, window=None, *, max_seqlen=None)

q (total, H, D), k and v (total, Hkv, D) are the tokens of all documents laid end to end; `cu_seqlens` says where each
ends and is filled up by repeating its last border, so shapes stay the same whatever the mix of documents. A token sees
its own document up to itself, with `window` the last so many tokens. Tokens behind the last document cost next to
nothing and give 0. q, k and v must be finite: what is not may show in any row near it, of other documents too. On a
card nobody looks whether `cu_seqlens` is in order and no document longer than `max_seqlen`, which would wait for it:
then results are wrong. It is one operator to torch.compile and can be captured in a CUDA graph after a first call. Its
backward gives the same bits every time with our kernel, with cuDNN where torch's deterministic algorithms are asked
for.

cuDNN's graph API (the extra `cudnn`) takes 16 bits and heads up to 128, needs `max_seqlen`, and is slow where
`cu_seqlens` has far more slots than documents. Our kernel needs neither and is chosen for short documents. Budget:
16-bit backends are within 5.6e-3 of FP64 (relative L2 of the output and of each gradient); errors in the tables are
multiples of that. FlexAttention is compared with ours instead. A gradient is written anew in every arm, never added to
an old one.

`train --window W --global-every N` gives layers a sliding window, but for every N-th layer, and `--document-mask` keeps
attention within documents; both run on the same kernel. `llmtrain bench attention` times one shape;
`scripts/bench/attention_blocks.py` times other tiles.

In the tables `on rows` is a batch of documents side by side, each row as long as the longest, and `padding` the share
of it that is none; `room for` so many documents is a `cu_seqlens` with unused slots; `cache B/token` is what a cache of
keys and values takes.
"""

HEADINGS = {
    "bars": "Documents of one length and of many",
    "kv": "Key and value heads, dimension 1280",
    "padding": "Against a padded batch",
    "windows": "Sliding windows",
}

COMPILED = ("kv", "windows")
"""Groups that FlexAttention takes part in."""


def shapes() -> dict[str, list[Shape]]:
    mixed = uniform_lengths(200, 50, 600)
    padded = [Shape(f"200 of 50 to 600, padding {share}", mixed, 20, 4, 64, padded=padded_row(mixed, share))
              for share in (0.65, 0.69, 0.82)]  # fmt: skip
    windows = []
    for length, count in ((4096, 16), (16384, 4)):
        windows += [Shape(f"{count} of {length}", (length,) * count, 20, 4, 64, window=w) for w in (512, 1024, 2048)]
    windows.append(Shape("4 of 16384", (16384,) * 4, 16, 16, 128, window=512))
    return {
        "bars": [
            Shape("64 of 1024", (1024,) * 64, 12, 4, 64),
            Shape("32 of 2048", (2048,) * 32, 12, 4, 64),
            Shape("32 of 2048", (2048,) * 32, 6, 2, 128),
            Shape("256 of 256", (256,) * 256, 12, 4, 64),
            Shape("200 of 50 to 600", mixed, 12, 4, 64),
            Shape("200 of 50 to 600, room for 1400", mixed, 12, 4, 64, slots=1400),
        ],
        "kv": [Shape("16 of 4096", (4096,) * 16, 20, kv, 64) for kv in (1, 4, 20)],
        "padding": padded,
        "windows": windows,
    }


def padded_row(lengths: tuple[int, ...], share: float) -> int:
    """How long rows of a padded batch are whose padding is this share."""
    return max(max(lengths), round(sum(lengths) / len(lengths) / (1 - share)))


def arm_of(row: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((arm for arm in row["arms"] if arm["name"] == name and arm["status"] == "ok"), None)


BARS = (
    # documents, heads, window, direction, peer, how many times as fast ours must be, goal
    ("64 of 1024", "12+4 of 64", "none", "forward + backward", "cuDNN on rows", 1 / 1.12, 1.0),
    ("32 of 2048", "12+4 of 64", "none", "forward + backward", "cuDNN on rows", 1 / 1.12, 1.0),
    ("32 of 2048", "6+2 of 128", "none", "forward + backward", "cuDNN on rows", 1 / 1.12, 1.0),
    ("256 of 256", "12+4 of 64", "none", "forward + backward", "varlen_attn", 1.3, 2.0),
    ("200 of 50 to 600", "12+4 of 64", "none", "forward + backward", "varlen_attn", 1.3, 2.0),
    ("200 of 50 to 600, padding 0.82", "20+4 of 64", "none", "forward + backward", "cuDNN on rows", 6.3, 8.0),
    ("4 of 16384", "16+16 of 128", 512, "forward + backward", "ours without the window", 8.0, 12.0),
)


def bar_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Each bar that was measured: what must hold and what does."""
    found = []
    for documents, heads, window, what, peer, must, goal in BARS:
        for row in rows:
            shape = row["shape"]
            if (shape["documents"], shape["heads"], shape["window"], row["what"]) != (documents, heads, window, what):
                continue
            arm = arm_of(row, peer)
            ratio = arm["ratio"] if arm else None
            held = "not measured" if ratio is None else "yes" if ratio >= must else "NO"
            shown = "" if ratio is None else f"{ratio:.2f}"
            found.append([documents, heads, str(window), peer, f"{must:.2f}", f"{goal:.2f}", shown, held])
    return found


def page(data: dict[str, Any]) -> str:
    lines = [TEXT]
    groups = [name for name in HEADINGS if name in data["groups"]]
    if groups:
        rows = [row for name in groups for row in data["groups"][name]["rows"]]
        header = ["documents", "heads", "window", "peer", "must", "goal", "peer's time / ours", "held"]
        lines += ["## What must hold", "", "Forward + backward.", "", *table(header, bar_rows(rows), 4), "", LEGEND, ""]
    for name in groups:
        lines += [f"## {HEADINGS[name]}", "", *section_lines(data["groups"][name])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=HEADINGS, help="this group; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one session of two short rounds")
    parser.add_argument("--no-compile", action="store_true", help="without FlexAttention")
    parser.add_argument("--page", action="store_true", help="make the page from its JSON, measure nothing")
    parser.add_argument("--output", type=Path, help="default: docs/attention.md")
    arguments = parser.parse_args()
    on_card = torch.cuda.is_available()
    arguments.output = place(arguments.output, "docs/attention.md", not (on_card or arguments.page))
    where = arguments.output.parent / "data" / f"{arguments.output.stem}-backends.json"
    data: dict[str, Any] = {"groups": {}}
    if where.exists():
        data = json.loads(where.read_text())
    sizes = dict(sessions=1, rounds=2, samples=11) if arguments.quick else dict(turn_seconds=0.02)
    timing = OpTimingConfig(**sizes, device="cuda" if on_card else "cpu")
    wrong: list[str] = []
    measured = [] if arguments.page else arguments.only or list(HEADINGS)
    for name in measured:
        cases = [make_case(shape, torch.device(timing.device)) for shape in shapes()[name]]
        timing = replace(timing, compile=name in COMPILED and not arguments.no_compile)

        def keep(group: dict[str, Any], name: str = name) -> None:
            data["groups"][name] = group
            save(data, where, arguments.output)

        measure_op(name, cases, timing, tell=lambda line: print(line, flush=True), keep=keep)
        for row in data["groups"][name]["rows"]:
            for arm in row["arms"]:
                what = f"{' '.join(map(str, row['shape'].values()))} {row['what']} {arm['name']}"
                if arm["ours"] and arm["status"] == "failed":
                    wrong.append(f"FAILED: {what}: {arm['reason']}")
                elif arm["ours"] and arm["status"] == "ok" and not all(e <= 1 for e in arm["errors"].values()):
                    wrong.append(f"OUTSIDE THE BUDGET: {what}: {arm['errors']}")
    if arguments.page:
        save(data, where, arguments.output)
    rows = [row for name in measured or data["groups"] for row in data["groups"][name]["rows"]]
    wrong += [f"BAR MISSED: {' '.join(row)}" for row in bar_rows(rows) if row[-1] == "NO"]
    for line in wrong:
        print(line)
    return int(bool(wrong))


def save(data: dict[str, Any], where: Path, output: Path) -> None:
    make_parent(where)
    if data["groups"]:
        write_json(where, data)
    write_bytes(output, page(data).encode())


if __name__ == "__main__":
    sys.exit(main())

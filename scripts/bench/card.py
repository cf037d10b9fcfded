"""All figures of one card in one go, those that most rests on first: each script that measures, and what it took.

    python scripts/bench/card.py [--tokens data/corpus.u16] [--seconds 540] [--only NAME ...] [--gather FOLDER] [--list]
    python scripts/bench/card.py --cards 0 1 ...       # two cards: each takes the next part when it is free

Each part is a script of its own that writes its page and JSON into docs/; a part is not begun where what is left of
--seconds is less than it should take, and is ended where it takes twice that, so a lease of any length is used up and a
later call does the rest: `--skip` or `--only` names parts. With several cards each part has one of them, but for those
that measure several, which come first; parts that write one page never run at once. --gather copies every file of docs/
that changed, and each part's output, after each part. Exits 1 where a part failed: its last line stands beside it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    name: str
    seconds: int
    """That it should take on one H200."""
    words: str
    """Behind `python`; TOKENS stands for a token file."""
    needs_tokens: bool = False
    cards: int = 1

    @property
    def writes(self) -> str:
        """What only one part at a time may write: a script's page. Peers write theirs under a lock."""
        script = self.words.split(" --")[0]
        return self.name if script.endswith("/peers.py") else script


PARTS = [
    # Several cards.
    Part("scaling", 150, "scripts/bench/parallel.py --rows weak-1 weak-8 strong --output docs/scaling.md", cards=2),
    Part(
        "scaling-1b", 200,
        "scripts/bench/parallel.py --rows fsdp-1b ddp-1b pipeline-1b --bursts 3 --output docs/scaling.md", cards=2,
    ),
    Part("scaling-checks", 180, "scripts/bench/parallel.py --checks --output docs/scaling.md", cards=2),
    # The step against its peers, and whether a run reaches it.
    Part("peers-4x1024", 90, "scripts/bench/peers.py --case 102m-4x1024"),
    Part("peers-64x1024", 120, "scripts/bench/peers.py --case 102m-64x1024"),
    Part("peers-1b", 200, "scripts/bench/peers.py --case 1b-16x2048"),
    Part("peers-361m", 140, "scripts/bench/peers.py --case 361m-32x1024"),
    Part(
        "peers-accumulation", 120, "scripts/bench/peers.py --case 102m-accumulation --case 102m-deterministic",
    ),
    *(
        Part(f"peers-{shape}", 80, f"scripts/bench/peers.py --case 102m-{shape}")
        for shape in ("1x512", "1x1024", "4x512", "8x512")
    ),
    Part("sweep", 150, "-m llmtrain sweep --output docs/baseline.md"),
    Part("step-checks", 200, "scripts/bench/check_step.py --tokens TOKENS --output docs/step-checks.md", True),
    Part("train-rate", 160, "scripts/bench/train_rate.py --tokens TOKENS --output docs/train-rate.md", True),
    Part("profile-102m", 30, "-m llmtrain bench profile --config 102m --output docs/profile-102m.md"),
    Part("profile-1b", 40, "-m llmtrain bench profile --config 1b --accumulate 1 --output docs/profile-1b.md"),
    # Runs that nothing kills.
    Part(
        "reliability", 120,
        "scripts/faults/card.py --tokens TOKENS --folder /dev/shm --output docs/data/reliability-card.json", True,
    ),
    Part("memory-102m", 90, "scripts/bench/memory_limit.py --case 102m --output docs/memory.md"),
    Part("memory-1b", 120, "scripts/bench/memory_limit.py --case 1b --output docs/memory.md"),
    # Ops.
    Part("kernels", 60, "scripts/bench/check_kernels.py --only rmsnorm"),
    Part("rmsnorm-routes", 75, "scripts/bench/rmsnorm_routes.py --quick"),
    Part("ops", 140, "scripts/bench/ops.py"),
    Part("attention-check", 60, "scripts/bench/check_attention.py"),
    Part("attention-bars", 80, "scripts/bench/attention_backends.py --only bars"),
    Part("attention-kv", 80, "scripts/bench/attention_backends.py --only kv"),
    Part("attention-padding", 40, "scripts/bench/attention_backends.py --only padding"),
    Part("attention-windows", 150, "scripts/bench/attention_backends.py --only windows"),
    Part("attention-blocks", 130, "scripts/bench/attention_blocks.py"),
    Part("head", 60, "scripts/bench/head_arms.py"),
    # Eight bits and experts.
    Part("fp8-check", 40, "scripts/bench/check_fp8.py --quick"),
    Part("precision-1b", 150, "scripts/bench/precision.py --only 1b --quick --add"),
    Part("experts", 90, "scripts/bench/kernel_ladder.py --quick"),
    Part("precision-moe-1b", 120, "scripts/bench/precision.py --only moe-1b --quick --add"),
    Part("half-accumulate", 30, "scripts/bench/half_accumulate.py"),
    Part("fp8-loss", 540, "scripts/experiments/run.py scripts/experiments/fp8-102m"),
    # Fewer tokens to the same loss.
    Part(
        "newton-schulz", 60,
        "scripts/bench/newton_schulz.py --config configs/102m.toml --batch-size 16 --config configs/1b.toml "
        "--batch-size 4 --output docs/data/newton-schulz.json",
    ),
    Part("muon", 720, "scripts/experiments/run.py scripts/experiments/muon-102m"),
    Part("stable-average", 240, "scripts/experiments/run.py scripts/experiments/stable-average-31m"),
    Part("mxfp8-loss", 240, "scripts/experiments/run.py scripts/experiments/mxfp8-31m"),
]  # fmt: skip


def docs_now() -> dict[Path, float]:
    found = [*(ROOT / "docs").rglob("*"), *(ROOT / "scripts" / "experiments").glob("*/result.json")]
    return {path: path.stat().st_mtime for path in found if path.is_file()}


def gather(folder: Path, before: dict[Path, float]) -> None:
    """Copies what is another file than before to the same place below `folder`."""
    for path, changed in docs_now().items():
        if before.get(path) != changed:
            place = folder / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)


def run(part: Part, tokens: Path | None, log: Path, left: float, cards: Sequence[str] = ()) -> tuple[int, float]:
    """Its exit status, 124 where it was ended, and its seconds."""
    words = part.words.replace("TOKENS", str(tokens)).split()
    if part.cards > 1:
        words += ["--ranks", str(part.cards)]
    begin = time.monotonic()
    with log.open("w") as out:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {}
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                timeout=min(2 * part.seconds, left),
            )  # fmt: skip
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = 124
    return status, time.monotonic() - begin


class Lease:
    """The parts that are still to run, the time for them, and what was said of those before."""

    def __init__(self, args: argparse.Namespace, parts: list[Part], folder: Path) -> None:
        self.args, self.waiting, self.folder = args, parts, folder
        self.end, self.before = time.monotonic() + args.seconds, docs_now()
        self.running: list[Part] = []
        self.changed = threading.Condition()
        self.failed = False

    def tell(self, part: Part, text: str) -> None:
        print(f"{part.name}: {text}", flush=True)

    def next_part(self) -> Part | None:
        """The first that may run now; waits where all that are left share their page with one that runs."""
        with self.changed:
            while self.waiting:
                pages = {part.writes for part in self.running}
                part = next((part for part in self.waiting if part.writes not in pages), None)
                if part is None:
                    self.changed.wait()
                    continue
                self.waiting.remove(part)
                left = self.end - time.monotonic()
                if part.needs_tokens and self.args.tokens is None:
                    self.tell(part, "left out: give --tokens")
                elif left < part.seconds:
                    self.tell(part, f"left out: should take {part.seconds} s, {max(left, 0):.0f} s are left")
                else:
                    self.running.append(part)
                    return part
        return None

    def use(self, cards: list[str]) -> None:
        """Runs parts on these cards until none is left."""
        while part := self.next_part():
            log = self.folder / f"{part.name}.log"
            status, seconds = run(part, self.args.tokens, log, self.end - time.monotonic(), cards)
            last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:120]
            with self.changed:
                self.running.remove(part)
                self.failed |= status != 0
                self.tell(part, f"{'ok' if status == 0 else f'EXIT {status}'}, {seconds:.0f} s: {last}")
                if self.args.gather:
                    gather(self.folder, self.before)
                self.changed.notify_all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--tokens", type=Path, help="token file; parts that need one are left out without it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--only", action="append", choices=names, help="a part; may be repeated")
    parser.add_argument("--skip", action="append", choices=names, default=[], help="a part; may be repeated")
    parser.add_argument("--gather", type=Path, help="folder for copies of what changed, and the parts' output")
    parser.add_argument("--cards", nargs="+", default=[], help="cards to use, as in CUDA_VISIBLE_DEVICES; default: all")
    parser.add_argument("--list", action="store_true", help="say the parts and what they should take")
    args = parser.parse_args()
    asked = [part for part in PARTS if part.name in (args.only or names) and part.name not in args.skip]
    if args.list:
        for part in asked:
            print(f"{part.name:18} {part.seconds:4} s  {part.words}")
        return 0
    folder = args.gather or ROOT / "runs" / "card"
    folder.mkdir(parents=True, exist_ok=True)
    several = [part for part in asked if 1 < part.cards <= len(args.cards)]
    for part in asked:
        if part.cards > max(1, len(args.cards)) and args.only:
            parser.error(f"{part.name} needs --cards with {part.cards} cards")
    lease = Lease(args, several, folder)
    lease.use(args.cards)
    lease.waiting = [part for part in asked if part.cards == 1]
    users = [threading.Thread(target=lease.use, args=([card],)) for card in args.cards[1:]]
    for user in users:
        user.start()
    lease.use(args.cards[:1])
    for user in users:
        user.join()
    return int(lease.failed)


if __name__ == "__main__":
    sys.exit(main())

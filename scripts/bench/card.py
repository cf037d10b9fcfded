"""All figures of one card in one go, those that most rests on first: each script that measures, and what it took.

    python scripts/bench/card.py [--tokens data/corpus.u16] [--seconds 540] [--only NAME ...] [--gather FOLDER] [--list]
    python scripts/bench/card.py --missing             # only what docs/ does not hold yet
    python scripts/bench/card.py --cards 0 1 ...       # two cards: each takes the next part when it is free

Each part is a script of its own that writes its JSON into docs/, and its page, or a second script makes that of it.
Parts whose result docs/ lacks come first, or --only says the order. A part is not begun where what is left of --seconds
is less than it should take, and is ended where it takes twice that, so a lease of any length is used up and a later
call does the rest: `--skip` or `--only` names parts. Experiments go on where an earlier call ended, if runs/gathered is
still there. With several cards each part has one of them, but for those that measure several, which come first; parts
that write one file never run at once. --gather copies every result that changed, and each part's output, after each
part and every half minute; what lies there is whole at any time. A signal to stop ends what runs, with all that it
started, and gathers once more. Exits 1 where a part failed: its last line stands beside it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ("docs", "scripts/experiments", "runs/gathered")
PAGE_SECONDS = 60
GATHER_SECONDS = 30
ROUTES = "llmtrain/kernels/rmsnorm_table.py"
"""Beside those folders: what rmsnorm_routes.py writes."""


KERNELS, OPS = ("scripts/docs_kernels.py",), ("scripts/docs_ops.py",)
LADDERS = ("scripts/bench/precision.py --page", "scripts/bench/kernel_ladder.py --page")
EXPERIMENTS = ("scripts/docs_experiments.py",)


@dataclass(frozen=True)
class Part:
    name: str
    seconds: int
    """That it should take on one H200."""
    words: str
    """Behind `python`; TOKENS stands for a token file."""
    result: str
    """The JSON it writes, below the root, and what of it is its own: keys, or names of entries."""
    pages: tuple[str, ...] = ()
    """What makes the pages that take in its JSON, where its own script does not."""
    cards: int = 1
    in_turns: int = 0
    """Of what goes on where an earlier call ended: seconds without which nothing is begun. It takes a --budget."""

    @property
    def needs_tokens(self) -> bool:
        return "TOKENS" in self.words

    @property
    def writes(self) -> str:
        """What only one part at a time may write: a script's file. Peers write theirs under a lock."""
        script = self.words.split(" --")[0]
        return self.name if script.endswith("/peers.py") else script

    @property
    def measured(self) -> bool:
        """Whether its result is there, with the machine it was taken on, and whole."""
        path, _, keys = self.result.partition(": ")
        data = json.loads((ROOT / path).read_text()) if (ROOT / path).exists() else None
        if self.cards > 1 and data:  # rows of the same names there may be of another number
            data |= {"rows": [row for row in data["rows"] if row["ranks"] == self.cards]}
        if not keys:
            return whole(data)
        missing = (data or {}).get("missing") or ()
        return all(key not in missing and whole(entry_of(data, key)) for key in keys.split(", "))


def entry_of(data: Any, key: str) -> Any:
    """What stands under a key, or is called so, anywhere in `data`; None where nothing is."""
    if isinstance(data, dict):
        if isinstance(data.get(key), (dict, list)) or data.get("name") == key:
            return data.get(key, data)
        data = list(data.values())
    found = (entry_of(one, key) for one in data) if isinstance(data, list) else ()
    return next((entry for entry in found if entry is not None), None)


def whole(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return bool(entry)
    cut_short = bool(entry.get("missing")) or len(entry.get("rows", ())) < entry.get("planned", 0)
    return not cut_short and entry.get("machine", True) is not None


PARTS = [
    # Several cards.
    Part(
        "scaling", 130, "scripts/bench/parallel.py --rows weak-1 weak-8 strong --output docs/scaling.md",
        "docs/data/scaling.json: weak-1, weak-8, strong", cards=2,
    ),
    Part(
        "scaling-1b", 190,
        "scripts/bench/parallel.py --rows ddp-1b pipeline-1b --bursts 3 --output docs/scaling.md",
        "docs/data/scaling.json: ddp-1b, pipeline-1b", cards=2,
    ),
    Part(
        "scaling-fsdp", 100, "scripts/bench/parallel.py --rows fsdp-1b fsdp-1b-kept --output docs/scaling.md",
        "docs/data/scaling.json: fsdp-1b, fsdp-1b-kept", cards=2,
    ),
    Part(
        "scaling-checks", 190, "scripts/bench/parallel.py --checks --output docs/scaling.md",
        "docs/data/scaling.json: checks", cards=2,
    ),
    Part(
        "scaling-four", 200, "scripts/bench/parallel.py --rows weak-1 weak-8 strong fsdp-1b --output docs/scaling.md",
        "docs/data/scaling.json: weak-1, weak-8, strong, fsdp-1b", cards=4,
    ),
    Part(
        "scaling-four-1b", 280,
        "scripts/bench/parallel.py --rows ddp-1b pipeline-1b ddp-1b-fp8 pipeline-1b-fp8 --bursts 3 "
        "--output docs/scaling.md",
        "docs/data/scaling.json: ddp-1b, pipeline-1b, ddp-1b-fp8, pipeline-1b-fp8", cards=4,
    ),
    # The step against its peers, and whether a run reaches it.
    Part(
        "same-bits", 100, "scripts/bench/same_bits.py --output docs/data/same-bits.json", "docs/data/same-bits.json"
    ),
    *(
        Part(f"peers-{name}", seconds, f"scripts/bench/peers.py --case {case}", f"docs/data/peers.json: {case}")
        for name, case, seconds in (
            ("64x1024", "102m-64x1024", 190), ("1b", "1b-16x2048", 280), ("361m", "361m-32x1024", 190),
        )
    ),
    Part(
        "peers-small", 300,
        "scripts/bench/peers.py --together --case 102m-4x1024 --case 102m-1x512 --case 102m-1x1024 --case 102m-4x512 "
        "--case 102m-8x512",
        "docs/data/peers.json: 102m-4x1024, 102m-1x512, 102m-1x1024, 102m-4x512, 102m-8x512",
    ),
    Part(
        "peers-accumulation", 210, "scripts/bench/peers.py --case 102m-accumulation --case 102m-deterministic",
        "docs/data/peers.json: 102m-accumulation, 102m-deterministic",
    ),
    Part("sweep", 110, "-m llmtrain sweep --output docs/baseline.md", "docs/data/baseline.json"),
    Part(
        "activations", 120, "-m llmtrain sweep --config sweep-activations --output docs/activations.md",
        "docs/data/activations.json",
    ),
    Part(
        "step-checks", 320, "scripts/bench/check_step.py --tokens TOKENS --output docs/step-checks.md",
        "docs/data/step-checks.json",
    ),
    Part(
        "train-rate", 160, "scripts/bench/train_rate.py --tokens TOKENS --output docs/train-rate.md",
        "docs/data/train-rate.json: bench step --tokens",
    ),
    Part(
        "profile-102m", 30, "-m llmtrain bench profile --config 102m --output docs/profile-102m.md",
        "docs/data/profile-102m.json",
    ),
    Part(
        "profile-1b", 35, "-m llmtrain bench profile --config 1b --accumulate 1 --output docs/profile-1b.md",
        "docs/data/profile-1b.json",
    ),
    # Runs that nothing kills.
    Part(
        "reliability", 80,
        "scripts/faults/card.py --tokens TOKENS --folder /dev/shm --output docs/data/reliability-card.json",
        "docs/data/reliability-card.json", ("scripts/faults/all.py --render",),
    ),
    *(
        Part(
            f"memory-{case}", seconds, f"scripts/bench/memory_limit.py --case {case} --output docs/memory.md",
            f"docs/data/memory.json: {case}",
        )
        for case, seconds in (("102m", 80), ("1b", 120))
    ),
    # Ops.
    Part("kernels", 20, "scripts/bench/check_kernels.py --only rmsnorm", "docs/data/kernels.json: rmsnorm", KERNELS),
    Part("rmsnorm-routes", 150, "scripts/bench/rmsnorm_routes.py --quick", "docs/data/rmsnorm-routes.json", OPS),
    *(
        Part(f"ops-{part}", seconds, f"scripts/bench/ops.py --only {part}", f"docs/data/ops-{part}.json", OPS)
        for part, seconds in (("rmsnorm", 120), ("crossover", 50), ("swiglu", 50), ("gemm", 20))
    ),
    Part(
        "attention-check", 40, "scripts/bench/check_attention.py", "docs/data/attention.json: results, times", KERNELS,
    ),
    *(
        Part(
            f"attention-{group}", seconds, f"scripts/bench/attention_backends.py --only {group}",
            f"docs/data/attention-backends.json: {group}",
        )
        for group, seconds in (("bars", 80), ("kv", 80), ("padding", 60), ("windows", 200))
    ),
    Part(
        "attention-blocks", 130, "scripts/bench/attention_blocks.py",
        "docs/data/attention-blocks.json: 64-long, 64-short, 128-long, 128-short", KERNELS,
    ),
    Part("head", 60, "scripts/bench/head_arms.py", "docs/data/head-arms.json"),
    Part("head-check", 60, "scripts/bench/check_head.py", "docs/data/head.json: adamw, cross_entropy, head", KERNELS),
    Part(
        "kernels-others", 60, "scripts/bench/check_kernels.py --only swiglu --only rotary --only embedding",
        "docs/data/kernels.json: swiglu, rotary, embedding", KERNELS,
    ),
    Part(
        "sanitize", 180, "scripts/bench/sanitize.py --output docs/data/sanitize.json", "docs/data/sanitize.json",
        KERNELS,
    ),
    # Eight bits and experts.
    Part(
        "fp8-check", 40, "scripts/bench/check_fp8.py --quick",
        "docs/data/fp8-check.json: gate and up of 102M, down of 102M, 64 experts", KERNELS,
    ),
    Part(
        "check-capture", 40, "scripts/bench/check_capture.py", "docs/data/check-capture.json: steps", KERNELS,
    ),
    Part("fp8-tiles", 40, "scripts/bench/fp8_tiles.py", "docs/data/fp8-tiles.json: 102M, 1B", KERNELS),
    Part(
        "precision-1b", 150, "scripts/bench/precision.py --only 1b --quick --add", "docs/data/precision.json: 1b",
        LADDERS,
    ),
    Part("experts", 90, "scripts/bench/kernel_ladder.py --quick", "docs/data/experts.json", LADDERS),
    Part(
        "precision-moe-1b", 120, "scripts/bench/precision.py --only moe-1b --quick --add",
        "docs/data/precision.json: moe-1b", LADDERS,
    ),
    Part("half-accumulate", 30, "scripts/bench/half_accumulate.py", "docs/data/half-accumulate.json", KERNELS),
    Part(
        "fp8-loss", 540, "scripts/experiments/run.py scripts/experiments/fp8-102m",
        "scripts/experiments/fp8-102m/result.json", (*EXPERIMENTS, *LADDERS), in_turns=100,
    ),
    # Fewer tokens to the same loss.
    Part(
        "newton-schulz", 60,
        "scripts/bench/newton_schulz.py --config configs/102m.toml --batch-size 16 --config configs/1b.toml "
        "--batch-size 4", "docs/data/newton-schulz.json: 102m, 1b", KERNELS,
    ),
    *(
        Part(
            name, seconds, f"scripts/experiments/run.py scripts/experiments/{folder}",
            f"scripts/experiments/{folder}/result.json", EXPERIMENTS, in_turns=one_run,
        )
        for name, folder, seconds, one_run in (
            ("muon", "muon-102m", 720, 110), ("stable-average", "stable-average-31m", 320, 60),
            ("mxfp8-loss", "mxfp8-31m", 330, 140),
        )
    ),
]  # fmt: skip


def docs_now() -> dict[Path, int]:
    """Results and when each was written; what is being written has another name yet."""
    found = {}
    for path in [*(path for folder in RESULTS for path in (ROOT / folder).rglob("*")), ROOT / ROUTES]:
        with suppress(FileNotFoundError):  # it has got its final name since
            if path.is_file() and not path.name.startswith("."):
                found[path] = path.stat().st_mtime_ns
    return found


def gather(folder: Path, before: dict[Path, int]) -> None:
    """Copies what is another file than before to the same place below `folder`, where none is ever half there."""
    for path, changed in docs_now().items():
        place = folder / path.relative_to(ROOT)
        if before.get(path) == changed or (place.exists() and place.stat().st_mtime_ns == changed):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.partial")
        shutil.copyfile(path, partial)
        os.utime(partial, ns=(changed, changed))  # where it is written anew meanwhile, the next time takes it again
        partial.replace(place)


def run(part: Part, tokens: Path | None, log: Path, left: float, cards: Sequence[str] = ()) -> tuple[int, float]:
    """Its exit status, 124 where it was ended, and its seconds."""
    words = part.words.replace("TOKENS", str(tokens)).split()
    limit = min(2 * part.seconds, left)
    if part.in_turns:
        words += ["--budget", f"{limit - part.in_turns:.0f}"]
    if part.cards > 1:
        words += ["--ranks", str(part.cards)]
    begin = time.monotonic()
    with log.open("w") as out:
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {}
        status = python(words, limit, out, chosen)
    return status, time.monotonic() - begin


RUNNING: set[subprocess.Popen] = set()


def end(process: subprocess.Popen) -> None:
    """Ends what it has started too, which would hold the card and its files."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def python(words: Sequence[str], timeout: float, stdout: IO[str], environment: dict[str, str]) -> int:
    """The exit status of a script here, 124 where it was ended."""
    here = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=here | environment, stdout=stdout, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    RUNNING.add(process)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        end(process)
        process.wait()
        RUNNING.discard(process)


class Lease:
    """The parts that are still to run, the time for them, and what was said of those before."""

    def __init__(self, args: argparse.Namespace, parts: list[Part], folder: Path) -> None:
        self.args, self.waiting, self.folder = args, parts, folder
        self.end, self.before = time.monotonic() + args.seconds, docs_now()
        self.running: list[Part] = []
        self.changed, self.pages, self.done = threading.Condition(), threading.Lock(), threading.Event()
        self.failed = False

    def stop(self, *_: Any) -> None:
        """Begins nothing more and ends what runs: a signal's handler."""
        self.end = time.monotonic()
        for process in tuple(RUNNING):
            end(process)

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
                elif left < (needed := part.in_turns or part.seconds):
                    self.tell(part, f"left out: should take {needed} s, {max(left, 0):.0f} s are left")
                else:
                    self.running.append(part)
                    return part
        return None

    def make_pages(self, part: Part) -> None:
        """Of all JSON that there is now; one part at a time, since parts of several scripts share pages."""
        with self.pages, (self.folder / "pages.log").open("a") as out:
            for words in part.pages:
                if status := python(words.split(), PAGE_SECONDS, out, {}):
                    self.failed = True
                    self.tell(part, f"EXIT {status}: {words}")

    def use(self, cards: list[str]) -> None:
        """Runs parts on these cards until none is left."""
        while part := self.next_part():
            try:
                failed, said = self.do(part, cards)
            except Exception as error:  # or those that wait for the part would wait for ever
                failed, said = True, f"EXIT, {type(error).__name__}: {error}"
            with self.changed:
                self.running.remove(part)
                self.failed |= failed
                self.tell(part, said)
                self.changed.notify_all()
            self.gather()

    def do(self, part: Part, cards: list[str]) -> tuple[bool, str]:
        """Whether the part failed, and what is said of it."""
        log = self.folder / f"{part.name}.log"
        left = self.end - time.monotonic()
        status, seconds = run(part, self.args.tokens, log, left, cards[: part.cards])
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:120]
        self.make_pages(part)
        return status != 0, f"{'ok' if status == 0 else f'EXIT {status}'}, {seconds:.0f} s: {last}"

    def gather(self) -> None:
        with self.pages:
            if self.args.gather:
                gather(self.folder, self.before)

    def keep_gathering(self) -> None:
        while not self.done.wait(GATHER_SECONDS):
            self.gather()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--tokens", type=Path, help="token file; parts that need one are left out without it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these parts, in this order")
    parser.add_argument("--skip", nargs="+", choices=names, metavar="NAME", default=[], help="parts to leave out")
    parser.add_argument("--missing", action="store_true", help="only parts whose result docs/ lacks")
    parser.add_argument("--gather", type=Path, help="folder for copies of what changed, and the parts' output")
    parser.add_argument("--cards", nargs="+", default=[], help="cards to use, as in CUDA_VISIBLE_DEVICES; default: all")
    parser.add_argument("--list", action="store_true", help="say the parts and what they should take")
    args = parser.parse_args()
    by_name = {part.name: part for part in PARTS}
    in_order = args.only or sorted(names, key=lambda name: by_name[name].measured)
    asked = [by_name[name] for name in in_order if name not in args.skip]
    asked = [part for part in asked if not (args.missing and part.measured)]
    if args.list:
        for part in asked:
            print(f"{part.name:18} {part.seconds:4} s  {'' if part.measured else 'missing':7}  {part.words}")
        missing = [part for part in asked if not part.measured]
        print(f"{sum(part.seconds for part in missing)} s for {len(missing)} that are missing, "
              f"{sum(part.seconds for part in asked)} s for all {len(asked)}")  # fmt: skip
        return 0
    folder = args.gather or ROOT / "runs" / "card"
    folder.mkdir(parents=True, exist_ok=True)
    several = [part for part in asked if 1 < part.cards <= len(args.cards)]
    for part in asked:
        if part.cards > max(1, len(args.cards)) and args.only:
            parser.error(f"{part.name} needs --cards with {part.cards} cards")
    args.tokens = args.tokens and args.tokens.resolve()  # parts run at the root
    lease = Lease(args, several, folder)
    handlers = {number: signal.signal(number, lease.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    gatherer = threading.Thread(target=lease.keep_gathering)
    gatherer.start()
    lease.use(args.cards)
    lease.waiting = [part for part in asked if part.cards == 1]
    users = [threading.Thread(target=lease.use, args=([card],)) for card in args.cards[1:]]
    for user in users:
        user.start()
    lease.use(args.cards[:1])
    for user in users:
        user.join()
    lease.done.set()
    gatherer.join()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return int(lease.failed)


if __name__ == "__main__":
    sys.exit(main())

"""This project against its peers: the same model, batch and data, each arm in a process of its own, taking turns.

    python scripts/bench/peers.py [--case 102m-4x1024 ...] [--together] [--budget 540] [--output docs/peers.md]
    python scripts/bench/peers.py --smoke        # a tiny model on the CPU: do the arms run, and do they agree;
                                                 # its page lies below build/

Arms of a case stay resident and time one burst each a round, in rotating order. Where the card cannot hold all of them
at once, those that do not fit form another group, with llmtrain in it again as the measure. With --together the arms of
all chosen cases start side by side, and then case after case takes its turns: small shapes wait once for compilers
instead of once a case; none is written before all are measured. Cases that were measured before stay in the JSON, each
with the machine it was taken on, and so does one of which no arm ran now: then it exits with 1.
"""

import argparse
import fcntl
import math
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from models import MODEL_1B, MODEL_102M, MODEL_361M  # noqa: E402
from peer_arm import ARMS, NEEDS  # noqa: E402
from peer_process import ArmEnded, ArmProcess, Settings  # noqa: E402
from places import place  # noqa: E402

from llmtrain.benchmark.config import Shape  # noqa: E402
from llmtrain.benchmark.machine import card_state, describe  # noqa: E402
from llmtrain.benchmark.peers_table import peers_markdown  # noqa: E402
from llmtrain.benchmark.statistics import rotation  # noqa: E402
from llmtrain.benchmark.step import model_figures  # noqa: E402
from llmtrain.benchmark.tables import read_data, write_page  # noqa: E402
from llmtrain.model.config import ModelConfig  # noqa: E402
from llmtrain.storage.atomic import make_parent  # noqa: E402
from llmtrain.storage.errors import LlmtrainError  # noqa: E402

NO_CARD = "there is no card here; --smoke runs a tiny model on the CPU"
OURS, COPY, IN_ORDER = "llmtrain", "llmtrain (copy)", "llmtrain, deterministic"
PLAIN, GRAPHS = "plain, compiled", "plain, compiled, CUDA graphs"
FINDS_CACHES_OF = {COPY: OURS, GRAPHS: PLAIN}
"""Arms that start when the other is ready, and find what it compiled."""
HELD = {
    OURS: (1.35, 1.0),
    "plain": (1.15, 5.0),
    "transformers, compiled": (1.15, 10.0),
    "transformers, Liger": (1.6, 2.0),
    "transformers": (1.8, 16.0),
}
"""By the beginning of an arm's name: how often it holds the activations, and bytes it holds a logit."""

TINY = ModelConfig(
    vocab_size=512, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, max_seq_len=32
)


@dataclass(frozen=True)
class Entry:
    """One line of a case: an arm on a shape."""

    arm: str
    shape: Shape


@dataclass(frozen=True)
class Case:
    """Entries that are compared with one another: the first is the measure, its copy the floor."""

    name: str
    entries: tuple[Entry, ...]
    steps: int = 20
    """Steps whose losses are compared."""


def alike(name: str, shape: Shape, *arms: str, steps: int = 20) -> Case:
    """A case of several arms on one shape."""
    return Case(name, tuple(Entry(arm, shape) for arm in arms), steps)


ALL = (OURS, COPY, PLAIN, GRAPHS, "transformers, compiled", "transformers", "transformers, Liger")
FEW = (OURS, COPY, PLAIN, "transformers, compiled")
CASES = [
    alike("102m-4x1024", Shape(MODEL_102M, 4, 1024), *ALL),
    alike("102m-64x1024", Shape(MODEL_102M, 64, 1024), *ALL),
    alike("102m-deterministic", Shape(MODEL_102M, 64, 1024), OURS, COPY, IN_ORDER),
    alike("361m-32x1024", Shape(MODEL_361M, 32, 1024), *FEW),
    alike("1b-16x2048", Shape(MODEL_1B, 16, 2048), *FEW),
    Case(
        "102m-accumulation",
        (
            Entry(OURS, Shape(MODEL_102M, 64, 1024)),
            Entry(COPY, Shape(MODEL_102M, 64, 1024)),
            Entry(OURS, Shape(MODEL_102M, 64, 1024, accumulate=16)),
            Entry(OURS, Shape(MODEL_102M, 16, 1024, accumulate=4)),
            Entry(PLAIN, Shape(MODEL_102M, 64, 1024, accumulate=16)),
            Entry(PLAIN, Shape(MODEL_102M, 16, 1024, accumulate=4)),
        ),
        steps=4,
    ),
    *(alike(f"102m-{b}x{t}", Shape(MODEL_102M, b, t), *ALL) for b, t in ((1, 512), (1, 1024), (4, 512), (8, 512))),
]
SMOKE = [
    Case(
        "smoke",
        (
            *(Entry(arm, Shape(TINY, 4, 32)) for arm in (OURS, COPY, "plain", "transformers")),
            Entry(OURS, Shape(TINY, 2, 32, accumulate=2)),
        ),
        steps=30,
    )
]


def expected_bytes(entry: Entry) -> float:
    """About what an arm holds at its peak: weights, gradients and moments in FP32, activations, and logits with what is
    made of them. Fitted to measured peaks on an H200, and above all of those."""
    c, tokens = entry.shape.model, entry.shape.batch_size * entry.shape.seq_len
    activations = 2 * tokens * c.n_layers * (4 * c.d_model + 3 * c.d_ff)
    kind = next(name for name in HELD if entry.arm.startswith(name))
    of_activations, of_logits = HELD[kind]
    return (
        16 * model_figures(entry.shape)["parameters"] + of_activations * activations + of_logits * tokens * c.vocab_size
    )


def free_bytes() -> float:
    """Free memory of the card; without a card there is no limit."""
    card = card_state()
    return math.inf if card is None else (card["memory_total_mib"] - card["memory_used_mib"]) * 2**20


@dataclass(frozen=True)
class Part:
    """The entries of a case that are to be measured in one group."""

    case: Case
    entries: tuple[Entry, ...]


class Group:
    """Entries of one case or of several, resident together; no two are equal."""

    def __init__(self, parts: list[Part], settings: Settings) -> None:
        self.parts, self.settings = parts, settings
        self.steps = {entry: part.case.steps for part in parts for entry in part.entries}
        assert len(self.steps) == sum(len(part.entries) for part in parts)
        self.processes: dict[Entry, ArmProcess] = {}
        self.ready: list[Entry] = []
        self.rows: dict[Entry, dict[str, Any]] = {}
        self.no_room: list[Entry] = []

    def answer(self, entry: Entry) -> dict[str, Any] | None:
        """The arm's next answer, or None where it ended: then the reason is noted."""
        process = self.processes[entry]
        try:
            answer = process.answer()
        except ArmEnded as ended:
            self.rows[entry] = {"status": "failed", "reason": str(ended)}
        else:
            if answer.pop("event") != "oom":
                return answer
            process.stop()
            self.rows[entry] = {"status": "oom", "reason": answer["reason"]}
            if len(self.steps) > 1:
                self.no_room.append(entry)
        if entry in self.ready:
            self.ready.remove(entry)
        return None

    def may_start(self, entry: Entry, waiting: list[Entry], starting: list[Entry]) -> bool:
        """Whether what it starts after is there, a processor for it, and room beside what runs and what starts. The
        copy starts alone, so that its first step is what a warm cache is worth."""
        if not starting and not self.ready:
            return True
        first = Entry(FINDS_CACHES_OF.get(entry.arm, ""), entry.shape)
        if first in waiting or first in starting or starting and COPY in (entry.arm, starting[0].arm):
            return False
        if len(starting) >= (os.cpu_count() or 1):
            return False
        # What those that start hold already counts twice: that errs to the safe side.
        return expected_bytes(entry) < free_bytes() - sum(map(expected_bytes, starting))

    def start(self) -> None:
        """Start as many at a time as there is room for, compilers side by side."""
        waiting, starting = list(self.steps), list[Entry]()
        beside = dict.fromkeys(self.steps, 0)
        while waiting or starting:
            for entry in list(waiting):
                if self.may_start(entry, waiting, starting):
                    waiting.remove(entry)
                    starting.append(entry)
                    beside |= {other: max(beside[other], len(starting) - 1) for other in starting}
                    self.processes[entry] = ArmProcess(entry.arm, entry.shape, self.steps[entry], self.settings)
            if not starting:
                break
            entry = starting.pop(0)
            if answer := self.answer(entry):
                self.rows[entry] = {"status": "ok", "started_beside": beside[entry], "bursts": []} | answer
                self.ready.append(entry)
        self.no_room += waiting

    def take_turns(self, entries: tuple[Entry, ...]) -> None:
        """One burst of each arm a round."""
        for turn in range(self.settings.rounds):
            for i in rotation(len(entries), turn):
                entry = entries[i]
                if entry in self.ready:
                    self.processes[entry].tell("burst")
                    if burst := self.answer(entry):
                        self.rows[entry]["bursts"].append(burst)

    def run(self) -> None:
        try:
            self.start()
            for part in self.parts:
                self.take_turns(part.entries)
        finally:
            for process in self.processes.values():
                process.stop()


def run_cases(cases: list[Case], settings: Settings) -> list[dict[str, Any]]:
    """Measure cases that are resident together, in as many groups as the card's memory makes of them."""
    machine = describe(settings.device == "cuda")
    results: dict[Entry, list[dict[str, Any]]] = {entry: [] for case in cases for entry in case.entries}
    for entry in results:
        package = NEEDS.get(entry.arm)
        if package and find_spec(package) is None:
            results[entry].append({"status": "absent", "reason": f"{package} is not installed"})
    present = [Part(case, tuple(entry for entry in case.entries if not results[entry])) for case in cases]
    queue = [present]
    number = 0
    while queue:
        parts = queue.pop(0)
        group = Group(parts, settings)
        group.run()
        for part in parts:
            no_room = [entry for entry in part.entries if entry in group.no_room]
            measure = next(whole.entries[0] for whole in present if whole.case == part.case)
            if measure in no_room and len(parts) > 1:  # nothing of the case has a measure here
                no_room = list(part.entries)
            for entry in part.entries:
                if entry in group.rows and entry not in no_room:
                    results[entry].append({"group": number} | group.rows[entry])
            if no_room:
                smaller = (measure, *(entry for entry in no_room if entry != measure))
                fewer = len(smaller) < len(part.entries) or len(parts) > 1
                queue += [[Part(part.case, smaller)]] if fewer else [[Part(part.case, (entry,))] for entry in no_room]
        number += 1
    return [
        {
            "name": case.name,
            "steps": case.steps,
            "machine": machine,
            "rows": [
                {"arm": entry.arm, "shape": asdict(entry.shape)} | model_figures(entry.shape) | result
                for entry in case.entries
                for result in results[entry]
            ],
        }
        for case in cases
    ]


def add_case(output: Path, result: dict[str, Any]) -> None:
    """Writes the page with one more case, or with this one anew; another process may be adding one of its own."""
    make_parent(output)
    folder = os.open(output.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        data = read_data(output) or {"kind": "peers", "cases": []}
        cases = [old for old in data["cases"] if old["name"] != result["name"]] + [result]
        order = {case.name: place for place, case in enumerate(CASES)}
        data["cases"] = sorted(cases, key=lambda case: order.get(case["name"], len(order)))
        write_page(output, data, peers_markdown)
    finally:
        os.close(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="only these arms (the measure always)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, in FP32")
    parser.add_argument("--together", action="store_true", help="hold the arms of all chosen cases on the card at once")
    parser.add_argument("--seconds", type=float, default=0.7, help="length of a burst")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=math.inf, help="start no case after this many seconds")
    parser.add_argument("--output", type=Path, help="default: docs/peers.md")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be 2 or more to show a spread, not {options.rounds}")
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds must be more than 0, not {options.seconds:g}")
    if not (options.smoke or torch.cuda.is_available()):
        parser.error(NO_CARD)
    output = place(options.output, "docs/peers.md", options.smoke)
    try:
        make_parent(output)
        read_data(output)
    except (LlmtrainError, ValueError) as error:
        parser.error(f"--output {output}: {error}")

    chosen = SMOKE if options.smoke else [case for case in CASES if case.name in (options.case or [case.name])]
    if options.arm:
        keep = {OURS, *options.arm}
        chosen = [Case(c.name, tuple(e for e in c.entries if e.arm in keep), c.steps) for c in chosen]
    entry, times = Counter(entry for case in chosen for entry in case.entries).most_common(1)[0]
    if options.together and times > 1:
        parser.error(f"--together: {times} of these cases have {entry.arm} at {entry.shape}: name others by --case")
    failed, begin = False, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peers-caches-") as caches:
        settings = Settings(
            options.seconds / 10 if options.smoke else options.seconds,
            options.rounds,
            "cpu" if options.smoke else "cuda",
            "fp32" if options.smoke else "bf16",
            Path(caches),
        )
        for cases in [chosen] if options.together else [[case] for case in chosen]:
            names = ", ".join(case.name for case in cases)
            if time.monotonic() - begin > options.budget:
                print(f"{names}: not started, {options.budget:g} s are over", flush=True)
                continue
            for result in run_cases(cases, settings):
                if any(row["status"] == "ok" for row in result["rows"]):
                    add_case(output, result | {"seconds": settings.seconds, "precision": settings.precision})
                else:
                    failed = True
                    print(f"{result['name']}: no arm ran: {result['rows'][0]['reason']}", flush=True)
            print(f"{names}: {time.monotonic() - begin:.0f} s since the start", flush=True)
    if output.exists():
        print(output.read_text())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

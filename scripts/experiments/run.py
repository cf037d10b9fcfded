"""Does an experiment: trains its runs, evaluates, compares, and writes result.json beside experiment.toml.

    python scripts/experiments/run.py scripts/experiments/NAME [--only RUN ...] [--budget SECONDS]

See README.md beside this file. What is finished is not done again, so it may be called as often as it takes, and of
several experiments at once. Exits 1 where a command failed, after all that did not need it.
"""

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmtrain.benchmark.machine import describe
from llmtrain.report.curves import VAL_LOSS, read_curve
from llmtrain.storage.atomic import write_bytes, write_json
from llmtrain.storage.errors import InputMissing
from llmtrain.storage.journal import JsonLines
from llmtrain.storage.manifest import sha256_file

KEPT = ("config.toml", "metrics.jsonl", "status.json")
"""Of a run: all that a verdict rests on; the last says that it is finished, and so is kept last."""

VOCAB_SIZE = "16384"


class Experiment:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.plan = tomllib.loads((folder / "experiment.toml").read_text())
        self.runs_dir: Path = args.runs / folder.name
        self.gathered: Path = args.gathered / folder.name
        self.by_name = {run["name"]: run for run in self.plan["runs"]}
        self.failed: list[str] = []

    def finished(self, name: str) -> bool:
        status = self.gathered / name / "status.json"
        return status.exists() and json.loads(status.read_text())["state"] == "finished"

    def loss(self, name: str) -> float:
        """The last held-out loss of a finished run."""
        return float(read_curve(self.gathered / name, VAL_LOSS).losses[-1])

    def best(self, names: str | list[str]) -> str:
        """The run itself, or of several the one that ends lowest; "" where one is not finished."""
        names = [names] if isinstance(names, str) else names
        return min(names, key=self.loss) if all(map(self.finished, names)) else ""

    def options(self, run: dict[str, Any]) -> list[str] | None:
        """Of `llmtrain train`; None where the run is like one that is not known yet."""
        options = [] if "like" in run else list(self.plan["common"])
        if "like" in run:
            model = self.best(run["like"])
            if not model:
                return None
            options = self.options(self.by_name[model]) or []
        return options + [option.format(runs=self.runs_dir) for option in run["options"]]

    def train(self, name: str) -> None:
        """Trains a run to its end, and keeps what is needed of it."""
        options = self.options(self.by_name[name])
        if options is None or self.finished(name):
            return
        for source, step in re.findall(r"\{runs\}/(.+):(\d+)", "\n".join(self.by_name[name]["options"])):
            if not (self.runs_dir / source / "checkpoints" / f"step-{int(step):08d}").is_dir():
                self.fit(source)  # where it was gathered from its checkpoints stayed
        since = time.perf_counter()
        self.fit(name)
        facts = {"options": options, "seconds": time.perf_counter() - since, "machine": describe(on_card())}
        kept = self.gathered / name
        kept.mkdir(parents=True, exist_ok=True)
        write_json(kept / "facts.json", facts)
        for file in KEPT:
            write_bytes(kept / file, (self.runs_dir / name / file).read_bytes())

    def fit(self, name: str) -> None:
        corpus = self.args.data / "corpus"
        command = ["train", *(self.options(self.by_name[name]) or []), "--tokens", f"{corpus}.u16"]
        command += ["--val-tokens", f"{corpus}.val.u16", "--run-dir", str(self.runs_dir / name), "--resume"]
        llmtrain(*command, *self.args.override)

    def evaluate(self) -> None:
        """Held-out losses of finished runs whose checkpoints are here, of all windows."""
        for entry in self.plan.get("evaluate", []):
            for name in filter(self.finished, entry["runs"]):
                run_dir, out = self.runs_dir / name, self.gathered / name / f"evaluate{''.join(entry['options'])}.json"
                if not out.exists() and (run_dir / "checkpoints").is_dir():
                    text = llmtrain("evaluate", "--run-dir", str(run_dir), "--json", *entry["options"])
                    write_bytes(out, text.encode())

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """A command that fails in this block is told in the end: what needs it is left out."""
        try:
            yield
        except subprocess.CalledProcessError as error:
            self.failed.append(f"{what}: exit {error.returncode}")

    def compare(self) -> list[dict[str, Any]]:
        """The verdicts on what is finished."""
        said = []
        for entry in self.plan["compare"]:
            names = [self.best(entry[arm]) for arm in ("a", "a2", "b")]
            further = entry.get("replicates", [])  # of a, beside a2
            if not all(names) or not all(map(self.finished, further)):
                print(f"{entry['name']}: not all of its runs are finished")
                continue
            picture = self.folder / f"{entry['name'].replace(' ', '-')}.png"
            paths = [str(self.gathered / name) for name in names]
            options = list(entry.get("options", ["--metric", VAL_LOSS]))
            for name in further:
                options += ["--replicate", str(self.gathered / name)]
            plot = ["--plot", str(picture)] if has_matplotlib() else []
            with self.going_on(f"compare {entry['name']}"):
                found = json.loads(llmtrain("compare", *paths, *options, *plot, "--json"))
                said.append({"name": entry["name"], "arms": dict(zip(("a", "a2", "b"), names, strict=True)), **found})
                print(f"{entry['name']}: {found['verdict']}, {found['difference']:+.4f}, {found['floors']} floors")
        return said

    def result(self) -> dict[str, Any]:
        runs = {}
        for name in filter(self.finished, self.by_name):
            kept = self.gathered / name
            curve = read_curve(kept, VAL_LOSS)
            evaluations = {
                path.stem.removeprefix("evaluate"): [json.loads(line) for line in path.read_text().splitlines()]
                for path in sorted(kept.glob("evaluate*.json"))
            }
            runs[name] = {
                **json.loads((kept / "facts.json").read_text()),
                "val_loss": {"step": curve.steps.tolist(), "tokens": curve.tokens.tolist(),
                             "seconds": curve.seconds.tolist(), "loss": curve.losses.tolist()},
                "events": [x["text"] for x in JsonLines.read(kept / "metrics.jsonl") if x.get("event") == "note"],
                "evaluations": evaluations,
            }  # fmt: skip
        return {
            "question": self.plan["question"],
            "missing": [name for name in self.by_name if name not in runs],
            "corpus": json.loads((self.args.data / "corpus.json").read_text()),
            "runs": runs,
            "comparisons": self.compare(),
        }


def on_card() -> bool:
    import torch

    return torch.cuda.is_available()


def has_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def llmtrain(*command: str) -> str:
    """The output of a command, which must succeed."""
    print("llmtrain", *command, flush=True)
    # Where the output is not read as data, it is for whoever looks.
    out = subprocess.PIPE if "--json" in command else None
    done = subprocess.run([sys.executable, "-m", "llmtrain", *command], stdout=out, text=True, check=True)
    return done.stdout or ""


def origin(tokenizer: Path) -> Path:
    return tokenizer.with_suffix(".origin.json")


def of_tokenizer(tokenizer: Path, text_sha256: str) -> dict[str, str]:
    """What is recorded beside a tokenizer; its own hash too, as a record may be left of one that was overwritten."""
    return {"text_sha256": text_sha256, "vocab_size": VOCAB_SIZE, "tokenizer_sha256": sha256_file(tokenizer)}


def made_from(tokenizer: Path, text_sha256: str) -> bool:
    """Whether the tokenizer is there, and of this very text."""
    try:
        return json.loads(origin(tokenizer).read_text()) == of_tokenizer(tokenizer, text_sha256)
    except (OSError, ValueError, InputMissing):
        return False


def prepare(data: Path) -> None:
    """Tokenizes the text of `corpus.py`, once, and by the tokenizer that is there where it is of that text; another
    experiment that is begun meanwhile waits for it."""
    text, tokenizer, corpus = data / "text.jsonl.gz", data / "tokenizer.json", data / "corpus.u16"
    if not text.exists() and not (data / "corpus.json").exists():
        raise SystemExit(f"{text} is not there: scripts/experiments/corpus.py makes it")
    folder = os.open(data, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if (data / "corpus.json").exists():
            return
        text_sha256 = sha256_file(text)
        if not made_from(tokenizer, text_sha256):
            llmtrain("train-tokenizer", "--input", str(text), "--output", str(tokenizer), "--vocab-size", VOCAB_SIZE)
            write_json(origin(tokenizer), of_tokenizer(tokenizer, text_sha256))
        llmtrain(
            "tokenize-corpus", "--input", str(text), "--tokenizer", str(tokenizer), "--output", str(corpus),
            "--holdout", "0.02", "--workers", str(len(os.sched_getaffinity(0))),
        )  # fmt: skip
        facts: dict[str, Any] = {"text_sha256": text_sha256}
        for name in ("corpus.u16", "corpus.val.u16"):
            manifest = json.loads((data / f"{name}.json").read_text())
            facts[name] = {key: manifest[key] for key in ("tokens", "documents", "vocab_size", "engine")}
        write_json(data / "corpus.json", facts)
    finally:
        os.close(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", type=Path, help="folder with an experiment.toml")
    parser.add_argument("--only", action="append", help="train this run alone; repeat it for several")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no run is started")
    parser.add_argument("--data", type=Path, default=Path("data/experiments"), help="folder of the corpus")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where run directories are made")
    parser.add_argument("--gathered", type=Path, default=Path("runs/gathered"), help="what is kept of finished runs")
    parser.add_argument("--output", type=Path, help="default: result.json in the experiment's folder")
    parser.add_argument("--override", action="append", default=[], help="one more word of each `train`, for a trial")
    args = parser.parse_args()
    since = time.perf_counter()
    prepare(args.data)
    experiment = Experiment(args.experiment, args)
    output = args.output or args.experiment / "result.json"
    for name in args.only or experiment.by_name:
        if time.perf_counter() - since > args.budget:
            print(f"the budget is spent before {name}")
            break
        if not experiment.finished(name):
            with experiment.going_on(name):
                experiment.train(name)
                experiment.evaluate()
            write_json(output, experiment.result())  # so that what ends this process costs no run
    with experiment.going_on("evaluate"):
        experiment.evaluate()
    write_json(output, experiment.result())
    failed = list(dict.fromkeys(experiment.failed))
    print(f"FAILED: {'; '.join(failed)}" if failed else "nothing failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

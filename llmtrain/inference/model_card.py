"""What is written beside exported weights: README.md, the run's evaluations and a picture of its losses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from llmtrain.corpus.order import parse_sources
from llmtrain.model.config import ModelConfig
from llmtrain.storage import atomic
from llmtrain.storage.journal import JsonLines, is_number

EVALUATION, CURVES = "evaluation.json", "curves.svg"


@dataclass(frozen=True)
class Card:
    """Of a checkpoint, from its state.json and from what the run said on its way there."""

    state: dict[str, Any]
    parameters: int
    dtype: str
    """Of the exported matrices."""
    train: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, loss) of the train lines up to the checkpoint's step."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    """The eval lines up to it, as they stand in metrics.jsonl."""

    @classmethod
    def of(cls, state: dict[str, Any], parameters: int, dtype: str, metrics: Path) -> "Card":
        """`metrics`: the run's metrics.jsonl, which may be missing."""
        lines = list(JsonLines.read(metrics)) if metrics.exists() else []
        lines = [line for line in lines if all(type(line.get(name)) is int for name in ("step", "tokens"))]
        lines = [line for line in lines if line["step"] <= state["step"]]
        # A step that was skipped has no loss.
        trained = [line for line in lines if line.get("kind") == "train" and is_number(line.get("lm_loss"))]
        train = [(line["tokens"], line["lm_loss"]) for line in trained]
        return cls(state, parameters, dtype, train, [line for line in lines if line.get("kind") == "eval"])

    def write(self, folder: Path, title: str, form: str) -> None:
        """Writes what there is to say into `folder`. Raises StorageFailure."""
        if self.evals:
            atomic.write_json(folder / EVALUATION, self.evals)
        if len(self.train) > 1:
            atomic.write_bytes(folder / CURVES, curves(self.train, self.evals).encode(errors="backslashreplace"))
        atomic.write_bytes(folder / "README.md", self.text(title, form).encode(errors="backslashreplace"))

    def text(self, title: str, form: str) -> str:
        """README.md, with the front matter that model hubs read."""
        state, config = self.state, self.state["config"]
        model = config["model"]
        head = ["---", "library_name: " + ("transformers" if form == "hf" else "gguf"), "pipeline_tag: text-generation"]
        head += ["tags:", "- llmtrain", *(["- gguf"] if form == "gguf" else []), "---"]
        about = (
            f"A language model of {self.parameters:,} parameters, trained with llmtrain "
            f"{state.get('environment', {}).get('llmtrain', '')} on {state['tokens']:,} tokens ({state['step']:,} "
            f"steps). Weights are {self.dtype}. It continues text; nothing more was asked of it here."
        )
        imported = state.get("imported")
        if imported:
            about = (
                f"The {self.parameters:,} parameters of {imported['name']}, as llmtrain took them over: nothing was "
                f"trained. Weights are {self.dtype}."
            )
        parts = ["\n".join(head), f"# {title}", about, _use(title, form), "## Shape", _table(_shape(model))]
        if state.get("corpus") and not imported:
            parts += ["## Data", *_data(state)]
        if "optimizer" in config:
            parts += ["## Recipe", _table(_recipe(state))]
        if len(self.train) > 1:
            tokens, loss = self.train[-1]
            last = f"At {tokens:,} tokens the training loss was {loss:.4f}."
            parts += ["## Curves", f"![Loss by tokens]({CURVES})", last]
        if self.evals:
            all_of_them = f"All evaluations of the run are in [{EVALUATION}]({EVALUATION})."
            parts += ["## Evaluation", _evaluation(self.evals), all_of_them]
        parts += ["## Licence", "Not stated yet. Say it here before the model is given to others."]
        return "\n\n".join(parts) + "\n"


def _use(title: str, form: str) -> str:
    if form == "gguf":
        return f"    llama-cli -m {title}.gguf -p 'Once upon a time' -n 128"
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{title}")
model = AutoModelForCausalLM.from_pretrained("{title}")
ids = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids)[0]))
```"""


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _shape(model: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("layers", model["n_layers"]),
        ("width", model["d_model"]),
        ("heads (query / key and value)", f"{model['n_heads']} / {model['n_kv_heads']} of {model['head_dim']}"),
        ("feed-forward", ModelConfig(**model).feed_forward_words()),
        ("vocabulary", f"{model['vocab_size']:,}"),
        ("longest context, in tokens", f"{model['max_seq_len']:,}"),
        ("tied head", "yes" if model["tie_embeddings"] else "no"),
    ]


def _data(state: dict[str, Any]) -> list[str]:
    rows = ["| token file | tokens | weight | sha256 of its content |", "|---|---:|---:|---|"]
    for spec, one in zip(state["config"]["data"]["tokens"], state["corpus"], strict=False):
        name = parse_sources([spec])[0].name
        rows.append(f"| {name} | {one['tokens']:,} | {one['weight']:g} | `{one['sha256'][:16]}` |")
    data = state["config"]["data"]
    made = f"Samples of {data['seq_len']:,} tokens, packing `{data.get('packing', 'concat')}`; "
    made += "attention stays within documents." if data.get("document_mask") else "attention crosses documents."
    return ["\n".join(rows), made]


def _recipe(state: dict[str, Any]) -> list[tuple[str, Any]]:
    config, environment = state["config"], state.get("environment", {})
    rows: list[tuple[str, Any]] = []
    for section in ("optimizer", "schedule"):
        rows += [(name, value) for name, value in config[section].items() if value not in ("", None)]
    unused = {
        "muon_lr": config["optimizer"].get("optimizer") != "muon",
        "muon_momentum": config["optimizer"].get("optimizer") != "muon",
        "decay_share": config["schedule"].get("schedule") != "wsd",
        "epochs": config["schedule"].get("total_steps") is not None,
    }
    rows = [(name, value) for name, value in rows if not unused.get(name)]
    run = config["run"]
    keep = ("batch_size", "accumulate", "global_batch_size", "precision", "seed")
    rows += [(name, run[name]) for name in keep if name in run]
    return rows + [(name, environment[name]) for name in ("device", "torch", "cuda") if environment.get(name)]


def _evaluation(evals: Sequence[dict[str, Any]]) -> str:
    newest = {str(line.get("source")): line for line in evals}
    names = [name for name in FIGURES if any(is_number(line.get(name)) for line in newest.values())]
    rows = [f"| source | step | {' | '.join(names)} |", "|---|" + "---:|" * (len(names) + 1)]
    for source, line in newest.items():
        figures = [f"{line[name]:.4g}" if is_number(line.get(name)) else "" for name in names]
        rows.append(f"| {source} | {line['step']:,} | {' | '.join(figures)} |")
    return "\n".join(rows)


FIGURES = (
    "val_loss", "ppl", "bits_per_byte", "accuracy", "accuracy_stderr", "accuracy_norm", "accuracy_norm_stderr"
)  # fmt: skip
"""Figures of an eval line that the card shows."""


def curves(train: Sequence[tuple[int, float]], evals: Sequence[dict[str, Any]]) -> str:
    """An SVG of losses by tokens: of the training, and of each held-out source. Readable on light and dark ground."""
    held_out: dict[str, list[tuple[int, float]]] = {}
    for line in evals:
        if is_number(line.get("val_loss")):
            held_out.setdefault(str(line.get("source")), []).append((line["tokens"], line["val_loss"]))
    lines = {"training": _thinned(train), **held_out}
    width, height, left, bottom = 720, 360, 56, 36
    points = [point for series in lines.values() for point in series]
    most = max(tokens for tokens, _ in points) or 1
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    high = max(high, low + 1e-6)

    def place(tokens: float, loss: float) -> str:
        x = left + (width - left - 12) * tokens / most
        return f"{x:.1f},{12 + (height - bottom - 12) * (high - loss) / (high - low):.1f}"

    colours = ("#8a8a8a", "#d1495b", "#2e86ab", "#3a7d44", "#b8860b", "#7b4fa3")
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#808080">'
    ]
    for i in range(5):
        loss, tokens = low + (high - low) * i / 4, most * i / 4
        x, y = place(tokens, loss).split(",")
        out.append(f'<line x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}" stroke="#808080" stroke-opacity="0.3"/>')
        out.append(f'<text x="{left - 6}" y="{y}" text-anchor="end" dominant-baseline="middle">{loss:.3g}</text>')
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        out.append(f'<text x="{x}" y="{height - 14}" text-anchor="{anchor}">{_short(tokens)}</text>')
    for i, (name, series) in enumerate(lines.items()):
        colour = colours[i % len(colours)]
        path = " ".join(place(*point) for point in series)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        out.append(f'<text x="{width - 20}" y="{28 + 16 * i}" text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _thinned(points: Sequence[tuple[int, float]], most: int = 500) -> list[tuple[int, float]]:
    """At most `most` of them, each the mean of those that it stands for."""
    size = -(-len(points) // most)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(run[-1][0], sum(loss for _, loss in run) / len(run)) for run in runs]


def _short(tokens: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.3g}{name}"
    return f"{tokens:.0f}"

"""Vocabularies of several sizes on one mix of text: bytes a token, share of the embedding, text trained on a second.

    python scripts/bench/vocabularies.py --input code:0.7 --input web:0.3 --output docs/vocabularies.md
    python scripts/bench/vocabularies.py --text docs/data/vocabularies.json --config configs/102m.toml \\
        --output docs/vocabularies.md

Each vocabulary is learnt by `train-tokenizer` from the mix and measured on documents of the same mix that it was not
learnt from. A larger vocabulary makes fewer tokens of a text and each token dearer, so the rate to compare is bytes of
text a second: tokens a second of `llmtrain bench step`, times bytes a token. With `--text` the bytes a token of an
earlier run are taken, so that a card needs no corpus; without `--config` no step is measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.tables import percent, read_data, table, write_page
from llmtrain.corpus import tokenizer
from llmtrain.corpus.config import TokenizerConfig
from llmtrain.corpus.documents import falls_within
from llmtrain.corpus.reading import read_documents
from llmtrain.corpus.tokenizer_training import parts_of, pieces_of, train_tokenizer
from llmtrain.model.config import ModelConfig
from llmtrain.model.flops import parameter_counts


def held_out_texts(config: TokenizerConfig, measure_bytes: int) -> dict[str, list[str]]:
    """Texts of each input, in the proportions of the mix: the documents, and parts of long ones, that are at the other
    end of the order in which they are chosen to be learnt from."""
    found = {}
    for part in parts_of(config):
        share = part.share * measure_bytes / config.sample_bytes
        if part.share + share > 1:
            sys.exit(f"{part.name}: the sample leaves nothing of it to measure on: lower --sample-bytes")
        texts = []
        for document in read_documents(part.files, config.reading):
            for _, piece in pieces_of(document.data):
                if not falls_within(piece, 1 - share):
                    texts.append(piece.decode(errors="ignore"))
        found[part.name or "all inputs"] = texts
    return found


def measure_text(args: argparse.Namespace, folder: Path) -> dict:
    """Bytes a token of each vocabulary, by input and of the mix."""
    config = TokenizerConfig(
        tuple(args.input), sample_bytes=args.sample_bytes, document=args.document, text_field=args.text_field,
        on_bad="skip",
    )  # fmt: skip
    texts = held_out_texts(config, args.measure_bytes)
    sizes = {name: sum(len(text.encode()) for text in some) for name, some in texts.items()}
    rows = []
    for vocab_size in args.vocab_size:
        file = folder / f"{vocab_size}.json"
        train_tokenizer(replace(config, vocab_size=vocab_size, output=file))
        library = tokenizer.load(file)
        # Each document ends with an EOS, which is a token too.
        tokens = {
            name: sum(len(ids) + 1 for i in range(0, len(some), 64) for ids in library.encode_batch(some[i : i + 64]))
            for name, some in texts.items()
        }
        rows.append({
            "vocab_size": vocab_size, "found": library.vocab_size,
            "bytes_per_token": {name: sizes[name] / tokens[name] for name in texts if tokens[name]},
            "bytes_per_token_of_mix": sum(sizes.values()) / sum(tokens.values()),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return {"inputs": args.input, "sample_bytes": args.sample_bytes, "measured_bytes": sizes, "vocabularies": rows}


def measure_steps(args: argparse.Namespace, vocab_sizes: list[int], folder: Path) -> list[dict]:
    """The step of each configuration with each vocabulary, taking turns."""
    rows = []
    for preset in args.config:
        for vocab_size in vocab_sizes:
            output = folder / "step.md"
            shape = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("batch-size", "seq-len")
                     if getattr(args, name.replace("-", "_"))]  # fmt: skip
            subprocess.run(
                [sys.executable, "-m", "llmtrain", "bench", "step", "--config", preset, "--accumulate", "1",
                 "--vocab-size", str(vocab_size), "--seconds", str(args.seconds), *shape, "--output", str(output)],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            step = read_data(output)
            rows.append({"config": preset, "vocab_size": vocab_size, **{k: step[k] for k in ("tok_per_s", "spread")}})
            rows[-1]["shape"] = step["shape"]
            print(rows[-1], flush=True)
    return rows


def model_of(preset: str, vocab_size: int) -> dict:
    """Parameters of a configuration with a vocabulary, and the share of them in embedding and head."""
    model = tomllib.loads(Path(preset).read_text())["model"] | {"vocab_size": vocab_size}
    config = ModelConfig(**model)
    embedding = (1 if config.tie_embeddings else 2) * vocab_size * config.d_model
    total = parameter_counts(config).total
    return {"parameters": total, "embedding_share": embedding / total}


def markdown(result: dict, source: str) -> str:
    """docs/vocabularies.md."""
    names = list(result["text"]["measured_bytes"])
    text = [
        [f"{row['vocab_size']:,}", *(f"{row['bytes_per_token'].get(name, float('nan')):.3f}" for name in names),
         f"{row['bytes_per_token_of_mix']:.3f}"]
        for row in result["text"]["vocabularies"]
    ]  # fmt: skip
    of_mix = {row["vocab_size"]: row["bytes_per_token_of_mix"] for row in result["text"]["vocabularies"]}
    steps = {(row["config"], row["vocab_size"]): row["tok_per_s"] for row in result["steps"]}
    models = []
    for row in result["models"]:
        rate = steps.get((row["config"], row["vocab_size"]))
        models.append([
            row["config"], f"{row['vocab_size']:,}", f"{row['parameters'] / 1e6:,.1f} M",
            percent(row["embedding_share"]),
            "not measured" if rate is None else f"{rate:,.0f}",
            "not measured" if rate is None else f"{rate * of_mix[row['vocab_size']] / 1e6:.3f}",
        ])  # fmt: skip
    lines = [
        "# Vocabularies", "",
        f"Learnt from {result['text']['sample_bytes'] / 1e6:,.0f} MB of {', '.join(result['text']['inputs'])}; bytes a "
        "token, on other documents of the same mix "
        f"({sum(result['text']['measured_bytes'].values()) / 1e6:,.1f} MB).", "",
        *table(["vocabulary", *names, "mix"], text), "",
        f"What that is worth to a model. {headline(result['machine'])}", "",
        *table(["model", "vocabulary", "parameters", "in the embedding", "tokens/s", "MB of text/s"], models), "",
        f"Made by `scripts/bench/vocabularies.py` from [{source}]({source}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", action="append", default=[], metavar="PATH[:WEIGHT]", help="as of train-tokenizer")
    parser.add_argument("--text", type=Path, metavar="JSON", help="bytes a token of an earlier run, instead of --input")
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[16384, 32000])
    parser.add_argument("--sample-bytes", type=int, default=200_000_000, help="text to learn from")
    parser.add_argument("--measure-bytes", type=int, default=20_000_000, help="text to measure on")
    parser.add_argument("--document", default="file")
    parser.add_argument("--text-field")
    parser.add_argument("--model", action="append", metavar="FILE", help="configuration whose parameters to count")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="configuration to time a step of")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--seconds", type=float, default=6, help="length of a burst of `bench step`")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if bool(args.input) == bool(args.text):
        parser.error("give --input, or --text")
    machine = describe(bool(args.config))
    with tempfile.TemporaryDirectory() as name:
        text = json.loads(args.text.read_text())["text"] if args.text else measure_text(args, Path(name))
        vocab_sizes = [row["vocab_size"] for row in text["vocabularies"]]
        steps = measure_steps(args, vocab_sizes, Path(name))
    presets = list(dict.fromkeys([*(args.model or ["configs/31m.toml", "configs/102m.toml"]), *args.config]))
    models = [{"config": preset, "vocab_size": n, **model_of(preset, n)} for preset in presets for n in vocab_sizes]
    result = {"text": text, "models": models, "steps": steps, "machine": machine}
    if args.output:
        write_page(args.output, result, markdown)


if __name__ == "__main__":
    main()

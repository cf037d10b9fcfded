"""How fast `tokenize-corpus` is, reading, hashing and writing included, beside the bare engines on the same text.

    python scripts/bench/tokenize.py --text DIR [--tokenizer FILE] [--rounds 3] [--share 16] [--output docs/tokenize.md]

Each arm is a process of its own on one core (the last on two), the arms in turn, round after round; the best round
counts. `tokenizers` and tiktoken get every `--share`-th file, because they need minutes for all (1: all of them); their
speed does not depend on how much they get. Where other programs use the cores, seconds of CPU are what compares: a
second of the clock is only what was left over. Text that is not UTF-8 is left out. Without `--tokenizer` one of 50,257
tokens is learnt from the text.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.benchmark import machine
from llmtrain.corpus.engine import utf8_error
from llmtrain.corpus.inputs import find_inputs
from llmtrain.corpus.tokenizer import Tokenizer, load
from llmtrain.storage.atomic import write_bytes, write_json

BLOCK = 4 << 20
COMMAND = [sys.executable, "-m", "llmtrain"]
ARMS = ("tokenizers", "tiktoken", "gigatoken", "tokenize-corpus", "tokenize-corpus 2")


def read(text: str, share: int) -> list[list[bytes]]:
    """The files, in blocks of about BLOCK bytes."""
    blocks: list[list[bytes]] = [[]]
    size = 0
    for one in find_inputs([text])[::share]:
        data = Path(one.name).read_bytes().removeprefix(b"\xef\xbb\xbf")
        if utf8_error(data) is None:
            blocks[-1].append(data)
            size += len(data)
        if size > BLOCK:
            blocks.append([])
            size = 0
    return blocks


def bare(arm: str, tokenizer: Tokenizer) -> Callable[[list[bytes]], int]:
    """Encodes a block and gives the number of ids."""
    if arm == "gigatoken":
        from gigatoken.gigatoken_rs import load_hf_json

        fast = load_hf_json(tokenizer.plain)
        return lambda block: len(fast.encode_batch(block, parallel=False).layout.content)
    if arm == "tiktoken":
        import tiktoken

        letters = byte_of_letter()
        ranks = {bytes(letters[letter] for letter in token): number for token, number in tokenizer.vocab.items()
                 if number not in tokenizer.added_ids}  # fmt: skip
        pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        encoding = tiktoken.Encoding("bench", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        return lambda block: sum(len(encoding.encode_ordinary(data.decode())) for data in block)
    library = tokenizer._library
    return lambda block: sum(
        len(one.ids) for one in library.encode_batch_fast([data.decode() for data in block], add_special_tokens=False)
    )


def byte_of_letter() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def run_arm(arm: str, text: str, tokenizer: str, share: int) -> None:
    """The bare engine's process: prints what it took, without the reading."""
    blocks = read(text, share)
    encode = bare(arm, load(tokenizer))
    encode([b"a few words to begin with"])
    wall, cpu = time.perf_counter(), time.process_time()
    ids = sum(map(encode, blocks))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        json.dumps({"bytes": sum(len(one) for block in blocks for one in block), "ids": ids, "s": wall, "cpu_s": cpu})
    )


def measure(arm: str, text: str, tokenizer: str, share: int, folder: Path, cores: list[int]) -> dict[str, Any]:
    if arm.startswith("tokenize-corpus"):
        command = [*COMMAND, "tokenize-corpus", "--tokenizer", tokenizer, "--input", text, "--on-bad", "skip"]
        command += ["--engine", "gigatoken", "--output", str(folder / "bench.u16")]
        cores = cores[:2] if arm.endswith(" 2") else cores[:1]
        for path in folder.glob("bench.*"):  # removing an earlier output is no part of the command's work
            path.unlink()
    else:
        if arm == "gigatoken":
            share = 1
        command = [
            sys.executable,
            __file__,
            "--arm",
            arm,
            "--text",
            text,
            "--tokenizer",
            tokenizer,
            "--share",
            str(share),
        ]
        cores = cores[:1]
    load = os.getloadavg()[0]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    assert process.stdout
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arm} ended with {process.returncode}")
    took = {"s": time.perf_counter() - begin, "cpu_s": usage.ru_utime + usage.ru_stime}
    if arm.startswith("tokenize-corpus"):
        manifests = [json.loads((folder / f"bench{held}.u16.json").read_text()) for held in ("", ".val")]
        took |= {
            "bytes": sum(one["bytes"] for one in manifests[0]["inputs"]),
            "ids": sum(one["tokens"] - one["documents"] for one in manifests),
            "rss_mib": usage.ru_maxrss / 1024,
        }
    else:
        took = json.loads(said)
    return took | {
        "load": load,
        "mb_per_s": took["bytes"] / 1e6 / took["s"],
        "mb_per_cpu_s": took["bytes"] / 1e6 / took["cpu_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("docs/tokenize.md"))
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm, options.text, options.tokenizer, options.share)
        return
    data = options.output.parent / "data" / "tokenize.json"
    data.parent.mkdir(parents=True, exist_ok=True)  # before minutes of work are for nothing
    cores = sorted(os.sched_getaffinity(0))
    arms = ARMS if len(cores) > 1 else ARMS[:-1]
    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = options.tokenizer or str(folder / "tokenizer.json")
        if not options.tokenizer:
            subprocess.run(
                [*COMMAND, "train-tokenizer", "--input", options.text, "--vocab-size", "50257", "--on-bad", "skip",
                 "--sample-bytes", "60000000", "--output", tokenizer], check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        described = machine.describe(on_card=False)
        for _ in range(options.rounds):
            for arm in arms:
                rounds[arm].append(measure(arm, options.text, tokenizer, options.share, folder, cores))
                print(arm, {name: round(value, 2) for name, value in rounds[arm][-1].items()}, flush=True)
        vocabulary = load(tokenizer).vocab_size
    versions = {name: machine.installed(name) for name in ("tokenizers", "gigatoken", "tiktoken")}
    speeds = ("mb_per_s", "mb_per_cpu_s")
    result = {
        "text": Path(options.text).name,
        "vocab_size": vocabulary,
        "share": options.share,
        "rounds": rounds,
        "best": {arm: {name: max(one[name] for one in rounds[arm]) for name in speeds} for arm in arms},
        "engines": versions,
        "machine": described,
    }
    data = options.output.parent / "data" / "tokenize.json"
    write_json(data, result)
    write_bytes(options.output, table(result).encode())


def table(result: dict[str, Any]) -> str:
    best, rounds = result["best"], result["rounds"]
    loads = [one["load"] for arm in rounds.values() for one in arm]
    corpus = rounds["tokenize-corpus"][0]
    lines = [
        "# Text to ids",
        "",
        f"{result['text']}, {corpus['bytes'] / 1e6:,.0f} MB, byte-level BPE of {result['vocab_size']:,} tokens with "
        f"GPT-2's splitting. MB of text a second, best of {len(rounds['tokenizers'])} rounds in turn. "
        "`tokenize-corpus` is the whole command: start, search for files, probe, reading, encoding, hashing, writing. "
        "The engines alone get text that is in memory; "
        f"`tokenizers` and tiktoken every {result['share']}th file of it. "
        f"{machine.headline(result['machine'])} "
        f"{', '.join(f'{name} {version}' for name, version in result['engines'].items())}.",
        "",
        f"Load average while it ran: {min(loads):.1f} to {max(loads):.1f} on {result['machine']['cores']} cores. Above "
        "the number of cores others take time from every arm: then MB a second of CPU compares, not of the clock.",
        "",
        "| | MB/s of the clock | MB a second of CPU | times `tokenizers` (CPU) |",
        "| --- | ---: | ---: | ---: |",
    ]
    slow = best["tokenizers"]["mb_per_cpu_s"]
    names = {
        "tokenizers": "`tokenizers` encode_batch_fast, one core",
        "tiktoken": "tiktoken encode_ordinary, one core",
        "gigatoken": "gigatoken encode_batch, one core",
        "tokenize-corpus": "`tokenize-corpus`, gigatoken, one core",
        "tokenize-corpus 2": "`tokenize-corpus`, gigatoken, two cores",
    }
    for arm, speed in best.items():
        row = f"{speed['mb_per_s']:,.1f} | {speed['mb_per_cpu_s']:,.1f} | {speed['mb_per_cpu_s'] / slow:,.1f}"
        lines.append(f"| {names[arm]} | {row} |")
    bare = best["gigatoken"]["mb_per_cpu_s"] / best["tokenize-corpus"]["mb_per_cpu_s"]
    lines += ["", f"The whole command takes {bare:.2f} times the bare engine's CPU on one core."]
    if "tokenize-corpus 2" in best:
        clock = best["tokenize-corpus 2"]["mb_per_s"] / best["tokenize-corpus"]["mb_per_s"]
        lines[-1] += f" Two cores are {clock:.2f} times one by the clock"
        cpu = 2 * best["tokenize-corpus 2"]["mb_per_cpu_s"] / best["tokenize-corpus"]["mb_per_cpu_s"]
        lines[-1] += f"; by CPU alone, were both always busy, {cpu:.2f} times."
    ids = {arm: rounds[arm][0]["ids"] for arm in ("gigatoken", "tokenize-corpus")}
    shared = {arm: rounds[arm][0]["ids"] for arm in ("tokenizers", "tiktoken")}
    same = len(set(ids.values())) == 1 and len(set(shared.values())) == 1
    lines += [
        "",
        f"All gave the same number of ids{'' if same else ' (NOT SO: ' + str(ids | shared) + ')'}.",
        "",
        "Made by `scripts/bench/tokenize.py` from [data/tokenize.json](data/tokenize.json).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""How fast batches come, what a corpus of 50 billion tokens costs a run, and whether a cold one is read ahead.

    python scripts/bench/batches.py [--folder data/bench] [--tokens 1000000000] [--output docs/batches.md]

Four measurements, on files that are made in the folder and stay there (2 bytes a token; the large corpora are sparse,
so take no room but their index of documents, 440 MB, and their packed windows, 1.4 GB):

rate    tokens a second out of a BatchStream, its file in the page cache, the process held to one core
scale   start-up to the first batch, and the peak of memory, on 50 million and on 50 billion tokens
pack    packing 50 billion tokens into windows: seconds and memory
cold    a step of a fixed rate, and one that takes no time, on a file whose pages were dropped: how long it waits, with
        reading ahead and without

Document lengths are log-normal with a mean of 900 tokens, ids uniform: neither matters to what is measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from llmtrain.benchmark.machine import describe, headline
from llmtrain.benchmark.tables import table, write_page
from llmtrain.corpus import packing
from llmtrain.corpus.order import SampleOrder, Source
from llmtrain.corpus.token_file import TokenFile
from llmtrain.corpus.token_manifest import BLOCK_BYTES, BlockHashes, docs_path, manifest_path, write_manifest

VOCAB = 16384
BATCH_TOKENS = 16384


def document_ends(tokens: int, seed: int) -> np.ndarray:
    """Ends of documents that fill `tokens` exactly."""
    lengths = np.random.default_rng(seed).lognormal(6.2, 1.1, tokens // 600).astype(np.int64) + 2
    ends = np.cumsum(lengths)
    return np.append(ends[ends < tokens], tokens)


def finish(path: Path, tokens: int, ends: np.ndarray, sha256: list[str]) -> None:
    ends.astype("<u8").tofile(docs_path(path))
    write_manifest(
        path, tokens=tokens, documents=len(ends), max_id=VOCAB - 1, vocab_size=VOCAB, eos_id=1, sha256=sha256,
        tokenizer={"file": "none", "sha256": "0" * 64}, engine={"name": "none", "version": "0"}, inputs=[],
    )  # fmt: skip


def real_file(path: Path, tokens: int) -> Path:
    """A token file with ids on the disk."""
    if not manifest_path(path).exists():
        ends, hashes, random = document_ends(tokens, 0), BlockHashes(), np.random.default_rng(1)
        with open(path, "wb") as file:
            for begin in range(0, tokens, 1 << 26):
                end = min(begin + (1 << 26), tokens)
                ids = random.integers(2, VOCAB, end - begin, dtype=np.uint16)
                last = ends[np.searchsorted(ends, begin, "right") : np.searchsorted(ends, end, "right")]
                ids[last - 1 - begin] = 1
                hashes.update(ids)
                file.write(ids.data)
            os.fsync(file.fileno())
        finish(path, tokens, ends, hashes.hexdigests())
    return path


def sparse_file(path: Path, tokens: int) -> Path:
    """A token file all of whose ids are 0 and take no room."""
    if not manifest_path(path).exists():
        with open(path, "wb") as file:
            file.truncate(2 * tokens)
        hashes = BlockHashes()
        hashes.update(bytes(BLOCK_BYTES))
        blocks = -(-2 * tokens // BLOCK_BYTES)
        finish(path, tokens, document_ends(tokens, 0), hashes.hexdigests() * blocks)
    return path


def order_of(path: Path, seq_len: int, packed: bool) -> SampleOrder:
    file = TokenFile.open(path)
    cut = packing.open_or_build(file, seq_len) if packed else None
    return SampleOrder([Source("corpus", file, 1.0, cut=cut)], seq_len, seed=0)


def stream_of(order: SampleOrder, tokens: int, mask: bool = False):
    """A BatchStream of that many tokens on the CPU."""
    from llmtrain.corpus.batch_stream import BatchStream

    batch_size = max(1, BATCH_TOKENS // order.seq_len)
    return BatchStream(
        order, start=0, stop=tokens // order.seq_len, sequences_per_step=batch_size, batch_size=batch_size,
        device="cpu", document_mask=mask,
    )  # fmt: skip


def memory_mib() -> dict[str, float]:
    """Resident memory of this process: its peak and, of what is there now, its own and that of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith(" kB")}
    return {"peak": found["VmHWM"], "own": found["RssAnon"], "files": found["RssFile"]}


# What runs in a process of its own: `--child NAME JSON` prints one JSON.


def child_rate(path: str, seq_len: int, packed: bool, mask: bool, tokens: int) -> dict:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    import torch

    torch.set_num_threads(1)
    order = order_of(Path(path), seq_len, packed)
    with open(path, "rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass
    with stream_of(order, tokens, mask) as stream:
        next(stream)
        cpu, wall, taken = time.process_time(), time.perf_counter(), 0
        for batch in stream:
            taken += batch.sequences * seq_len
        return {
            "tokens_per_s": taken / (time.perf_counter() - wall),
            "tokens_per_cpu_s": taken / (time.process_time() - cpu),
        }


def child_scale(path: str, packing: str, seq_len: int, batches: int) -> dict:
    import torch  # before the clock: it is the same for every corpus

    from llmtrain.model.config import ModelConfig
    from llmtrain.training.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
    from llmtrain.training.devices import pick_attention
    from llmtrain.training.fit import room
    from llmtrain.training.plan import make_plan
    from llmtrain.training.plan_words import describe as plan_lines
    from llmtrain.training.run_corpus import open_corpus

    before = memory_mib()
    began = time.perf_counter()
    device = torch.device("cpu")
    config = TrainConfig(
        ModelConfig(), DataConfig(tokens=(path,), seq_len=seq_len, packing=packing, document_mask=True),
        OptimizerConfig(), ScheduleConfig(), RunConfig(device="cpu", batch_size=16, run_dir=Path(path).parent),
    )  # fmt: skip
    config, order, _ = open_corpus(config)
    attention = pick_attention("auto", "bf16", config.model, seq_len, device, True)
    plan = make_plan(config, order, device, "cpu", attention, room(device))
    lines = plan_lines(config, plan, order, "cpu", 0)
    with stream_of(order, batches * BATCH_TOKENS, True) as stream:
        next(stream)
        first = time.perf_counter() - began
        count = 1 + sum(1 for _ in stream)
    found = memory_mib()
    return {
        "windows": int(order.windows[0]),
        "plan": next(line for line in lines if line.startswith("run")),
        "first_batch_s": first,
        "batches": count,
        "batches_s": time.perf_counter() - began,
        "grew_mib": {name: found[name] - before[name] for name in found},
        "peak_mib": found["peak"],
    }


def child_pack(path: str, seq_len: int) -> dict:
    before, began = memory_mib(), time.perf_counter()
    file = TokenFile.open(path)
    made = packing.build(file, seq_len)
    header = packing.open_packed(file, seq_len).header
    return {
        "seconds": time.perf_counter() - began,
        "grew_mib": memory_mib()["peak"] - before["peak"],
        "index_bytes": made.stat().st_size,
        **{name: header[name] for name in ("tokens", "documents", "windows", "pieces", "split", "padding", "seq_len")},
    }


def child_cold(path: str, seq_len: int, packed: bool, ahead: bool, tokens: int, rate: float) -> dict:
    import torch  # noqa: F401

    for name in (Path(path), docs_path(path), packing.pack_path(path, seq_len)):
        if name.exists():
            with open(name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    order = order_of(Path(path), seq_len, packed)
    if not ahead:
        for cut in order.cuts:
            cut.file.read_ahead = cut.read_index_ahead = lambda *_: None
    with stream_of(order, tokens, True) as stream:
        next(stream)
        first, began, taken = stream.wait_seconds, time.perf_counter(), 0
        for batch in stream:
            taken += batch.sequences * seq_len
            if rate:
                time.sleep(batch.sequences * seq_len / rate)
        waited, seconds = stream.wait_seconds - first, time.perf_counter() - began
    return {"first_batch_s": first, "waited_s": waited, "seconds": seconds, "share": waited / seconds, "tokens": taken}


def child(name: str, **arguments: object) -> dict:
    """The result of a function above, in a process of its own."""
    command = [sys.executable, __file__, "--child", name, json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict:
    args.folder.mkdir(parents=True, exist_ok=True)
    path = str(real_file(args.folder / "real.u16", args.tokens))
    sizes = {"50 million": 50_000_000, "50 billion": 50_000_000_000}
    sparse = {name: str(sparse_file(args.folder / f"sparse-{n}.u16", n)) for name, n in sizes.items()}
    result: dict = {"seq_len": args.seq_len, "rate": [], "scale": [], "cold": [], "step_rate": args.step_rate}
    for seq_len in (512, 1024, 2048, 8192):
        for packed in (False, True):
            for mask in (False, True):
                # The first packs, where that has not been done.
                turns = [child("rate", path=path, seq_len=seq_len, packed=packed, mask=mask, tokens=args.tokens // 4)
                         for _ in range(args.rounds)]  # fmt: skip
                medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
                result["rate"].append({"seq_len": seq_len, "packed": packed, "mask": mask, **medians, "turns": turns})
                print(result["rate"][-1], flush=True)
    result["pack"] = child("pack", path=sparse["50 billion"], seq_len=args.seq_len)
    print(result["pack"], flush=True)
    child("pack", path=sparse["50 million"], seq_len=args.seq_len)
    for packing_name in ("concat", "documents"):
        for name, file in sparse.items():
            row = child("scale", path=file, packing=packing_name, seq_len=args.seq_len, batches=2000)
            result["scale"].append({"corpus": name, "packing": packing_name, **row})
            print(result["scale"][-1], flush=True)
    for rate in (args.step_rate, 0.0):
        for packed in (False, True):
            for ahead in (True, False):
                row = child("cold", path=path, seq_len=args.seq_len, packed=packed, ahead=ahead, tokens=20_000_000,
                            rate=rate)  # fmt: skip
                result["cold"].append({"rate": rate, "packed": packed, "read_ahead": ahead, **row})
                print(result["cold"][-1], flush=True)
    return result


def markdown(result: dict, source: str) -> str:
    """docs/batches.md."""
    cut = {False: "out of the stream", True: "whole documents"}
    rates = [
        [f"{row['seq_len']:,}", cut[row["packed"]], "yes" if row["mask"] else "no",
         f"{row['tokens_per_s'] / 1e6:,.0f}", f"{row['tokens_per_cpu_s'] / 1e6:,.0f}"]
        for row in result["rate"]
    ]  # fmt: skip
    scale = [
        [row["corpus"], cut[row["packing"] == "documents"], f"{row['windows']:,}", f"{row['first_batch_s']:.2f}",
         f"{row['batches_s']:.2f}", f"{row['grew_mib']['peak']:,.0f}", f"{row['grew_mib']['own']:,.0f}"]
        for row in result["scale"]
    ]  # fmt: skip
    cold = [
        [f"{row['rate'] / 1e6:g} M tokens/s" if row["rate"] else "takes no time", cut[row["packed"]],
         "yes" if row["read_ahead"] else "no", f"{row['first_batch_s']:.2f}", f"{row['waited_s']:.3f}",
         f"{row['seconds']:.2f}", f"{row['tokens'] / row['seconds'] / 1e6:,.1f}"]
        for row in result["cold"]
    ]  # fmt: skip
    pack = result["pack"]
    width = pack["seq_len"] + 1
    lines = [
        "# Batches", "", headline(result["machine"]), "",
        "## Rate", "",
        "Millions of tokens a second from one core, file in the page cache: by the clock, and by the processor time of "
        "the process, which other programs on the machine disturb less. Medians.", "",
        *table(["window", "cut", "document mask", "M tokens/s", "M tokens/CPU s"], rates), "",
        "## Scale", "",
        f"A run's start on simulated corpora, windows of {result['seq_len']:,}: seconds from opening the corpus to the "
        f"first batch (plan made), and to the last of {result['scale'][0]['batches']:,} batches; MiB by which the "
        "process grew meanwhile, at its peak and, at the end, without mapped files.", "",
        *table(["tokens", "cut", "windows", "first batch, s", "all, s", "grew, MiB", "own, MiB"], scale), "",
        f"The packed windows of the {pack['tokens']:,} tokens in {pack['documents']:,} documents took "
        f"{pack['seconds']:.0f} s to make, with {pack['grew_mib']:,.0f} MiB; they are "
        f"{pack['index_bytes'] / 1e6:,.0f} MB, {pack['padding'] / pack['windows'] / width:.3%} padding, "
        f"{pack['split'] / pack['documents']:.1%} of the documents split.", "",
        "## A cold corpus", "",
        "Steps on a file whose pages were dropped from memory (the host of a virtual disk may hold them): seconds "
        "that they waited for batches behind the first, and the tokens that came.", "",
        *table(["step", "cut", "read ahead", "first batch, s", "waited, s", "of, s", "M tokens/s"], cold), "",
        f"Made by `scripts/bench/batches.py` from [{source}]({source}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("data/bench"))
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of the file for rate and cold")
    parser.add_argument("--seq-len", type=int, default=1024, help="of scale, pack and cold")
    parser.add_argument("--step-rate", type=float, default=2e6, help="tokens a second of the step on a cold file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("docs/batches.md"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, arguments = args.child
        print(json.dumps(globals()[f"child_{name}"](**json.loads(arguments))))
        return
    machine = describe(False)
    result = {**measure(args), "machine": machine}
    write_page(args.output, result, markdown)


if __name__ == "__main__":
    main()

"""The trials of `llmtrain doctor` that may crash or hang: torch, driver, kernels, engines. Run as a process of its own,
it prints a JSON object a line: what it tries next, and what it found.

    python -m llmtrain.benchmark.doctor_trials auto|cpu|cuda
"""

import glob
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from llmtrain.benchmark.doctor import Finding, note, ok, wrong
from llmtrain.benchmark.machine import card_state, cpu_count, installed
from llmtrain.storage.errors import HardwareFault
from llmtrain.storage.units import in_bytes

LOSS_TOLERANCE = 0.02
"""By how much the losses of kernels and references may differ in bf16, of about 6 nats."""
LEAST_GIB = 4.0
"""Free memory of a card below which even a small model's run is likely to be refused."""

Trial = Callable[[str], Iterator[Finding]]


def torch_itself(device: str) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield wrong("torch", f"cannot be imported: {error}", "pip install 'llmtrain', see pytorch.org/get-started")
        raise SystemExit(0) from None  # nothing else can be tried
    needed = next((x for x in metadata.requires("llmtrain") or [] if re.match(r"torch\b", x)), "torch>=0")
    version, least = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (torch.__version__, needed))
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for processors only"
    text = f"{torch.__version__}, built {built}"
    if version < least:
        yield wrong("torch", f"{text}: {needed} is needed", f"pip install '{needed}'")
    else:
        yield ok("torch", text)


def processor(device: str) -> Iterator[Finding]:
    """A step of a small model, in the references."""
    import torch

    from llmtrain.training.devices import cpu_name

    since = time.perf_counter()
    loss, _ = small_step("cpu", "fp32")
    seconds = time.perf_counter() - since
    text = f"{cpu_name()}, {cpu_count()} cores, {torch.get_num_threads()} threads"
    if not math.isfinite(loss) or not 4 < loss < 9:
        code = HardwareFault.exit_code
        yield wrong("processor", f"{text}: a small model's first loss is {loss}", "test its memory (memtest86+)", code)
    else:
        yield ok("processor", f"{text}: a step of a small model took {seconds:.2f} s")


def memory(device: str) -> Iterator[Finding]:
    """What the machine has, within the limits of the process and its control group."""
    import torch

    from llmtrain.training.fit import room

    there = room(torch.device("cpu"))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limited = f", of {in_bytes(physical)} by a limit (control group, ulimit -v)" if there.total < physical else ""
    text = f"{in_bytes(there.total)}{limited}, {in_bytes(there.free)} free"
    if there.free < 2**30:
        yield note("memory", text, "a run needs some GB: end other programs, or raise the limit (MemoryMax=)")
    else:
        yield ok("memory", text)


def card_is_there() -> str:
    """The driver's version of a machine with an NVIDIA card, "unknown" where it does not say; "" without a card."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"(\d+\.\d+(\.\d+)?)", text)
        return match[1] if match else "unknown"
    return "unknown" if glob.glob("/dev/nvidia[0-9]*") else ""


def card(device: str) -> Iterator[Finding]:
    import torch

    driver = card_is_there()
    if torch.cuda.is_available():
        yield from each_card(driver)
        return
    if not driver and device != "cuda":
        yield Finding("driver", "ok", "no NVIDIA card is here: runs train on the processor")
        return
    fault = note if device == "cpu" else wrong
    if not driver:
        yield fault("driver", "no NVIDIA driver is loaded", "install the driver, then see nvidia-smi")
    elif torch.version.cuda is None:
        advice = "install a torch that is built for CUDA: pytorch.org/get-started"
        yield fault("driver", f"driver {driver} is here, but this torch is for processors only", advice)
    else:
        yield fault("driver", f"driver {driver} is here, but CUDA does not start: {why_no_cuda()}", advice_for_cuda())


def why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "no card is visible"


def advice_for_cuda() -> str:
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return "unset CUDA_VISIBLE_DEVICES"
    closed = [path for path in glob.glob("/dev/nvidia*") if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return f"no permission for {closed[0]}: add the user to its group"
    return f"update the driver to one that knows CUDA {torch.version.cuda}, or install a torch for an older CUDA"


def each_card(driver: str) -> Iterator[Finding]:
    import torch

    yield ok("driver", f"{driver or 'unknown'}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    known = torch.cuda.get_arch_list()
    for i in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
        free, total = torch.cuda.mem_get_info(i)
        text = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, compute capability {major}.{minor}"
        built = any(int(arch.rpartition("_")[2].rstrip("a")) // 10 == major for arch in known if "_" in arch)
        if not built:
            yield wrong("card", f"{text}: this torch is built for {', '.join(known)}", "install another torch")
        elif (major, minor) < (8, 0):
            yield note("card", f"{text}: no bf16 matmuls", "give --precision fp32")
        elif free < LEAST_GIB * 2**30:
            yield wrong("card", f"{text}: other processes hold the rest", "see nvidia-smi for whose they are", 74)
        else:
            yield ok("card", text)
    state = card_state([os.getpid()])
    if state and state["processes"]:
        held = ", ".join(f"{one['name']} ({one['pid']})" for one in state["processes"])
        yield note("card", f"others use the first card: {held}", "a run beside them is slower; wait, or pick another")


def triton(device: str) -> Iterator[Finding]:
    """A kernel of ours, compiled anew, against its reference."""
    import torch

    version = installed("triton")
    if not torch.cuda.is_available() or device == "cpu":
        yield ok("triton", f"{version or 'not installed'}; of use with a card only")
        return
    if version is None:
        yield wrong("triton", "is not installed, and the card's kernels are written in it", "pip install triton")
        return
    from llmtrain.kernels import choice
    from llmtrain.kernels.rmsnorm import rmsnorm_forward

    torch.manual_seed(0)
    x, weight = torch.randn(513, 768, device="cuda", dtype=torch.bfloat16), torch.rand(768, device="cuda")
    since = time.perf_counter()
    with choice.forced(choice.TRITON):
        y = rmsnorm_forward(x, weight)[0].float()
    seconds = time.perf_counter() - since
    with choice.forced(choice.REFERENCE):
        off = float((rmsnorm_forward(x.double(), weight)[0] - y).abs().max())
    text = f"{version}: a kernel was ready after {seconds:.1f} s"
    if off > 0.05:
        advice = "clear ~/.triton/cache and try again"
        yield wrong("triton", f"{text}, and its result is off by {off:.2g}", advice, HardwareFault.exit_code)
    else:
        yield ok("triton", f"{text} and computes as its reference does")


def graph(device: str) -> Iterator[Finding]:
    """A matmul captured in a CUDA graph, and replayed on other numbers."""
    import torch

    if not torch.cuda.is_available() or device == "cpu":
        return
    a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a @ a  # cuBLAS makes its workspace before the capture
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        b = a @ a
    a.fill_(2)
    captured.replay()
    found = float(b[0, 0])
    if found != 4 * 256:
        text = f"a replay gave {found}, not {4 * 256}"
        yield wrong("graphs", text, "update the driver; see nvidia-smi -q for errors", HardwareFault.exit_code)
    else:
        yield ok("graphs", "a CUDA graph was captured and replayed")


def step(device: str) -> Iterator[Finding]:
    """A whole step on the card, captured, against the references on the card."""
    import torch

    from llmtrain.kernels import choice

    if not torch.cuda.is_available() or device == "cpu":
        return
    since = time.perf_counter()
    loss, why_not = small_step("cuda", "bf16")
    seconds, ran = time.perf_counter() - since, dict(choice.ran)
    with choice.forced(choice.REFERENCE):
        expected, _ = small_step("cuda", "bf16", capture=False)
    text = f"a small model's step took {seconds:.1f} s to compile and run, attention by {ran.get('attention', '?')}"
    if not abs(loss - expected) < LOSS_TOLERANCE:
        text = f"a small model's loss is {loss:.4f} by the kernels and {expected:.4f} by the references"
        yield wrong("step", text, "update the driver; see nvidia-smi -q for errors", HardwareFault.exit_code)
    elif why_not:
        yield note("step", f"{text}; not captured, so slower: {why_not}", "report it with the versions above")
    else:
        yield ok("step", text)


def small_step(device: str, precision: str, capture: bool | None = None) -> tuple[float, str | None]:
    """The loss of a small model's first step, and why it was not captured where it should have been."""
    import torch

    from llmtrain.model.config import ModelConfig
    from llmtrain.training.config import OptimizerConfig
    from llmtrain.training.step import TrainStep

    model = ModelConfig(
        d_model=128, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=64, d_ff=256, vocab_size=512, max_seq_len=256
    )
    made = TrainStep.build(
        model, OptimizerConfig(), batch_size=2, seq_len=128, precision=precision, device=device, capture=capture
    )
    ids = torch.arange(2 * 129).remainder(512).view(2, 129)
    made.micro_step(ids[:, :-1].to(device), ids[:, 1:].to(device), first=True)
    made.optimizer_step(1e-4)
    return made.metrics()["lm_loss"], made.why_not_captured


def several(device: str) -> Iterator[Finding]:
    """What a run over several cards needs."""
    import torch

    if torch.cuda.device_count() < 2 or device == "cpu":
        return
    if not torch.distributed.is_nccl_available():
        yield wrong("nccl", "this torch has none, and several cards are here", "install a torch built for CUDA")
        return
    shared = os.statvfs("/dev/shm")
    room = shared.f_bavail * shared.f_frsize
    text = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {in_bytes(room)} of /dev/shm are free"
    if room < 1 << 30:
        yield note("nccl", text, "give a container more: --shm-size=8g or --ipc=host")
    else:
        yield ok("nccl", text)


def helpers(device: str) -> Iterator[Finding]:
    """What is asked beside the training: cuDNN's graph API, the card's sensors."""
    import torch

    if not torch.cuda.is_available() or device == "cpu":
        return
    from llmtrain.kernels import cudnn_attention
    from llmtrain.training.card import Card

    if reason := cudnn_attention.unavailable():
        advice = "only --attention cudnn-graph, for windows and --deterministic, asks for it"
        yield Finding("cudnn", "ok", f"its graph API {reason}", advice)
    else:
        yield ok("cudnn", "its graph API is there")
    sensors = Card(torch.device("cuda", torch.cuda.current_device()))
    end = time.monotonic() + 5
    while not sensors.now() and time.monotonic() < end and installed("nvidia-ml-py"):
        time.sleep(0.05)
    sensors.close()
    if figures := sensors.now():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        yield ok("sensors", f"NVML says {shown}")
    else:
        text = "no temperature and power in the log: NVML does not answer"
        yield note("sensors", text, "pip install 'llmtrain[nvml]'")


def engine(device: str) -> Iterator[Finding]:
    """The engines of `tokenize-corpus`, tried on a tokenizer that is trained for it."""
    from llmtrain.corpus.engine import choose_engine
    from llmtrain.corpus.tokenizer import Tokenizer, train

    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = Tokenizer(train(texts, 1024), "a tokenizer of a thousand tokens")
    chosen, reason = choose_engine(tokenizer, "auto", [text.encode() for text in texts])
    if reason:
        slow = f"{chosen.name} {chosen.version} works; the faster engine does not: {reason.partition('because ')[2]}"
        yield note("tokenizers", slow, "pip install 'llmtrain[fast]' for an engine a hundred times as fast")
    else:
        yield ok("tokenizers", f"{chosen.name} {chosen.version} gives the ids of tokenizers {installed('tokenizers')}")


TRIALS: dict[str, Trial] = {
    "torch": torch_itself,
    "processor": processor,
    "memory": memory,
    "driver": card,
    "triton": triton,
    "graphs": graph,
    "step": step,
    "nccl": several,
    "cudnn": helpers,
    "tokenizers": engine,
}


def main(device: str) -> None:
    for name, trial in TRIALS.items():
        print(json.dumps({"tries": name}), flush=True)
        try:
            for finding in trial(device):
                print(json.dumps(asdict(finding)), flush=True)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = "see to what it names; the other findings may say why"
            print(json.dumps(asdict(wrong(name, f"{type(error).__name__}: {reason}", advice, 70))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""The one way in which anything here is timed.

Arms are built anew in every session and take turns in rounds, in an order that rotates and in every other session is
reversed; medians are compared block by block, against the difference between an arm and its own second copy. Device
time (a CUDA graph's replay, or events around the eager call, behind a cold L2) and the host's time to issue the work
are separate figures. On a CPU there is host time alone.

An op's benchmark does not call `measure` itself. It describes its arms as `llmtrain.benchmark.op.Arm` (how to build the
`Work`, what the arm's error was) and its shapes as `op.Case`, and `op.measure_cases` makes the rows of its table: what
belongs to an arm (casts, copies, reductions, set-up) is in its `Work.run`, a backward by itself gets its forward from
`Work.prepare`:

    def rows(compiled: bool) -> list[Timed]:
        x = torch.randn(n, device=device)
        judgement = judge({"y": double(x)}, {"y": 2 * x.double()}, {"y": Budget(rtol=1e-6)})
        return [Timed("forward", {"ours": Arm(lambda: Work(lambda: double(x), (x,)), judgement, ours=True)}, 8 * n)]

    measure_cases([Case("double", {"n": n}, rows)], device=device, ceilings=measure_ceilings(device))
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from llmtrain.benchmark.statistics import Times, noise_floor, rotation

REPLICATE = " (copy)"
"""What the name of an arm's second copy ends with."""

L2_FLUSH_BYTES = 256 << 20
"""Read before each cold sample: four times the largest L2 that the cards here have (60 MB)."""

SPIN_CYCLES = 100_000
"""About 50 us of device work before a warm sample: the host records both events and launches behind it."""

LEAST_SAMPLES = 11
"""In a turn, where `Method.samples` asks for as many."""

HOST_SAMPLES, LEAST_HOST_SAMPLES = 20, 2
"""Eager calls a round whose host time is taken: each waits for the device first, so many would cost card time. Of calls
that take the device long the fewest will do: nothing hangs on their host's time."""


@dataclass(frozen=True)
class Work:
    """An arm, built: what to run, and the tensors that it reads."""

    run: Callable[..., object]
    """What is timed. Called with what `prepare` returned, where there is one."""
    inputs: tuple[Tensor, ...] = ()
    """Checked before anything is timed: zeros hide wrong indexing and run faster than data."""
    prepare: Callable[[], object] | None = None
    """Untimed, on the stream of what is timed: the forward of a backward that is timed by itself. Autograd runs a
    backward on its forward's stream, and one on any other could not be captured."""
    capturable: bool = True
    """False: it waits for the device, as nothing in a CUDA graph can, and so the eager call is timed."""

    def bound(self) -> Callable[[], object]:
        """`run` with what it needs; `prepare` is called here."""
        return self.run if self.prepare is None else functools.partial(self.run, self.prepare())


@dataclass(frozen=True)
class Method:
    """How often what is run."""

    sessions: int = 4
    """Times the arms are built anew; every other one runs in reverse order."""
    rounds: int = 3
    """Turns of each arm in a session."""
    samples: int = 67
    """Samples in a turn, at most: 3 rounds of 67 are 201 a session."""
    turn_seconds: float = 0.05
    """A turn ends after this time, but not before its least number of samples: long calls scatter less, and 67 of each
    would cost minutes."""
    warmup: int = 5
    """Untimed calls of each arm before a session's first round."""
    graph: bool = True
    """Time replays of a captured CUDA graph; off, events around the eager call."""
    cold_l2: bool = True
    """Read a buffer larger than the L2 before each sample."""

    def __post_init__(self) -> None:
        for name in ("sessions", "rounds", "samples", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.turn_seconds <= 0:
            raise ValueError(f"turn_seconds: must be above 0, not {self.turn_seconds}")
        if self.sessions * self.rounds < 2:
            raise ValueError("rounds: one round of one session shows no spread; take at least 2")


@dataclass(frozen=True)
class Measured:
    """What one arm took, in milliseconds."""

    device: Times | None
    """Device time; None on a CPU."""
    host: Times
    """On a CPU the whole call, on a card the time to issue the eager call."""

    @property
    def times(self) -> Times:
        """The figure that arms are compared by."""
        return self.device or self.host

    @property
    def host_bound(self) -> bool:
        """The device finishes before the host has issued the work."""
        return self.device is not None and self.host.pooled > self.device.pooled


def require_data(name: str, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError where an input is all zeros."""
    for i, tensor in enumerate(inputs):
        flat = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach()
        if not bool(flat.any()):
            raise ValueError(f"arm {name!r}: input {i} {tuple(tensor.shape)} is all zeros; time random data")


class DeviceTimer:
    """Device time of single calls on one card, by events."""

    def __init__(self, device: torch.device, cold_l2: bool):
        self.device = device
        self.flush = torch.randn(L2_FLUSH_BYTES // 4, device=device) if cold_l2 else None
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def sample(self, run: Callable[[], object]) -> float:
        """Milliseconds of `run` on the device."""
        torch.cuda.synchronize(self.device)
        if self.flush is not None:
            # Read, not written: dirty lines would be written back inside the timed span.
            self.flush.amax()
        else:
            torch.cuda._sleep(SPIN_CYCLES)
        self.start.record()
        run()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)


def captured(work: Work | Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as the replay of a CUDA graph, which keeps alive what it reads."""
    work = work if isinstance(work, Work) else Work(work)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run = work.bound()
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay(alive: object = (run, work)) -> None:
        graph.replay()

    return replay


def one_turn(sample: Callable[[], float], method: Method, most: int, least: int = LEAST_SAMPLES) -> list[float]:
    """The samples of a turn: at most `most`, and none begun after `method.turn_seconds` but the least number."""
    end = time.perf_counter() + method.turn_seconds
    taken: list[float] = []
    while len(taken) < most and (len(taken) < least or time.perf_counter() < end):
        taken.append(sample())
    return taken


def host_sample(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until `run` returns: on a card that is the time to issue it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def milliseconds(run: Callable[[], object], device: torch.device, samples: int, *, graph: bool = True) -> float:
    """The median of a few calls, for scripts that look at one thing by itself: on a card the device time of a CUDA
    graph's replay (`graph` off: of the eager call) behind a cold L2."""
    if device.type != "cuda":
        return median(host_sample(run, device) for _ in range(samples))
    timer = DeviceTimer(device, cold_l2=True)
    timed = captured(run, device) if graph else run
    for _ in range(2):
        timer.sample(timed)
    return median(timer.sample(timed) for _ in range(samples))


def run_session(
    arms: Mapping[str, Callable[[], Work]], method: Method, device: torch.device, *, backwards: bool
) -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    """One session: for each arm its device samples (empty on a CPU) and its host samples, round by round."""
    on_card = device.type == "cuda"
    timer = DeviceTimer(device, method.cold_l2) if on_card else None
    eager: dict[str, Callable[[], object]] = {}
    timed: dict[str, Callable[[], object]] = {}
    for name, build in arms.items():
        work = build()
        require_data(name, work.inputs)
        eager[name] = work.bound()
        for _ in range(method.warmup):
            eager[name]()
        graph = on_card and method.graph and work.capturable
        timed[name] = captured(work, device) if graph else eager[name]
    names = list(arms)
    taken: dict[str, tuple[list[list[float]], list[list[float]]]] = {name: ([], []) for name in names}
    for turn in range(method.rounds):
        for i in rotation(len(names), turn, backwards=backwards):
            name = names[i]
            device_rounds, host_rounds = taken[name]
            if timer is not None:
                timer.sample(timed[name])  # the turn before was another arm's: its first sample pays for that
                sample = functools.partial(timer.sample, timed[name])
                device_rounds.append(one_turn(sample, method, method.samples))
                sample = functools.partial(host_sample, eager[name], device)
                host_rounds.append(one_turn(sample, method, min(HOST_SAMPLES, method.samples), LEAST_HOST_SAMPLES))
                torch.cuda.synchronize(device)
            else:
                host_sample(timed[name], device)
                sample = functools.partial(host_sample, timed[name], device)
                host_rounds.append(one_turn(sample, method, method.samples))
    return taken


def measure(
    arms: Mapping[str, Callable[[], Work]],
    *,
    device: torch.device,
    replicate: Sequence[str],
    method: Method | None = None,
) -> tuple[dict[str, Measured], float]:
    """Time `arms` (name -> a function that builds it) and return what each took and the noise floor, a fraction.

    `replicate` names the arms of which a second copy, built by the same function, takes part as an arm of its own
    under NAME + " (copy)". The set-up that belongs to an arm (casts, copies, reductions) belongs into its `run`.
    Raises ValueError for an unknown or missing replicate and for inputs that are zeros.
    """
    method = method or Method()
    unknown = sorted(set(replicate) - set(arms))
    if unknown or not replicate:
        raise ValueError(f"replicate: names of arms wanted, got {unknown or 'none'}")
    everyone = dict(arms) | {name + REPLICATE: arms[name] for name in replicate}
    sessions = [run_session(everyone, method, device, backwards=s % 2 == 1) for s in range(method.sessions)]

    def blocks(name: str, which: int) -> Times | None:
        rounds = [session[name][which] for session in sessions]
        if not rounds[0]:
            return None
        if method.sessions == 1:
            return Times(tuple(tuple(samples) for samples in rounds[0]))
        return Times(tuple(tuple(x for samples in session for x in samples) for session in rounds))

    measured = {}
    for name in everyone:
        host = blocks(name, 1)
        assert host is not None
        measured[name] = Measured(blocks(name, 0), host)
    floor = noise_floor((measured[name].times, measured[name + REPLICATE].times) for name in replicate)
    return measured, floor


@dataclass(frozen=True)
class Burst:
    """Several whole training steps, one after the other."""

    steps: int
    wall_s: float
    """From an idle device to an idle device: what tokens per second are counted with."""
    device_s: float | None
    """Between events at both ends; None on a CPU."""
    issue_s: float
    """Until the host had issued the last step."""


def burst(step: Callable[[], object], steps: int, device: torch.device) -> Burst:
    """Time `steps` calls of `step`, which must not wait for the device itself."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wall = time.perf_counter() - begin
        return Burst(steps, wall, None, wall)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    issued = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    wall = time.perf_counter() - begin
    return Burst(steps, wall, start.elapsed_time(end) / 1e3, issued)


def steps_for(step: Callable[[], object], seconds: float, device: torch.device, *, warmup: int = 5) -> int:
    """Warm up, and say how many steps fill `seconds` (at least 1), by the faster half of the warm-up."""
    times = sorted(burst(step, 1, device).wall_s for _ in range(warmup))
    return max(1, round(seconds / times[len(times) // 4]))

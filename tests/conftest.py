"""One thread a process: the tests' matrices are so small that a second thread only waits for its turn (measured on two
busy cores: 14 s against 250 s for the model's tests). Set before anything imports torch; subprocesses inherit it."""

import os
import signal
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton looks at it when a kernel is defined, so before any test imports one.
os.environ.setdefault("TRITON_INTERPRET", "1")

# What is ignored here, as HUP is under nohup and INT behind a shell's &, the processes that tests start would ignore
# too, and rightly.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# CI judges the code by the same examples each time; elsewhere each run looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("default", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def as_torch_was() -> Iterator[None]:
    """A deterministic run sets that for its whole process, and the next test in it would pick other kernels."""
    yield
    if "torch" in sys.modules:
        import torch

        if torch.are_deterministic_algorithms_enabled():  # to turn it off imports the compiler, which takes seconds
            torch.use_deterministic_algorithms(False)

"""One thread a process: the tests' matrices are so small that a second thread only waits for its turn (measured on two
busy cores: 14 s against 250 s for the model's tests). Set before anything imports torch; subprocesses inherit it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton looks at it when a kernel is defined, so before any test imports one.
os.environ.setdefault("TRITON_INTERPRET", "1")

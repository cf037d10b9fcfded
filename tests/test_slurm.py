"""scripts/slurm/train.sbatch with stand-ins for Slurm's commands and a real run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.conftest import write_corpus

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/slurm/train.sbatch"

# As Slurm does, --signal=USR1 goes to the processes of the step, and not to the batch script.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 2
shift
if [ -n "${CANCELLED:-}" ]; then kill -TERM "$PPID"; fi
if [ -n "${CODE:-}" ]; then exit "$CODE"; fi
"$@" >>out 2>&1 &
until grep -qs ' step 3/' out; do sleep 0.02; done
kill -USR1 $!
wait $!
"""

OPTIONS = [
    "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
    "--seq-len", "16", "--batch-size", "2", "--total-steps", "2000", "--warmup-steps", "4", "--device", "cpu",
    "--precision", "fp32", "--log-every", "1", "--tokens", "corpus.u16", "--run-dir", "run",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    llmtrain = f'#!/bin/sh\nexec {sys.executable} -m llmtrain "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/sh\necho "$@" >>scontrol.log\n', "llmtrain": llmtrain}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    write_corpus(tmp_path / "corpus.u16", 3000)
    return tmp_path


def sbatch(here: Path, *options: str, **environment: str) -> tuple[int, str, list[str]]:
    """The job's exit code, what the script says, and what it has asked of scontrol."""
    (here / "scontrol.log").unlink(missing_ok=True)
    env = {**os.environ, "PATH": f"{here}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "77"}
    env |= {"LLMTRAIN": str(here / "bin/llmtrain"), **environment}
    done = subprocess.run(["bash", SCRIPT, *options], cwd=here, env=env, capture_output=True, text=True, timeout=120)
    asked = here / "scontrol.log"
    return done.returncode, done.stdout, asked.read_text().splitlines() if asked.exists() else []


def test_the_script_is_bash_and_its_settings_stand_before_its_first_command():
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    head, _, rest = SCRIPT.read_text().partition("\nset -u\n")
    assert "#SBATCH --signal=USR1@300" in head and "#SBATCH --requeue" in head and "#SBATCH" not in rest
    assert all(line.startswith("#") for line in head.splitlines())


def test_a_job_whose_time_is_up_saves_and_is_queued_again_and_one_that_is_cancelled_is_not(here):
    code, says, asked = sbatch(here, *OPTIONS)
    assert (code, asked) == (75, ["requeue 77"]) and "stopped and saved" in says
    assert re.search(r"stopped by SIGUSR1 at step \d+ of 2000, saved in run/checkpoints", (here / "out").read_text())
    code, says, asked = sbatch(here, CODE="75", CANCELLED="yes")
    assert (code, asked) == (75, []) and "not queued again" in says


@pytest.mark.parametrize("code", [0, 2, 65, 66, 71, 78, 79])
def test_an_end_that_another_attempt_would_meet_again_is_not_queued(code, here):
    assert sbatch(here, CODE=str(code))[::2] == (code, [])


def test_failures_are_queued_again_until_there_are_too_many_in_a_row(here):
    for code in ("70", "74", "137", "75", "1", "139"):
        assert sbatch(here, CODE=code, MOST_FAILURES="4")[::2] == (int(code), ["requeue 77"])
    assert sbatch(here, CODE="74", MOST_FAILURES="3")[::2] == (74, [])


# As many tasks as SLURM_NTASKS says; its code is the largest of theirs.
MANY = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=0 ] || exit 2
shift
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" >>out.$i 2>&1 & pids[i]=$!; done
until grep -qs ' step 3/' out.0; do sleep 0.02; done
kill -USR1 "${pids[@]}"
most=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; [ $code -gt $most ] && most=$code; done
exit $most
"""


def test_several_tasks_are_the_ranks_of_one_run(here):
    (here / "bin/srun").write_text(MANY)
    show = 'if [ "$1" = show ]; then echo localhost; exit; fi\n'
    (here / "bin/scontrol").write_text(f'#!/bin/sh\n{show}echo "$@" >>scontrol.log\n')
    ranks = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}
    code, said, asked = sbatch(here, *OPTIONS, **ranks)
    assert (code, asked) == (75, ["requeue 77"]), said
    assert "2 x " in (here / "out.0").read_text() and "SIGUSR1, which rank" in (here / "out.0").read_text()

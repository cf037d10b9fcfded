"""What a shell is told for its TAB key."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def asked(words: str, **environment: str) -> list[str]:
    """What bash is told for the last of the words."""
    number = len(words.split(" ")) - 1
    asks = {"COMP_WORDS": words, "COMP_CWORD": str(number), "_LLMTRAIN_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain"], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | asks | environment,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_commands_options_and_their_values_are_completed():
    assert asked("llmtrain ") == [f"plain,{name}" for name in COMMANDS]
    assert "plain,--precision" in asked("llmtrain train --prec")
    assert asked("llmtrain train --precision ") == ["plain,bf16", "plain,fp32", "plain,fp8", "plain,mxfp8"]
    assert asked("llmtrain train --batch-size a") == ["plain,auto"]


def test_paths_are_left_to_the_shell_and_presets_are_named():
    assert asked("llmtrain train --tokens data/") == ["file,data/"]
    assert asked("llmtrain watch runs/") == ["file,runs/"]
    assert asked("llmtrain train --config 10") == ["plain,102m"]
    assert asked("llmtrain train --config my/own.toml") == ["file,my/own.toml"]


def test_what_cannot_be_completed_is_no_error_in_the_middle_of_a_line():
    assert asked("llmtrain nonsense --x") == [] or "file," in asked("llmtrain nonsense --x")[0]


def test_it_is_fast():
    look = (
        "import sys; from llmtrain.cli import main; code = main.complete(); "
        "print(code, sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    asks = {"COMP_WORDS": "llmtrain train --prec", "COMP_CWORD": "2", "_LLMTRAIN_COMPLETE": "bash_complete"}
    env = os.environ | {"PYTHONPATH": str(ROOT)} | asks
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str):
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "completion", shell], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and f"_LLMTRAIN_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash_completes(tmp_path: Path):
    program = tmp_path / "llmtrain"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmtrain "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(llmtrain completion bash)"\nCOMP_WORDS=(llmtrain tra) COMP_CWORD=1\n'
        '_llmtrain_completion llmtrain tra llmtrain\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["train-tokenizer", "train"], done.stderr

"""docs/tutorial.md: its commands, taken from the page and run one after the other in a clean folder."""

import re
import shlex
import subprocess
from pathlib import Path

from tests.faults.forks import Forks

ROOT = Path(__file__).parents[1]

SMALLER = {
    # Instead of two gigabytes over a network, a file that the test writes.
    "curl -L -o data/text/stories.txt https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
    "TinyStoriesV2-GPT4-train.txt": "cp stories.txt data/text/stories.txt",
    "--vocab-size 32000": "--vocab-size 400",
    # The preset's model and step in small, and a run of 12 steps in place of an epoch.
    "--config 102m": "--config 102m --vocab-size 400 --d-model 32 --n-layers 2 --n-heads 2 --n-kv-heads 1 "
    "--head-dim 16 --d-ff 48 --seq-len 32 --global-batch-size 8 --total-steps 12 --warmup-steps 2 --log-every 1",
    "--batch-size auto": "--batch-size 4",
    "--val-every 500": "--val-every 6 --val-windows 4",
    "--max-new-tokens 100": "--max-new-tokens 10",
}
"""What stands on the page -> what the test runs in its place. All else is run as it stands."""

CTRL_C = """
import os, signal
from llmtrain.training.step import TrainStep
update, done = TrainStep.optimizer_step, []
def pressed(self, lr):
    update(self, lr)
    done.append(lr)
    if len(done) == 5:
        os.kill(os.getpid(), signal.SIGINT)
TrainStep.optimizer_step = pressed
"""
"""What comes of Ctrl-C while a run's fifth step is done."""

NEEDED = ("train-tokenizer", "tokenize-corpus", "inspect", "plan", "watch", "report", "evaluate", "generate", "export")


def commands() -> list[str]:
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", page)
    return [line for block in blocks for line in block.splitlines()]


def smaller(line: str) -> str:
    for words, instead in SMALLER.items():
        line = line.replace(words, instead)
    return line


def stories() -> str:
    animals, places = ("dog", "cat", "bird", "fish", "cow"), ("house", "garden", "forest", "sea", "hill", "barn")
    told = [
        f"Once upon a time, there was a little {animal}. It lived in a {place}, and had {n} friends.\n"
        f'The {animal} said: "Let us go to the {place}!"\n'
        for animal in animals
        for place in places
        for n in range(2, 16)
    ]
    return "<|endoftext|>\n".join(told)


def test_every_command_of_the_tutorial_works(tmp_path: Path):
    lines = commands()
    assert all(any(words in line for line in lines) for words in SMALLER)
    assert all(any(line.startswith(f"llmtrain {name} ") for line in lines) for name in NEEDED)
    first = next(line for line in lines if line.startswith("llmtrain train "))
    (tmp_path / "stories.txt").write_text(stories())
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with Forks("llmtrain.inference.generate", "llmtrain.inference.evaluate") as forks:
        for line in lines:
            words = shlex.split(smaller(line))
            if words[0] != "llmtrain":
                subprocess.run(words, cwd=tmp_path, check=True, timeout=60)
                continue
            done = forks.start(tmp_path, "said", *words[1:], before=CTRL_C if line == first else "")
            code = done.end(120)
            assert code == (75 if line == first else 0), (line, code, done.out, done.err)
            if line == first:
                assert "step 5 of 12" in done.err and "--resume goes on" in done.err
            elif "--resume" in line:
                assert "step 5: starts at step 5 of 12" in done.out and "finished: 12 steps" in done.out
            elif "generate" in line:
                prompt = words[words.index("--prompt") + 1]
                assert done.out.startswith(prompt) and len(done.out) > len(prompt) + 5
            elif "evaluate" in line:
                assert "bits/byte" in done.out
    assert "<h1>stories</h1>" in (tmp_path / "stories.html").read_text()
    assert (tmp_path / "export/stories/model.safetensors").is_file()

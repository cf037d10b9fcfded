"""`llmtrain generate`."""

import io
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.inference.config import ModelSource, PromptConfig, SamplingConfig
from llmtrain.storage.errors import BadData, UsageError, read_error
from llmtrain.storage.journal import JsonLines

if TYPE_CHECKING:
    from llmtrain.cli.trained import Trained

EPILOG = """Example:

    llmtrain generate --run-dir runs/default --prompt "Once upon a time" --temperature 0.7
"""


@click.command(cls=ConfigCommand, epilog=EPILOG)
@config_options(PromptConfig, SamplingConfig, ModelSource)
def command(given: dict[str, Any]) -> None:
    """Continue a prompt with a trained model.

    The text appears as it is made. Several prompts are continued in one batch and printed one after the other.
    """
    source, sampling, asked = build(ModelSource, given), build(SamplingConfig, given), build(PromptConfig, given)
    prompts = read_prompts(asked)

    from llmtrain.cli.trained import load
    from llmtrain.inference.generate import generate, stream
    from llmtrain.inference.text_stream import TextStream

    trained = load(source)
    tokenizer = trained.tokenizer()
    # A document begins behind the end of the one before it.
    ids = [row or [tokenizer.eos_id] for row in tokenizer.encode_batch(prompts)]
    limit = trained.model.config.max_seq_len
    if max(map(len, ids)) > limit:
        raise UsageError(
            f"the prompt has {max(map(len, ids))} tokens, the model reads at most {limit} (max_seq_len): shorten it"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for what it cannot
    if len(prompts) > 1:
        for prompt, row, more in zip(
            prompts, ids, generate(trained.model, ids, sampling, tokenizer.eos_id), strict=True
        ):
            text = TextStream(tokenizer.decode, row)
            made = "".join([*map(text.push, more), text.flush()])
            show(f"{prompt}{made}\n-----\n")
            if asked.keep:
                keep(trained, sampling, prompt, made)
        return
    show(prompts[0])
    text, count, made = TextStream(tokenizer.decode, ids[0]), 0, ""
    for (token,) in stream(trained.model, ids, sampling, tokenizer.eos_id):
        assert token is not None
        count += 1
        piece = text.push(token)
        made += piece
        show(piece)
    made += (rest := text.flush())
    show(rest + "\n")
    if asked.keep:
        keep(trained, sampling, prompts[0], made)
    if count < sampling.max_new_tokens and len(ids[0]) + count > limit:
        click.echo(f"(the model's max_seq_len of {limit} tokens is reached)", err=True)


def keep(trained: "Trained", sampling: SamplingConfig, prompt: str, text: str) -> None:
    """A line of RUN/samples.jsonl. Raises CannotCreate, StorageFailure."""
    s = sampling
    how = f"temperature {s.temperature:g}, top-k {s.top_k}, top-p {s.top_p:g}, seed {s.seed}"
    with JsonLines(trained.run_dir / "samples.jsonl") as samples:
        samples.append({"step": trained.state["step"], "prompt": prompt, "text": text, "how": how, "time": time.time()})


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def read_prompts(config: PromptConfig) -> list[str]:
    """The texts to continue; an empty one stands for a document from its beginning."""
    if config.prompt_file is None:
        for number, prompt in enumerate(config.prompt, 1):
            if not prompt.isascii() and any("\ud800" <= c <= "\udfff" for c in prompt):  # bytes that were no text
                raise UsageError(f"--prompt {number}: is not UTF-8: convert it")
        return list(config.prompt) or [""]
    try:
        with click.open_file(str(config.prompt_file), "rb") as file:
            return [file.read().decode("utf-8")]
    except OSError as error:
        raise read_error(error, config.prompt_file) from None
    except UnicodeDecodeError as error:
        raise BadData(f"{config.prompt_file}: is not UTF-8 at byte {error.start}: convert it") from None

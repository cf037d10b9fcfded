"""`llmtrain lm-eval`, and the model that lm-evaluation-harness knows by the name `llmtrain` where this is imported."""

from pathlib import Path
from typing import Any

import click

from llmtrain.cli.options import ConfigCommand, build, config_options
from llmtrain.inference.config import HarnessConfig, ModelSource
from llmtrain.storage.errors import UsageError

EPILOG = """Example:

    llmtrain lm-eval --run-dir runs/default --task hellaswag --task arc_easy --limit 200 --output scores.json
"""


@click.command("lm-eval", cls=ConfigCommand, epilog=EPILOG)
@config_options(ModelSource, HarnessConfig)
def command(given: dict[str, Any]) -> None:
    """Score a trained model by the tasks of lm-evaluation-harness.

    Needs the extra `lm-eval`. Tasks of the harness fetch their data from a hub; those of --include-path may have theirs
    on the disk.
    """
    source, config = build(ModelSource, given), build(HarnessConfig, given)
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise UsageError(f"lm-evaluation-harness is missing ({error}): pip install 'llmtrain[lm-eval]'") from None
    from llmtrain.storage import atomic

    tasks = TaskManager(include_path=None if config.include_path is None else str(config.include_path))
    known = set(tasks.all_tasks)
    for task in config.task:
        if task not in known and not Path(task).exists():
            raise UsageError(f"--task {task}: lm-evaluation-harness knows no such task: see its list")
    if config.output is not None:
        atomic.make_place(config.output)
    results = lm_eval.simple_evaluate(
        model=harness_of(source, config.batch_size),
        tasks=list(config.task),
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        task_manager=tasks,
        log_samples=False,
        bootstrap_iters=0,
    )
    click.echo(make_table(results))
    if config.output is not None:
        scores = {name: results[name] for name in ("results", "versions", "n-shot", "n-samples")}
        atomic.write_json(config.output, scores)


def harness_of(source: ModelSource, batch_size: int) -> Any:
    """The model as the harness takes it. Raises as `load` and `Trained.tokenizer` do."""
    from llmtrain.cli.trained import load
    from llmtrain.inference.harness import Harness

    trained = load(source)
    tokens = batch_size * trained.state["config"]["data"]["seq_len"]
    return Harness(trained.model, trained.tokenizer(), tokens)


def register() -> None:
    """Makes `--model llmtrain --model_args run_dir=RUN` mean something to the harness' own command line and to
    `simple_evaluate`."""
    from lm_eval.api.registry import register_model

    from llmtrain.inference.harness import Harness

    @register_model("llmtrain")
    class OfRun(Harness):
        def __init__(
            self, run_dir: str = "runs/default", checkpoint: str | None = None, weights: str = "last",
            device: str | None = None, batch_size: int | str = 8, **_: Any,
        ) -> None:  # fmt: skip
            given = {"run_dir": Path(run_dir), "weights": weights, "device": (device or "auto").partition(":")[0]}
            if checkpoint is not None:
                given["checkpoint"] = Path(checkpoint)
            size = int(batch_size) if str(batch_size).isdecimal() else 8
            made = harness_of(build(ModelSource, given), size)
            super().__init__(made.model, made.text, made.tokens_at_once)

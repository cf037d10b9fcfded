"""The model as lm-evaluation-harness sees it. Skipped where the harness is not installed: it brings over thirty
packages, datasets, pandas, scipy and scikit-learn among them."""

import json
from pathlib import Path

import pytest

from llmtrain.cli.main import run as llmtrain
from llmtrain.training.checkpoint import folder_of, load_model

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra lm-eval)")

TASK = """task: tiny_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
QUESTIONS = [
    {"prompt": f"def insort_{side}(a, x", "choices": [", lo=0, hi=None", "): pass  # nothing"], "answer": i % 2}
    for i, side in enumerate(["right", "left", "both", "none"])
]


@pytest.fixture()
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task whose questions are on the disk; nothing is fetched."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/tiny.yaml").write_text(TASK.format(file=tmp_path / "q.jsonl"))
    return tmp_path


def test_a_local_task_scores_as_our_own_evaluation_does(runs, task, capsys):
    args = ["lm-eval", "--run-dir", str(runs["llama"]), "--task", "tiny_choices", "--include-path", str(task / "tasks")]
    assert llmtrain([*args, "--output", str(task / "scores.json")]) == 0
    assert "tiny_choices" in capsys.readouterr().out
    scores = json.loads((task / "scores.json").read_text())["results"]["tiny_choices"]
    assert llmtrain(["evaluate", "--run-dir", str(runs["llama"]), "--choices", str(task / "q.jsonl"), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert (scores["acc,none"], scores["acc_norm,none"]) == (ours["accuracy"], ours["accuracy_norm"])


def test_likelihoods_and_texts_are_those_of_the_model(runs):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from llmtrain.cli.lm_eval import register

    register()
    harness = get_model("llmtrain").create_from_arg_string(f"run_dir={runs['llama']}", {"device": "cpu"})
    model = load_model(folder_of(runs["llama"], 8))[0]
    ids = harness.tok_encode("import os")

    def ask(kind: str, *arguments: object) -> Instance:
        return Instance(kind, {}, arguments, 0)  # type: ignore[arg-type]

    ((score, _),) = harness.loglikelihood([ask("loglikelihood", "", "import os")])
    assert score == pytest.approx(harness.loglikelihood_rolling([ask("loglikelihood_rolling", "import os")])[0])
    long = "import os\n" * 40  # beyond the model's 64 tokens
    assert len(harness.tok_encode(long)) > 2 * model.config.max_seq_len
    assert harness.loglikelihood_rolling([ask("loglikelihood_rolling", long)])[0] < score
    ((_, greedy),) = harness.loglikelihood([ask("loglikelihood", long, " and")])
    assert greedy in (True, False) and ids
    settings = {"until": ["\n"], "max_gen_toks": 12}
    (text,) = harness.generate_until([ask("generate_until", "def insort_right(a, x", settings)])
    assert "\n" not in text


@pytest.mark.parametrize("words, args", [("task is missing", []), ("knows no such task", ["--task", "nowhere"])])
def test_mistakes_are_one_line(runs, capsys, words, args):
    capsys.readouterr()
    assert llmtrain(["lm-eval", "--run-dir", str(runs["llama"]), *args]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1

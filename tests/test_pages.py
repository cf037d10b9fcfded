"""Each page of docs/ that a script makes from its JSON is what the script makes of it."""

import itertools
import json
import re
import runpy
from pathlib import Path

import pytest

from llmtrain.benchmark.peers_table import peers_markdown, seconds_per_token
from llmtrain.benchmark.step_tables import profile_markdown
from llmtrain.benchmark.tables import sweep_markdown
from llmtrain.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

SCRIPTS = {
    "batches": "batches", "save-delay": "save_delay", "scaling": "parallel", "step-checks": "check_step",
    "train-rate": "train_rate", "vocabularies": "vocabularies",
}  # fmt: skip
"""Page -> script in scripts/bench whose `markdown` makes it."""


def data(name: str) -> dict:
    path = DOCS / f"data/{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def script(path: str) -> dict:
    return runpy.run_path(str(ROOT / "scripts" / path))


PAGES = {
    "attention": lambda: script("bench/attention_backends.py")["page"](data("attention-backends") or {"groups": {}}),
    "baseline": lambda: sweep_markdown(data("baseline"), "data/baseline.json"),
    "experiments": lambda: script("docs_experiments.py")["page"](ROOT / "scripts" / "experiments"),
    "head": lambda: script("bench/head_arms.py")["page"](data("head-arms") or None),
    "kernels": lambda: script("docs_kernels.py")["page"](DOCS / "data"),
    "ops": lambda: script("docs_ops.py")["page"](DOCS / "data"),
    "memory": lambda: script("bench/memory_limit.py")["markdown"](data("memory"), "data/memory.json"),
    "profile-102m": lambda: profile_markdown(data("profile-102m")),
    "profile-1b": lambda: profile_markdown(data("profile-1b")),
    "peers": lambda: peers_markdown(data("peers"), "data/peers.json"),
    "tokenize": lambda: script("bench/tokenize_speed.py")["table"](data("tokenize")),
    **{
        page: lambda page=page, name=name: script(f"bench/{name}.py")["markdown"](data(page), f"data/{page}.json")
        for page, name in SCRIPTS.items()
    },
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_its_script_makes_of_its_json(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts/bench")  # as where the script is run
    assert (DOCS / f"{page}.md").read_text() == PAGES[page](), f"make docs/{page}.md anew"


def test_the_page_of_activations_is_that_of_its_json_or_says_that_there_is_none():
    text, source = (DOCS / "activations.md").read_text(), "data/activations.json"
    assert text == sweep_markdown(data("activations"), source) if data("activations") else "Not measured yet" in text


def cells(page: Path, first: str) -> list[list[str]]:
    """The rows of the table whose first row begins with `first`."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    begin = next(i for i, row in enumerate(rows) if row[:1] == [first]) + 2
    return list(itertools.takewhile(len, rows[begin:]))


def test_the_speeds_in_the_readme_are_those_of_the_peers_table():
    cases = {case["name"]: case["rows"] for case in data("peers")["cases"]}
    arms = ("llmtrain", "plain, compiled", "transformers, compiled")
    for model, *speeds in cells(ROOT / "README.md", "model, batch"):
        case = model.lower().replace("1.04b", "1b").replace(", ", "-").replace(" ", "")
        rows = [row for row in cases[case] if row["status"] == "ok"]
        # Of an arm in several groups the first counts: in a dict the last stays.
        measured = {row["arm"]: f"{1 / seconds_per_token(row).pooled:,.0f}" for row in reversed(rows)}
        assert speeds == [measured.get(arm, "") for arm in arms]


def test_the_two_cards_of_the_readme_are_those_of_the_scaling_table():
    times = {row["name"]: f"{row['times_one']:.2f}" for row in data("scaling")["rows"]}
    (said,) = re.findall(
        r"at ([\d.]+) times the rate of one, and with 8 micro-batches a step at ([\d.]+) times",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )
    assert said == (times["weak-1"], times["weak-8"])


def test_no_artifact_holds_a_path_of_the_machine_that_it_was_taken_on():
    for path in DOCS.glob("data/*.json"):
        found = re.findall(r'"(/(?!dev/)[^"]*/[^"]*)"', path.read_text(encoding="utf-8"))
        assert not found, (path.name, found[:3])


def test_every_link_to_a_file_leads_somewhere():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)


def test_the_features_in_the_readme_name_every_command_and_every_page_is_linked():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = cells(ROOT / "README.md", "feature")
    ways = " ".join(row[1] for row in rows)
    assert not [name for name in COMMANDS if not re.search(rf"`{name}[ `]", ways)]
    assert all(len(row) == 3 and re.search(r"\]\((docs/|#)", row[2]) for row in rows)
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", readme))
    assert linked >= {page.name for page in DOCS.glob("*.md")} and "commands" in readme


def test_every_link_to_a_heading_finds_it():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for link, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            if link.startswith("http"):
                continue
            target = (page.parent / link) if link else page
            found = re.findall(r"(?m)^#+ (.*)$", target.read_text(encoding="utf-8"))
            names = [re.sub(r"[^\w\s-]", "", one.lower()).strip().replace(" ", "-") for one in found]
            assert heading in names, (page, link, heading)

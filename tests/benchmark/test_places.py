"""docs/ has figures of a card, and the kernels' table its routes: what is measured without one goes elsewhere."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "bench"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A script of scripts/bench, called in an empty folder that stands for the project."""

    def of(name: str, *words: str, **stand_ins: object) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"placed_{name}", SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *words])
        for attribute, stand_in in stand_ins.items():
            monkeypatch.setattr(module, attribute, stand_in)
        return module

    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)
    return of


def quick_op(name, cases, timing, tell=None, keep=None):
    """Stands in for `measure_op`."""
    assert timing.device in ("auto", "cpu")
    found = {"rows": [{"arms": []}], "seconds": 0.0}
    if keep is not None:
        keep(found)
    return found


PAGE = {"page": lambda _: "a page", "bar_rows": lambda _: []}
OF_PAGE = {"measure_op": quick_op, "make_case": lambda *_: None} | PAGE
OF_OPS = {"measure_op": quick_op, "PARTS": {"gemm": lambda *_: []}}
ROUTE = {"width": 64, "windows": [{"deterministic": {"qualified": True}}]}
DEMO = ("--config", str(ROOT / "configs/demo.toml"), "--batch-size", "1", "--seq-len", "32")


@pytest.mark.parametrize(
    ("name", "words", "stand_ins", "left"),
    [
        (
            "attention_backends", ["--only", "bars"], OF_PAGE,
            ["docs/attention.md", "docs/data/attention-backends.json"],
        ),
        ("head_arms", [], OF_PAGE, ["docs/head.md", "docs/data/head-arms.json"]),
        ("ops", ["--only", "gemm"], OF_OPS, ["docs/data/ops-gemm.json"]),
        ("newton_schulz", [*DEMO, "--vocab-size", "64", "--rounds", "1"], {}, ["docs/data/newton-schulz.json"]),
        ("fp8_tiles", ["--smoke"], {"TILES": ((16, 16, 4),)}, ["docs/data/fp8-tiles.json"]),
        ("check_kernels", ["--cpu", "--only", "embedding"], {}, ["docs/data/kernels.json"]),
        (
            "rmsnorm_routes", ["--cpu"], {"choose": lambda *_: (ROUTE, (), {}), "judge_all": lambda *_: {}},
            ["docs/data/rmsnorm-routes.json", "llmtrain/kernels/rmsnorm_table.py"],
        ),
    ],
)  # fmt: skip
def test_what_is_measured_without_a_card_lies_below_build(load, tmp_path, monkeypatch, name, words, stand_ins, left):
    module = load(name, *words, **stand_ins)
    if hasattr(module, "ROOT"):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    assert not module.main()
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == sorted(f"build/{path}" for path in left)


@pytest.mark.parametrize("name", ["attention_backends", "head_arms"])
def test_a_page_is_made_in_docs_without_a_card_too(load, tmp_path, name):
    (tmp_path / "docs").mkdir()
    load(name, "--page", **PAGE).main()
    assert [path.read_text() for path in (tmp_path / "docs").glob("*.md")] == ["a page"]
    assert not (tmp_path / "build").exists()

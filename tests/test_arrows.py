"""The rooms and what each may import: DESIGN's arrows, read from the source."""

import ast
from pathlib import Path

import llmtrain

PACKAGE = Path(llmtrain.__file__).parent

ALLOWED: dict[str, set[str]] = {
    "storage": set(),
    "corpus": {"storage"},
    "kernels": set(),
    "model": {"kernels"},
    "training": {"storage", "corpus", "model", "kernels", "report"},
    "inference": {"model", "corpus", "storage"},
    "benchmark": {"storage", "corpus", "model", "kernels", "training", "inference"},
    "report": {"storage"},
    "cli": {"storage", "corpus", "model", "kernels", "training", "inference", "benchmark", "report"},
}

# Rooms whose modules must stay importable without torch, apart from the modules named.
TORCH_FREE = {"storage": set(), "corpus": {"batches.py", "batch_stream.py"}, "report": set()}


def imports(path: Path) -> set[str]:
    """Every module named by an import statement of `path`, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms() -> dict[str, list[Path]]:
    folders = [folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()]
    return {folder.name: sorted(folder.glob("*.py")) for folder in folders}


def test_every_room_is_known_and_flat():
    assert set(rooms()) <= set(ALLOWED)
    nested = [p for p in PACKAGE.rglob("*.py") if len(p.relative_to(PACKAGE).parts) > 2]
    assert not nested


def test_rooms_import_only_along_the_arrows():
    wrong = []
    for room, files in rooms().items():
        for path in files:
            for name in imports(path):
                parts = name.split(".")
                if parts[0] == "llmtrain" and len(parts) > 1 and parts[1] in ALLOWED:
                    if parts[1] != room and parts[1] not in ALLOWED[room]:
                        wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_torch_stays_out_of_the_rooms_that_must_start_fast():
    wrong = []
    for room, exempt in TORCH_FREE.items():
        for path in rooms().get(room, []):
            if path.name not in exempt and any(n.split(".")[0] == "torch" for n in imports(path)):
                wrong.append(str(path.relative_to(PACKAGE)))
    assert not wrong

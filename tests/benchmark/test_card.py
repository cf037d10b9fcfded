"""The script that takes all figures of a card in turn."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmtrain.storage.atomic import write_bytes

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "card.py"


@pytest.fixture
def card(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("card", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "card", module)  # where dataclasses look a module up
    spec.loader.exec_module(module)
    return module


def test_each_part_is_a_script_or_a_command_that_is_there(card):
    for part in card.PARTS:
        script, *words = part.words.split()
        assert (card.ROOT / script).is_file() or script == "-m", part.name
        for word in words:
            assert not word.startswith(("scripts/", "configs/")) or (card.ROOT / word).exists(), part.name
        for page in part.pages:
            assert (card.ROOT / page.split()[0]).is_file(), part.name
        assert part.result.startswith(("docs/data/", "scripts/experiments/")), part.name
    assert len({part.name for part in card.PARTS}) == len(card.PARTS)


def test_parts_run_in_order_while_time_is_left_and_one_that_fails_is_told(card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "docs" / "data").mkdir(parents=True)
    (tmp_path / "docs" / "old.md").write_text("old")
    (tmp_path / "good.py").write_text("open('docs/data/new.json', 'w').write('{}'); print('a figure')")
    (tmp_path / "bad.py").write_text("raise SystemExit('bad: no card')")
    (tmp_path / "page.py").write_text("open('docs/new.md', 'w').write('made of the JSON')")
    parts = [("good", 9, "good.py"), ("bad", 9, "bad.py"), ("long", 900, "good.py"), ("short", 9, "good.py TOKENS")]
    monkeypatch.setattr(card, "PARTS", [card.Part(*part, "docs/none.json", ("page.py",)) for part in parts])
    monkeypatch.setattr(sys, "argv", ["card.py", "--seconds", "300", "--gather", str(tmp_path / "out")])
    assert card.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["good", "bad", "long", "short"]
    assert "ok, " in said[0] and said[0].endswith("a figure")
    assert "EXIT 1" in said[1] and said[1].endswith("bad: no card")
    assert "should take 900 s" in said[2] and "give --tokens" in said[3]
    gathered = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert gathered == {"docs/data/new.json", "docs/new.md", "good.log", "bad.log", "pages.log"}


def test_a_part_that_hangs_is_ended(card, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    assert card.run(card.Part("hangs", 1, "hangs.py", "docs/none.json"), None, tmp_path / "log", 0.5)[0] == 124


def test_two_cards_work_side_by_side_but_not_on_one_page(card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(
            "import os, sys, time\n"
            "log = open('log', 'a', 1)\n"
            "words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]\n"
            "what = ' '.join([*words, 'on', os.environ['CUDA_VISIBLE_DEVICES']])\n"
            "print('begin', what, file=log); time.sleep(0.5); print('end', what, file=log); print(what)"
        )
    parts = [("a1", "a.py --of 1", 1), ("a2", "a.py --of 2", 1), ("b", "b.py", 1), ("both", "c.py", 2)]
    monkeypatch.setattr(card, "PARTS", [card.Part(name, 9, words, "no.json", cards=n) for name, words, n in parts])
    monkeypatch.setattr(sys, "argv", ["card.py", "--cards", "0", "1", "--gather", str(tmp_path / "out")])
    assert card.main() == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert log[:2] == ["begin c.py --ranks 2 on 0,1", "end c.py --ranks 2 on 0,1"]
    assert {line.split(" on ")[0] for line in log[2:4]} == {"begin a.py --of 1", "begin b.py"}  # at once
    assert {line.split(" on ")[1] for line in log[2:4]} == {"0", "1"}
    a = [line.split(" on ")[0] for line in log if "a.py" in line]
    assert a == ["begin a.py --of 1", "end a.py --of 1", "begin a.py --of 2", "end a.py --of 2"]


def test_what_is_missing_comes_first_and_is_summed_up(card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    data = {
        "cases": [{"name": "4x1024", "strong": True}],
        "groups": {"old": {"machine": None, "records": [1]}, "new": {"machine": {"cpu": "a"}, "records": [1]}},
    }
    (tmp_path / "kept.json").write_text(json.dumps(data))
    (tmp_path / "cut.json").write_text('{"machine": {}, "planned": 3, "rows": [1, 2]}')
    (tmp_path / "some.json").write_text('{"missing": ["a run"], "runs": {}}')
    (tmp_path / "work.json").write_text('{"missing": ["1b"], "runs": [{"name": "1b"}, {"name": "2b"}]}')
    (tmp_path / "ops.json").write_text('{"missing": 2, "machine": {}, "rows": [1]}')
    results = {
        "there": "kept.json: 4x1024", "both": "kept.json: 4x1024, new", "machine not kept": "kept.json: old",
        "not an entry": "kept.json: strong", "cut short": "cut.json", "a run short": "some.json",
        "in work": "work.json: 1b", "done there": "work.json: 2b", "cases to come": "ops.json", "none": "none.json",
    }  # fmt: skip
    monkeypatch.setattr(card, "PARTS", [card.Part(name, 10, "x.py", result) for name, result in results.items()])
    missing = ["machine not kept", "not an entry", "cut short", "a run short", "in work", "cases to come", "none"]
    for more, names in (([], [*missing, "there", "both", "done there"]), (["--missing"], missing)):
        monkeypatch.setattr(sys, "argv", ["card.py", "--list", *more])
        assert card.main() == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines] == [name[:18].rstrip() for name in names]
        assert last == f"70 s for 7 that are missing, {10 * len(names)} s for all {len(names)}"


def test_rows_of_two_cards_are_not_those_of_four_and_an_order_that_is_asked_for_is_kept(
    card, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [{"name": "weak", "ranks": 2}], "checks": {"a": 1}}))
    results = {"one": (1, "none.json"), "two": (2, "rows.json: weak, checks"), "four": (4, "rows.json: weak")}
    parts = [card.Part(name, 10, "x.py", result, cards=cards) for name, (cards, result) in results.items()]
    monkeypatch.setattr(card, "PARTS", parts)
    for words, names in (["--missing"], ["one", "four"]), (["--only", "two", "four", "one"], ["two", "four", "one"]):
        monkeypatch.setattr(sys, "argv", ["card.py", "--list", *words])
        assert card.main() == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == names


def test_what_goes_on_where_it_ended_is_begun_with_little_time_and_told_how_much(card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "runs.py").write_text("import sys; print(*sys.argv[1:])")
    parts = [card.Part("runs", 900, "runs.py", "r.json", in_turns=60), card.Part("whole", 900, "runs.py", "r.json")]
    monkeypatch.setattr(card, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["card.py", "--seconds", "100", "--gather", str(tmp_path / "out")])
    assert card.main() == 0
    runs, whole = capsys.readouterr().out.splitlines()
    assert runs.endswith(": --budget 40") and "should take 900 s" in whole


def test_what_an_ended_part_has_started_ends_too(card, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    log = tmp_path / "log"
    assert card.run(card.Part("hangs", 9, "hangs.py", "docs/none.json"), None, log, 2)[0] == 124
    assert has_ended(int(log.read_text()))


def has_ended(pid: int) -> bool:
    """Whether a process of that number is gone, or dead and not collected, within a few seconds."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_signal_ends_what_runs_begins_no_more_and_gathers(tmp_path):
    """As one that is sent where a lease is over."""
    out, pid = tmp_path / "out", tmp_path / "pid"
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import card; from pathlib import Path\n"
        "card.ROOT = Path(sys.argv.pop(1))\n"
        "card.PARTS = [card.Part(name, 99, 'works.py', 'no.json') for name in 'ab']\n"
        "sys.exit(card.main())"
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "works.py").write_text(
        "import os, time; from pathlib import Path\n"
        "Path('docs/new.json').write_text('[1]'); Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(SCRIPT.parent), str(tmp_path), "--gather", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=30)[0].splitlines()
    assert process.returncode == 1
    assert "a: EXIT -9" in said[0] and said[1].startswith("b: left out")
    assert has_ended(int(pid.read_text()))
    assert (out / "docs/new.json").read_text() == "[1]"


def test_results_are_gathered_while_parts_run_and_never_half(card, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    folder = tmp_path / "docs" / "data"
    folder.mkdir(parents=True)
    texts = ["1" * 2_000_000, "2" * 2_000_000]
    write_bytes(folder / "x.json", texts[0].encode())
    stop, wrong = threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_bytes(folder / "x.json", text.encode())

    def look() -> None:
        copy = tmp_path / "out" / "docs" / "data" / "x.json"
        while not stop.is_set():
            if copy.exists() and copy.read_text() not in texts:
                wrong.append(len(copy.read_text()))

    threads = [threading.Thread(target=work) for work in (write, look)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        card.gather(tmp_path / "out", {})
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    last = (folder / "x.json").read_text()
    card.gather(tmp_path / "out", {})
    assert (tmp_path / "out" / "docs" / "data" / "x.json").read_text() == last
    assert [path.name for path in (tmp_path / "out" / "docs" / "data").iterdir()] == ["x.json"]


def test_a_part_that_cannot_be_run_holds_up_no_other(card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "ROOT", tmp_path)
    (tmp_path / "good.py").write_text("print('a figure')")
    run = card.run

    def broken(part, *more):
        if part.name == "bad":
            raise OSError("no more processes")
        return run(part, *more)

    monkeypatch.setattr(card, "run", broken)
    monkeypatch.setattr(card, "PARTS", [card.Part(name, 9, "good.py", "no.json") for name in ("bad", "good")])
    monkeypatch.setattr(sys, "argv", ["card.py", "--cards", "0", "1", "--gather", str(tmp_path / "out")])
    assert card.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert "no more processes" in said[0] and said[1].endswith("a figure")

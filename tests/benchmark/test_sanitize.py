"""What is made of compute-sanitizer's reports, by a program in its place that prints some; and the work it watches."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

from llmtrain.kernels import choice

SCRIPTS = Path(__file__).parents[2] / "scripts"

# In its place: reports the planted fault (but of tools in MISSES), runs no case, and says what SAYS holds.
SANITIZER = f"""#!{sys.executable}
import os, sys
tool = sys.argv[sys.argv.index("--tool") + 1]
if "--planted" in sys.argv:
    if tool not in os.environ["MISSES"]:
        print("========= Some fault")
        print(f"=========     at planted_{{tool}}_kernel+0x70")
        print("=========     by thread (0,0,0) in block (0,0,0)")
else:
    cases = sys.argv[sys.argv.index("--cases") + 1 : sys.argv.index("--device")]
    for case in cases[: int(os.environ["RUNS"])]:
        print("CASE", case, "swiglu=triton rmsnorm=triton", flush=True)
    if os.environ["RUNS"] == "2":
        os.system("sleep 30")  # a child of the tool's has its output too
    print(os.environ["SAYS"])
print("========= ERROR SUMMARY: some")
"""

ELSEWHERE = "========= Race reported between Write access at void cudnn::fort::kernel<128>(int)+0x10"
OLDER = "=========     at 0x90 in _swiglu_forward_kernel(float *)"
NEWER = "=========     and Read access at _swiglu_forward_kernel+0x90 [8 hazards]"


def load(name: str, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location(Path(name).name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sanitize(tmp_path, monkeypatch, capsys):
    """Runs the script; its exit code, its lines, and the records it wrote."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    module = load("bench/sanitize", monkeypatch)
    monkeypatch.setattr(module, "describe", lambda _, describe=module.describe: describe(False))

    def go(misses: str = "", says: str = "", runs: int = 99) -> tuple[int, list[str], list[dict]]:
        for name, value in {"MISSES": misses, "SAYS": says, "RUNS": str(runs)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(sys, "argv", ["sanitize.py", "--output", str(tmp_path / "data" / "sanitize.json")])
        code = module.main()
        records = json.loads((tmp_path / "data" / "sanitize.json").read_text())["records"]
        return code, capsys.readouterr().out.splitlines(), records

    go.module = module
    return go


def test_nothing_in_ours_holds_whatever_is_said_of_a_librarys(sanitize, tmp_path, monkeypatch):
    code, lines, records = sanitize(says=ELSEWHERE)
    assert code == 0 and len(lines) == 4 and all("nothing in our kernels" in line for line in lines)
    assert all(r["held"] and r["elsewhere"] == {"cudnn::fort::kernel": 1} and r["in_ours"] == {} for r in records)
    page = load("docs_kernels", monkeypatch).page(tmp_path / "data")
    assert "| memcheck | found | nothing | cudnn::fort::kernel 1 |" in page and "rmsnorm, swiglu." in page


@pytest.mark.parametrize("report", [OLDER, NEWER])
def test_a_report_that_names_one_of_ours_fails(sanitize, report):
    code, lines, records = sanitize(says=report)
    assert code == 1 and all("NOT HELD" in line and "_swiglu_forward_kernel" in line for line in lines)
    assert all(r["in_ours"] == {"_swiglu_forward_kernel": 1} for r in records)


def test_a_tool_that_misses_its_planted_fault_proves_nothing(sanitize):
    code, lines, records = sanitize(misses="racecheck")
    assert code == 1 and {r["tool"]: r["held"] for r in records} == {
        "memcheck": True, "initcheck": True, "racecheck": False, "synccheck": True,
    }  # fmt: skip
    assert sum("planted fault found: False" in line for line in lines) == 1


def test_work_that_ends_early_does_not_hold(sanitize):
    code, _, records = sanitize(runs=3)
    assert code == 1 and not any(r["held"] for r in records) and all(len(r["cases"]) == 3 for r in records)


def test_a_tool_that_takes_too_long_is_ended_and_what_it_said_is_kept(sanitize, monkeypatch):
    monkeypatch.setattr(sanitize.module, "TIMEOUT_S", 5)
    begin = time.monotonic()
    code, _, records = sanitize(runs=2)
    assert code == 1 and time.monotonic() - begin < 20
    assert all(r["status"] == 124 and len(r["cases"]) == 2 and not r["held"] for r in records)


def test_each_case_is_work_that_the_ops_can_do(monkeypatch):
    cases = load("bench/sanitize", monkeypatch).CASES
    with choice.forced(choice.REFERENCE):
        for case, run in cases.items():
            choice.ran.clear()
            run("cpu")
            assert choice.ran, case

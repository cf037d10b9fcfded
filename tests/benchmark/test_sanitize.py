"""What is made of compute-sanitizer's reports, by a program in its place that prints some; and the work it watches."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

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
        print("CASE", case, '{{"rmsnorm": "triton", "windowed swiglu": "triton"}}', flush=True)
    if os.environ["RUNS"] == "2":
        os.system("sleep 30")  # a child of the tool's has its output too
    print(os.environ["SAYS"])
print("========= ERROR SUMMARY: some")
"""

LAUNCH = "=========     Saved host backtrace up to driver entry point at kernel launch time"
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
    monkeypatch.setattr(module, "compile_all", lambda *_: None)  # it needs a card
    monkeypatch.setattr(module, "describe", lambda _, describe=module.describe: describe(False))

    def go(misses: str = "", says: str = "", runs: int = 99, timeout: float = 60) -> tuple[int, list[str], list[dict]]:
        for name, value in {"MISSES": misses, "SAYS": says, "RUNS": str(runs)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        output = str(tmp_path / "data" / "sanitize.json")
        monkeypatch.setattr(sys, "argv", ["sanitize.py", "--timeout", str(timeout), "--output", output])
        code = module.main()
        records = json.loads((tmp_path / "data" / "sanitize.json").read_text())["records"]
        return code, capsys.readouterr().out.splitlines(), records

    go.processes = {
        tool: -(-len(module.CASES) // module.AT_ONCE.get(tool, module.OF_OTHERS)) for tool in module.TOOLS
    }
    go.tools = list(module.TOOLS)
    go.data = lambda: json.loads((tmp_path / "data" / "sanitize.json").read_text())
    return go


def test_nothing_in_ours_holds_whatever_is_said_of_a_librarys(sanitize, tmp_path, monkeypatch):
    code, lines, records = sanitize(says=f"{ELSEWHERE}\n{LAUNCH}")
    assert code == 0 and len(lines) == 5 and all("nothing in our kernels" in line for line in lines[1:])
    processes = sanitize.processes
    assert all(r["held"] and r["in_ours"] == {} for r in records)
    assert all(r["elsewhere"] == {"cudnn::fort::kernel": processes[r["tool"]]} for r in records)
    page = load("docs_kernels", monkeypatch).page(tmp_path / "data")
    assert f"| memcheck | found | nothing | cudnn::fort::kernel {processes['memcheck']} |" in page
    assert "rmsnorm, windowed swiglu." in page


@pytest.mark.parametrize("report", [OLDER, NEWER])
def test_a_report_that_names_one_of_ours_fails(sanitize, report):
    code, lines, records = sanitize(says=report)
    assert code == 1 and all("NOT HELD" in line and "_swiglu_forward_kernel" in line for line in lines[1:])
    assert all(r["in_ours"] == {"_swiglu_forward_kernel": sanitize.processes[r["tool"]]} for r in records)


def test_a_tool_that_misses_its_planted_fault_proves_nothing(sanitize):
    code, lines, records = sanitize(misses="racecheck")
    assert code == 1 and {r["tool"]: r["held"] for r in records} == {
        "memcheck": True, "initcheck": True, "racecheck": False, "synccheck": True,
    }  # fmt: skip
    assert sum("planted fault found: False" in line for line in lines) == 1


def test_work_that_ends_early_does_not_hold(sanitize):
    code, _, records = sanitize(runs=1)
    assert code == 1 and not any(r["held"] for r in records if r["tool"] != "initcheck")
    assert all(len(r["cases"]) == sanitize.processes[r["tool"]] for r in records if r["tool"] != "initcheck")


def test_a_tool_that_takes_too_long_is_ended_and_what_it_said_is_kept(sanitize):
    begin = time.monotonic()
    code, _, records = sanitize(runs=2, timeout=12)
    assert code == 1 and time.monotonic() - begin < 27
    assert {r["tool"]: (r["status"], r["held"]) for r in records} == dict.fromkeys(sanitize.tools, (124, False))
    assert all(len(r["cases"]) == min(2 * sanitize.processes[r["tool"]], 11) for r in records)
    assert sanitize.data()["missing"] == sanitize.tools, "it is to be done again"


def test_each_case_is_work_that_the_ops_can_do(monkeypatch):
    cases = load("bench/sanitize", monkeypatch).CASES
    with choice.forced(choice.REFERENCE):
        for case, run in cases.items():
            choice.ran.clear()
            run("cpu")
            assert choice.ran, case


def test_products_written_where_torch_wrote_are_the_same(monkeypatch):
    seen = load("bench/sanitize", monkeypatch).SeenProducts
    a, b, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    ops = {
        "mm": lambda: a @ b,
        "addmm": lambda: torch.addmm(c, a, b),
        "out": lambda: torch.mm(a, b, out=torch.full((5, 3), torch.nan)),
        "added to": lambda: c.clone().addmm_(a, b),
        "bmm": lambda: torch.bmm(a[None], b[None]),
        "baddbmm": lambda: torch.baddbmm(c[None], a[None], b[None], beta=0.5),
    }
    for name, op in ops.items():
        wanted = op()
        with seen() as mode:
            got = op()
        assert torch.equal(got, wanted), name
        assert mode.made == (name != "added to"), name

"""Presets are found by name from any folder, and a name that is none is told which there are."""

from pathlib import Path

import pytest

from llmtrain.cli.main import run
from llmtrain.cli.presets import preset_path
from llmtrain.storage.errors import InputMissing

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_preset_of_the_repository_is_found_from_any_folder():
    assert preset_path("31m") == CONFIGS / "31m.toml"
    assert run(["plan", "--config", "31m", "--card", "H200"]) == 0


def test_a_file_and_a_preset_of_ones_own_go_before():
    own = Path("configs", "31m.toml")
    own.parent.mkdir()
    own.write_text("")
    assert preset_path("31m") == own
    Path("31m").write_text("")
    assert preset_path("31m") == Path("31m")


def test_a_name_that_is_none_is_told_those_there_are():
    with pytest.raises(InputMissing, match="^31mm: no such file: .* or name a preset: .*102m, .*demo"):
        preset_path("31mm")
    with pytest.raises(InputMissing, match="name a preset: sweep, sweep-activations, sweep-cpu$"):
        preset_path("sweeps", of_sweep=True)


@pytest.mark.parametrize("command", ["train", "plan", "service", "bench step", "sweep"])
def test_every_command_says_so(command: str, capsys: pytest.CaptureFixture[str]):
    assert run([*command.split(), "--config", "nothing"]) == InputMissing.exit_code
    assert "nothing: no such file: check the path, or name a preset: " in capsys.readouterr().err

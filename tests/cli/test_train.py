"""`llmtrain train` as a person meets it: what goes wrong is one line, its exit code, and nothing left behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llmtrain.cli.main import run as run_cli
from llmtrain.cli.train import configuration
from llmtrain.storage.lock import RunLock
from llmtrain.training import checkpoint
from tests.training.conftest import write_corpus

SMALL = [
    "--d-model", "32", "--n-layers", "1", "--n-heads", "4", "--n-kv-heads", "2", "--head-dim", "8", "--d-ff", "48",
    "--seq-len", "16", "--batch-size", "2", "--total-steps", "3", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data/corpus.u16", 600)
    return tmp_path


def failure(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the error of a command line that must fail with one line."""
    capfd.readouterr()
    code = run_cli(["train", *arguments])
    error = capfd.readouterr().err
    assert code != 0 and error.startswith("llmtrain: error:") and error.count("\n") == 1, error
    return code, error



@pytest.mark.parametrize(
    ("make", "extra", "code", "says"),
    [
        (lambda p: p.write_bytes(b"\1\0\2"), ["--vocab-size", "9"], 65, "odd"),
        (lambda p: p.write_bytes(b""), ["--vocab-size", "9"], 65, "empty"),
        (lambda p: p.write_bytes(b"\1\0" * 16), ["--vocab-size", "9"], 65, "16 tokens"),
        (lambda p: p.write_bytes(b"\1\0" * 90), [], 2, "--vocab-size"),
        (lambda p: None, [], 66, "no such file"),
    ],
    ids=["odd length", "empty", "shorter than a window", "no vocabulary", "missing"],
)
def test_a_token_file_that_cannot_be_trained_on(make, extra, code, says, here, capfd):
    make(here / "bad.u16")
    got, error = failure(capfd, "--tokens", "bad.u16", "--run-dir", "run", *extra, *SMALL)
    assert got == code and says in error and "bad.u16" in error
    assert not (here / "run").exists()


@pytest.fixture
def other(here: Path) -> Path:
    """A configuration whose held-out file belongs to tokens that are not here."""
    file = here / "other.toml"
    file.write_text('[data]\ntokens = ["other.u16"]\nval_tokens = ["other.val.u16"]\n')
    return file


def held_out_of(given: dict[str, tuple[str, ...]], file: Path, resume: bool = False) -> tuple[str, ...]:
    return configuration(given, file, resume).data.val_tokens


def test_tokens_of_the_command_line_bring_their_own_held_out_file_and_not_the_configurations(here, other):
    mine = {"tokens": ("data/corpus.u16",)}
    assert held_out_of(mine, other) == held_out_of(mine, other, resume=True) == ()
    write_corpus(here / "data/corpus.val.u16", 200)
    write_corpus(here / "more.val.1-of-1.u16", 200)
    assert held_out_of(mine, other) == ("corpus.val=data/corpus.val.u16",)
    mixed = {"tokens": ("code=data/corpus.u16:0.7", "more.u16:3")}
    assert held_out_of(mixed, other) == ("code.val=data/corpus.val.u16", "more.val=more.val.u16")
    assert held_out_of({}, other) == ("other.val.u16",)
    assert held_out_of(mine | {"val_tokens": ("x.u16",)}, other) == ("x.u16",)


def test_a_run_on_tokens_of_which_nothing_is_held_out_trains_with_another_corpus_configuration(here, other):
    arguments = ["--config", str(other), "--tokens", "data/corpus.u16", "--run-dir", "run", *SMALL]
    assert run_cli(["train", *arguments]) == 0


def test_a_held_out_file_that_is_not_there_says_what_writes_one_and_how_to_go_without(here, capfd):
    code, error = failure(capfd, "--val-tokens", "data/corpus.val.u16", "--run-dir", "run", *SMALL)
    assert code == 66 and "corpus.val.u16: no such file: nothing was held out of" in error
    assert "--holdout" in error and "--document" in error and "without --val-tokens" in error


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(here, capfd):
    ids = np.arange(300, dtype=np.uint16) % 40
    ids[205] = 999
    ids.tofile(here / "flat.u16")
    asked = ["--tokens", "flat.u16", "--vocab-size", "40", "--run-dir", "run", *SMALL, "--total-steps", "50"]
    code, error = failure(capfd, *asked)
    assert code == 65 and "999" in error and "205" in error
    assert not checkpoint.list_steps(here / "run")


def test_a_manifest_that_asks_for_more_than_the_model_has(here, capfd):
    code, error = failure(capfd, "--vocab-size", "40", "--run-dir", "run", *SMALL)
    assert code == 78 and "--vocab-size 96" in error
    assert not (here / "run").exists()


def test_a_vocabulary_beyond_all_bounds_is_refused(here, capfd):
    code, error = failure(capfd, "--vocab-size", "1048577", "--run-dir", "run", *SMALL)
    assert code == 2 and "1048577" in error
    assert not (here / "run").exists()


def test_an_attention_that_cannot_run_here_is_refused_with_its_reason(here, capfd):
    code, error = failure(capfd, "--attention", "flash", "--run-dir", "run", *SMALL)
    assert code == 2 and "--attention flash" in error and "CUDA" in error
    assert not (here / "run").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, which refuses even root")
def test_a_folder_that_cannot_be_written(here, capfd):
    code, error = failure(capfd, "--run-dir", "/proc/nothing/run", *SMALL)
    assert code == 73 and "/proc/nothing/run" in error


def test_a_file_where_the_run_directory_should_be(here, capfd):
    (here / "taken").write_text("")
    code, error = failure(capfd, "--run-dir", "taken", *SMALL)
    assert code == 73 and "taken" in error


def test_a_run_directory_in_use_is_refused_with_the_pid_of_its_owner(here, capfd):
    (here / "run").mkdir()
    holder = (
        "import sys, time\nfrom llmtrain.storage.lock import RunLock\n"
        "with RunLock('run/lock'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        code, error = failure(capfd, "--run-dir", "run", *SMALL)
        assert code == 78 and f"in use by process {process.pid} on {socket.gethostname()} since" in error
    finally:
        process.kill()
        process.wait()
    with RunLock(here / "run/lock"):  # the lock of the dead is no obstacle
        pass


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_another_width_at_resume_is_refused_by_name_and_the_run_goes_on_without_it(here, capfd):
    assert run_cli(["train", "--run-dir", "run", *SMALL]) == 0
    before = {p.name: p.read_bytes() for p in checkpoint.folder_of(here / "run", 3).iterdir()}
    code, error = failure(capfd, "--run-dir", "run", "--resume", "--d-model", "64")
    assert code == 78 and "d_model is 32" in error and "64" in error
    code, error = failure(capfd, "--run-dir", "run", *SMALL)
    assert code == 78 and "--resume" in error
    assert {p.name: p.read_bytes() for p in checkpoint.folder_of(here / "run", 3).iterdir()} == before
    assert run_cli(["train", "--run-dir", "run", "--resume"]) == 0


def test_resume_without_a_run_starts_one_with_the_defaults_of_the_command_line(here):
    assert run_cli(["train", "--run-dir", "run", "--resume", *SMALL]) == 0
    assert checkpoint.list_steps(here / "run") == [3]


def test_a_configuration_file_is_checked_key_by_key(here, capfd):
    (here / "c.toml").write_text("[model]\nd_modle = 3\n")
    code, error = failure(capfd, "--config", "c.toml", "--run-dir", "run")
    assert code == 2 and "d_modle" in error
    (here / "c.toml").write_text("[modle]\n")
    assert failure(capfd, "--config", "c.toml")[0] == 2
    (here / "c.toml").write_text("= 3")
    assert failure(capfd, "--config", "c.toml")[0] == 65
    assert failure(capfd, "--config", "none.toml")[0] == 66
    (here / "c.toml").write_text("[model]\nn_heads = 3\nn_kv_heads = 2\n")
    code, error = failure(capfd, "--config", "c.toml")
    assert code == 2 and "n_heads 3" in error
    assert not (here / "run").exists()


def test_the_command_line_goes_before_the_configuration_file(here):
    (here / "c.toml").write_text("[run]\nrun_dir = 'elsewhere'\nseed = 4\n[schedule]\ntotal_steps = 2\n")
    assert run_cli(["train", "--config", "c.toml", *SMALL, "--run-dir", "run"]) == 0
    saved = (here / "run/config.toml").read_text()
    assert "seed = 4" in saved and "total_steps = 3" in saved and "vocab_size = 96" in saved
    assert not (here / "elsewhere").exists()


def test_cuda_where_there_is_none(here, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, error = failure(capfd, "--run-dir", "run", *SMALL, "--device", "cuda")
    assert code == 2 and "cuda" in error


def test_a_preset_is_named_as_in_bench(here, capfd):
    (here / "configs").mkdir()
    (here / "configs/tiny.toml").write_text("[schedule]\ntotal_steps = 2\n")
    options = [word for word in SMALL if word not in ("--total-steps", "3")]
    assert run_cli(["train", "--config", "tiny", "--run-dir", "run", *options]) == 0
    assert checkpoint.list_steps(here / "run") == [2]


def test_a_mistake_in_the_configuration_is_said_before_torch_is_imported():
    look = (
        "import sys\nfrom llmtrain.cli.main import run\ncode = run(['train', '--warmup-steps', '-1'])\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], env=environment(), capture_output=True, text=True)
    assert done.stdout == "2 False\n" and "warmup_steps must be 0 or more" in done.stderr


def checkpoints(run_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in (run_dir / "checkpoints").rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("d_model = 32", "d_model = 64", "d_model is 32"),
        ("d_model = 32\n", "", "d_model is 32"),
        ("seed = 0", "seed = 1", "seed is 0"),
        ("learning_rate = 0.0004", "learning_rate = 1.0", "learning_rate is 0.0004"),
        ("total_steps = 3", "total_steps = 2", "total_steps is 3"),
        ("total_steps = 3\n", "", "total_steps is 3"),
        ("batch_size = 2", "batch_size = 3", "2 sequences"),
        ("seq_len = 16", "seq_len = 8", "seq_len is 16"),
    ],
)
def test_a_config_toml_edited_into_another_run_is_refused_and_no_checkpoint_is_taken_for_damaged(
    before, after, named, here, capfd
):
    assert run_cli(["train", "--run-dir", "run", *SMALL]) == 0
    kept, text = checkpoints(here / "run"), (here / "run/config.toml").read_text()
    assert before in text
    (here / "run/config.toml").write_text(text.replace(before, after, 1))
    code, error = failure(capfd, "--run-dir", "run", "--resume")
    assert code == 78 and named in error and "config.toml" in error
    assert checkpoints(here / "run") == kept


@pytest.mark.parametrize("broken", ["batch_size = 'x'", "batch_size = [1]", "accumulate = true", "seed = 1.5", "x = 1"])
def test_a_config_toml_edited_into_nonsense_is_one_line(broken, here, capfd):
    assert run_cli(["train", "--run-dir", "run", *SMALL]) == 0
    (here / "run/config.toml").write_text(f"[run]\n{broken}\n")
    code, error = failure(capfd, "--run-dir", "run", "--resume", "--batch-size", "1")
    assert code == 2 and "config.toml" in error


def test_a_damaged_config_toml_may_be_removed_which_the_error_says(here, capfd):
    assert run_cli(["train", "--run-dir", "run", *SMALL]) == 0
    (here / "run/config.toml").write_bytes(b"[run]\nbatch_size \0= 2\n")
    code, error = failure(capfd, "--run-dir", "run", "--resume")
    assert code in (2, 65) and "or remove run/config.toml: the checkpoints hold its settings too" in error
    (here / "run/config.toml").unlink()
    assert run_cli(["train", "--run-dir", "run", "--resume"]) == 0


def test_at_resume_options_are_checked_beside_the_runs_own_values_and_not_the_defaults(here, capfd):
    own = ["--checkpoint-every", "2", "--deterministic", "--total-steps", "4"]
    assert run_cli(["train", "--run-dir", "run", *SMALL, *own]) == 0
    assert run_cli(["train", "--run-dir", "run", "--resume", "--keep-every", "4", "--verify-every", "2"]) == 0
    code, error = failure(capfd, "--run-dir", "run", "--resume", "--keep-every", "3")
    assert code == 2 and "checkpoint_every, 2" in error


def test_a_run_without_its_config_toml_goes_on_as_its_checkpoint_says(here):
    assert run_cli(["train", "--run-dir", "run", *SMALL]) == 0
    kept, text = checkpoints(here / "run"), (here / "run/config.toml").read_text()
    (here / "run/config.toml").unlink()
    assert run_cli(["train", "--run-dir", "run", "--resume"]) == 0
    assert checkpoints(here / "run") == kept and (here / "run/config.toml").read_text() == text


def test_a_run_goes_on_from_another_folder_and_in_another_place(here, monkeypatch):
    asked = ["--val-tokens", "held=data/corpus.u16", *SMALL]
    assert run_cli(["train", "--run-dir", "run", "--tokens", "a:b=data/corpus.u16:2", *asked]) == 0
    (here / "run").rename(here / "moved")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    (here / "moved/checkpoints/step-00000003/MANIFEST.json").unlink()  # so that there is something to train
    assert run_cli(["train", "--run-dir", "../moved", "--resume"]) == 0
    assert checkpoint.list_steps(here / "moved") == [3] and not (here / "run").exists()
    assert run_cli(["evaluate", "--run-dir", "../moved", "--device", "cpu"]) == 0


def test_the_tokenizer_of_another_corpus_is_never_used_for_this_one(here, capfd):
    (here / "run").mkdir()
    (here / "run/tokenizer.json").write_text("of an earlier corpus")
    code, error = failure(capfd, "--run-dir", "run", *SMALL)
    assert code == 78 and "run/tokenizer.json" in error


@pytest.mark.parametrize(
    "asked",
    [["--batch-size", str(10**9)], ["--batch-size", str(10**15)], ["--d-model", "10000000"],
     ["--n-layers", str(10**9)], ["--max-seq-len", str(10**15)], ["--total-steps", str(10**18)]],
)  # fmt: skip
def test_what_cannot_fit_is_refused_at_once_and_leaves_nothing(asked, here, capfd):
    since = time.monotonic()
    code, error = failure(capfd, "--run-dir", "run", *SMALL, *asked)
    assert code == 2, error
    assert not (here / "run").exists() and time.monotonic() - since < 5


def test_auto_keeps_the_sequences_of_a_step_whatever_names_them(here, capfd):
    def sequences(*arguments: str) -> int:
        assert run_cli(["train", *SMALL[:-6], "--total-steps", "1", "--device", "cpu", *arguments]) == 0
        return state(here / "run")["tokens"] // 16

    def state(run_dir: Path) -> dict:
        return checkpoint.read_state(checkpoint.folder_of(run_dir, 1))

    (here / "preset.toml").write_text("[run]\nbatch_size = 5\naccumulate = 3\n")
    of_auto = ["--batch-size", "auto"]
    for number, (arguments, wanted) in enumerate([
        (of_auto, 8),
        ([*of_auto, "--accumulate", "2"], 16),
        ([*of_auto, "--global-batch-size", "7"], 7),
        ([*of_auto, "--config", "preset.toml"], 15),
        ([*of_auto, "--config", "preset.toml", "--accumulate", "4"], 20),
        ([*of_auto, "--config", "preset.toml", "--accumulate", "1", "--global-batch-size", "9"], 9),
    ]):  # fmt: skip
        assert sequences("--run-dir", "run", "--resume", *arguments) == wanted, arguments
        # The line that a supervisor gives again and again names the same run.
        assert run_cli(["train", "--run-dir", "run", "--resume", *arguments]) == 0
        code, error = failure(capfd, "--run-dir", "run", "--resume", "--batch-size", "auto", "--global-batch-size", "6")
        assert code == 78 and f"has {wanted} sequences" in error
        (here / "run").rename(here / f"run{number}")


LIMITED = """
import os, resource, sys
from llmtrain.cli.main import run
from llmtrain.training import fit, run as _
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20,) * 2)
if sys.argv[2] == "unpredicted":
    fit.room = lambda device: fit.Room(2**40, 2**40)
    fit.CPU_TOKENS = 2**30
sys.exit(run(sys.argv[3:]))
"""
HUNGRY = [
    "train", "--run-dir", "run", "--d-model", "32", "--n-layers", "8", "--n-heads", "4", "--n-kv-heads", "2",
    "--head-dim", "8", "--d-ff", "48", "--seq-len", "64", "--precision", "fp32", "--device", "cpu",
    "--total-steps", "1",
]  # fmt: skip


def limited(mib: int, prediction: str, *arguments: str) -> tuple[int, str, str]:
    """`llmtrain` in a process that may take `mib` beyond what importing takes: (exit code, stdout, stderr)."""
    narrow = {**environment(), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(mib), prediction, *HUNGRY, *arguments],
        capture_output=True, text=True, env=narrow,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_what_a_limit_of_memory_forbids_is_refused_with_what_works_in_its_place(here):
    code, _, error = limited(640, "predicted", "--batch-size", "900")
    assert code == 2 and error.count("\n") == 1 and "of the machine's" in error and "activations" in error
    assert not (here / "run").exists()
    options = error.partition("give ")[2].partition(" or --batch-size auto")[0].split()
    assert options[0] == "--batch-size"
    code, out, error = limited(640, "predicted", *options)
    assert code == 0, error
    assert "step        900 sequences x 64" in out


def test_auto_goes_down_when_the_memory_really_runs_out(here):
    code, out, error = limited(700, "unpredicted", "--batch-size", "auto", "--global-batch-size", "900")
    assert code == 0, error
    assert "micro-batches of 450 fit, as --batch-size auto found; of 900 did not" in out


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(here, capfd):
    code, error = failure(capfd, "--run-dir", os.fsdecode(b"run\xff"), *SMALL)
    assert code == 2 and "UTF-8" in error and not os.path.exists(b"run\xff")


def test_a_run_directory_whose_name_is_too_long(here, capfd):
    assert failure(capfd, "--run-dir", "r" * 300, *SMALL)[0] == 73


def test_a_file_in_the_place_of_the_checkpoints_is_found_before_the_first_step(here, capfd):
    (here / "run").mkdir()
    (here / "run/checkpoints").write_text("")
    assert failure(capfd, "--run-dir", "run", *SMALL)[0] == 73
    assert not (here / "run/metrics.jsonl").exists()

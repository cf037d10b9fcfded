"""`tokenize-corpus` killed with -9 at random moments; scripts/faults/tokenize_kills.py does it 500 times."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults" / "tokenize_kills.py"


def test_killed_at_50_random_moments_it_ends_with_the_bytes_of_an_undisturbed_run(tmp_path: Path):
    script = runpy.run_path(str(SCRIPT))
    done = script["kill_again_and_again"](tmp_path, 50, 1, ("tokenizers",))
    assert done["kills"] == 50 and done["kills_with_a_journal"] > 25 and done["kills_of_a_resumed_run"] > 10
    assert sum(done["finished_runs"].values()) >= 4

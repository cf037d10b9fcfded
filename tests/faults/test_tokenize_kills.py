"""`tokenize-corpus` killed with -9 at random moments; scripts/faults/tokenize_kills.py does it 500 times."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults" / "tokenize_kills.py"


def test_killed_at_32_random_moments_it_ends_with_the_bytes_of_an_undisturbed_run(tmp_path: Path):
    script = runpy.run_path(str(SCRIPT))
    done = script["kill_again_and_again"](tmp_path, 32, 1, ("tokenizers",))
    assert done["kills"] == 32 and done["kills_with_a_journal"] > 16 and done["kills_of_a_resumed_run"] > 8
    # What starts over each time, or never comes further, would end right too, once it is left alone.
    assert done["kills_that_left_more_than_was_there"] > 12
    assert all(done["finished_runs"].values())

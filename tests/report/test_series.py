import numpy as np

from llmtrain.report.history import Lines, read_history
from llmtrain.report.series import MOST_SPIKES, bunch, charts_of, draw, short, spikes
from tests.report.logged import event, train_lines, write_log, write_run


def lines_of(values: np.ndarray) -> Lines:
    steps = np.arange(1, len(values) + 1)
    return Lines(steps, steps * 10, np.ones(len(values), np.int64), steps / 2.0, {"lm_loss": values})


def test_a_short_curve_keeps_every_line():
    values = np.array([3.0, np.nan, 2.0])
    one = bunch(lines_of(values), ["lm_loss", "absent"], most=3)
    assert not one.cut and set(one.curves) == {"lm_loss"}
    np.testing.assert_array_equal(one.curves["lm_loss"].mean, values)


def test_a_long_curve_keeps_least_mean_and_greatest_of_every_stretch():
    rng = np.random.default_rng(0)
    values = rng.normal(3, 1, 100_003)
    values[[17, 50_000]] = 99.0, -99.0
    values[1000:1010] = np.nan
    one = bunch(lines_of(values), ["lm_loss"], most=300)
    curve = one.curves["lm_loss"]
    assert one.cut and one.lines == 100_003 and len(one.steps) == 300 and one.steps[-1] == 100_003
    assert curve.high.max() == 99.0 and curve.low.min() == -99.0
    ends = one.steps
    for i in (0, 1, 150, 299):
        part = values[(ends[i - 1] if i else 0) : ends[i]]
        assert np.isclose(curve.mean[i], np.nanmean(part))
        assert (curve.low[i], curve.high[i]) == (np.nanmin(part), np.nanmax(part))


def test_a_stretch_without_a_number_is_a_gap():
    values = np.full(1000, np.nan)
    values[:500] = 1.0
    curve = bunch(lines_of(values), ["lm_loss"], most=10).curves["lm_loss"]
    assert np.isfinite(curve.mean).tolist() == [True] * 5 + [False] * 5
    assert np.isnan(curve.low[5:]).all() and np.isnan(curve.high[5:]).all()


def test_a_spike_is_found_once_and_noise_is_none():
    rng = np.random.default_rng(1)
    losses = 3 + 6 * np.arange(1, 20_001) ** -0.4 + rng.normal(0, 0.05, 20_000)
    assert spikes(losses) == []
    losses[[700, 701, 9000]] += [2.0, 2.5, 1.0]
    found = spikes(losses)
    assert [row for row, _ in found] == [701, 9000] and all(above > 6 for _, above in found)
    losses[rng.integers(200, 20_000, 3000)] = np.nan
    assert {row for row, _ in spikes(losses)} <= {700, 701, 9000}
    losses[200::300] += 100.0
    assert len(spikes(losses)) <= MOST_SPIKES
    assert spikes(np.array([1.0, 100.0])) == [] and spikes(np.zeros(0)) == []


def test_what_there_is_decides_what_is_drawn(tmp_path):
    run = read_history(write_run(tmp_path / "run"))
    usual, more = charts_of([run])
    assert [c.key for c in usual][:3] == ["lm_loss", "val_loss web", "val_loss code"]
    names = {c.name for c in usual}
    assert {"lr", "grad_norm", "tok_per_s", "mfu", "peak_gib"} <= names
    assert "aux_loss" not in names and "skipped" not in names  # 0 throughout
    assert [c.name for c in more] == ["expert_share", "n_targets"]
    bare = read_history(write_log(tmp_path / "bare", [{"kind": "train", "step": 1, "tokens": 9, "lm_loss": 3.0}]))
    assert [c.key for c in charts_of([bare])[0]] == ["lm_loss"]
    assert charts_of([]) == ([], [])


def test_events_are_marks_where_they_happened(tmp_path):
    run = read_history(write_run(tmp_path / "run", 2000))
    drawn = draw("run", run, charts_of([run])[0])
    kinds = [mark.kind for mark in drawn.marks]
    assert kinds.count("save") == 8 and kinds.count("resume") == 1 and kinds.count("start") == 1
    assert kinds.count("failure") == 1 and kinds.count("skipped") == 1 and kinds.count("spike") == 1
    spike = next(mark for mark in drawn.marks if mark.kind == "spike")
    assert abs(spike.step - 1500) < 20 and "standard deviations above" in spike.text
    assert [mark.step for mark in drawn.marks] == sorted(mark.step for mark in drawn.marks)
    at_1000 = float(np.interp(1000, run.train.steps, run.train.seconds))
    assert next(mark.seconds for mark in drawn.marks if mark.kind == "resume") == at_1000


def test_losses_that_are_no_numbers_and_too_many_marks_are_counted(tmp_path):
    lines = [*train_lines(3000, every=1)]
    for line in lines[1000:1200]:
        line["lm_loss"] = None
    lines += [event(s, "note", f"note {s}") for s in range(1, 3000)]
    drawn = draw("run", read_history(write_log(tmp_path / "run", lines)), [])
    failures = [mark for mark in drawn.marks if mark.kind == "failure"]
    assert len(failures) == MOST_SPIKES and failures[0].step == 1001
    assert drawn.left_out == {"note": 2999 - 400, "failure": 150}


def test_numbers_for_the_page_have_six_digits():
    assert short(1 / 3) == 0.333333 and short(np.nan) is None and short(-np.inf) is None

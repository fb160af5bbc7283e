from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from discern.cli.progress import Display
from discern.progress import BudgetProgress

# A command that prints results while its bar is shown.
PRINTING = """
from discern.cli.console import Console
console = Console(json_output=False)
console.progress.start("reading", 40, "lines")
console.print("a result")
console.lines(["a\\tline"])
console.progress.finish()
"""


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_on(clock: Clock) -> tuple[Display, io.StringIO]:
    stream = io.StringIO()
    return Display(Console(file=stream, width=10_000), clock), stream


def test_a_terminal_gets_a_bar_and_everything_else_lines():
    for terminal in (True, False):
        display = Display(Console(file=io.StringIO(), force_terminal=terminal))
        display.start("reading", 10, "lines")
        assert display.shows_bar is terminal
        display.finish()
        assert not display.shows_bar


def test_lines_come_at_bounded_growing_intervals():
    clock = Clock()
    lines, stream = lines_on(clock)
    lines.start("pre-training", 100_000, "steps")
    for second in range(1, 36_001):
        clock.now = second
        lines.advance(1, loss="1.0")
    lines.finish()
    told = stream.getvalue().splitlines()
    assert told[0] == "pre-training: 100,000 steps"
    assert told[1] == "pre-training: 10/100,000 steps  0%  27:46:30 left  loss 1.0"
    assert 50 < len(told) < 250
    assert told[-1] == "pre-training: 36,000/100,000 steps in 10:00:00  loss 1.0"


def test_the_time_left_does_not_count_what_an_earlier_run_had_done():
    clock = Clock()
    lines, stream = lines_on(clock)
    lines.start("pre-training", 1000, "steps")
    lines.advance(900)
    clock.now = 10
    lines.advance(10)
    assert stream.getvalue().splitlines()[-1] == "pre-training: 910/1,000 steps  91%  1:30 left"


def test_short_stages_end_silently_and_notes_stay():
    clock = Clock()
    lines, stream = lines_on(clock)
    lines.start("reading", None, "bytes")
    clock.now = 1.5
    lines.advance(5_000_000)
    lines.note("x" * 200 + " [bold]")
    lines.finish()
    lines.advance(1)
    assert stream.getvalue() == "reading\n" + "x" * 200 + " [bold]\n"


def test_bytes_are_readable_and_a_new_stage_ends_the_one_before():
    clock = Clock()
    lines, stream = lines_on(clock)
    lines.start("reading", 10_000_000, "bytes")
    lines.advance(2_500_000, documents="12")
    clock.now = 3
    lines.start("writing", None, "shards")
    assert stream.getvalue().splitlines() == [
        "reading: 10.0 MB",
        "reading: 2.5 MB of 10.0 MB in 0:03  documents 12",
        "writing",
    ]


def test_a_bar_shows_amount_figures_and_notes_without_folding():
    stream = io.StringIO()
    bar = Display(Console(file=stream, force_terminal=True, width=100, color_system=None))
    bar.start("pre-training", 40, "steps")
    bar.advance(40, loss="8.5", learning_rate="1e-3")
    bar.note("step 40: saved [bold]")
    bar.start("reading", None, "bytes")
    bar.advance(1_000_000)
    bar.finish()
    bar.finish()
    shown = stream.getvalue()
    assert "40/40 steps" in shown
    assert "loss 8.5  learning rate 1e-3" in shown
    assert "step 40: saved [bold]" in shown
    assert "1.0 MB" in shown


def test_a_narrow_terminal_cuts_the_last_figures():
    stream = io.StringIO()
    clock = Clock()
    bar = Display(Console(file=stream, force_terminal=True, width=60, color_system=None), clock)
    bar.start("pre-training", 200, "steps")
    bar.advance(200, loss="6.010", tokens_per_second="12.3k", learning_rate="1e-4")
    clock.now = 3
    bar.finish()
    last = stream.getvalue().replace("\r", "\n").split("\n")[-2]
    assert "pre-training" in last
    assert "200/200 steps" in last
    assert "loss 6.010" in last
    assert "learning" not in last
    assert last.endswith("…")


def test_a_note_on_a_terminal_breaks_between_words():
    stream = io.StringIO()
    bar = Display(Console(file=stream, force_terminal=True, width=40, color_system=None))
    bar.note("step 145: held out loss 14.8669, generator_loss 3.9528, generator_accuracy 0.0359")
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1
    assert "generator_accuracy" in " ".join(lines).split()
    assert max(map(len, lines)) <= 40


def test_a_brief_stage_leaves_no_trace():
    clock, stream = Clock(), io.StringIO()
    bar = Display(Console(file=stream, force_terminal=True, width=60, color_system=None), clock)
    for seconds in (3, 1):
        bar.start("reading", 40, "lines")
        clock.now += seconds
        bar.finish()
        erased = stream.getvalue().rsplit("reading", 1)[1].endswith("\x1b[1A\x1b[2K")
        assert erased == (seconds == 1)


def test_what_is_printed_on_the_terminal_of_the_bar_stands_above_it():
    leader, follower = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60", "NO_COLOR": "1"}
    subprocess.run(
        [sys.executable, "-c", PRINTING],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        check=True,
        timeout=60,
    )
    os.close(follower)
    found = b""
    with contextlib.suppress(OSError):  # the end of what was written
        while read := os.read(leader, 65536):
            found += read
    os.close(leader)
    for printed in (b"a result", b"a\tline"):
        assert found.split(printed)[0].endswith(b"\r\x1b[2K"), found  # the line of the bar was erased
        assert found.split(printed)[1].startswith(b"\r\n")


def test_results_stay_on_stdout_where_colors_are_forced(tmp_path: Path):
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        environment = os.environ | {"FORCE_COLOR": "1"}
        subprocess.run([sys.executable, "-c", PRINTING], stdout=out, stderr=err, env=environment, check=True, timeout=60)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "a result\na\tline\n"


def test_a_long_description_is_cut_and_the_amount_is_not():
    stream = io.StringIO()
    clock = Clock()
    bar = Display(Console(file=stream, force_terminal=True, width=60, color_system=None), clock)
    bar.start("reading a sample for the tokenizer of the data set", 10_000_000, "bytes")
    bar.advance(10_000_000, tokens="12,345")
    clock.now = 3
    bar.finish()
    last = stream.getvalue().replace("\r", "\n").split("\n")[-2]
    assert "reading a" in last
    assert "… " in last
    assert "10.0 MB of 10.0 MB" in last


def test_a_time_budget_shows_elapsed_and_total_time():
    clock = Clock()
    lines, stream = lines_on(clock)
    budget = BudgetProgress(lines, 3600, used=600, clock=clock)
    budget.start("pre-training", None, "steps")
    budget.advance(150)
    clock.now = 600
    budget.advance(150, loss="5.1")
    budget.finish()
    told = stream.getvalue().splitlines()
    assert told[0] == "pre-training"
    assert told[1].replace("40:01", "40:00") == "pre-training: 33%  40:00 left  time 20:00/1:00:00  steps 300  loss 5.1"


def test_steps_that_end_before_the_time_count():
    clock = Clock()
    lines, stream = lines_on(clock)
    budget = BudgetProgress(lines, 36_000, max_units=1000, clock=clock)
    budget.start("pre-training", 1000, "steps")
    budget.advance(250)
    clock.now = 60
    budget.advance(250)
    assert stream.getvalue().splitlines()[1] == "pre-training: 50%  2:00 left  time 1:00/10:00:00  steps 500/1,000"


def test_a_bar_shows_a_time_budget():
    stream = io.StringIO()
    bar = Display(Console(file=stream, force_terminal=True, width=80, color_system=None))
    budget = BudgetProgress(bar, 3600, used=1800)
    budget.start("pre-training", None, "steps")
    budget.advance(20, loss="5.1")
    budget.finish()
    assert "50%" in stream.getvalue()
    assert "time 30:00/1:00:00" in stream.getvalue()


def test_what_counts_nothing_shows_no_count():
    clock = Clock()
    lines, stream = lines_on(clock)
    lines.start("training the tokenizer", None, "")
    clock.now = 7
    lines.finish()
    assert stream.getvalue().splitlines()[-1] == "training the tokenizer: in 0:07"
